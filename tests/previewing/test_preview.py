"""What a preview shows is what a loader yields."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from PIL import Image

import headrace
from headrace.cli.main import main
from headrace.errors import ConfigError
from headrace.previewing import draw_sheet, preview
from headrace.previewing.sheet import pictures_of, value_range
from tests.data.labelled import make_coco, make_masks, make_street, make_street_labels
from tests.data.make import image_bytes, make_tar
from tests.data.sparse import random_matrix, write_anndata


def captions(shown: Any) -> list[str]:
    return [item.caption for item in shown.items]


def test_samples_are_those_of_a_loader(photos: Path, make_loader: Any) -> None:
    shown = preview(photos, count=7, seed=3, epoch=2)
    dataset = headrace.ImageDataset(photos, return_index=True)
    loader = make_loader(dataset, batch_size=7, seed=3, num_workers=0)
    loader.set_epoch(2)
    images, targets, indices = next(iter(loader))
    assert [item.index for item in shown.items] == indices.tolist()
    assert captions(shown) == [dataset.classes[target] for target in targets.tolist()]
    for item, image, index in zip(shown.items, images, indices.tolist(), strict=True):
        assert np.array_equal(item.value, image.numpy())
        assert item.where == dataset.source_of(index)
    assert shown.batch == "(float32 [7, 3, 224, 224], int64 [7])"


def test_the_sheet_shows_the_pixels(tmp_path: Path) -> None:
    colors = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    for number, color in enumerate(colors):
        (tmp_path / f"c{number}").mkdir()
        Image.new("RGB", (40, 40), color).save(tmp_path / f"c{number}" / "a.png")
    shown = preview(tmp_path, count=3, shuffle=False, normalize=False)
    drawn = np.asarray(draw_sheet(shown, cell=50))
    for color in colors:
        assert (drawn == color).all(axis=-1).sum() == 50 * 50


def test_volumes_are_three_slices_with_labels(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "a.zarr", mode="w")
    steps = np.broadcast_to(np.arange(32) // 8, (32, 32, 32))
    for name, dtype in (("raw", "u2"), ("labels", "u1")):
        group.create_array(name, shape=(32, 32, 32), chunks=(16, 16, 16), dtype=dtype)[:] = steps
    shown = preview(tmp_path / "a.zarr", dataset_name="raw", target_name="labels", patch_shape=16)
    (item, *_) = shown.items
    assert item.value.shape == item.target.shape == (16, 16, 16)
    assert len(pictures_of(item.value, value_range([item.value]))) == 3
    assert draw_sheet(shown, cell=40).width > 6 * 40


def test_texts_tell_tokens_and_padding(tmp_path: Path) -> None:
    for number, text in enumerate(["short", "a longer text"]):
        (tmp_path / f"{number}.txt").write_text(text)
    shown = preview(tmp_path, shuffle=False)
    told = [(item.text, item.padding) for item in shown.items]
    assert told == [("short", 8), ("a longer text", 0)]
    lines = list(shown.lines(60))
    assert any("5 tokens + 8 padding  short" in line for line in lines)
    assert max(map(len, lines[2:])) <= 60
    assert draw_sheet(shown).width == 1100


def test_shards_of_other_sizes_are_told(tmp_path: Path) -> None:
    members = []
    for number in range(4):
        data = image_bytes(Image.new("RGB", (20 + number, 20)), "PNG")
        members += [(f"{number}.png", data), (f"{number}.cls", b"1")]
    make_tar(tmp_path / "a.tar", members)
    shown = preview(str(tmp_path / "a.tar"), count=4)
    assert "the default collate function raises" in shown.notes[0]
    assert len(shown.items) == 4
    assert all("cls 1" in item.caption and item.value is not None for item in shown.items)


def test_arrays_of_any_shape_are_pictures() -> None:
    for shape, dtype, count in [
        ((3, 9, 8), "u1", 1),
        ((9, 8, 3), "f4", 1),
        ((1, 9, 8), "f4", 1),
        ((9, 8), "i4", 1),
        ((9, 8, 7), "u2", 3),
        ((2, 9, 8, 7), "u2", 3),
        ((5, 9, 8, 3), "u1", 1),
        ((100,), "f4", 1),
        ((), "f8", 1),
        ((0, 4), "u1", 0),
        ((4, 4), "?", 1),
    ]:
        array = (np.random.default_rng(0).random(shape) * 5).astype(dtype)
        pictures = pictures_of(array, value_range([array]))
        assert len(pictures) == count, shape
        for picture in pictures:
            assert (picture.dtype, picture.ndim, picture.shape[2]) == (np.uint8, 3, 3)
    array = np.array([[0.0, np.nan], [np.inf, 1.0]], "f4")
    assert pictures_of(array, (0.0, 1.0), is_labels=True)[0][0].tolist() == [[0, 0, 0], [0, 0, 0]]
    assert value_range([array]) == (0.0, 1.0)
    assert pictures_of(array, (0.0, 1.0))[0][..., 0].tolist() == [[0, 0], [255, 255]]


def test_a_dataset_without_samples(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "a.zarr", shape=(0, 4), dtype="f4")
    with pytest.raises(ConfigError, match="no samples"):
        preview(tmp_path / "a.zarr")


def test_targets_of_several_columns_are_named(tmp_path: Path) -> None:
    folder = make_street_labels(make_street(tmp_path))
    images, labels = folder / "images", folder / "labels.csv"
    columns = ["weather", "lamps"]
    shown = preview(images, targets=labels, target_name=columns, count=3, shuffle=False)
    dataset = headrace.ImageDataset(images, targets=labels)
    for number, caption in enumerate(captions(shown)):
        target = dataset[number][1]
        weather = dataset.column_classes["weather"][target["weather"]]
        assert caption == f"weather {weather}, lamps {target['lamps']}"
    matrix = write_anndata(tmp_path / "a.h5ad", random_matrix(9, 4))
    shown = preview(matrix, targets=["kind", "age"], count=2, shuffle=False)
    assert captions(shown) == ["kind B cell, age 0", "kind NK, age 0.5"]


def test_boxes_are_drawn_and_objects_counted(tmp_path: Path) -> None:
    folder = make_coco(tmp_path, 6)
    targets = folder / "instances.json"
    size = (48, 64)
    shown = preview(folder / "images", targets=targets, count=6, shuffle=False, image_size=size)
    wanted = ["1 mill", "1 mill, 1 wheel", "2 mill, 1 wheel", "1 mill", "0 objects"]
    assert captions(shown)[:5] == wanted
    drawn = np.asarray(draw_sheet(shown, cell=64))
    assert (drawn == (250, 60, 180)).all(axis=-1).sum() > 200


def test_masks_are_drawn_beside_their_images(tmp_path: Path) -> None:
    folder = make_masks(tmp_path, 6)
    shown = preview(folder / "images", targets=folder / "masks", count=6, image_size=16)
    for item in shown.items:
        assert (item.value.shape, item.target.shape) == ((3, 16, 16), (16, 16))
        assert not item.caption


# -- the command


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, from which transforms are imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    return tmp_path


UPSIDE = """
import numpy, torch
def upside(image):
    return torch.from_numpy(numpy.array(image)[::-1].copy())
