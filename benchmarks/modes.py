"""Measures how fast each loading mode gives batches of a folder of photographs.

    python benchmarks/modes.py PATH [--workers N] [--rounds 5] [--json]

Everything gives batches of 64 uint8 images of 224 x 224, in a full shuffle, and touches each batch.
Beside the four modes stand, in the same run: a plain torch DataLoader over a dataset that decodes
with the same functions (what recycled buffers are worth), the same with Pillow's decode and resize
(what most people run), and the limits: a bare decode loop in as many processes, and a bare gather
from memory into a reused buffer.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import headrace
from headrace.datasets.pixels import decode_image
from headrace.datasets.resizing import resize_image, to_channels_first

BATCH, SIZE = 64, (224, 224)


class Files(Dataset[tuple[torch.Tensor, int]]):
    """What a user writes by hand: one file a sample, decoded with headrace's functions or with
    Pillow's.
    """

    def __init__(self, dataset: headrace.ImageDataset, pillow: bool) -> None:
        self.samples, self.pillow = list(dataset.samples), pillow

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, target = self.samples[index]
        return torch.from_numpy(pixels_of(path, self.pillow)), target


def pixels_of(path: str, pillow: bool = False) -> np.ndarray[Any, Any]:
    """[3, 224, 224] uint8."""
    if pillow:
        with Image.open(path) as image:
            resized = image.convert("RGB").resize((SIZE[1], SIZE[0]), Image.Resampling.BILINEAR)
        return np.ascontiguousarray(np.asarray(resized).transpose(2, 0, 1))
    return to_channels_first(resize_image(decode_image(Path(path).read_bytes()), SIZE))


def decode_all(paths: list[str]) -> int:
    torch.set_num_threads(1)
    return sum(int(pixels_of(path)[0, 0, 0]) for path in paths)


def touch(batches: Any) -> int:
    """Goes through an epoch as a training loop would: looks at each batch, holds none."""
    count = 0
    for images, _ in batches:
        count += images.shape[0]
        images[:, :, ::16, ::16].sum()
    return count


def epochs(loader: Any) -> Iterator[Callable[[], int]]:
    while True:
        yield lambda: touch(loader)


def gather(store: np.ndarray[Any, Any], rounds: int) -> Iterator[Callable[[], int]]:
    """The limit from memory: rows in a random order, copied into one buffer that is used again."""
    buffer = np.empty((BATCH, *store.shape[1:]), np.uint8)

    def run() -> int:
        order = np.random.permutation(len(store))
        for start in range(0, len(store) - BATCH + 1, BATCH):
            np.take(store, order[start : start + BATCH], axis=0, out=buffer, mode="clip")
        return len(store) // BATCH * BATCH

    while True:
        yield run


def bare_decode(paths: list[str], workers: int) -> Iterator[Callable[[], int]]:
    parts = [paths[w :: max(1, workers)] for w in range(max(1, workers))]
    with multiprocessing.get_context("fork").Pool(max(1, workers)) as pool:

        def run() -> int:
            pool.map(decode_all, parts, chunksize=1)
            return len(paths)

        while True:
            yield run


def measure(path: str, workers: int, rounds: int) -> dict[str, list[float]]:
    """Images a second of each contestant, a list with one figure an epoch; the first epoch is
    warm-up, or fills what is to be filled.
    """
    folder = headrace.ImageDataset(path, image_size=SIZE, normalize=False)
    rows = np.zeros((min(3000, len(folder)), 3, *SIZE), np.uint8)
    rows[:] = 1  # the pages are there before they are timed

    def ours(mode: str, number: int) -> Iterator[Callable[[], int]]:
        dataset = headrace.ImageDataset(
            path, image_size=SIZE, normalize=False, loading_mode=mode, progress=False
        )
        return epochs(
            headrace.create_dataloader(dataset, batch_size=BATCH, shuffle=True, num_workers=number)
        )

    def plain(pillow: bool) -> Iterator[Callable[[], int]]:
        return epochs(
            DataLoader(
                Files(folder, pillow),
                BATCH,
                shuffle=True,
                num_workers=workers,
                persistent_workers=workers > 0,
            )
        )

    contestants = {
        "limit: bare decode loop": bare_decode([p for p, _ in folder.samples], workers),
        "plain DataLoader, Pillow": plain(True),
        "plain DataLoader, same decode": plain(False),
        "headrace lazy": ours("lazy", workers),
        "headrace streaming": ours("streaming", workers),
        "headrace cached": ours("cached", workers),
        "headrace eager": ours("eager", 0),
        "limit: bare gather from memory": gather(rows, rounds),
    }
    figures: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(rounds + 1):
        # in turn, so that a drift of the machine hits all alike
        for name, runs in contestants.items():
            run = next(runs)
            start = time.perf_counter()
            count = run()
            if round_:
                figures[name].append(count / (time.perf_counter() - start))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", help="a folder of class folders of images")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = measure(arguments.path, arguments.workers, arguments.rounds)
    medians = {name: statistics.median(values) for name, values in figures.items()}
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        **{m.__name__: m.__version__ for m in (torch, np, headrace)},
    }
    if arguments.json:
        json.dump(
            {
                "workers": arguments.workers,
                "median_img_per_s": medians,
                "all": figures,
                "machine": machine,
            },
            sys.stdout,
            indent=1,
        )
        print()
        return
    base = medians["plain DataLoader, same decode"]
    print(
        f"{'':<32} {'ratio':>7} {'img/s':>9}   min to max   ({arguments.workers} workers, median "
        f"of {arguments.rounds} epochs)"
    )
    for name, values in figures.items():
        print(
            f"{name:<32} {medians[name] / base:>6.2f}x {medians[name]:>9,.0f}   "
            f"{min(values):,.0f} to {max(values):,.0f}"
        )
    print(
        "ratio: to the plain DataLoader with the same decode. "
        + ", ".join(f"{k} {v}" for k, v in machine.items())
    )


if __name__ == "__main__":
    main()
