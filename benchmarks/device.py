"""Compares how fast a GPU trains on photographs, and how long it waits for them.

    python benchmarks/device.py PATH [--workers 16] [--batch 256] [--images 20000] [--rounds 5]
    [--limit N] [--only NAME ...] [--json]

A ResNet-50 is trained in bfloat16 (autocast, channels_last) on the files of a folder of class
folders, resized to 224 x 224, in a full shuffle. An epoch is as many images as `--images` says: a
small folder is gone through several times. Headrace's loading modes stand beside itself with images
that are normalised on the host, a plain DataLoader over its dataset, a DataLoader as torchvision's
users write it, DALI with its decoder on the GPU, and the limit: the same step on a batch that is
there.

Of each epoch it prints images a second; `idle`, the share of the time in which the device had no
step to do; `blocked`, that in which the loop was blocked in `next`; and `overlap`, how much of the
time of all copies to the device lies within steps. The device's times are those of its own events.
torchvision's network is taken where it is installed, else the same one that is written out here.

Without a GPU it runs on the CPU, and leaves out `idle` and `overlap`: that shows that it runs, and
nothing else.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import Contestant, Ratio, Section, add_options, run_sections
from folders import work_folder
from images import some_of
from peers import MEAN, STD, ImageFolder, Job, Runs
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

import headrace
from headrace.loader.device import CudaPrefetcher

LIMIT, PLAIN, TORCHVISION, DALI = (
    "limit: the step alone",
    "headrace's dataset, plain DataLoader",
    "torchvision-style DataLoader",
    "DALI (GPU)",
)
MODES = ("eager", "cached", "lazy")
Interval = tuple[float, float]
"""Begin and end, in milliseconds."""


@dataclass(frozen=True)
class Task:
    """What all contestants do.

    Attributes:
        job: the photographs, and the workers.
        images: of an epoch.
        device: where the network is.
    """

    job: Job
    images: int
    device: str

    @property
    def batches(self) -> int:
        """Of an epoch; all of them whole."""
        return self.images // self.job.batch


# --- the network, as torchvision has it


class Bottleneck(nn.Module):
    """A block of ResNet-50: 1 x 1, 3 x 3 and 1 x 1 convolutions beside a shortcut; the stride is
    that of the 3 x 3 one.
    """

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        steps = ((before, width, 1, 1), (width, width, 3, stride), (width, after, 1, 1))
        self.convolutions = nn.ModuleList(
            nn.Conv2d(a, b, size, by, size // 2, bias=False) for a, b, size, by in steps
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _, _ in steps)
        is_same = stride == 1 and before == after
        self.shortcut = (
            nn.Identity()
            if is_same
            else nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x
        for number, (convolution, norm) in enumerate(
            zip(self.convolutions, self.norms, strict=True)
        ):
            out = norm(convolution(out))
            if number < 2:
                out = torch.relu_(out)
        return torch.relu_(out + self.shortcut(x))


def resnet50(classes: int) -> nn.Module:
    """ResNet-50 (He and others, 2015; stride in the 3 x 3 convolution), 25.6 million weights for
    1,000 classes.
    """
    if importlib.util.find_spec("torchvision") is not None:
        from torchvision.models import resnet50 as theirs

        network: nn.Module = theirs(num_classes=classes)
        return network
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    before = 64
    for number, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            layers.append(Bottleneck(before, width, 2 if number and not block else 1))
            before = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


class Trainer:
    """Trains the network, and notes when the device is at it.

    Args:
        task: says where.
        classes: of the labels.
    """

    def __init__(self, task: Task, classes: int) -> None:
        torch.manual_seed(0)
        self.device, self.has_events = torch.device(task.device), task.device.startswith("cuda")
        self.network = resnet50(classes).to(self.device, memory_format=torch.channels_last)
        self._optimiser = torch.optim.SGD(self.network.parameters(), 0.01, momentum=0.9)
        self.steps: list[tuple[Any, Any]] = []
        self.copies: list[tuple[Any, Any]] = []

    def step(self, images: torch.Tensor, targets: torch.Tensor) -> None:
        """One step of the training on a batch that is on the device."""
        began = self.mark()
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(
                self.network(images.contiguous(memory_format=torch.channels_last)), targets
            )
        self._optimiser.zero_grad(set_to_none=True)
        loss.backward()
        self._optimiser.step()
        self.steps.append((began, self.mark()))

    def mark(self) -> Any:
        """An event of the current stream, with its time; None on the CPU."""
        if not self.has_events:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def epoch(
        self, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[int, dict[str, float]]:
        """Trains on all batches; the images there were, and what is said of the epoch."""
        self.steps.clear()
        self.copies.clear()
        origin, count, blocked, start = self.mark(), 0, 0.0, time.perf_counter()
        iterator = iter(batches)
        while True:
            asked = time.perf_counter()
            batch = next(iterator, None)
            blocked += time.perf_counter() - asked
            if batch is None:
                break
            self.step(*batch)
            count += len(batch[0])
        end = self.mark()
        if self.has_events:
            torch.cuda.synchronize()
        figures = {"blocked": blocked / (time.perf_counter() - start)}
        if self.has_events:
            steps, copies = (
                [(origin.elapsed_time(a), origin.elapsed_time(b)) for a, b in pairs]
                for pairs in (self.steps, self.copies)
            )
            figures["idle"] = 1 - covered([(0.0, origin.elapsed_time(end))], steps)
            if copies:
                figures["overlap"] = covered(copies, steps)
        return count, figures


def covered(intervals: list[Interval], by: list[Interval]) -> float:
    """The share of some intervals that lies within others, which don't overlap each other."""
    whole = sum(end - begin for begin, end in intervals)
    within = sum(
        max(0.0, min(end, last) - max(begin, first))
        for begin, end in intervals
        for first, last in by
    )
    return within / whole if whole else 0.0


