"""Batches are right, early and in bounds on a real CUDA device (`pytest -m cuda`; the stand-in's
tests are in test_prefetcher.py).

Nothing here is a matter of time but for this: a sleeping kernel of about a second ends later than a
copy of 4 MiB. Memory for the copy must be there by then, since to allocate some, pinned or the
device's, CUDA may wait for kernels: hence `warm`.
"""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from headrace import ImageDataset, RandomHorizontalFlip, RandomResizedCrop, move_to_device
from headrace.loader.device import CudaPrefetcher, transfer_to
from headrace.memory.tree import tensors_of
from headrace.testing.contract import same
from tests.data.make import make_photos
from tests.loader.device.test_prefetcher import (
    Deliveries,
    come,
    more_structures,
    next_with_another_behind_it,
    pinned,
    received,
    until,
)

pytestmark = pytest.mark.cuda

SAMPLE, BATCH, NUMBER = (64, 1024), 16, 320
BATCH_BYTES = 4 * 64 * 1024 * BATCH
LONG = 2_000_000_000  # cycles: about a second


class Numbers(Dataset[torch.Tensor]):
    """Sample i is full of i."""

    def __init__(self, number: int = NUMBER) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full(SAMPLE, index, dtype=torch.int32)


Make = Callable[..., Any]


@pytest.fixture
def make(make_loader: Make) -> Iterator[Make]:
    def make(dataset: Any = None, **options: Any) -> Any:
        options = {"num_workers": 2, "device": "cuda", **options}
        options = {"batch_size": BATCH, "shuffle": False, **options}
        return make_loader(Numbers() if dataset is None else dataset, **options)

    yield make
    torch.cuda.synchronize()


def warm(loader: Any) -> Any:
    """The loader, after an epoch in which as many batches were on their way at once as there can
    be.
    """
    kept, workers = [], loader.config.num_workers
    iterator = iter(loader)
    for step, batch in enumerate(iterator):
        if step < 5:
            kept.append(batch)
        if step == 2 and workers:
            until(lambda: len(come(iterator)) == workers * loader.config.prefetch_factor)
    torch.cuda.synchronize()
    loader.set_epoch(0)
    return loader


def is_right(batch: torch.Tensor, step: int) -> torch.Tensor:
    """True, on the current stream, if it is the batch of this step: the stream sleeps before and
    works in many small kernels after.
    """
    torch.cuda._sleep(500_000)
    worked = batch
    for _ in range(30):
        worked = worked + 1
    first, device = step * BATCH, batch.device
    expected = torch.arange(first, first + BATCH, device=device, dtype=torch.int32) + 30
    return (worked == expected[:, None, None]).all()


def long_kernel() -> torch.cuda.Event:
    """An event that comes after about a second, in which the user's stream is busy."""
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    kernel = torch.cuda.Event()
    kernel.record()
    return kernel


def most_bytes(loader: Any) -> int:
    """The most bytes of the device that the batches of an epoch, each of them dropped, take at a
    time.
    """
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    for batch in loader:
        torch.cuda._sleep(5_000_000)
        (batch if isinstance(batch, torch.Tensor) else batch[0]).add_(1)
        del batch
    return int(torch.cuda.memory_stats()["active_bytes.all.peak"] - before)


