"""Compares how fast samples that are in memory already become batches.

    python benchmarks/from_memory.py [--images 3000] [--size 224] [--workers N] [--rounds 5]
    [--step] [--only NAME ...] [--json]

Random uint8 images, in a full shuffle and batches of 64: as they are; as float32, normalised by
ImageNet's statistics; and, as samples of one number each, empty batches: what a batch costs by
itself. `--step` adds a small training step on each batch, which wants the same cores. Beside
headrace's eager mode stand a plain DataLoader over a TensorDataset, FFCV's raw images, and the
limit: a bare gather into a buffer that is used again. A turn is as many whole epochs as take a
second.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import peers
import torch
from common import Contestant, Ratio, Section, add_options, run_sections
from folders import prepared, work_folder
from peers import Runs, normalized, touch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

import headrace

BATCH, EMPTY, SECONDS = 64, 2000, 1.0
"""Samples a batch, empty batches an epoch, the least length of a turn."""


@dataclass(frozen=True)
class Job:
    """The task: its samples lie in files in `work`, from where each contestant reads them into
    memory, outside of the timing.
    """

    work: Path
    size: int
    workers: int
    batch: int = BATCH
    normalize: bool = False
    dtype: str | None = None

    @property
    def rows(self) -> str:
        return str(self.work / "rows" / "rows.h5")

    def images(self) -> torch.Tensor:
        with h5py.File(self.rows) as file:
            return torch.from_numpy(file["data"][:])

    def numbers(self) -> torch.Tensor:
        with h5py.File(self.rows) as file:
            return torch.from_numpy(file["numbers"][:])


def write_rows(folder: Path, images: int, size: int) -> None:
    random = np.random.default_rng(0)
    with h5py.File(folder / "rows.h5", "w") as file:
        rows = file.create_dataset("data", (images, 3, size, size), np.uint8)
        for start in range(0, images, BATCH):
            rows[start : start + BATCH] = random.integers(
                0, 256, (min(BATCH, images - start), 3, size, size), np.uint8
            )
        file["numbers"] = np.arange(EMPTY * BATCH)


def write_packed(folder: Path, job: Job) -> None:
    """The same images, as headrace packs a folder of files."""
    with tempfile.TemporaryDirectory(dir=job.work) as files:
        (Path(files) / "only").mkdir()
        for number, image in enumerate(job.images()):
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(
                Path(files) / "only" / f"{number:06d}.bmp"
            )
        headrace.pack(
            headrace.ImageDataset(files, image_size=job.size),
            folder / "packed.h5",
            store="decoded",
            progress=False,
        )


class _Pixels:
    """What FFCV's writer takes."""

    def __init__(self, job: Job) -> None:
        self.images = job.images()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.images[index].permute(1, 2, 0).numpy(), 0


def turns(epoch: Callable[[], int]) -> Runs:
    """Whole epochs, until a turn is long enough."""

    def run() -> int:
        count, end = 0, time.perf_counter() + SECONDS
        while time.perf_counter() < end:
            count += epoch()
        return count

    while True:
        yield run


def first_of(batch: Any) -> torch.Tensor:
    return batch if isinstance(batch, torch.Tensor) else batch[0]


def look_at_numbers(batches: Any) -> int:
    count = 0
    for batch in batches:
        first_of(batch).sum()
        count += 1
    return count


def _closing(loader: headrace.Loader, epoch: Callable[[], int]) -> Runs:
    try:
        yield from turns(epoch)
    finally:
        loader.close()


def our_loader(job: Job, workers: int | None, name: str = "data") -> headrace.Loader:
    """None: the number of workers that headrace chooses."""
    if job.normalize:
        packed = str(job.work / "packed" / "packed.h5")
        how: dict[str, Any] = {} if job.dtype is None else {"dtype": job.dtype}
        dataset: Any = headrace.ImageDataset(
            packed, image_size=job.size, loading_mode="eager", progress=False, **how
        )
    else:
        dataset = headrace.HDF5Dataset(job.rows, name, loading_mode="eager", progress=False)
    return headrace.create_dataloader(
        dataset, batch_size=job.batch, shuffle=True, num_workers=workers
    )


