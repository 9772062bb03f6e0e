"""Measures how fast a small network trains on photographs in each loading mode, and compares
batches and losses.

    # a folder of class folders, or a packed train.h5
    python benchmarks/training.py PATH [--epochs 4] [--json]
    python benchmarks/training.py PATH --no-train                       # loading alone, as uint8
    python benchmarks/training.py --modes lazy cached  # photographs of its own, 600

The network is that of examples/train_images.py. Every batch is summed, so that where losses differ
the output says whether a batch does, or the arithmetic alone. Exit status: 0; 1 where losses
differ; 2 for an error; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# torch's threads leave their cores to the workers instead of spinning
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

import torch
from common import machine
from folders import temporary_folder
from make_photos import make_photos
from report_modes import MODES, Epoch as Sums
from torch import nn
from train_images import Network

from headrace import (
    ConfigError,
    HeadraceError,
    ImageDataset,
    Loader,
    LoadingMode,
    create_dataloader,
    seed_everything,
)


@dataclass
class Epoch(Sums):
    """Sums over one epoch, and what the loader counted in it."""

    waited: float = 0.0
    hits: int = 0
    misses: int = 0
    checksums: list[int] = field(default_factory=list)


@dataclass
class Run:
    """What one loading mode took."""

    mode: str
    start_up: float = 0.0
    epochs: list[Epoch] = field(default_factory=list)
    peak: float = 0.0


class Learner:
    """The network of the example with its optimiser. The same seed gives the same network."""

    def __init__(self, classes: int, seed: int, device: str) -> None:
        seed_everything(seed, deterministic=True)
        self.network = Network(classes).to(device)
        self.optimiser = torch.optim.AdamW(self.network.parameters(), lr=3e-3)

    def step(self, images: torch.Tensor, targets: torch.Tensor, sums: Epoch) -> None:
        """Learns from one batch."""
        scores = self.network(images)
        loss = nn.functional.cross_entropy(scores, targets)
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        sums.add(loss, scores, targets)


def run_mode(given: argparse.Namespace, mode: str) -> Run:
    """Loads, and unless --no-train trains, for all epochs in one mode."""
    start = time.perf_counter()
    dataset = ImageDataset(
        given.path,
        image_size=given.image_size,
        loading_mode=LoadingMode(mode),
        normalize=given.train,
        seed=given.seed,
    )
    loader = create_dataloader(
        dataset,
        batch_size=given.batch_size,
        num_workers=given.workers,
        seed=given.seed,
        device=given.device,
        shuffle=True,
    )
    run = Run(mode, time.perf_counter() - start)
    with dataset, loader:
        learner = Learner(_classes(dataset), given.seed, given.device) if given.train else None
        for number in range(given.epochs):
            loader.set_epoch(number)
            run.epochs.append(_run_epoch(loader, learner))
        run.peak = loader.get_stats().get("peak_memory_bytes", 0)
    return run


def _classes(dataset: ImageDataset) -> int:
    if dataset.targets is None:
        raise ConfigError(
            "these images have no classes to learn: use class folders, or pass --no-train"
        )
    return len(dataset.classes) or int(max(dataset.targets)) + 1


def _run_epoch(loader: Loader, learner: Learner | None) -> Epoch:
    sums, before, start = Epoch(), loader.get_stats(), time.perf_counter()
    for images, targets in loader:
        if learner is None:
            sums.images += len(images)
        else:
            learner.step(images, targets, sums)
            # after the step, to see what was written into the batch meanwhile
            sums.checksums.append(checksum(images, targets))
    sums.seconds = time.perf_counter() - start  # until the loader has ended its epoch
    after = loader.get_stats()
    sums.waited, sums.hits, sums.misses = (
        after.get(name, 0) - before.get(name, 0)
        for name in ("wait_time", "cache_hits", "cache_misses")
    )
    return sums


def checksum(images: torch.Tensor, targets: torch.Tensor) -> int:
    """The bits of float32 images, taken for int64 and summed, and their int64 targets: changes
    with any single value.
    """
    values = images.flatten()
    pairs, rest = (
        values[: len(values) // 2 * 2].view(torch.int64).sum(),
        values[len(values) // 2 * 2 :].view(torch.int32).sum(),
    )
    positions = torch.arange(1, len(targets) + 1, device=targets.device)
    return int(pairs + rest + (targets * positions).sum())


def table(runs: Sequence[Run], train: bool) -> str:
    """A line a mode, and one that says what the columns are."""
    head = [
        "mode",
        "start-up",
        *(f"epoch {i}" for i in range(1, len(runs[0].epochs) + 1)),
        "wait",
        "hits",
        "peak",
    ]
    rows = [head + (["loss", "accuracy"] if train else [])]
    for run in runs:
        last = run.epochs[-1]
        row = [run.mode, f"{run.start_up:.2f} s", *(f"{epoch.speed:,.0f}" for epoch in run.epochs)]
        row += [
            f"{last.waited / max(last.seconds, 1e-9):.0%}",
            f"{last.hits / max(1, last.hits + last.misses):.0%}",
        ]
        row += [f"{run.peak / 1e6:,.0f} MB"] + (
            [repr(last.mean_loss), f"{last.accuracy:.1%}"] if train else []
        )
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    learnt = ", loss and accuracy" if train else ""
    columns = (
        f"epochs in img/s; wait (for batches), hits (in memory){learnt} are the last epoch's; "
        "peak: this process and its workers"
    )
    return "\n".join([*lines, "", columns])


def differences(runs: Sequence[Run]) -> list[str]:
    """A line for each mode whose losses are not those of the first one."""
    first = runs[0]
    losses = [epoch.mean_loss for epoch in first.epochs]
    others = [run for run in runs if [epoch.mean_loss for epoch in run.epochs] != losses]
    return [f"{run.mode} against {first.mode}: {_difference(first, run)}" for run in others]


def _difference(first: Run, other: Run) -> str:
    """The first batch that differs; where none does, the network's arithmetic is at fault."""
    for epoch, (one, two) in enumerate(zip(first.epochs, other.epochs, strict=True), 1):
        for batch, (mine, theirs) in enumerate(zip(one.checksums, two.checksums, strict=True)):
            if mine != theirs:
                return f"batch {batch} of epoch {epoch} differs, please report it"
        if one.mean_loss != two.mean_loss:
            return (
                f"the losses of epoch {epoch} differ, and its batches are equal: torch calculated "
                "in another way"
            )
    return "equal"


