"""What docs/names.md says of headrace is true; of the others it can't be asked here."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import pytest

import headrace
from headrace.arguments import OLD_NAMES
from headrace.datasets.core.options import PathOptions
from headrace.loader.config import _OLD_WORDS, FIELDS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "names.md").read_text()
BOUND = {"loader", "dataset", "len", "None", "True", "False", "verify", "headrace"}
"""Words in the examples that are no names of headrace's."""


def rows(heading: str) -> Iterator[list[str]]:
    """The cells of the rows of the table under a heading, without its head."""
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    for line in lines[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def known_names() -> set[str]:
    """Public names, their attributes, and the names of their parameters."""
    found = set(headrace.__all__) | set(FIELDS) | set(get_type_hints(PathOptions)) | BOUND
    for name in headrace.__all__:
        thing = getattr(headrace, name)
        found |= parameters(thing)
        if inspect.isclass(thing):
            for attribute in dir(thing):
                found |= {attribute} | parameters(getattr(thing, attribute, None))
    return found | {"targets", "classes", "class_to_idx"} | {"DataLoader", "DistributedSampler"}  # only instances have the first; torch's


def parameters(thing: object) -> set[str]:
    try:
        return set(inspect.signature(thing).parameters) if callable(thing) else set()
    except (TypeError, ValueError):
        return set()


def test_every_name_of_ours_is_one() -> None:
    known, seen = known_names(), 0
    for heading in ("torch and its trainers", "Other loaders"):
        for row in rows(heading):
            for code in re.findall(r"`([^`]+)`", row[-1]):
                words = re.findall(r"[A-Za-z_]\w*", re.sub(r'"[^"]*"', "", code))
                assert set(words) <= known, (row[0], code)
                seen += len(words)
    assert seen > 100


def test_all_rows_have_all_columns() -> None:
    tables = {"torch and its trainers": 4, "Other loaders": 8, "Words that are refused with a hint": 2, "Names of older guides": 2}
    for heading, columns in tables.items():
        assert {len(row) for row in rows(heading)} == {columns}


def test_the_refused_words_are_those_of_the_code() -> None:
    said = {}
    for words, instead in rows("Words that are refused with a hint"):
        for word in re.findall(r"`([^`]+)`", words):
            said[word] = plain(instead)
    assert said == _OLD_WORDS


def plain(cell: str) -> str:
    return cell.replace("`", "").replace('"', "'")


def test_the_older_names_are_those_of_the_code() -> None:
    table = {re.findall(r"`([^`]+)`", name)[0]: plain(instead) for name, instead in rows("Names of older guides")}
    assert table == OLD_NAMES
    assert not set(OLD_NAMES) & set(headrace.__all__)


@pytest.mark.parametrize("name", OLD_NAMES)
def test_an_older_name_says_what_to_use(name: str) -> None:
    said = re.escape(f"headrace has no '{name}': use {OLD_NAMES[name]}")
    with pytest.raises(AttributeError, match=said):
        getattr(headrace, name)
    with pytest.raises(ImportError, match=said):
        exec(f"from headrace import {name}")


def test_what_an_older_name_leads_to_is_there() -> None:
    known = known_names()
    for instead in OLD_NAMES.values():
        words = set(re.findall(r"\w+", re.sub(r"'[^']*'", "", instead)))
        names = {word for word in words if "_" in word or re.search("[a-z][A-Z]", word)}
        assert names <= known and words & known, instead


def test_a_misspelt_name_of_the_package() -> None:
    with pytest.raises(AttributeError, match=r"^headrace has no 'ImageDatset': did you mean ImageDataset"):
        headrace.ImageDatset  # noqa: B018
    assert not hasattr(headrace, "nothing_like_it")
    exec("from headrace import testing")  # a module, which is imported when it is asked for
