"""docs/cli.md shows the help and the outputs of the commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.cli.main import VERBS
from tests.docs_cli import EXAMPLES, PAGE, VOLATILE, make_data, sections


@pytest.mark.slow
def test_outputs_are_those_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    page = _masked(PAGE.read_text(encoding="utf-8"))
    for verb, text in sections():
        shown = text
        if verb in VOLATILE:
            shown = text.partition("```console")[0]
            assert "error:" not in text
        assert _masked(shown) in page, f"{verb}: python -m tests.docs_cli"


def _masked(text: str) -> str:
    """Without sizes, which other versions of the libraries that compress change a little."""
    return re.sub(r" +[\d.]+ [kMG]?B\b", " ... B", text)


def test_every_verb_has_a_section() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert set(re.findall(r"^## `(\w+)`", page, re.MULTILINE)) == set(VERBS) == set(EXAMPLES)