"""


def test_the_command_writes_a_picture(
    photos: Path, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (in_folder / "turned.py").write_text(UPSIDE)
    options = ["-o", "a.png", "--count", "5", "--transform", "turned:upside", "--json"]
    assert main(["preview", str(photos), *options]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["samples"]) == 5
    assert told["batch"] == "(uint8 [5, 48, 64, 3], int64 [5])"
    with Image.open("a.png") as drawn:
        assert drawn.format == "PNG"
    assert main(["preview", str(photos)]) == 2
    assert "pass -o sheet.png" in capsys.readouterr().err


def test_wrong_use_is_told(
    photos: Path, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, said in [
        (["-o", "a.txt"], ".png"),
        (["-o", "none/a.png"], "does not exist"),
        (["-o", str(photos / "a.png")], "is inside the data"),
        (["-o", "a.png", "--transform", "os"], "MODULE:NAME"),
        (["-o", "a.png", "--transform", "no_such_module:x"], "no_such_module"),
        (["-o", "a.png", "--transform", "os:sep"], "must be a function"),
        (["-o", "a.png", "--patch-shape", "8"], "option for"),
    ]:
        assert main(["preview", str(photos), *arguments]) == 2
        assert said in capsys.readouterr().err
    assert not list(in_folder.iterdir())


def test_a_fault_of_a_transform_is_its_own(
    photos: Path, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, (program, said) in enumerate(
        [
            ("number = 1 / 0", "ZeroDivisionError: division by zero"),
            ("def augment(image:", "SyntaxError"),
            ("def augment(image):\n    return image.turned", "augment raised AttributeError: "),
        ]
    ):
        (in_folder / f"faulty_{number}.py").write_text(program)
        transform = f"faulty_{number}:augment"
        assert main(["preview", str(photos), "-o", "a.png", "--transform", transform]) == 2
        shown = capsys.readouterr().err
        assert said in shown
        assert "please report it" not in shown
