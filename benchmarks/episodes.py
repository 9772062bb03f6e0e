"""Compares how fast windows over demonstrations become batches, beside a plain DataLoader over
h5py, as robomimic has it.

    python benchmarks/episodes.py [--demos 24] [--window 8] [--workers N] [--rounds 5] [--only NAME
    ...] [--work FOLDER] [--json]

Made demonstrations of 90 to 150 steps, as robomimic lays them out: two cameras, uint8 [84, 84, 3],
a position and actions, contiguous and in compressed chunks of 8 steps. Batches of 32 windows of 8
steps that begin at each step, in random order, and in a block shuffle. All files are in the page
cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import torch
from common import Contestant, Ratio, Section, add_options, run_sections
from folders import prepared, work_folder
from torch.utils.data import DataLoader, Dataset

import headrace

KEYS = ["obs/agentview_image", "obs/wrist_image", "obs/position", "actions"]
LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "gzip, chunks of 8": {"chunks": (8, 84, 84, 3), "compression": "gzip"},
}
BATCH, BATCHES = 32, 20
OURS, BLOCK, PLAIN = "headrace", "headrace, block shuffle", "h5py, DataLoader"


class Job(NamedTuple):
    path: str
    window: int
    workers: int


def write_demos(folder: Path, demos: int, how: dict[str, Any]) -> None:
    draws = np.random.default_rng(0)
    with h5py.File(folder / "demos.hdf5", "w") as file:
        for number in range(demos):
            steps = int(draws.integers(90, 150))
            for key in KEYS[:2]:
                scene = draws.integers(0, 250, (1, 21, 21, 3)).repeat(4, 1).repeat(4, 2)
                pixels = (scene + draws.integers(0, 4, (steps, 84, 84, 3))).astype(np.uint8)
                file.create_dataset(f"data/demo_{number}/{key}", data=pixels, **how)
            for key, width in (("obs/position", 3), ("actions", 7)):
                file[f"data/demo_{number}/{key}"] = draws.normal(size=(steps, width))


class Windows(Dataset[dict[str, torch.Tensor]]):
    """What people write over h5py: opened in each worker, a slice of each key."""

    def __init__(self, job: Job) -> None:
        self._job, self._file = job, None
        with h5py.File(job.path) as file:
            self._places = [
                (demo, step)
                for demo in file["data"]
                for step in range(len(file[f"data/{demo}/actions"]))
            ]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self._file is None:
            self._file = h5py.File(self._job.path)
        (demo, step), sample = self._places[index], {}
        for key in KEYS:
            rows = self._file[f"data/{demo}/{key}"][step : step + self._job.window]
            missing = self._job.window - len(rows)
            sample[key] = torch.from_numpy(
                np.concatenate([rows, np.repeat(rows[-1:], missing, 0)]) if missing else rows
            )
        return sample


def turns(loader: Any) -> Iterator[Callable[[], int]]:
    """Turns of some batches each."""
    batches = iter(loader)

    def turn() -> int:
        nonlocal batches
        count = 0
        for _ in range(BATCHES):
            if (batch := next(batches, None)) is None:
                batches = iter(loader)
                batch = next(batches)
            count += len(batch["actions"])
            batch["actions"].sum()
        return count

    while True:
        yield turn


def ours(job: Job, shuffle: bool | str) -> Iterator[Callable[[], int]]:
    dataset = headrace.EpisodeDataset(job.path, KEYS, window=job.window)
    loader = headrace.create_dataloader(
        dataset, batch_size=BATCH, shuffle=shuffle, drop_last=True, num_workers=job.workers, seed=1
    )
    try:
        yield from turns(loader)
    finally:
        loader.close()


def plain(job: Job) -> Iterator[Callable[[], int]]:
    options: dict[str, Any] = {"num_workers": job.workers, "persistent_workers": job.workers > 0}
    return turns(
        DataLoader(Windows(job), batch_size=BATCH, shuffle=True, drop_last=True, **options)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--demos", type=int, default=24)
    parser.add_argument("--window", type=int, default=8, help="steps (8)")
    parser.add_argument(
        "--work", help="a folder for the files, which stays; else they are written anew and removed"
    )
    add_options(parser)
    given = parser.parse_args()
    with work_folder(given.work) as work:
        sections = []
        for layout, how in LAYOUTS.items():
            name = f"{layout.replace(',', '').replace(' ', '-')}-{given.demos}"
            folder = prepared(
                work, name, lambda folder, how=how: write_demos(folder, given.demos, how)
            )
            job = Job(str(folder / "demos.hdf5"), given.window, given.workers)
            contestants = [
                Contestant(OURS, ours, (job, True)),
                Contestant(BLOCK, ours, (job, "block")),
                Contestant(PLAIN, plain, (job,)),
            ]
            ratios = [Ratio(f"{layout}: {one} / {PLAIN}", one, (PLAIN,)) for one in (OURS, BLOCK)]
            sections.append(Section(layout, "windows/s", PLAIN, contestants, ratios))
        run_sections(
            sections,
            given,
            f"{given.workers} workers, batches of {BATCH} windows of {given.window} steps",
        )


if __name__ == "__main__":
    main()
