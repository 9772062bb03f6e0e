"""Batches of images with masks and boxes: the bytes of samples made one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from headrace import ImageDataset, RandomHorizontalFlip, RandomResizedCrop, SampleError, pack
from headrace.collate import DetectionCollator, stack_collate
from headrace.core.batcher import Batcher, Collating
from headrace.order.ranks import BatchRequest
from headrace.testing import DatasetContract
from headrace.testing.contract import same
from tests.data.labelled import make_coco, make_masks, save_mask

CROP = [RandomResizedCrop(16, scale=(0.3, 1)), RandomHorizontalFlip()]
SIZED: dict[str, Any] = {"image_size": (20, 14)}
INDICES = [5, 3, 17, 3, 0, 23]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ways")
    make_coco(folder / "boxes")
    make_masks(folder / "masks")
    return folder


@pytest.fixture(scope="module", params=["masks", "boxes"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def opened(folder: Path, kind: str, **options: Any) -> ImageDataset:
    if kind == "masks":
        return ImageDataset(folder / "masks/images", targets=folder / "masks/masks", **options)
    return ImageDataset(
        folder / "boxes/images", targets=folder / "boxes/instances.json", masks=True, **options
    )


def collating(kind: str) -> Collating:
    return Collating(stack_collate if kind == "masks" else DetectionCollator())


def batches(
    dataset: ImageDataset, kind: str, indices: list[int], epoch: int = 2
) -> tuple[Any, Any]:
    """The batch by the way that is chosen, which takes no other one, and that of single samples."""
    way, request = Batcher(dataset, collating(kind)), BatchRequest(indices, 7, epoch)
    assert "row by row" in way.explain()
    assert way.writes_in_place
    with mock.patch.object(Batcher, "of_samples", side_effect=AssertionError("the slow way")):
        made = way.make(request)
    slow = Batcher(dataset, collating(kind)).of_samples(request)
    assert made.samples == slow.samples == len(made.batch[1])
    return made.batch, slow.batch


def test_batches_are_those_of_samples(folder: Path, kind: str) -> None:
    flip = [RandomHorizontalFlip()]
    for options in (
        {**SIZED, "loading_mode": "cached"},
        {"image_size": 20, "normalize": False, "loading_mode": "eager"},
        {"image_size": 20, "color": "L"},
        {"image_size": 20, "dtype": torch.bfloat16, "transform": flip},
        {"transform": CROP},
        {"transform": CROP, "loading_mode": "cached"},
        {"transform": CROP, "loading_mode": "eager", "hold": "decoded"},
        {"image_size": 20, "transform": CROP, "normalize": False, "loading_mode": "eager"},
        {"transforms": CROP},
    ):
        with opened(folder, kind, **options) as dataset:
            for epoch in (1, 1, 2):
                fast, slow = batches(dataset, kind, INDICES, epoch)
                assert same(fast, slow), options
                assert fast[0].is_contiguous()
            assert same(*batches(dataset.subset([7, 2, 9]), kind, [2, 0])), options


def test_batches_of_packs(folder: Path, kind: str, tmp_path: Path) -> None:
    for store in ("encoded", "decoded"):
        with opened(folder, kind, image_size=20).subset([0, 3, 6, 9]) as dataset:
            out = pack(dataset, tmp_path / store, store=store)  # type: ignore[arg-type]
        for options in ({"image_size": 20}, {"image_size": 20, "transform": CROP}):
            with ImageDataset(out, **options) as packed:  # type: ignore[arg-type]
                assert same(*batches(packed, kind, [3, 1, 1])), (store, options)


BAD = {"masks": [2, 4, 12], "boxes": [2, 9]}


def make_bad(folder: Path, kind: str) -> None:
    """No mask, an image of which Pillow raises another error, one that ends behind its header, and
    ones of another size.
    """
    if kind == "masks":
        make_masks(folder / "masks")
        (folder / "masks/masks/a/004.tif").write_bytes(b"nothing")
        Image.new("RGB", (32, 24)).save(folder / "masks/images/a/008.png", "DDS")
        save_mask(folder / "masks/masks/b/001.png", np.zeros((9, 9)), "L")
    else:
        make_coco(folder / "boxes")
        image = folder / "boxes/images/002.jpg"
        image.write_bytes(image.read_bytes()[:500])
        Image.new("RGB", (9, 9)).save(folder / "boxes/images/009.png")


@pytest.mark.quick_every(4)
class TestContract(DatasetContract):
    """Of resized images with masks, and of crops with boxes."""

    @pytest.fixture(autouse=True)
    def _data(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind

    def make(self, **options: Any) -> ImageDataset:
        if self.kind == "masks":
            return opened(self.folder, "masks", image_size=8, **options)
        steps = [*CROP, *([options.pop("transform")] if "transform" in options else [])]
        return opened(self.folder, "boxes", transform=steps, **options)

    def make_bad(self, **options: Any) -> tuple[ImageDataset, list[int]]:
        folder = self.folder / "bad"
        if not (folder / self.kind).exists():
            make_bad(folder, self.kind)
        return opened(folder, self.kind, **SIZED, **options), BAD[self.kind]


def test_samples_that_can_t_be_read(kind: str, tmp_path: Path) -> None:
    make_bad(tmp_path, kind)
    for options in (SIZED, {"transform": CROP}):
        with opened(tmp_path, kind, on_error="skip", **options) as dataset:
            way, request = Batcher(dataset, collating(kind)), BatchRequest([1, 2, 0, 3], 7, 2)
            made = way.make(request)
            assert same(made.batch, way.of_samples(request).batch) and made.samples == 3
            with pytest.raises(SampleError, match="none of the 1 samples"):
                Batcher(dataset, collating(kind)).make(BatchRequest([2], 0, 0))
            report = dataset.sample_reader.take_report()
            assert report["skipped"] == report["errors"] == 3
            assert "fallbacks" not in report
        with opened(tmp_path, kind, **options) as dataset:
            stand_in = dataset[1]
            with pytest.raises(SampleError, match="sample 2 "):
                Batcher(dataset, collating(kind)).make(BatchRequest([1, 2], 0, 0))
        with opened(tmp_path, kind, on_error=lambda *_, one=stand_in: one, **options) as dataset:
            request = BatchRequest([1, 2, 0], 0, 0)
            made = Batcher(dataset, collating(kind)).make(request).batch
            slow = Batcher(dataset, collating(kind)).of_samples(request).batch
            assert same(made, slow)
            assert len(made[0]) == 3