# --- contestants


def classes_of(task: Task) -> int:
    return 1 + max(target for _, target in task.job.files)


def step_alone(task: Task) -> Runs:
    trainer = Trainer(task, classes_of(task))
    images = torch.rand(task.job.batch, 3, *task.job.size, device=trainer.device).contiguous(
        memory_format=torch.channels_last
    )
    targets = torch.zeros(task.job.batch, dtype=torch.int64, device=trainer.device)
    while True:
        yield lambda: trainer.epoch((images, targets) for _ in range(task.batches))


def ours(task: Task, mode: Any, normalize: Any = True) -> Runs:
    """Images are made bfloat16 where they are normalised."""
    job = task.job
    options = {"image_size": job.size, "normalize": normalize, "dtype": torch.bfloat16}
    dataset = headrace.ImageDataset(job.path, loading_mode=mode, progress=False, **options)  # type: ignore[arg-type]
    loader = headrace.create_dataloader(
        dataset,
        batch_size=job.batch,
        num_workers=job.workers,
        num_samples=task.batches * job.batch,
        drop_last=True,
        device=task.device,
        memory_format=torch.channels_last,
    )
    trainer, settle = Trainer(task, classes_of(task)), CudaPrefetcher._settle

    def noted(prefetcher: CudaPrefetcher) -> None:
        under_way = list(prefetcher._copies)
        settle(prefetcher)
        ended = under_way[: len(under_way) - len(prefetcher._copies)]
        trainer.copies += [(copy.began, copy.done) for copy in ended]

    CudaPrefetcher._settle = noted  # type: ignore[method-assign]  # in this process alone
    try:
        while True:
            yield lambda: trainer.epoch(loader)
    finally:
        loader.close()


def plain(task: Task, dataset: Any) -> Runs:
    """A DataLoader as torch's documentation says: pinned, and copied without waiting, on the
    stream of the step.
    """
    job, trainer = task.job, Trainer(task, classes_of(task))
    sampler = RandomSampler(dataset, num_samples=task.batches * job.batch)
    loader = DataLoader(
        dataset,
        job.batch,
        sampler=sampler,
        drop_last=True,
        pin_memory=trainer.has_events,
        **job.loader,
    )

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for images, targets in loader:
            began = trainer.mark()
            moved = (
                images.to(trainer.device, non_blocking=True),
                targets.to(trainer.device, non_blocking=True),
            )
            trainer.copies.append((began, trainer.mark()))
            yield moved

    while True:
        yield lambda: trainer.epoch(batches())


def same_decoder(task: Task) -> Runs:
    return plain(task, headrace.ImageDataset(task.job.path, image_size=task.job.size))


def torchvision_style(task: Task) -> Runs:
    return plain(task, ImageFolder(task.job))


