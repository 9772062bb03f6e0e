"""docs/errors.md shows the messages of the code."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import headrace
from tests.docs_errors import CHAPTERS, PAGE, made_page, make_files, message_of

MISUSES = [misuse for misuses in CHAPTERS.values() for misuse in misuses]
TEXTS = re.findall(
    r"^### \d+\. (.*?)\n.*?^```text\n(.*?)\n```$", PAGE.read_text(), re.DOTALL | re.MULTILINE
)
MODULES = [module for name, module in list(sys.modules.items()) if name.startswith("headrace.")]
CLASSES = {
    name
    for module in MODULES
    for name, value in vars(module).items()
    if isinstance(value, type) and "headrace" in value.__module__
}
PUBLIC = set(headrace.__all__)


def test_the_page_lists_every_misuse() -> None:
    assert len(MISUSES) == len({misuse.title for misuse in MISUSES}) == 47
    assert [title for title, _ in TEXTS] == [misuse.title for misuse in MISUSES], (
        "write the page: python -m tests.docs_errors --write"
    )


def test_messages_are_those_of_the_page(tmp_path: Path) -> None:
    make_files(tmp_path)
    for misuse in MISUSES:
        if misuse.title == "A worker that dies":  # the slow test has it
            continue
        said = message_of(misuse.code, tmp_path)
        assert said == dict(TEXTS)[misuse.title], "write it: python -m tests.docs_errors --write"
        written, words = (set(re.findall(r"\w+", text)) for text in (misuse.code, said))
        # the others are remedies
        assert words & CLASSES <= PUBLIC, misuse.title
        assert "BaseDataset" not in words or "BaseDataset" in written, misuse.title


@pytest.mark.slow
def test_the_page_is_the_generated_one(tmp_path: Path) -> None:
    assert made_page(tmp_path) == PAGE.read_text()
