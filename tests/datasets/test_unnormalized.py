"""Images travel as uint8 to a device that normalises them, where that gives the host's batches;
elsewhere the host does it, and says why.

Without a GPU: "cpu" passes for an accelerator here. The real one is in
tests/loader/device/test_cuda.py.
"""

from __future__ import annotations

import functools
import multiprocessing
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, Subset, get_worker_info

from headrace import (
    CollateError,
    DetectionCollator,
    ImageDataset,
    MemoryEfficientDataset,
    MultiDataLoader,
    RandomHorizontalFlip,
    RandomResizedCrop,
    TableDataset,
    VisionCollator,
)
from headrace.loader import data
from headrace.memory.tree import map_tensors
from headrace.testing.contract import same
from tests.data.labelled import make_coco, make_masks

pytestmark = pytest.mark.quick_every(6)

CROP = [RandomResizedCrop(16, scale=(0.3, 1)), RandomHorizontalFlip()]


@pytest.fixture(autouse=True)
def _cpu_is_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "is_accelerator", lambda device: device is not None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_masks(make_coco(tmp_path_factory.mktemp("coco") / "boxes").parent / "masks").parent


@pytest.fixture(scope="module")
def table(folder: Path) -> Path:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    files = sorted((folder / "masks/images").rglob("*.*"))
    rows = {
        "image": [path.read_bytes() for path in files],
        "label": range(len(files)),
        "caption": [path.name for path in files],
    }
    parquet.write_table(pa.table(rows), folder / "photos.parquet")
    return folder / "photos.parquet"


Loaders = Callable[..., tuple[Any, Any]]


@pytest.fixture
def loaders(make_loader: Any) -> Loaders:
    """Two loaders of the same options: one normalises on the host, and one on the device."""

    def make(dataset: Callable[[], Any], **options: Any) -> tuple[Any, Any]:
        options = {"batch_size": 5, "num_workers": 0, "seed": 3, **options}
        return make_loader(dataset(), **options), make_loader(dataset(), device="cpu", **options)

    return make


def pixels_of(batch: Any) -> list[torch.dtype]:
    """The dtypes of a batch's tensors."""
    found: list[torch.dtype] = []
    map_tensors(batch, lambda tensor: found.append(tensor.dtype) or tensor)  # type: ignore[func-returns-value]
    return found


def check(host: Any, device: Any, epochs: int = 2) -> list[Any]:
    """Both give the same bits, and all batches of the one were normalised on the device; returns
    them.
    """
    all_batches = []
    for _ in range(epochs):
        plain, batches = list(host), list(device)
        assert same(batches, plain) and torch.uint8 not in pixels_of(
            [batch[0] if isinstance(batch, tuple) else 0 for batch in batches]
        )
        all_batches += batches
    assert (
        device.get_stats()["normalized_on_device"] == len(all_batches)
        and host.get_stats()["normalized_on_device"] == 0
    )
    assert (
        "images: uint8 until cpu, and normalised there, to " in device.explain()
        and "images:" not in host.explain()
    )
    return all_batches


def of_masks(folder: Path, **options: Any) -> ImageDataset:
    return ImageDataset(
        folder / "masks/images", targets=folder / "masks/masks", **{"image_size": 20, **options}
    )


def of_boxes(folder: Path, **options: Any) -> ImageDataset:
    return ImageDataset(
        folder / "boxes/images",
        targets=folder / "boxes/instances.json",
        masks=True,
        **{"image_size": 20, **options},
    )


def of_classes(folder: Path, **options: Any) -> ImageDataset:
    return ImageDataset(folder / "masks/images", **{"image_size": 20, **options})


# --- the same batches


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("opened", [of_masks, of_boxes, of_classes])
def test_labels_masks_and_boxes_are_untouched(
    folder: Path, loaders: Loaders, opened: Any, workers: int
) -> None:
    host, device = loaders(
        lambda: opened(folder, image_size=None, transform=CROP), num_workers=workers
    )
    batches = check(host, device)
    assert batches[0][0].shape == (5, 3, 16, 16)


