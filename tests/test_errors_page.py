"""docs/misuses.md shows the messages of the code."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import headrace
from tests.docs_errors import MISUSES, PAGE, made_page, make_files, message_of

MODULES = [module for name, module in list(sys.modules.items()) if name.startswith("headrace.")]
CLASSES = {
    name
    for module in MODULES
    for name, value in vars(module).items()
    if isinstance(value, type) and "headrace" in value.__module__
}
PUBLIC = set(headrace.__all__)


def test_messages_are_those_of_the_page(tmp_path: Path) -> None:
    make_files(tmp_path)
    page = PAGE.read_text(encoding="utf-8")
    for misuse in MISUSES:
        code, title = misuse["code"].strip(), misuse["title"]
        if title == "A worker that dies":  # the slow test has it
            continue
        said = message_of(code, tmp_path)
        shown = f"{title}:\n\n```python\n{code}\n```\n\n```text\n{said}\n```\n"
        assert shown in page, "write it: python -m tests.docs_errors"
        written = set(re.findall(r"\w+", code))
        words = set(re.findall(r"\w+", said))
        # the others are remedies
        assert words & CLASSES <= PUBLIC, title
        assert "BaseDataset" not in words or "BaseDataset" in written, title


@pytest.mark.slow
def test_the_page_is_the_generated_one(tmp_path: Path) -> None:
    assert made_page(tmp_path) == PAGE.read_text()