def ours(job: Job, workers: int | None) -> Runs:
    loader = our_loader(job, workers)
    return _closing(loader, lambda: touch(loader, first_of))


def plain_loader(
    samples: torch.Tensor,
    batch: int,
    workers: int,
    collate: Callable[[list[Any]], Any] | None = None,
) -> DataLoader[Any]:
    options: dict[str, Any] = {
        "num_workers": workers,
        "persistent_workers": workers > 0,
        "collate_fn": collate,
    }
    return DataLoader(TensorDataset(samples), batch, shuffle=True, **options)


def plain(job: Job, workers: int) -> Runs:
    collate = _normalizing_collate if job.normalize else None
    loader = plain_loader(job.images(), job.batch, workers, collate)
    return turns(lambda: touch(loader))


def _normalizing_collate(samples: list[tuple[torch.Tensor]]) -> tuple[torch.Tensor]:
    return (normalized(torch.stack([image for (image,) in samples])),)


def ffcv_raw(job: Job) -> Runs:
    """Images of one size, uncompressed in a beton file, which the page cache holds."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.decoders import SimpleRGBImageDecoder
    from ffcv.writer import DatasetWriter

    def write(folder: Path) -> None:
        fields = {"image": RGBImageField(write_mode="raw"), "label": IntField()}
        DatasetWriter(
            str(folder / "train.beton"), fields, num_workers=max(1, job.workers)
        ).from_indexed_dataset(_Pixels(job))

    beton = str(prepared(job.work, "ffcv-raw", write) / "train.beton")
    return turns(next(peers.ffcv_epochs(beton, SimpleRGBImageDecoder(), job)))


def numpy_gather(job: Job) -> Runs:
    store = job.images().numpy()
    buffer = np.empty((job.batch, *store.shape[1:]), np.uint8)

    def epoch() -> int:
        order = np.random.permutation(len(store))
        for start in range(0, len(store) - job.batch + 1, job.batch):
            np.take(store, order[start : start + job.batch], axis=0, out=buffer, mode="clip")
        return len(store) // job.batch * job.batch

    return turns(epoch)


def torch_gather(job: Job, buffers: int = 1) -> Runs:
    """Into a buffer; or into several in turn, as a loop needs two, which holds one batch while
    the next is made.
    """
    store = job.images()
    each = itertools.cycle(
        [torch.empty((job.batch, *store.shape[1:]), dtype=torch.uint8) for _ in range(buffers)]
    )

    def epoch() -> int:
        order = torch.randperm(len(store))
        for start in range(0, len(store) - job.batch + 1, job.batch):
            torch.index_select(store, 0, order[start : start + job.batch], out=next(each))
        return len(store) // job.batch * job.batch

    return turns(epoch)


def our_numbers(job: Job, workers: int | None) -> Runs:
    loader = our_loader(job, workers, "numbers")
    return _closing(loader, lambda: look_at_numbers(loader))


def plain_numbers(job: Job, workers: int) -> Runs:
    loader = plain_loader(job.numbers(), job.batch, workers)
    return turns(lambda: look_at_numbers(loader))


def training_step() -> Callable[[torch.Tensor], None]:
    """A small network, forward and backward, in as many threads as torch takes."""
    torch.manual_seed(0)
    convolutions = [
        torch.nn.Conv2d(3, 16, 5, stride=4),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, stride=2),
        torch.nn.ReLU(),
    ]
    network = torch.nn.Sequential(
        *convolutions, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(32, 10)
    )
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)

    def step(images: torch.Tensor) -> None:
        optimizer.zero_grad()
        network(images.to(torch.float32) / 255).square().mean().backward()
        optimizer.step()

    return step


def training(batches: Any) -> Callable[[], int]:
    """An epoch of steps, counted."""
    step = training_step()

    def epoch() -> int:
        count = 0
        for batch in batches:
            step(first_of(batch))
            count += 1
        return count

    return epoch


def step_alone(job: Job) -> Runs:
    """The same batch again and again."""
    images = job.images()
    return turns(training([images[: job.batch].clone()] * -(-len(images) // job.batch)))


def ours_training(job: Job, workers: int) -> Runs:
    loader = our_loader(job, workers)
    return _closing(loader, training(loader))


def plain_training(job: Job, workers: int) -> Runs:
    return turns(training(plain_loader(job.images(), job.batch, workers)))


def sections(job: Job, floats: Job, step: bool) -> list[Section]:
    w = job.workers
    own, more = "headrace eager", f"headrace eager, {w} workers"
    plain_0, plain_w = "TensorDataset, 0 workers", f"TensorDataset, {w} workers"
    take, select, raw = (
        "limit: numpy.take into one buffer",
        "limit: torch.index_select into one buffer",
        "FFCV raw",
    )
    turn, half = "limit: torch.index_select into two buffers in turn", "headrace eager, bfloat16"

    def loaders(images: Job) -> list[Contestant]:
        return [
            Contestant(own, ours, (images, None)),
            Contestant(more, ours, (images, w)),
            Contestant(raw, ffcv_raw, (images,), ("ffcv",)),
            Contestant(plain_w, plain, (images, w)),
            Contestant(plain_0, plain, (images, 0)),
        ]

    limits = [
        Contestant(take, numpy_gather, (job,)),
        Contestant(select, torch_gather, (job,)),
        Contestant(turn, torch_gather, (job, 2)),
    ]
    as_they_are = [*loaders(job), *limits]
    numbers = [
        Contestant(own, our_numbers, (job, None)),
        Contestant(more, our_numbers, (job, w)),
        Contestant(plain_w, plain_numbers, (job, w)),
        Contestant(plain_0, plain_numbers, (job, 0)),
    ]
    steps = [
        Contestant("limit: the step alone", step_alone, (job,)),
        Contestant("headrace eager, 0 workers", ours_training, (job, 0)),
        Contestant(more, ours_training, (job, w)),
        Contestant(plain_w, plain_training, (job, w)),
        Contestant(plain_0, plain_training, (job, 0)),
    ]
    with_workers = Ratio("uint8: headrace / TensorDataset with workers", own, (plain_w,))
    uint8 = [
        with_workers,
        Ratio("uint8: headrace / bare gather", own, (take, select)),
        Ratio("uint8: headrace / FFCV raw", own, (raw,)),
    ]
    uint8.append(Ratio("uint8: headrace / bare gather into two buffers", own, (turn,)))
    said = "empty batches: headrace / plain DataLoader"
    empty = [
        Ratio(said, own, (plain_w,)),
        Ratio(f"{said}, neither with workers", own, (plain_0,)),
        Ratio(f"{said}, both", more, (plain_w,)),
    ]
    normalised = [
        *loaders(floats),
        Contestant(half, ours, (replace(floats, dtype="bfloat16"), None)),
    ]
    halved = Ratio("bfloat16 / float32", half, (own,))
    found = [
        Section("uint8", "img/s", plain_w, as_they_are, uint8),
        Section(
            "float32 normalised",
            "img/s",
            plain_w,
            normalised,
            [Ratio("float32: headrace / FFCV raw", own, (raw,)), halved],
        ),
        Section("empty batches", "batches/s", plain_w, numbers, empty),
    ]
    beside = Ratio(
        "training: headrace, 0 workers / TensorDataset",
        "headrace eager, 0 workers",
        (plain_w, plain_0),
    )
    return (
        [*found, Section("beside a training step", "steps/s", plain_w, steps, [beside])]
        if step
        else found
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--step", action="store_true", help="measure beside a training step too")
    add_options(parser)
    given = parser.parse_args()
    with work_folder(None) as work:
        job, floats = (
            Job(work, given.size, given.workers, normalize=normalize) for normalize in (False, True)
        )
        prepared(work, "rows", lambda folder: write_rows(folder, given.images, given.size))
        prepared(work, "packed", lambda folder: write_packed(folder, job))
        task = (
            f"{given.images:,} images of {given.size} x {given.size}, {given.workers} workers, "
            f"batches of {BATCH}"
        )
        run_sections(sections(job, floats, given.step), given, task)


if __name__ == "__main__":
    main()
