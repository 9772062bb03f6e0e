"""docs/errors.md lists the messages of the source."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from headrace import errors

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
SHOWN = re.findall(
    r"^```text\n(\w+): (.*?)\n```$",
    (ROOT / "docs" / "misuses.md").read_text(encoding="utf-8"),
    re.DOTALL | re.MULTILINE,
)
KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and kind.__module__ == errors.__name__
}


@pytest.mark.slow
def test_messages_are_listed_and_say_what_where_and_what_to_do(scripts: Any) -> None:
    """As far as a program sees: a value or an argument is named, and, after a colon or a comma,
    something can be done. Some are parts of others, or have no remedy; their share may not rise.
    """
    tool = scripts("list_messages")
    messages = list(tool.messages())
    listed: dict[str, list[str]] = {}
    for message in messages:
        form = ".*".join(map(re.escape, message.text.split(tool.VARIES)))
        listed.setdefault(message.kind, []).append(form)
    shown = [(kind, text) for kind, text in SHOWN if kind in KINDS]
    assert len(shown) > 40
    for kind, text in shown:
        assert any(re.fullmatch(form, text, re.DOTALL) for form in listed[kind]), text
    texts = [message.text for message in messages if message.kind in KINDS]
    where = re.compile(rf"{tool.VARIES}|\w+=|'\w+'|\w+_\w+|\w+\.\w+")
    remedy = re.compile(r"[:;,]|\b(use|pass|must|install)\b|did you mean|it has")
    nameless = [text for text in texts if not where.search(text)]
    without = [text for text in texts if not remedy.search(text)]
    assert len(texts) > 800
    assert len(nameless) < 0.05 * len(texts), nameless
    assert len(without) < 0.07 * len(texts), without


def test_each_kind_stands_in_the_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert sorted(rows) == sorted(set(KINDS) - {"HeadraceError"})
