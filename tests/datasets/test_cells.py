"""Columns of text: what is a number, and what a name that looks like one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from headrace import ConfigError, ImageDataset, TextDataset

CELLS: list[tuple[list[str], list[Any] | None]] = [
    (["007", "7"], None),
    (["00501", "1234"], None),
    (["+7", "7"], None),
    ([" 7", "7"], None),
    (["\u0667", "7"], None),
    (["1_2", "12"], None),
    (["7", "12"], [7, 12]),
    (["-1", "1"], [-1, 1]),
    ([" 7", "12"], [7, 12]),
    (["0.50", "3.00"], [0.5, 3.0]),
    (["+0.5", "-2e3"], [0.5, -2000.0]),
]
SAME = [("1.10", "1.1"), ("1e2", "100"), ("7", "7.0"), ("-0", "0")]


def photos(folder: Path) -> Path:
    for name in "ab":
        Image.new("RGB", (4, 3)).save(folder / f"{name}.png")
    return folder


def table(folder: Path, cells: Any) -> Path:
    path = folder / "labels.csv"
    path.write_text(
        "file,label,camera\n"
        + "".join(f"{name}.png,{cell},{cell}\n" for name, cell in zip("ab", cells, strict=True))
    )
    return path


def records(folder: Path, cells: Any) -> Path:
    path = folder / "records.csv"
    path.write_text("text,label\n" + "".join(f"row,{cell}\n" for cell in cells))
    return path


def test_no_two_labels_become_one(tmp_path: Path) -> None:
    folder = photos(tmp_path)
    for cells, numbers in CELLS:
        images = ImageDataset(folder, targets=table(folder, cells), target_name="label")
        texts = TextDataset(records(folder, cells), target_field="label")
        expected = [sorted(cells).index(cell) for cell in cells] if numbers is None else numbers
        for dataset in (images, texts):
            assert dataset.targets.tolist() == expected, cells
            assert dataset.classes == (sorted(cells) if numbers is None else []), cells
        if numbers is None:
            assert len(images.folds(2, groups="camera")) == 2  # two cameras, one a fold


def test_two_texts_of_one_number_are_refused(tmp_path: Path) -> None:
    folder = photos(tmp_path)
    for cells in SAME:
        first, second = sorted(cells)
        with pytest.raises(ConfigError, match=f"'label' .*{first!r} and {second!r}"):
            ImageDataset(folder, targets=table(folder, cells), target_name="label")
        with pytest.raises(ConfigError, match=f"'label': .*{first!r} and {second!r}"):
            TextDataset(records(folder, cells), target_field="label")


def test_numbers_between_separators_are_labels(tmp_path: Path) -> None:
    dataset = ImageDataset(
        photos(tmp_path),
        targets=table(tmp_path, ["7", "007"]),
        target_name="label",
        label_separator=";",
    )
    assert dataset.classes == ["007", "7"] and dataset[0][1].tolist() == [0, 1]