def as_json(runs: Sequence[Run], given: argparse.Namespace) -> dict[str, Any]:
    """What `--json` prints."""
    rows = []
    for run in runs:
        last = run.epochs[-1]
        row: dict[str, Any] = {
            "mode": run.mode,
            "start_up_s": run.start_up,
            "img_per_s": [epoch.speed for epoch in run.epochs],
        }
        row |= {
            "wait": last.waited / max(last.seconds, 1e-9),
            "hits": last.hits / max(1, last.hits + last.misses),
            "peak_bytes": run.peak,
        }
        rows.append(
            row | ({"loss": last.mean_loss, "accuracy": last.accuracy} if given.train else {})
        )
    threads = {
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
    return {
        "modes": rows,
        "differences": differences(runs),
        "train": given.train,
        **threads,
        "machine": machine(()),
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "path",
        nargs="?",
        help="folder of class folders, or a packed .h5 file; without: makes photographs",
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=MODES,
        default=MODES,
        help="one after the other, with the same seeds",
    )
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--workers", type=int, help="worker processes; without: chosen by headrace")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument(
        "--no-train", dest="train", action="store_false", help="load only, as uint8"
    )
    parser.add_argument("--images", type=int, default=600, help="how many photographs to make")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    if min(given.epochs, given.image_size, given.images) < 1:
        parser.error("--epochs, --image-size and --images must be at least 1")
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    try:
        with temporary_folder() as folder:
            given.path = given.path or make_photos(Path(folder) / "photos", given.images)
            runs = [run_mode(given, mode) for mode in given.modes]
    except HeadraceError as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    differing = differences(runs)
    if given.json:
        print(json.dumps(as_json(runs, given), indent=1))
    else:
        print(table(runs, given.train))
        if given.train:  # on a CPU losses are rounded in another order by another number of threads
            threads = (
                f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
            )
            print(
                f"torch {torch.__version__} on {given.device}, {threads}\nlosses equal in all "
                f"modes: {'no' if differing else 'yes'}"
            )
        print("".join(f"  {line}\n" for line in differing), end="")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
