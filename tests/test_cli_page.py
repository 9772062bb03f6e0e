"""The outputs in docs/cli.md are those of the commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.cli.main import VERBS
from tests.docs_cli import PAGE, VOLATILE, make_data, pages


@pytest.mark.slow
def test_outputs_are_those_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seen = set()
    for command, shown, printed in pages():
        seen.add(command.split()[1])
        if command.split()[1] in VOLATILE:
            assert shown.split()[:1] == printed.split()[:1] and "error" not in printed, command
        else:
            assert _masked(printed) == _masked(shown), f"{command}: python -m tests.docs_cli"
    assert len(seen) >= 7


def _masked(text: str) -> str:
    """Without sizes, which other versions of the libraries that compress change a little."""
    return re.sub(r" +[\d.]+ [kMG]?B\b", " ... B", text)


def test_every_verb_has_a_section() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert set(re.findall(r"^## `(\w+)`", page, re.MULTILINE)) == set(VERBS)
