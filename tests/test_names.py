"""What docs/moving.md says of headrace is true; of the others it can't be asked here."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import headrace
from headrace import (
    BaseDataset,
    ConfigError,
    DataModule,
    ImageDataset,
    MultiDataLoader,
    TextDataset,
    create_dataloader,
    pack,
)
from headrace.core.options import PathOptions
from headrace.loader.config import FIELDS
from headrace.monitor import MemoryMonitor
from headrace.packing.plan import PackOptions
from headrace.synonyms import (
    ARGUMENTS,
    BY_ARGUMENT,
    BY_NAME,
    BY_REMEDY,
    LOADER_OPTIONS,
    NAMES,
    WITHOUT_ARGUMENT,
)
from tests.testing.test_contract import SquareDataset

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "moving.md").read_text()
BOUND = {"loader", "dataset", "len", "None", "True", "False", "verify", "headrace"}
"""Words in the examples that are no names of headrace's."""


def rows() -> Iterator[list[str]]:
    """The cells of the rows of the page's tables."""
    for line in PAGE.splitlines():
        if line.startswith("|") and not line.startswith("|--"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def known_names() -> set[str]:
    """Public names, their attributes, and the names of their parameters."""
    found = set(headrace.__all__) | set(FIELDS) | BOUND
    found |= {*get_type_hints(PathOptions), *get_type_hints(PackOptions)}
    things = [getattr(headrace, name) for name in headrace.__all__]
    for package in (headrace.collate, headrace.memory, headrace.monitor, headrace.order):
        things += [getattr(package, name) for name in package.__all__]
        found |= {*package.__name__.split("."), *package.__all__}
    for thing in things:
        found |= parameters(thing)
        if inspect.isclass(thing):
            for attribute in dir(thing):
                found |= {attribute} | parameters(getattr(thing, attribute, None))
    # only instances have the first; torch's
    return found | {"targets", "classes", "class_to_idx"} | {"DataLoader", "DistributedSampler"}


def parameters(thing: object) -> set[str]:
    try:
        return set(inspect.signature(thing).parameters) if callable(thing) else set()
    except (TypeError, ValueError):
        return set()


def test_every_name_of_ours_is_one() -> None:
    known, seen = known_names(), 0
    for row in rows():
        assert len(row) in (2, 7), row
        for code in re.findall(r"`([^`]+)`", row[-1]):
            words = re.findall(r"[A-Za-z_]\w*", re.sub(r'"[^"]*"', "", code))
            assert set(words) <= known, (row[0], code)
            seen += len(words)
    assert seen > 40


def test_the_page_lists_all_synonyms(scripts: Any) -> None:
    page = scripts("list_words").on_page_markdown(PAGE)
    for word in (*ARGUMENTS, *WITHOUT_ARGUMENT, *NAMES):
        assert f"`{word}`" in page
    assert "tools/list_words.py" in (ROOT / "mkdocs.yml").read_text()


# -- synonyms


def test_each_synonym_leads_to_what_is_there() -> None:
    assert LOADER_OPTIONS == FIELDS
    known = known_names() | {"ConcatDataset"}
    for remedy in BY_ARGUMENT:
        assert re.split(r"\W", remedy, maxsplit=1)[0] in known, remedy
    for remedy in [*BY_NAME, *BY_REMEDY]:
        words = set(re.findall(r"\w+", re.sub(r"'[^']*'", "", remedy)))
        names = {word for word in words if "_" in word or re.search("[a-z][A-Z]", word)}
        assert names <= known and words & known, remedy
    assert not set(NAMES) & set(headrace.__all__)


def test_names_of_other_libraries_say_what_to_use() -> None:
    for name, use in NAMES.items():
        with pytest.raises(AttributeError, match=re.escape(f"'{name}': use {use}")):
            getattr(headrace, name)
    with pytest.raises(ImportError, match=re.escape(f"'{name}': use {use}")):
        exec(f"from headrace import {name}")


SAID: dict[Any, dict[str, str]] = {
    create_dataloader: {
        "patch_size": "patch_shape where the dataset is made",
        "distributed": "rank and world_size, which are detected",
        "loading_mode": "it where the dataset is made, whose option it is",
    },
    ImageDataset: {"resize": "image_size", "bs": "batch_size in create_dataloader"},
    TextDataset: {"block_size": "max_length, with packing=True"},
    MultiDataLoader: {"sampling_strategy": "strategy"},
    DataModule: dict.fromkeys(("groups", "stratify"), "train, val = dataset.split("),
    BaseDataset: {"data_path": "source, a Source of the records"},
    MemoryMonitor().check_memory_constraint: {"required_memory": "nbytes"},
    pack: {"num_workers": "workers"},
    SquareDataset().folds: {"n_splits": "k"},
}
AFTER_DATA = {pack: ("packed.h5",)}
REQUIRED = [(DataModule, "train_data", "train"), (MultiDataLoader, "dataloaders", "loaders")]
"""Synonyms of arguments that must be given."""


def test_arguments_of_other_libraries_say_what_to_use() -> None:
    for function, words in SAID.items():
        data = {"a": [1, 2]} if function is MultiDataLoader else [1, 2]
        for word, use in words.items():
            said = re.escape(f"{function.__name__} has no '{word}': use {use}")
            with pytest.raises(ConfigError, match=said):
                function(data, *AFTER_DATA.get(function, ()), **{word: 1})
    for function, word, use in REQUIRED:
        with pytest.raises(ConfigError, match=f"^{function.__name__} has no '{word}': use {use}"):
            function(**{word: "a"})


RECORDS = {
    *("BatchTimes", "LoadingMode", "Padded", "Profile", "RemoteOptions", "SlowStage"),
    *("SparseRow", "SparseRows"),
}
"""Public classes that users get and don't make, or enumerations."""
OTHERS = {
    *("DataModuleProtocol", "LRUCache", "Source", "WorkerHandle"),
    *("document_mask", "list_collate", "move_to_device", "sparse_collate"),
}


def test_public_functions_name_the_keyword_they_lack() -> None:
    required: dict[str, list[Any]] = {
        "MultiDataLoader": [{"a": [1]}],
        "pack": [[1, 2], "packed.h5"],
        "read_rows": ["x", "y", [0]],
        "split_workers": [{"a": 1}],
    }
    for name in sorted(set(headrace.__all__) - RECORDS - OTHERS):
        function = getattr(headrace, name)
        is_error = inspect.isclass(function) and issubclass(function, Exception)
        if callable(function) and not is_error:
            with pytest.raises(ConfigError, match=f"^{name} has no 'xyzzy': it has "):
                function(*required.get(name, [[1, 2]]), xyzzy=1)


def test_a_misspelt_name_of_the_package() -> None:
    with pytest.raises(
        AttributeError, match=r"^headrace has no 'ImageDatset': did you mean ImageDataset"
    ):
        headrace.ImageDatset  # noqa: B018
    assert not hasattr(headrace, "nothing_like_it")
    exec("from headrace import testing")  # a module, which is imported when it is asked for
