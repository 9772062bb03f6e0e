"""Folders that are called as parts of a dataset are not read as one without a word."""

from __future__ import annotations

import itertools
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import ImageDataset, StreamingDataset, TableDataset, TextDataset, open_dataset
from headrace.errors import ConfigError, FormatError, HeadraceWarning
from tests.data.labelled import make_masks
from tests.data.make import make_tar

SPLITS = [
    ("train/1", "val/1"),
    ("testing/1", "validation/1"),
    ("test-00000-of-00001", "train-00000-of-00001"),
]


def write(path: Path) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    if path.suffix == ".npy":
        np.save(path, np.ones((2, 3)))
    elif path.suffix == ".tar":
        make_tar(path, [("1.txt", b"a")])
    else:
        path.write_text('{"text": "a"}\n')


def test_splits_read_as_one_are_warned_of(tmp_path: Path) -> None:
    kinds = {".txt": TextDataset, ".jsonl": TextDataset, ".npy": TableDataset}
    for number, (ending, names) in enumerate(itertools.product((*kinds, ".tar"), SPLITS)):
        opened: Any = kinds.get(ending, StreamingDataset)
        folder = tmp_path / str(number)
        paths = [folder / f"{name}{ending}" for name in names]
        for path in paths:
            write(path)
        first, second = (path.relative_to(folder).parts[0] for path in paths)
        with pytest.warns(HeadraceWarning, match=f"{first} and {second}"):
            opened(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("error", HeadraceWarning)
            opened(paths)
            opened(paths[0])


def test_splits_below_images_and_masks_are_warned_of(tmp_path: Path) -> None:
    make_masks(tmp_path, 4)
    for kind in ("images", "masks"):
        for number, path in enumerate(sorted((tmp_path / kind).iterdir())):
            split = tmp_path / kind / ("train" if number % 2 else "val")
            split.mkdir(exist_ok=True)
            path.rename(split / path.name)
    with pytest.warns(HeadraceWarning, match="train and val"):
        ImageDataset(tmp_path / "images", targets=tmp_path / "masks")


ONE = "- {config_name: a, data_files: [{split: train, path: data/train-*}]}"
TWO = "- {config_name: b, data_files: {train: data/train-0.npy, test: [data/test.npy, more]}}"
DATA = ("data/train-0.npy", "data/train-1.npy", "data/test.npy", "more/0.npy")


@pytest.mark.parametrize(
    ("configs", "found"),
    [
        (ONE, DATA[:2]),
        ("- data_files: ./data/t*.npy  # of Windows\r\n", DATA[:3]),
        (f"{ONE[:-1]}, default: true}}\n{TWO}", DATA[:2]),
        (f"{ONE}\n- {{config_name: default, data_dir: more}}", DATA[3:]),
        (TWO, r"train '\S+/data/train-0\.npy', test \['\S+/test\.npy', '\S+/more'\]"),
        (f"{ONE}\n{TWO}", r"one: a/train '\S+/data/train-\*', b/train '.*, b/test \["),
        ("- data_files: ../other/*", "lie elsewhere"),
        ("- data_files: [{split: train}]", "can't be read"),
        ("- [", "can't be read"),
    ],
)
def test_a_readme_says_which_files_are_a_split(configs: str, found: Any, tmp_path: Path) -> None:
    for path in DATA:
        write(tmp_path / path)
    front = f"---\nlicense: mit\nconfigs:\n{configs}\nsize_categories:\n- n<1K\n---\nMill wheels"
    (tmp_path / "README.md").write_text(front)
    for opened in (open_dataset, TableDataset):
        if isinstance(found, str):
            with pytest.raises((ConfigError, FormatError), match=re.escape(str(tmp_path))) as said:
                opened(tmp_path)
            assert re.search(found, str(said.value))
            continue
        with opened(tmp_path) as dataset:
            assert len(dataset) == 2 * len(found) and repr(str(tmp_path)) in repr(dataset)
            assert {dataset.source_of(row)[: -len(", row 0")] for row in range(len(dataset))} == {
                str(tmp_path / path) for path in found
            }