@pytest.mark.parametrize("mode", ["lazy", "eager", "cached", "streaming"])
@pytest.mark.parametrize(
    "options",
    [{}, {"color": "L"}, {"transform": CROP}, {"return_index": True}, {"target_transform": str}],
)
def test_modes_and_options(folder: Path, loaders: Loaders, mode: Any, options: Any) -> None:
    check(*loaders(lambda: of_masks(folder, loading_mode=mode, progress=False, **options)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("workers", [0, 1])
def test_half_precision(folder: Path, loaders: Loaders, dtype: torch.dtype, workers: int) -> None:
    of_collator = {"collate_fn": VisionCollator("cifar10", dtype=dtype), "num_workers": workers}
    for host, device in (
        loaders(lambda: of_masks(folder, dtype=dtype), num_workers=workers),
        loaders(
            lambda: of_classes(folder, dtype=dtype, image_size=None),
            num_workers=workers,
            collate_fn="list",
            batch_size=1,
        ),
        loaders(lambda: Pixels(as_tuple), **of_collator),
    ):
        batch = check(host, device, 1)[0]
        assert (batch[0] if isinstance(batch, tuple) else batch[0][0]).dtype == dtype
        assert f"normalised there, to {str(dtype).removeprefix('torch.')} " in device.explain()


@pytest.mark.parametrize("stack", [True, False])
def test_detection_stacked_and_in_lists(folder: Path, loaders: Loaders, stack: bool) -> None:
    host, device = loaders(
        lambda: of_boxes(folder, image_size=20 if stack else None),
        collate_fn=DetectionCollator(stack=stack),
    )
    images, objects = check(host, device, 1)[0]
    assert isinstance(images, torch.Tensor) == stack and objects[0]["masks"].dtype == torch.uint8


@pytest.mark.parametrize("workers", [0, 1])
def test_lists_of_unequal_sizes(loaders: Loaders, tmp_path: Path, workers: int) -> None:
    for number in range(7):
        pixels = np.random.default_rng(number).integers(0, 256, (5 + number, 9, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    batches = check(
        *loaders(
            lambda: ImageDataset(tmp_path, image_size=None, targets=None),
            collate_fn="list",
            num_workers=workers,
        ),
        1,
    )
    assert {image.shape[1] for batch in batches for image, _ in batch} == {5, 6, 7, 8, 9, 10, 11}


@pytest.mark.parametrize("options", [{"targets": None}, {"targets": None, "return_index": True}])
@pytest.mark.parametrize("collate", ["list", None])
def test_images_without_targets(folder: Path, loaders: Loaders, options: Any, collate: Any) -> None:
    check(*loaders(lambda: of_classes(folder, **options), collate_fn=collate), 1)


@pytest.mark.parametrize("columns", [None, "image", ["caption", "image"]])
@pytest.mark.parametrize("options", [{}, {"target_name": "label"}, {"return_index": True}])
def test_columns_of_tables(table: Path, loaders: Loaders, columns: Any, options: Any) -> None:
    check(
        *loaders(
            lambda: TableDataset(table, columns, image_column="image", image_size=12, **options)
        ),
        1,
    )


def test_datasets_around_images(folder: Path, loaders: Loaders) -> None:
    check(*loaders(lambda: MemoryEfficientDataset(of_classes(folder), progress=False)))
    check(
        *loaders(
            lambda: MemoryEfficientDataset(of_classes(folder).subset([4, 1, 9, 11]), progress=False)
        )
    )
    check(*loaders(lambda: of_masks(folder).subset([9, 3, 3, 1, 0, 7])))
    check(*loaders(lambda: of_masks(folder, transform=torch.zeros_like).with_transform(None)))


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_every_start_method(folder: Path, loaders: Loaders, method: str) -> None:
    check(
        *loaders(
            lambda: of_masks(folder, loading_mode="cached", progress=False),
            num_workers=1,
            multiprocessing_context=method,
        )
    )


def test_resumption_in_an_epoch(folder: Path, loaders: Loaders) -> None:
    host, device = loaders(lambda: of_masks(folder, transform=CROP, image_size=None), num_workers=1)
    plain = list(host)
    iterator = iter(device)
    first = [next(iterator), next(iterator)]
    state = device.state_dict()
    del iterator
    _, again = loaders(lambda: of_masks(folder, transform=CROP, image_size=None))
    again.load_state_dict(state)
    assert same(first + list(again), plain)
    host.set_epoch(0)
    host.load_state_dict(state)
    assert same(list(host), plain[2:]), "a state says nothing of where images are normalised"


def test_a_quarter_of_the_bytes_is_set_aside_and_travels(folder: Path, loaders: Loaders) -> None:
    host, device = loaders(lambda: of_classes(folder, image_size=100), num_workers=1)
    list(host), list(device)
    assert device._last_nbytes < 0.3 * host._last_nbytes
    assert device._memory.reserved < host._memory.reserved


def test_several_loaders_at_once(folder: Path, loaders: Loaders) -> None:
    host, device = loaders(lambda: of_classes(folder))
    mixed = MultiDataLoader({"host": host, "device": device})
    batches: dict[str, list[Any]] = {"host": [], "device": []}
    for name, batch in mixed:
        batches[name].append(batch)
    assert same(batches["host"], batches["device"])


def test_images_that_cant_be_read_are_left_out(
    folder: Path, loaders: Loaders, tmp_path: Path
) -> None:
    for number, path in enumerate(sorted((folder / "masks/images").rglob("*.*"))[:8]):
        (tmp_path / f"{number}{path.suffix}").write_bytes(
            path.read_bytes()[: 40 if number == 3 else None]
        )
    host, device = loaders(
        lambda: ImageDataset(tmp_path, targets=None, image_size=9, on_error="skip")
    )
    check(host, device, 1)
    assert host.get_stats()["skipped"] == device.get_stats()["skipped"] == 1


# --- memory format


@pytest.mark.parametrize("normalize", [True, "host", False])
def test_memory_format(folder: Path, make_loader: Any, normalize: Any) -> None:
    dataset = of_masks(folder, normalize=normalize)
    plain = list(make_loader(dataset, batch_size=5, num_workers=0))
    for memory_format in (torch.channels_last, torch.contiguous_format):
        loader = make_loader(
            dataset, batch_size=5, num_workers=0, device="cpu", memory_format=memory_format
        )
        batches = list(loader)
        assert same(batches, plain) and all(
            batch[0].is_contiguous(memory_format=memory_format) for batch in batches
        )
        assert re.search(
            rf"^memory_format +=\s{memory_format} +given", loader.explain(), re.MULTILINE
        )
        assert loader.get_stats()["normalized_on_device"] == (
            len(plain) if normalize is True else 0
        )


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
    return {
        "label": 3,
        "image": image,
        "mask": image[0],
        "boxes": torch.ones(int(image[0, 0, 0] * 3) % 4, 4),
        "name": "n",
    }


def as_tuple(image: Any) -> Any:
    return image, 4, image[1]


def as_pair(image: Any) -> Any:
    return image, image.flip(1)


def as_pair_in_dict(image: Any) -> Any:
    return {"views": (image, image.flip(2).numpy())}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "own",
    [
        {},
        {"statistics": "cifar10"},
        {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.4, 0.9)},
        {"mean": 0.5, "std": 0.5},
    ],
)
@pytest.mark.parametrize(
    ("around", "fields"),
    [(as_dict, None), (as_tuple, None), (as_pair, [0, 1]), (as_pair_in_dict, "views")],
)
def test_uint8_of_any_dataset(
    loaders: Loaders, around: Any, fields: Any, own: Any, workers: int
) -> None:
    host, device = loaders(
        lambda: Pixels(around), collate_fn=VisionCollator(fields=fields, **own), num_workers=workers
    )
    check(host, device)


def test_floats_are_normalised_on_the_host(loaders: Loaders) -> None:
    host, device = loaders(lambda: Pixels(as_tuple, torch.float32), collate_fn="vision")
    assert same(list(device), list(host)) and device.get_stats()["normalized_on_device"] == 0


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([as_tuple(torch.full((3, 4, 4), n, dtype=torch.uint8)) for n in range(9)])


@pytest.mark.parametrize("workers", [0, 2])
def test_uint8_of_streams(loaders: Loaders, workers: int) -> None:
    check(*loaders(Stream, collate_fn=VisionCollator(), num_workers=workers), 1)


def test_a_collator_in_two_loaders(make_loader: Any) -> None:
    """One uses it on the host, in turn with one that uses it for a device."""
    collator, dataset = VisionCollator(), Pixels(as_tuple)
    host, device = (
        iter(make_loader(dataset, batch_size=4, num_workers=0, collate_fn=collator, device=d))
        for d in (None, "cpu")
    )
    for plain, batch in zip(host, device, strict=True):
        assert same(plain, batch) and plain[0].dtype == torch.float32


def test_wrong_channels_are_said_where_the_batch_is_made(make_loader: Any) -> None:
    collator = VisionCollator(mean=(0.5, 0.5), std=(0.1, 0.1), channels="first")
    for device in (None, "cpu"):
        with pytest.raises(Exception, match="have 3 channels, and the statistics have 2"):
            next(
                iter(
                    make_loader(Pixels(as_tuple), num_workers=0, collate_fn=collator, device=device)
                )
            )


@pytest.mark.parametrize("device", [None, "cpu"])
def test_nothing_is_normalised_twice(folder: Path, make_loader: Any, device: Any) -> None:
    with pytest.raises(CollateError, match="it may be normalised already"):
        next(
            iter(
                make_loader(
                    of_masks(folder), num_workers=0, device=device, collate_fn=VisionCollator()
                )
            )
        )


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


def own_collate(samples: list[Any]) -> Any:
    images = torch.stack([image for image, _ in samples])
    return (images - images.mean()) / images.std()  # statistics that depend on the samples


def partial_collate(samples: list[Any], extra: int) -> Any:
    return own_collate(samples)


@pytest.mark.parametrize(
    ("make", "options", "why"),
    [
        (lambda f: of_masks(f, normalize="host"), {}, "normalize='host'"),
        (
            lambda f: of_classes(f, transform=shift, transform_input="tensor"),
            {},
            "a transform makes them",
        ),
        (
            lambda f: of_masks(
                f, transforms=[*CROP, joint], transform_input="tensor", image_size=None
            ),
            {},
            "a transform makes them",
        ),
        (lambda f: Brighter(f / "masks/images", image_size=20), {}, "Brighter overrides to_input"),
        (lambda f: of_classes(f, on_error=stand_in), {}, "on_error gives finished samples"),
        (
            of_classes,
            {"collate_fn": own_collate},
            "the collate function (own_collate) may look at them",
        ),
        (
            of_classes,
            {"collate_fn": functools.partial(partial_collate, extra=1)},
            "the collate function (partial) may look at them",
        ),
        (of_classes, {"collate_fn": "pad"}, "may look at them"),
        (lambda f: Subset(of_classes(f), [3, 1, 2]), {}, "a Subset holds their dataset"),
        (
            lambda f: Pixels(as_tuple),
            {"collate_fn": VisionCollator(normalize="host")},
            "normalize='host'",
        ),
    ],
)
def test_the_host_way_is_said(
    folder: Path, loaders: Loaders, make: Any, options: Any, why: str
) -> None:
    host, device = loaders(functools.partial(make, folder), **options)
    assert same(list(device), list(host)) and device.get_stats()["normalized_on_device"] == 0
    (line,) = (line for line in device.explain().splitlines() if line.startswith("images:"))
    assert line.startswith("images: finished on the host, and copied as they are: ") and why in line


@pytest.mark.parametrize(
    ("make", "options"),
    [(lambda f: of_classes(f, normalize=False), {}), (lambda f: Pixels(as_tuple), {})],
)
def test_of_uint8_that_stays_nothing_is_said(
    folder: Path, loaders: Loaders, make: Any, options: Any
) -> None:
    host, device = loaders(functools.partial(make, folder), **options)
    assert same(list(device), list(host)) and "images:" not in device.explain()
    assert next(iter(device))[0].dtype == torch.uint8


@pytest.mark.parametrize("device", ["cpu", "meta", None])
def test_no_accelerator_no_change(
    folder: Path, make_loader: Any, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    loader = make_loader(of_classes(folder), num_workers=0, device=device)
    assert (
        next(iter(loader))[0].dtype == torch.float32
        and loader.get_stats()["normalized_on_device"] == 0
    )
    assert (
        "images:" not in loader.explain()
        and data.is_accelerator("cuda:1")
        and data.is_accelerator("mps")
    )


# --- what users change between batches


def test_a_transform_that_is_set_later_gets_normalised_images(
    folder: Path, loaders: Loaders
) -> None:
    host, device = loaders(lambda: of_classes(folder))
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


def set_transform(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.transform = shift


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_a_transform_that_a_worker_sets(folder: Path, loaders: Loaders, method: str) -> None:
    options = {"num_workers": 1, "worker_init_fn": set_transform, "multiprocessing_context": method}
    host, device = loaders(lambda: of_classes(folder), **options)
    assert same(list(device), list(host)) and device.get_stats()["normalized_on_device"] == 0


def test_a_closed_dataset_is_opened_again_once(folder: Path, loaders: Loaders) -> None:
    host, device = loaders(
        lambda: of_classes(folder, loading_mode="cached", progress=False), shuffle=False
    )
    list(device)
    device.dataset.close()
    assert (
        same(list(device), list(host)) and device._images.pixels._view.mode is device.dataset.mode
    )