@pytest.mark.parametrize("is_pinned", [False, True])
def test_the_plain_way_and_the_prefetcher_give_the_same(is_pinned: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    for value in more_structures():
        given = pinned(value) if is_pinned else value
        way = transfer_to("cuda")
        assert isinstance(way, CudaPrefetcher)
        moved, plain = received(way, Deliveries([given, given])), move_to_device(value, "cuda")
        assert type(moved) is type(plain) and str(moved) == str(plain)
        for a, b in zip(tensors_of(moved), tensors_of(plain), strict=True):
            assert a.device == b.device == device and a.layout == b.layout
            if a.layout is torch.strided:
                assert same(a.cpu(), b.cpu())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("waits", [True, False])
def test_batches_are_right_under_load(
    make: Make, workers: int, pin_memory: bool, waits: bool
) -> None:
    """Their pinned buffers, slots and device memory are used again and again; the loop asks for
    its result in each step, or never.
    """
    loader = make(num_workers=workers, pin_memory=pin_memory)
    for _ in range(3):
        right = []
        for step, batch in enumerate(loader):
            right.append(is_right(batch, step))
            del batch
            if waits:
                right[-1].item()
            assert loader.state_dict()["batches"] == step + 1
        assert len(right) == NUMBER // BATCH and torch.stack(right).all().item()
    assert loader.get_stats()["transfer_time"] > 0 and loader.get_stats()["ring_in_use"] == 0


def test_batches_are_right_on_streams_of_the_users(make: Make) -> None:
    streams = [torch.cuda.Stream() for _ in range(3)]
    for device in (0, torch.device("cuda", 0)):
        right, iterator = [], iter(make(device=device))
        for step in range(NUMBER // BATCH):
            with torch.cuda.stream(streams[step % 3]):
                right.append(is_right(next(iterator), step))
        torch.cuda.synchronize()
        assert torch.stack(right).all().item()


def test_the_next_copy_is_done_while_a_kernel_runs(make: Make) -> None:
    iterator = iter(warm(make()))
    batch = next_with_another_behind_it(iterator)
    until(iterator._deliveries.is_ready)  # the third
    kernel = long_kernel()
    following = next_with_another_behind_it(iterator)  # nothing in it waits for the kernel
    copy = iterator._transfer._started
    assert copy is not None
    copy.done.synchronize()
    assert not kernel.query(), "the copy stood in line behind the kernel"
    assert is_right(batch, 0).item() and is_right(following, 1).item() and kernel.query()


@pytest.mark.parametrize("pin_memory", [True, False])
def test_a_copy_waits_for_no_kernel_without_workers(make: Make, pin_memory: bool) -> None:
    iterator = iter(warm(make(num_workers=0, pin_memory=pin_memory)))
    first = next(iterator)
    kernel = long_kernel()
    second = next(iterator)
    for *_, done in iterator._transfer._copies:
        done.synchronize()
    assert not kernel.query()
    assert is_right(first, 0).item() and is_right(second, 1).item()


def test_batches_do_not_pile_up_on_the_device(make: Make) -> None:
    peak = most_bytes(make(Numbers(1600)))
    assert peak <= 6 * BATCH_BYTES, f"{peak / BATCH_BYTES:.1f} batches at a time"


@pytest.mark.parametrize("persistent", [True, False])
def test_an_early_break_frees_the_batch_that_was_taken_early(make: Make, persistent: bool) -> None:
    loader = make(persistent_workers=persistent)
    next(iter(loader))
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        loader.set_epoch(0)
        iterator = iter(loader)
        batch = next_with_another_behind_it(iterator)
        assert iterator._transfer._early is not None and loader.state_dict()["batches"] == 1
        assert torch.cuda.memory_allocated() == before + 2 * BATCH_BYTES
        del iterator
        assert torch.cuda.memory_allocated() == before + BATCH_BYTES
        assert is_right(batch, 0).item()
        del batch
        assert torch.cuda.memory_allocated() == before


@pytest.mark.skipif("torch.cuda.device_count() < 2")
def test_the_device_is_that_of_the_index_or_the_current_one(make: Make) -> None:
    for device, current, expected in [("cuda:1", 0, 1), ("cuda", 1, 1), ("cuda:0", 1, 0)]:
        with torch.cuda.device(current):
            iterator = iter(make(device=device))
            first = next(iterator)
            with torch.cuda.device(expected):
                assert is_right(first, 0).item() and is_right(next(iterator), 1).item()
            assert first.device == torch.device("cuda", expected)
            assert torch.cuda.current_device() == current


# --- images that travel as uint8


ONE_ROUNDING = {torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def noise_in(folder: Path, number: int = 48) -> Path:
    return make_photos(folder, ("noise", "noise too"), number // 2, (50, 40))


CROP = [RandomResizedCrop(32), RandomHorizontalFlip()]


@pytest.mark.parametrize("dtype", ONE_ROUNDING)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("workers", "pin_memory"), [(0, True), (0, False), (2, True), (2, False)])
def test_images_are_those_of_the_host(
    make: Make,
    tmp_path: Path,
    dtype: torch.dtype,
    memory_format: Any,
    workers: int,
    pin_memory: bool,
) -> None:
    """Within one rounding, in the same layout, while other streams' kernels run; with
    normalize="host" bit for bit.
    """
    folder, near = noise_in(tmp_path), ONE_ROUNDING[dtype]
    options = {"batch_size": 8, "num_workers": workers, "shuffle": True}
    plain = ImageDataset(folder, transform=CROP, dtype=dtype)
    host = list(make(plain, device=None, pin_memory=False, **options))
    for normalize in (True, "host"):
        dataset = ImageDataset(folder, transform=CROP, dtype=dtype, normalize=normalize)
        loader = make(dataset, pin_memory=pin_memory, memory_format=memory_format, **options)
        batches = []
        for images, targets in loader:
            torch.cuda._sleep(2_000_000)
            batches.append((images + 0, targets))
            assert images.dtype == dtype
            assert images.is_contiguous(memory_format=memory_format)
            del images
        assert loader.get_stats()["normalized_on_device"] == (len(host) if normalize is True else 0)
        for (images, targets), (expected, labels) in zip(batches, host, strict=True):
            assert torch.equal(targets.cpu(), labels)
            if normalize == "host":
                assert same(images.cpu(), expected)
            else:
                found = images.cpu().double()
                torch.testing.assert_close(found, expected.double(), rtol=near, atol=near)


def test_images_are_normalised_beside_a_kernel(make: Make, tmp_path: Path) -> None:
    """On the copy stream: it is done while the user's kernel still runs, and the user's stream
    waits for it.
    """
    loader = make(ImageDataset(noise_in(tmp_path), image_size=32), batch_size=8)
    for _ in range(2):  # memory for what is in between is there then
        list(loader)
    loader.set_epoch(0)
    iterator = iter(loader)
    first = next_with_another_behind_it(iterator)
    until(iterator._deliveries.is_ready)
    kernel = long_kernel()
    following = next_with_another_behind_it(iterator)
    copy = iterator._transfer._started
    assert copy is not None
    copy.done.synchronize()
    assert not kernel.query(), "it stood in line behind the kernel"
    assert first[0].dtype == following[0].dtype == torch.float32
    assert torch.isfinite(following[0]).all().item()
