"""Folders that are called as parts of a data set are not read as one without a word."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import HeadraceWarning, ImageDataset, StreamingDataset, TableDataset, TextDataset
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