def dali(task: Task) -> Runs:
    """Decoded, resized and normalised on the GPU; files are read by threads, in a new order for
    each epoch.
    """
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

    job, trainer = task.job, Trainer(task, classes_of(task))
    if not trainer.has_events:
        raise RuntimeError("it decodes on a GPU, and there is none")
    number = torch.device(task.device).index or 0

    @pipeline_def(batch_size=job.batch, num_threads=max(1, job.workers), device_id=number)
    def images(seed: int) -> Any:
        drawn, chosen = random.Random(seed), list[tuple[str, int]]()
        while len(chosen) < task.batches * job.batch:
            chosen += drawn.sample(job.files, len(job.files))
        paths, labels = (
            list(column) for column in zip(*chosen[: task.batches * job.batch], strict=True)
        )
        encoded, targets = fn.readers.file(files=paths, labels=labels, name="reader")
        decoded = fn.decoders.image(encoded, device="mixed", output_type=types.RGB)
        resized = fn.resize(decoded, size=job.size, interp_type=types.INTERP_LINEAR)
        statistics = {"mean": [255 * m for m in MEAN], "std": [255 * s for s in STD]}
        return fn.crop_mirror_normalize(
            resized, dtype=types.FLOAT16, output_layout="CHW", **statistics
        ), targets.gpu()

    def batches(iterator: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for (batch,) in iterator:
            yield batch["image"], batch["label"].squeeze(1).long()

    epoch = 0
    while True:
        options = {
            "reader_name": "reader",
            "last_batch_policy": LastBatchPolicy.DROP,
            "prepare_first_batch": False,
        }
        iterator = DALIGenericIterator(images(epoch), ["image", "label"], **options)
        yield functools.partial(trainer.epoch, batches(iterator))
        del iterator
        epoch += 1


def section(task: Task) -> Section:
    own: dict[str, Callable[..., Runs]] = {
        f"headrace {mode}": functools.partial(ours, mode=mode) for mode in MODES
    }
    own["headrace lazy, normalize='host'"] = functools.partial(ours, mode="lazy", normalize="host")
    contestants = [
        Contestant(LIMIT, step_alone, (task,)),
        *(Contestant(name, runs, (task,)) for name, runs in own.items()),
        Contestant(PLAIN, same_decoder, (task,)),
        Contestant(TORCHVISION, torchvision_style, (task,)),
        Contestant(DALI, dali, (task,), ("nvidia-dali-cuda130", "nvidia-dali-cuda120")),
    ]
    ratios = [
        Ratio(f"headrace {mode} / the step alone", f"headrace {mode}", (LIMIT,)) for mode in MODES
    ]
    others = {
        "plain DataLoader": PLAIN,
        "torchvision-style": TORCHVISION,
        "DALI": DALI,
        "normalised on the host": [*own][-1],
    }
    ratios += [
        Ratio(f"headrace lazy / {label}", "headrace lazy", (name,))
        for label, name in others.items()
    ]
    return Section(
        f"ResNet-50 in bfloat16 on {task.device}",
        "img/s",
        PLAIN,
        contestants,
        ratios,
        samples=task.batches * task.job.batch,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", help="a folder of class folders of JPEG files")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224, help="pixels of a side")
    parser.add_argument("--images", type=int, default=20_000, help="of an epoch")
    parser.add_argument("--limit", type=int, metavar="N", help="use only N of the files")
    parser.add_argument("--device", help="default: cuda, and cpu where there is no GPU")
    parser.add_argument(
        "--work",
        metavar="DIR",
        help="where chosen files are copied to, and kept (default: a temporary folder)",
    )
    add_options(parser)
    given = parser.parse_args()
    if given.images < given.batch:
        parser.error(f"--images {given.images} is less than one batch of {given.batch}")
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    with work_folder(given.work) as work:
        path = (
            os.path.abspath(given.path)
            if given.limit is None
            else some_of(given.path, given.limit, work)
        )
        files = tuple(
            (os.fspath(file), int(target)) for file, target in headrace.ImageDataset(path).samples
        )
        job = Job(
            path, files, True, given.workers, given.batch, (given.size, given.size), Path(work)
        )
        on = (
            torch.cuda.get_device_name(device)
            if device.startswith("cuda")
            else "no GPU: this shows that it runs, and nothing else"
        )
        task = (
            f"{on}; {len(files):,} files, {given.images:,} images an epoch, {given.workers} "
            f"workers, batches of {given.batch}"
        )
        run_sections([section(Task(job, given.images, device))], given, task)


if __name__ == "__main__":
    main()
