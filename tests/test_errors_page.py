"""docs/errors.md shows the messages of the code."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace
from tests.docs_errors import CHAPTERS, PAGE, Misuse, made_page, make_files, message_of

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
SLOW = {"A worker that dies"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("misuses")
    make_files(path)
    yield path


def test_the_page_lists_every_misuse() -> None:
    assert len(MISUSES) == len({misuse.title for misuse in MISUSES}) == 47
    assert [title for title, _ in TEXTS] == [misuse.title for misuse in MISUSES], (
        "write the page: python -m tests.docs_errors --write"
    )


@pytest.mark.parametrize(
    "misuse",
    [
        pytest.param(misuse, marks=pytest.mark.slow if misuse.title in SLOW else ())
        for misuse in MISUSES
    ],
    ids=lambda m: m.title,
)
def test_a_message_is_that_of_the_page(folder: Path, misuse: Misuse) -> None:
    said = message_of(misuse.code, folder)
    assert said == dict(TEXTS)[misuse.title], "write the page: python -m tests.docs_errors --write"
    written, ours = set(re.findall(r"\w+", misuse.code)), set(re.findall(r"\w+", said)) & CLASSES
    # the others are remedies
    assert ours <= PUBLIC and ("BaseDataset" not in ours or "BaseDataset" in written)


@pytest.mark.slow
def test_the_page_is_the_generated_one(tmp_path: Path) -> None:
    assert made_page(tmp_path) == PAGE.read_text()
