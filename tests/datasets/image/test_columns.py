"""Images in columns of tables, tars and arrays are those of the same folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr

from headrace import (
    ConfigError,
    FormatError,
    ImageDataset,
    Loader,
    MissingNameError,
    RandomResizedCrop,
    SampleError,
    create_dataloader,
)
from headrace.datasets.pixels import decode_image
from headrace.testing.contract import same
from tests.data.make import image_bytes, make_tar

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

N = 24
MODES = ("lazy", "eager", "cached", "streaming")


def encoded(number: int, size: tuple[int, int] = (20, 14)) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 255, (*size[::-1], 3), np.uint8)
    return image_bytes(pixels, "PNG")


def write_folder(folder: Path) -> Path:
    for number in range(N):
        path = folder / f"c{number % 3}" / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(number))
    return folder


def write_parquet(path: Path, as_struct: bool = False) -> Path:
    images: list[Any] = [encoded(number) for number in range(N)]
    if as_struct:
        images = [{"bytes": image, "path": f"{number}.png"} for number, image in enumerate(images)]
    labels = [number % 3 for number in range(N)]
    names = [f"c{label}" for label in labels]
    table = pa.table({"image": images, "label": labels, "name": names})
    pq.write_table(table, path, row_group_size=5)
    return path


def write_arrays(path: Path) -> Path:
    """An HDF5 file or a Zarr store with the images as bytes and as pixels."""
    images = [encoded(number) for number in range(N)]
    fixed = np.array(images)
    arrays: dict[str, Any] = {
        "rows": fixed.view(np.uint8).reshape(N, -1),
        "pixels": np.stack([decode_image(image) for image in images]),
        "label": np.arange(N) % 3,
        "opaque": fixed.view(f"V{fixed.itemsize}"),
    }
    if path.suffix == ".zarr":
        group = zarr.open_group(path, mode="w", zarr_format=2)
        for name, values in arrays.items():
            group.create_array(name, data=values, chunks=(5, *values.shape[1:]))
        return path
    if path.suffix == ".npz":
        np.savez(path, **arrays)
        return path
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            file[name] = values
        file["name"] = [f"c{number % 3}" for number in range(N)]
        file["any"] = np.zeros((N, 8), np.float32)
        vlen = file.create_dataset("vlen", N, h5py.vlen_dtype(np.uint8))
        for number, image in enumerate(images):
            vlen[number] = np.frombuffer(image, np.uint8)
    return path


def write_tars(folder: Path, bad: dict[int, str] | None = None) -> str:
    folder.mkdir(exist_ok=True)
    members = []
    for number in range(N):
        what = (bad or {}).get(number)
        sample = {"txt": b"x", "png": encoded(number), "cls": b"%d" % (number % 3)}
        if what == "label":
            sample["cls"] = b"cat"
        elif what is not None:
            del sample[what]
        members += [(f"{number:02}.{ending}", data) for ending, data in sample.items()]
    for shard in range(2):
        of_shard = [member for member in members if int(member[0][:2]) * 2 // N == shard]
        make_tar(folder / f"{shard}.tar", of_shard)
    return str(folder / "*.tar")


def loader_of(dataset: Any, **options: Any) -> Loader:
    return create_dataloader(dataset, **{"batch_size": 4, "num_workers": 0, "seed": 3, **options})


def by_image(loader: Any) -> list[Any]:
    """All samples of an epoch, in an order of their own."""
    with loader:
        samples = [pair for images, targets in loader for pair in zip(images, targets, strict=True)]
    return sorted(samples, key=lambda pair: float(pair[0].sum()))


def check_modes(path: Any, workers: Sequence[int], **options: Any) -> None:
    """Epochs are the same in all modes, by so many workers, and have all targets."""
    epochs = []
    for mode in MODES:
        with ImageDataset(path, loading_mode=mode, progress=False, **options) as dataset:
            for number in workers:
                epochs.append(by_image(loader_of(dataset, num_workers=number)))
    assert all(same(epoch, epochs[0]) for epoch in epochs[1:])
    assert sorted(int(target) for _, target in epochs[0]) == sorted([0, 1, 2] * (N // 3))


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("kind", ["parquet", "structs", "tar"])
def test_images_of_columns_in_all_modes(kind: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "photos")
    path: Any = write_parquet(tmp_path / "a.parquet", kind == "structs")
    column: dict[str, Any] = {"column": "image", "targets": "label"}
    if kind == "tar":
        path, column = write_tars(tmp_path / "tars"), {}
    given: tuple[dict[str, Any], ...] = (
        {},
        {"image_size": 8, "normalize": False},
        {"transform": RandomResizedCrop(8)},
        {"image_size": 8, "transform": np.asarray, "hold": "encoded"},
    )
    for options in given:
        with ImageDataset(folder, **options) as plain:
            order = sorted(range(N), key=lambda index: Path(plain.samples[index][0]).name)
            with ImageDataset(path, **column, **options) as dataset:
                assert len(dataset) == N
                if not isinstance(options.get("transform"), RandomResizedCrop):  # of the index
                    assert all(same(dataset[row], plain[order[row]]) for row in (0, 13, 23, 13))
        check_modes(path, [0] if options else [0, 2], **column, **options)


def test_batches_are_made_row_by_row(tmp_path: Path) -> None:
    tars = ImageDataset(write_tars(tmp_path / "tars"), image_size=8)
    table = write_parquet(tmp_path / "a.parquet")
    names = ImageDataset(table, column="image", targets="name", image_size=8)
    for dataset in (tars, names):
        with loader_of(dataset, shuffle=False) as loader:
            assert "row by row" in loader.explain()
            images, targets = next(iter(loader))
            assert images.shape == (4, 3, 8, 8)
            assert torch.equal(targets, torch.tensor([0, 1, 2, 0]))
    assert names.classes == ["c0", "c1", "c2"]
    assert ImageDataset(table, column="image")[0][1] is None
    assert ImageDataset(str(tmp_path / "tars/*.tar"), targets=None)[0][1] is None
    train, val = names.split(0.5, stratify=True)
    assert len(train) == len(val)


@pytest.mark.quick_every(2)
@pytest.mark.parametrize(
    ("ending", "column", "options"),
    [
        ("h5", "vlen", {"normalize": False, "image_size": None}),
        ("h5", "opaque", {"image_size": 8}),
        ("h5", "rows", {"transform": RandomResizedCrop(8)}),
        ("h5", "pixels", {"image_size": 8, "transform": np.asarray}),
        ("zarr", "opaque", {"image_size": None, "transform": np.asarray, "hold": "encoded"}),
        ("zarr", "pixels", {"normalize": False}),
        ("npz", "pixels", {"image_size": 8}),
    ],
)
@pytest.mark.quick_every(7)
def test_images_of_arrays_in_all_modes(
    ending: str, column: str, options: dict[str, Any], tmp_path: Path
) -> None:
    path = write_arrays(tmp_path / f"a.{ending}")
    table = write_parquet(tmp_path / "a.parquet")
    named: dict[str, Any] = {"targets": "label", **options}
    if column == "pixels":  # which keep their size
        options = {"image_size": None, **options}
    plain = ImageDataset(table, column="image", targets="label", **options)
    for mode in MODES[:3]:
        options = {**named, "column": column, "loading_mode": mode, "progress": False}
        with ImageDataset(path, **options) as dataset:
            assert len(dataset) == N
            assert all(same(dataset[row], plain[row]) for row in (0, 13, 23, 13))
    check_modes(path, [0, 2], column=column, **named)


def test_arrays_that_hold_no_images(tmp_path: Path) -> None:
    path = write_arrays(tmp_path / "a.h5")
    assert ImageDataset(path, column="vlen", targets="name").classes == ["c0", "c1", "c2"]
    assert ImageDataset(path, column="pixels")[0][0].shape == (3, 14, 20)
    for column in ("any", "name", "label"):
        with pytest.raises(FormatError, match=rf"{column}.*use HDF5Dataset"):
            ImageDataset(path, column=column)
    with pytest.raises(ConfigError, match="pixels are 'RGB'"):
        ImageDataset(path, column="pixels", color="L")
    with pytest.raises(FormatError, match="name its images by column="):
        ImageDataset(path)


@pytest.mark.falls_back
def test_images_that_are_none(tmp_path: Path) -> None:
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    images = [{"bytes": encoded(0)}, None, {"bytes": b"x"}, {"path": "a/b.png"}]
    pq.write_table(pa.table({"image": pa.array(images, kind)}), tmp_path / "a.parquet")
    for options in ({}, {"transform": RandomResizedCrop(8)}):
        with ImageDataset(tmp_path / "a.parquet", column="image", **options) as dataset:
            for row, said in ((1, "'image' must"), (2, "row 2"), (3, r"'a/b\.png'")):
                with pytest.raises(SampleError, match=said):
                    dataset[row]
    tars = write_tars(tmp_path / "tars", {1: "png", 2: "label", 3: "cls"})
    for options in ({}, {"transform": RandomResizedCrop(8)}):
        with ImageDataset(tars, **options) as dataset:
            for row, said in ((1, "no member"), (2, "class number"), (3, "no member 'cls'")):
                with pytest.raises(SampleError, match=said):
                    dataset[row]
        dataset = ImageDataset(tars, on_error="skip", **options)
        with loader_of(dataset, shuffle=False) as loader:
            assert len(next(iter(loader))[0]) == 1


def test_columns_that_make_no_sense(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet")
    wrong: tuple[tuple[type[Exception], dict[str, Any]], ...] = (
        (MissingNameError, {"column": "x"}),
        (MissingNameError, {"column": "image", "targets": "x"}),
        (FormatError, {"column": "label"}),
        (ConfigError, {"column": 3}),
        (ConfigError, {"column": "image", "targets": {"a": 1}}),
        (ConfigError, {"column": "image", "targets": "folders"}),
        (ConfigError, {"column": "image", "target_name": "label"}),
    )
    for error, options in wrong:
        with pytest.raises(error):
            ImageDataset(path, **options)
    with pytest.raises(ConfigError, match="without columns"):
        ImageDataset(write_folder(tmp_path / "photos"), column="image")
