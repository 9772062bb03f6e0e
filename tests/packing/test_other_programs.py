"""h5py reads a pack without headrace."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from headrace import ImageDataset, pack
from tests.packing.cases import make_case

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


def test_images_and_masks(tmp_path: Path) -> None:
    case = make_case("masks", "file", tmp_path)
    with case.source() as source:
        files = source.samples
    group: Any = h5py.File(case.path)
    offsets = group["offsets"]
    for number, (image, mask) in enumerate(files):
        middle = group["mask_starts"][number]
        assert group["data"][offsets[number] : middle].tobytes() == Path(image).read_bytes()
        assert group["data"][middle : offsets[number + 1]].tobytes() == Path(mask).read_bytes()


def test_boxes(tmp_path: Path) -> None:
    case = make_case("boxes", "file", tmp_path)
    with case.source() as source:
        targets = source.targets
    group: Any = h5py.File(case.path)
    offsets = group["object_offsets"]
    for number, target in enumerate(targets):
        for name in ("boxes", "labels", "area", "iscrowd"):
            of_image = group[name][offsets[number] : offsets[number + 1]]
            assert np.array_equal(of_image, target[name]), name
        assert group["image_id"][number] == target["image_id"]
        assert group["image_size"][number].tolist() == [24, 32]
    said = json.loads(group.attrs["headrace"])
    assert said["classes"] == ["mill", "wheel"] and said["image"]["class_ids"] == [3, 7]
    offsets = group["segmentation_offsets"]
    annotations = json.loads((tmp_path / "boxes" / "instances.json").read_text())["annotations"]
    for number, target in enumerate(targets):
        outlines = group["segmentations"][offsets[number] : offsets[number + 1]]
        assert json.loads(outlines.tobytes()) == [
            one["segmentation"] for one in annotations if one["image_id"] == target["image_id"]
        ]
