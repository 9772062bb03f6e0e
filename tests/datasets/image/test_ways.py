"""Images with masks and boxes, batch by batch: the bytes of samples that are made one by one and
stacked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from headrace import (
    DetectionCollator,
    ImageDataset,
    RandomHorizontalFlip,
    RandomResizedCrop,
    SampleError,
    create_dataloader,
    pack,
)
from headrace.collate import list_collate, stack_collate
from headrace.datasets.core.batch import Collating
from headrace.datasets.core.ways import SampleBySample, choose_way
from headrace.order.request import BatchRequest
from headrace.testing.contract import same
from tests.data.labelled import make_coco, make_masks, save_mask

pytestmark = pytest.mark.quick_every(3)

CROP = [RandomResizedCrop(16, scale=(0.3, 1)), RandomHorizontalFlip()]
OPTIONS: dict[str, dict[str, Any]] = {
    "sized": {"image_size": (20, 14)},
    "bytes": {"image_size": 20, "normalize": False},
    "grey": {"image_size": 20, "color": "L"},
    "half": {"image_size": 20, "dtype": torch.bfloat16, "transform": [RandomHorizontalFlip()]},
    "crop": {"transform": CROP},
    "sized crop": {"image_size": 20, "transform": CROP, "normalize": False},
    "flip": {"image_size": 20, "transform": [RandomHorizontalFlip()]},
    "joint crop": {"transforms": CROP},
}
INDICES = [5, 3, 17, 3, 0, 23]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_masks(make_coco(tmp_path_factory.mktemp("coco") / "boxes").parent / "masks").parent


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
    way, request = choose_way(dataset, collating(kind)), BatchRequest(indices, 7, epoch)
    assert "row by row" in way.name and way.writes_in_place
    with mock.patch.object(SampleBySample, "make", side_effect=AssertionError("the slow way")):
        made = way.make(request)
    slow = SampleBySample(dataset, collating(kind)).make(request)
    assert made.samples == slow.samples == len(made.batch[1])
    return made.batch, slow.batch


@pytest.mark.parametrize("mode", ["lazy", "eager", "cached"])
@pytest.mark.parametrize("options", OPTIONS)
def test_batches_are_those_of_samples(folder: Path, kind: str, options: str, mode: Any) -> None:
    with opened(folder, kind, loading_mode=mode, **OPTIONS[options]) as dataset:
        for epoch in (1, 1, 2):
            fast, slow = batches(dataset, kind, INDICES, epoch)
            assert same(fast, slow) and fast[0].is_contiguous()
        view = dataset.subset([7, 2, 9])
        assert same(*batches(view, kind, [2, 0]))


@pytest.mark.parametrize("store", ["encoded", "decoded"])
def test_batches_of_packs(folder: Path, kind: str, store: Any, tmp_path: Path) -> None:
    with opened(folder, kind, image_size=20).subset([0, 3, 6, 9]) as dataset:
        out = pack(dataset, tmp_path / "out", store=store)
    for options in ({"image_size": 20}, {"image_size": 20, "transform": CROP}):
        with ImageDataset(out, **options) as packed:  # type: ignore[arg-type]
            assert same(*batches(packed, kind, [3, 1, 1]))


@pytest.mark.parametrize(
    "options",
    [
        {"image_size": None},
        {"image_size": 8, "return_index": True},
        {"image_size": 8, "transform": torch.zeros_like, "transform_input": "tensor"},
        {"image_size": 8, "target_transform": id},
    ],
)
def test_others_are_made_one_by_one(folder: Path, kind: str, options: dict[str, Any]) -> None:
    with opened(folder, kind, **options) as dataset:
        assert choose_way(dataset, collating(kind)).name == "sample by sample"
    with opened(folder, kind, image_size=8) as dataset:
        for function in (list_collate, DetectionCollator(stack=False)):
            assert choose_way(dataset, Collating(function)).name == "sample by sample"


def test_a_transform_that_is_set_later(folder: Path, kind: str) -> None:
    with opened(folder, kind, image_size=8) as dataset:
        way = choose_way(dataset, collating(kind))
        dataset.transform = torch.zeros_like
        images, _ = way.make(BatchRequest([1, 2], 0, 0)).batch
        assert not images.any()


def _broken(folder: Path, kind: str) -> Path:
    """Of sample 2 of six the image (of a mask the mask) can't be read."""
    if kind == "masks":
        save_mask(make_masks(folder / "masks", 12) / "masks/a/004.tif", np.zeros((9, 9)), "L")
    else:
        (make_coco(folder / "boxes", 6) / "images/002.jpg").write_bytes(b"nothing")
    return folder


@pytest.mark.parametrize("options", ["sized", "crop"])
def test_samples_that_can_t_be_read(kind: str, options: str, tmp_path: Path) -> None:
    _broken(tmp_path, kind)
    with opened(tmp_path, kind, on_error="skip", **OPTIONS[options]) as dataset:
        fast, slow = batches(dataset, kind, [1, 2, 0, 3])
        assert same(fast, slow) and len(fast[0]) == 3
        with pytest.raises(SampleError, match="none of the 1 samples"):
            choose_way(dataset, collating(kind)).make(BatchRequest([2], 0, 0))
        report = dataset.sample_reader.take_report()
        assert report["skipped"] == 3 and report["errors"] == 3 and "fallbacks" not in report
    with (
        opened(tmp_path, kind, **OPTIONS[options]) as dataset,
        pytest.raises(SampleError, match="sample 2 can't be decoded"),
    ):
        choose_way(dataset, collating(kind)).make(BatchRequest([1, 2], 0, 0))
    stand_in = opened(tmp_path, kind, **OPTIONS[options])[1]
    with opened(tmp_path, kind, on_error=lambda *_: stand_in, **OPTIONS[options]) as dataset:
        request = BatchRequest([1, 2, 0], 0, 0)
        made = choose_way(dataset, collating(kind)).make(request).batch
        assert (
            same(made, SampleBySample(dataset, collating(kind)).make(request).batch)
            and len(made[0]) == 3
        )


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_take_it(folder: Path, kind: str, workers: int) -> None:
    with opened(folder, kind, image_size=8) as dataset:
        loader = create_dataloader(dataset, batch_size=5, num_workers=workers, shuffle=False)
        whole = list(loader)
        assert "row by row" in str(loader.explain())
        assert same(
            [target for _, targets in whole for target in targets],
            [target for _, target in dataset],
        )
        loader.close()
