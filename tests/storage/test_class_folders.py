"""Folders that are called as parts of a data set are not read as one without a word."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import HeadraceWarning, ImageDataset, StreamingDataset, TableDataset, TextDataset
from tests.data.labelled import make_masks
from tests.data.make import make_tar

OPENED: dict[str, tuple[Callable[[Path], Any], Callable[..., Any]]] = {
    ".txt": (lambda path: path.write_text("text"), TextDataset),
    ".jsonl": (lambda path: path.write_text('{"text": "a"}\n'), TextDataset),
    ".npy": (lambda path: np.save(path, np.ones((2, 3))), TableDataset),
    ".tar": (lambda path: make_tar(path, [("1.txt", b"a")]), StreamingDataset),
}


@pytest.mark.parametrize("ending", OPENED)
@pytest.mark.parametrize(
    "names",
    [
        ("train/1", "val/1"),
        ("testing/1", "validation/1"),
        ("test-00000-of-00001", "train-00000-of-00001"),
    ],
)
def test_splits_read_as_one_are_warned_of(
    ending: str, names: tuple[str, str], tmp_path: Path
) -> None:
    write, opened = OPENED[ending]
    paths = [tmp_path / f"{name}{ending}" for name in names]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        write(path)
    first, second = (path.relative_to(tmp_path).parts[0] for path in paths)
    with pytest.warns(
        HeadraceWarning,
        match=f"{first} and {second} are called as parts of a data set, and are read as one",
    ):
        opened(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", HeadraceWarning)
        opened(paths)
        opened(paths[0])


def test_splits_below_images_and_masks_are_warned_of(tmp_path: Path) -> None:
    make_masks(tmp_path, 4)
    for kind in ("images", "masks"):
        files = sorted((tmp_path / kind).iterdir())
        for number, path in enumerate(files):
            split = tmp_path / kind / ("train" if number % 2 else "val")
            split.mkdir(exist_ok=True)
            path.rename(split / path.name)
    with pytest.warns(HeadraceWarning, match="train and val are called as parts"):
        ImageDataset(tmp_path / "images", targets=tmp_path / "masks")
