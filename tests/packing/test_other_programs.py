"""h5py and zarr-python read a pack without headrace."""

from __future__ import annotations

import itertools
import json
import os
import warnings
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

from headrace import ImageDataset, pack
from headrace.packing import pack_status
from tests.packing.cases import COUNT, make_case

pytestmark = pytest.mark.quick_every(2)


@pytest.mark.parametrize("part_sizes", [{}, {"shard_size": 16_000}])
def test_encoded_images_in_hdf5(photos: Path, part_sizes: dict[str, Any], tmp_path: Path) -> None:
    """The bytes of the files, with names and targets."""
    out = pack(photos, tmp_path / "out", **part_sizes)
    paths = sorted(out.glob("*.h5")) if part_sizes else [out]
    with ImageDataset(photos) as source:
        samples = iter(source.samples)
        for path in paths:
            with h5py.File(path) as file:
                assert file["offsets"].dtype == np.int64 and file["crc32"].dtype == np.uint32
                assert all(file[name].chunks is None for name in file)
                names = file["names"][:].tobytes()
                ends = itertools.pairwise(file["name_offsets"])
                for number, (begin, end) in enumerate(itertools.pairwise(file["offsets"])):
                    image, target = next(samples)
                    assert file["data"][begin:end].tobytes() == Path(image).read_bytes()
                    assert file["targets"][number] == target
                    assert names[slice(*next(ends))].decode() == os.path.relpath(image, photos)
        assert next(samples, None) is None


@pytest.mark.parametrize("way", ["file", "zarr"])
def test_images_and_masks(way: str, tmp_path: Path) -> None:
    case = make_case("masks", way, tmp_path)
    with case.source() as source:
        files = source.samples
    group: Any = open_plainly(case.path)
    starts, stops = edges_of(group, "offsets", ("starts", "stops"))
    for number, (image, mask) in enumerate(files):
        middle = group["mask_starts"][number]
        assert group["data"][starts[number] : middle].tobytes() == Path(image).read_bytes()
        assert group["data"][middle : stops[number]].tobytes() == Path(mask).read_bytes()
    assert layout_of(group) == 4, "earlier versions of headrace refuse it"


def open_plainly(path: Path) -> Any:
    if path.is_file():
        return h5py.File(path)
    assert pack_status(path).parts > 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return zarr.open_group(path / "data.zarr", mode="r")


def edges_of(group: Any, in_hdf5: str, in_zarr: tuple[str, str]) -> tuple[Any, Any]:
    """First and last byte of each sample, or object; HDF5 has one array of both."""
    if in_hdf5 in group:
        return group[in_hdf5][:-1], group[in_hdf5][1:]
    return group[in_zarr[0]][:], group[in_zarr[1]][:]


def layout_of(group: Any) -> int:
    return int(json.loads(group.attrs["headrace"])["version"])


@pytest.mark.parametrize("way", ["decoded", "decoded zarr", "lz4 zarr"])
def test_pixels_and_masks(way: str, tmp_path: Path) -> None:
    case = make_case("masks", way, tmp_path)
    group: Any = open_plainly(case.path)
    if way == "decoded":
        pixels, numbers = group["data"]["image"], group["data"]["mask"]
    else:
        pixels, numbers = group["data"][:], group["mask"][:]
        assert layout_of(group) == 6
    assert pixels.shape == (COUNT, 8, 8, 3) and numbers.dtype == np.uint8
    with case.source(normalize=False) as source:
        for index, (image, mask) in enumerate(source):
            assert np.array_equal(pixels[index], image.permute(1, 2, 0))
            assert np.array_equal(numbers[index], mask)
            checksum = zlib.crc32(pixels[index].tobytes() + numbers[index].tobytes())
            assert group["crc32"][index] == checksum


@pytest.mark.parametrize("way", ["file", "zarr"])
def test_boxes(way: str, tmp_path: Path) -> None:
    case = make_case("boxes", way, tmp_path)
    with case.source() as source:
        targets = source.targets
    group: Any = open_plainly(case.path)
    starts, stops = edges_of(group, "object_offsets", ("object_starts", "object_stops"))
    for number, target in enumerate(targets):
        for name in ("boxes", "labels", "area", "iscrowd"):
            of_image = group[name][int(starts[number]) : int(stops[number])]
            assert np.array_equal(of_image, target[name]), name
        assert group["image_id"][number] == target["image_id"]
        assert group["image_size"][number].tolist() == [24, 32]
    said = json.loads(group.attrs["headrace"])
    assert said["classes"] == ["mill", "wheel"] and said["image"]["class_ids"] == [3, 7]
    begins, ends = edges_of(
        group, "segmentation_offsets", ("segmentation_starts", "segmentation_stops")
    )
    annotations = json.loads((tmp_path / "boxes" / "instances.json").read_text())["annotations"]
    for number, target in enumerate(targets):
        outlines = group["segmentations"][int(begins[number]) : int(ends[number])]
        assert json.loads(outlines.tobytes()) == [
            one["segmentation"] for one in annotations if one["image_id"] == target["image_id"]
        ]


@pytest.mark.parametrize("way", ["file", "zarr"])
def test_columns_of_targets(way: str, tmp_path: Path) -> None:
    case = make_case("columns", way, tmp_path)
    group: Any = open_plainly(case.path)
    said = json.loads(group.attrs["headrace"])
    assert [name for name, _ in said["target_columns"]] == ["kind", "height/m", "sound", "seen in"]
    assert group["targets_1"][:].tolist() == [number / 4 for number in range(COUNT)]
    assert group["targets_3"].shape == (COUNT, 2) and "targets" not in group
    assert layout_of(group) == 7
