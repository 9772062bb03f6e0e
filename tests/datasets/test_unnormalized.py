"""Images travel as uint8 to a device that normalises them, where that gives the host's batches;
elsewhere the host does it, and says why.

Without a GPU: "cpu" passes for an accelerator here. The real one is in
tests/loader/device/test_cuda.py.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, Subset

from headrace import (
    CollateError,
    ConfigError,
    ImageDataset,
    MemoryEfficientDataset,
    RandomHorizontalFlip,
    RandomResizedCrop,
    VisionCollator,
)
from headrace.collate import DetectionCollator
from headrace.loader import config
from headrace.memory import MemoryBudget
from headrace.memory.tree import map_tensors
from headrace.testing.contract import same
from tests.data.labelled import make_coco, make_masks

CROP = [RandomResizedCrop(16, scale=(0.3, 1)), RandomHorizontalFlip()]
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def _cpu_is_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.loader.loader.is_accelerator", lambda device: device is not None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_masks(make_coco(tmp_path_factory.mktemp("coco") / "boxes").parent / "masks").parent


Loaders = Callable[..., tuple[Any, Any]]


@pytest.fixture
def loaders(make_loader: Any) -> Loaders:
    """Two loaders of the same options: one normalises on the host, and one on the device."""

    def make(dataset: Callable[[], Any], **options: Any) -> tuple[Any, Any]:
        options = {"batch_size": 5, "num_workers": 0, "seed": 3, **options}
        return make_loader(dataset(), **options), make_loader(dataset(), device="cpu", **options)

    return make


def check(host: Any, device: Any, epochs: int = 1) -> list[Any]:
    """Both give the same bits; all batches, which are returned, were normalised on the device."""
    all_batches, dtypes = [], []
    for _ in range(epochs):
        plain, batches = list(host), list(device)
        assert same(batches, plain)
        all_batches += batches
    inputs = [batch[0] for batch in all_batches if isinstance(batch, tuple)]
    map_tensors(inputs, lambda tensor: dtypes.append(tensor.dtype) or tensor)
    assert torch.uint8 not in dtypes
    assert device.get_stats()["normalized_on_device"] == len(all_batches)
    assert host.get_stats()["normalized_on_device"] == 0
    assert "images: uint8 until cpu, and normalised there, to " in device.explain()
    assert "images:" not in host.explain()
    return all_batches


def check_host(host: Any, device: Any) -> None:
    """Both give the same bits, and nothing was normalised on the device."""
    assert same(list(device), list(host)) and device.get_stats()["normalized_on_device"] == 0


def of_masks(folder: Path, **options: Any) -> ImageDataset:
    options = {"image_size": 20, **options}
    return ImageDataset(folder / "masks/images", targets=folder / "masks/masks", **options)


def of_boxes(folder: Path, **options: Any) -> ImageDataset:
    options = {"image_size": 20, "masks": True, **options}
    return ImageDataset(folder / "boxes/images", targets=folder / "boxes/instances.json", **options)


def of_classes(folder: Path, **options: Any) -> ImageDataset:
    return ImageDataset(folder / "masks/images", **{"image_size": 20, **options})


# --- the same batches


@pytest.mark.parametrize(
    ("opened", "workers"), [(of_masks, 1), (of_boxes, 0), (of_classes, 0), slow(of_boxes, 3)]
)
def test_labels_masks_and_boxes_are_untouched(
    folder: Path, loaders: Loaders, opened: Any, workers: int
) -> None:
    make = functools.partial(opened, folder, image_size=None, transform=CROP)
    assert check(*loaders(make, num_workers=workers), 2)[0][0].shape == (5, 3, 16, 16)


def test_batches_are_those_of_the_host(folder: Path, loaders: Loaders, tmp_path: Path) -> None:
    files = sorted((folder / "masks/images").rglob("*.*"))
    columns = {"image": [path.read_bytes() for path in files], "label": range(len(files))}
    columns["caption"] = [path.name for path in files]
    pq.write_table(pa.table(columns), tmp_path / "photos.parquet")

    photos = tmp_path / "photos.parquet"
    column: dict[str, Any] = {"column": "image", "image_size": 12}
    held: dict[str, Any] = {"progress": False}
    images = of_classes(folder)
    cases: list[tuple[Callable[[], Any], dict[str, Any]]] = [
        (lambda: of_masks(folder, color="L"), {}),
        (lambda: of_masks(folder, transform=CROP, loading_mode="eager", **held), {}),
        (lambda: of_masks(folder, return_index=True, loading_mode="cached", **held), {}),
        (lambda: of_masks(folder, target_transform=str, loading_mode="streaming"), {}),
        (lambda: of_classes(folder, targets=None), {"collate_fn": "list"}),
        (lambda: of_classes(folder, targets=None, return_index=True), {}),
        (lambda: ImageDataset(photos, **column), {}),
        (lambda: ImageDataset(photos, targets="label", return_index=True, **column), {}),
        (lambda: MemoryEfficientDataset(images), {}),
        (lambda: MemoryEfficientDataset(images.subset([4, 1, 9, 11])), {}),
        (lambda: of_masks(folder).subset([9, 3, 3, 1, 0, 7]), {}),
        (lambda: of_masks(folder, transform=torch.zeros_like).with_transform(None), {}),
    ]
    for make, options in cases:
        host, device = loaders(make, **options)
        check(host, device, 2)
        for loader in (host, device):
            loader.close()
            loader.dataset.close()
    for stack, size in ((True, 20), (False, None)):
        boxes = functools.partial(of_boxes, folder, image_size=size)
        images, objects = check(*loaders(boxes, collate_fn=DetectionCollator(stack=stack)))[0]
        assert isinstance(images, torch.Tensor) == stack
        assert objects[0]["masks"].dtype == torch.uint8


@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float16)])
def test_half_precision(folder: Path, loaders: Loaders, dtype: torch.dtype) -> None:
    single = functools.partial(of_classes, folder, dtype=dtype, image_size=None)
    for host, device in (
        loaders(functools.partial(of_masks, folder, dtype=dtype)),
        loaders(single, collate_fn="list", batch_size=1),
        loaders(lambda: Pixels(as_tuple), collate_fn=VisionCollator("cifar10", dtype=dtype)),
    ):
        batch = check(host, device)[0]
        assert (batch[0] if isinstance(batch, tuple) else batch[0][0]).dtype == dtype
        assert f"normalised there, to {str(dtype).removeprefix('torch.')} " in device.explain()


def test_images_of_unequal_sizes_and_bad_ones(loaders: Loaders, tmp_path: Path) -> None:
    for number in range(7):
        pixels = np.random.default_rng(number).integers(0, 256, (5 + number, 9, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    options: dict[str, Any] = {"targets": None, "on_error": "skip"}
    make = functools.partial(ImageDataset, tmp_path, image_size=None, **options)
    batches = check(*loaders(make, collate_fn="list", num_workers=1))
    assert {image.shape[1] for batch in batches for image, _ in batch} == set(range(5, 12))
    (tmp_path / "3.png").write_bytes((tmp_path / "3.png").read_bytes()[:40])
    host, device = loaders(functools.partial(ImageDataset, tmp_path, image_size=9, **options))
    check(host, device)
    assert host.get_stats()["skipped"] == device.get_stats()["skipped"] == 1


def test_a_quarter_of_the_bytes_is_set_aside(folder: Path, make_loader: Any) -> None:
    taken = []
    for device in (None, "cpu"):
        before = MemoryBudget().reserved
        dataset = of_classes(folder, image_size=100)
        loader = make_loader(dataset, batch_size=5, num_workers=1, device=device)
        list(loader)
        taken.append(MemoryBudget().reserved - before)
    batch = 5 * 3 * 100 * 100  # in bytes; four times as much on the host, of two at least
    assert taken[0] - taken[1] >= 2 * 3 * batch


def test_memory_format(folder: Path, make_loader: Any) -> None:
    for normalize, layout in itertools.product(
        (True, "host", False), (torch.channels_last, torch.contiguous_format)
    ):
        dataset = of_masks(folder, normalize=normalize)
        plain = list(make_loader(dataset, batch_size=5, num_workers=0))
        options: dict[str, Any] = {"device": "cpu", "memory_format": layout}
        loader = make_loader(dataset, batch_size=5, num_workers=0, **options)
        batches = list(loader)
        assert same(batches, plain)
        assert all(batch[0].is_contiguous(memory_format=layout) for batch in batches)
        expected = len(plain) if normalize is True else 0
        assert loader.get_stats()["normalized_on_device"] == expected


# --- VisionCollator


class Pixels(Dataset[Any]):
    """Foreign samples in a structure around uint8 images."""

    def __init__(self, around: Callable[[Any], Any], dtype: torch.dtype = torch.uint8) -> None:
        self.around, self.dtype = around, dtype

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        image = torch.randint(0, 256, (3, 6, 8), generator=generator, dtype=torch.uint8)
        return self.around(image if self.dtype is torch.uint8 else image / 255)


def as_dict(image: Any) -> Any:
    boxes = torch.ones(int(image[0, 0, 0] * 3) % 4, 4)
    return {"label": 3, "image": image, "mask": image[0], "boxes": boxes, "name": "n"}


def as_tuple(image: Any) -> Any:
    return image, 4, image[1]


def as_pair(image: Any) -> Any:
    return image, image.flip(1)


def as_pair_in_dict(image: Any) -> Any:
    return {"views": (image, image.flip(2).numpy())}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([as_tuple(torch.full((3, 4, 4), n, dtype=torch.uint8)) for n in range(9)])


@pytest.mark.parametrize("workers", [0, slow(2)])
def test_uint8_of_any_dataset(loaders: Loaders, workers: int) -> None:
    cases: list[tuple[Any, Any, dict[str, Any]]] = [
        (as_dict, None, {}),
        (as_tuple, None, {"statistics": "cifar10"}),
        (as_pair, [0, 1], {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.4, 0.9)}),
        (as_pair_in_dict, "views", {"mean": 0.5, "std": 0.5}),
    ]
    for around, fields, own in cases:
        collate = VisionCollator(fields=fields, **own)
        make = functools.partial(Pixels, around)
        check(*loaders(make, collate_fn=collate, num_workers=workers))
    check(*loaders(Stream, collate_fn=VisionCollator(), num_workers=workers))


def test_what_a_collator_refuses(folder: Path, make_loader: Any) -> None:
    two = VisionCollator(mean=(0.5, 0.5), std=(0.1, 0.1), channels="first")
    for dataset, collate, named in (
        (Pixels(as_tuple), two, r"3 channels.* 2"),
        (of_masks(folder), VisionCollator(), "normalised already"),
    ):
        for device in (None, "cpu"):
            loader = make_loader(dataset, num_workers=0, device=device, collate_fn=collate)
            with pytest.raises((CollateError, ConfigError), match=named):
                next(iter(loader))


# --- what stays on the host, and why


class Brighter(ImageDataset):
    def to_input(self, value: Any) -> Any:
        return super().to_input(value) + 1


def shift(image: torch.Tensor) -> torch.Tensor:
    return image + 0.5


def joint(image: Any, mask: Any) -> Any:
    return image.float() * 2, mask


def stand_in(index: int, path: str, error: Exception) -> Any:
    return torch.zeros(3, 20, 20), 0


def own_collate(samples: list[Any], extra: int = 0) -> Any:
    images = torch.stack([image for image, _ in samples])
    return (images - images.mean()) / images.std()  # statistics that depend on the samples


def test_the_host_normalises_what_others_may_see(folder: Path, loaders: Loaders) -> None:
    tensors: dict[str, Any] = {"transform_input": "tensor"}
    both = {"transforms": [*CROP, joint], "image_size": None}
    partial = functools.partial(own_collate, extra=1)
    cases: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
        (of_masks, {"normalize": "host"}, {}),
        (of_classes, {"transform": shift, **tensors}, {}),
        (of_masks, {**both, **tensors}, {}),
        (of_classes, {"on_error": stand_in}, {}),
        (of_classes, {}, {"collate_fn": own_collate}),
        (of_classes, {}, {"collate_fn": partial}),
        (of_classes, {}, {"collate_fn": "pad"}),
    ]
    makers = [(functools.partial(of, folder, **own), options) for of, own, options in cases]
    subclass = functools.partial(Brighter, folder / "masks/images", image_size=20)
    on_host = {"collate_fn": VisionCollator(normalize="host")}
    makers += [
        (subclass, {}),
        (lambda: Subset(of_classes(folder), [3, 1, 2]), {}),
        (functools.partial(Pixels, as_tuple), on_host),
    ]
    for make, options in makers:
        host, device = loaders(make, **options)
        check_host(host, device)
        assert "images:" not in device.explain()


def test_what_is_left_as_it_is(
    folder: Path, loaders: Loaders, make_loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_host(*loaders(lambda: Pixels(as_tuple, torch.float32), collate_fn="vision"))
    for make in (lambda: of_classes(folder, normalize=False), lambda: Pixels(as_tuple)):
        host, device = loaders(make)
        check_host(host, device)
        assert "images:" not in device.explain()
        assert next(iter(device))[0].dtype == torch.uint8
    monkeypatch.undo()
    for no_accelerator in ("cpu", "meta", None):
        loader = make_loader(of_classes(folder), num_workers=0, device=no_accelerator)
        assert next(iter(loader))[0].dtype == torch.float32
        assert loader.get_stats()["normalized_on_device"] == 0 and "images:" not in loader.explain()
    assert config.is_accelerator("cuda:1") and config.is_accelerator("mps")


# --- what users change between batches


def test_what_is_set_between_batches_counts(folder: Path, loaders: Loaders) -> None:
    host, device = loaders(functools.partial(of_classes, folder))
    plain, batches = iter(host), iter(device)
    assert same(next(batches), next(plain))
    for loader in (host, device):
        loader.dataset.transform = shift
    assert same(next(batches), next(plain)) and device.get_stats()["normalized_on_device"] == 1
    for loader in (host, device):
        loader.dataset.transform = None
        loader.dataset.targets = np.arange(100, 100 + len(loader.dataset))
        loader.dataset.return_index = True
    batch = next(batches)
    assert same(batch, next(plain)) and int(batch[1].min()) >= 100 and len(batch) == 3
    assert device.get_stats()["normalized_on_device"] == 2
