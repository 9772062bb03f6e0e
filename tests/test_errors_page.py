"""docs/errors.md shows the messages of the code."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import headrace
from tests.docs_errors import MISUSE, PAGE, made_page, make_files, message_of

MISUSES = MISUSE.findall(PAGE.read_text(encoding="utf-8"))
MODULES = [module for name, module in list(sys.modules.items()) if name.startswith("headrace.")]
CLASSES = {
    name
    for module in MODULES
    for name, value in vars(module).items()
    if isinstance(value, type) and "headrace" in value.__module__
}
PUBLIC = set(headrace.__all__)


def test_misuses_have_numbers_and_remedies() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [int(number) for number, *_ in MISUSES] == list(range(1, 48))
    assert "lists the 47 most common misuses" in page
    assert page.count("\n### ") == page.count(" **Remedy:** ") == 47
    assert len({title for _, title, *_ in MISUSES}) == 47


def test_messages_are_those_of_the_page(tmp_path: Path) -> None:
    make_files(tmp_path)
    for _, title, code, shown in MISUSES:
        if title == "A worker that dies":  # the slow test has it
            continue
        said = message_of(code, tmp_path)
        assert said == shown, "write it: python -m tests.docs_errors"
        written = set(re.findall(r"\w+", code))
        words = set(re.findall(r"\w+", said))
        # the others are remedies
        assert words & CLASSES <= PUBLIC, title
        assert "BaseDataset" not in words or "BaseDataset" in written, title


@pytest.mark.slow
def test_the_page_is_the_generated_one(tmp_path: Path) -> None:
    assert made_page(tmp_path) == PAGE.read_text()
