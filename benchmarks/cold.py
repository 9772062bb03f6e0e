"""Compares how fast random samples come from a disk, of files that nobody has read yet.

    python benchmarks/cold.py [--work DIR] [--gb 2] [--batches 150] [--workers N] [--rounds 5]
    [--only NAME ...] [--json]

Batches of 64 in random order, with what the system holds of the files in memory forgotten before
each turn. Two sections:

lines: of a text, made and compared as in `text.py`: headrace beside HF datasets.

rows: of an HDF5 file, uint8 [96, 96, 3] as they are (28 kB): headrace beside a plain DataLoader
over h5py and one over ``np.memmap``.

"without hints" is headrace that does not tell the system what it will read
(`headrace.io.handles`). How much the system reads beyond what it is asked for
(`/sys/block/*/queue/read_ahead_kb`) is printed: where that is much, memory holds what comes later.
"""

from __future__ import annotations

import argparse
import gc
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import text
import torch
from common import Contestant, Ratio, Section, add_options, run_sections
from folders import forget, prepared, work_folder
from torch.utils.data import DataLoader, Dataset

import headrace
from headrace.io import handles as hints

BATCH, SIDE = 64, 96
Runs = Iterator[Callable[[], int]]


def turns(
    job: text.Job,
    batches: int,
    make: Callable[[dict[str, Any]], tuple[list[Path], Any]],
    count: Callable[[Any], int],
) -> Runs:
    """Some batches of an epoch, from files that are not in memory: what a process has mapped
    stays there, so each turn opens anew.
    """
    options = {"num_workers": job.workers, "persistent_workers": job.workers > 0}

    def run() -> int:
        done = 0
        for number, batch in enumerate(loader, 1):
            done += count(batch)
            if number == batches:
                break
        return done

    while True:
        files, loader = make(options)
        # what is opened once is open, and headrace has looked at what memory is taken
        for _ in itertools.islice(loader, 2):
            pass
        for file in files:
            forget(file)
        yield run
        getattr(loader, "close", lambda: None)()
        del loader
        gc.collect()


def ours(job: text.Job, kind: str, batches: int, told: bool) -> Runs:
    hints._CAN_TELL = hints._CAN_TELL and told

    def make(options: dict[str, Any]) -> tuple[list[Path], Any]:
        dataset: Any = (
            headrace.TextDataset(
                job.lines, unit="line", max_length=None, cache_dir=job.work / "kept", progress=False
            )
            if kind == "lines"
            else headrace.HDF5Dataset(rows_in(job), "data")
        )
        return files_of(job, kind), headrace.create_dataloader(
            dataset, batch_size=BATCH, shuffle=True, **options
        )

    yield from turns(job, batches, make, text.lines_of if kind == "lines" else len)


def hf_lines(job: text.Job, batches: int) -> Runs:
    def make(options: dict[str, Any]) -> tuple[list[Path], Any]:
        found = text.hf_dataset(job)
        files = [Path(one["filename"]) for one in found.cache_files]
        return files, DataLoader(
            found, BATCH, sampler=text.Drawn(len(found)), collate_fn=text.Padded(), **options
        )

    yield from turns(job, batches, make, text.lines_of)


class Rows(Dataset[torch.Tensor]):
    """What people write: opened in each worker, one sample at a time."""

    def __init__(self, path: Path, is_mapped: bool) -> None:
        self._path, self._is_mapped, self._rows = path, is_mapped, None
        with h5py.File(path) as file:
            self._length, self._at = len(file["data"]), file["data"].id.get_offset()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._rows is None:
            shape = (self._length, SIDE, SIDE, 3)
            self._rows = (
                np.memmap(self._path, np.uint8, "r", self._at, shape)
                if self._is_mapped
                else h5py.File(self._path)["data"]
            )
        return torch.from_numpy(np.array(self._rows[index]))


def plain_rows(job: text.Job, batches: int, is_mapped: bool) -> Runs:
    def make(options: dict[str, Any]) -> tuple[list[Path], Any]:
        return files_of(job, "rows"), DataLoader(
            Rows(rows_in(job), is_mapped), BATCH, shuffle=True, **options
        )

    yield from turns(job, batches, make, len)


def rows_in(job: text.Job) -> Path:
    return job.work / f"rows-{job.nbytes}" / "rows.h5"


def files_of(job: text.Job, kind: str) -> list[Path]:
    return [job.lines if kind == "lines" else rows_in(job)]


def write_rows(folder: Path, nbytes: int) -> None:
    random, count = np.random.default_rng(0), nbytes // (SIDE * SIDE * 3)
    with h5py.File(folder / "rows.h5", "w") as file:
        rows = file.create_dataset("data", (count, SIDE, SIDE, 3), np.uint8)
        for start in range(0, count, 256):
            some = min(256, count - start)
            rows[start : start + some] = random.integers(0, 256, (some, SIDE, SIDE, 3), np.uint8)


def section(work: Path, nbytes: int, kind: str, workers: int, batches: int) -> Section:
    job = text.Job(work, nbytes, 1, workers)
    peers = (
        [Contestant("HF datasets", hf_lines, (job, batches), ("datasets",))]
        if kind == "lines"
        else [
            Contestant("h5py", plain_rows, (job, batches, False)),
            Contestant("np.memmap", plain_rows, (job, batches, True)),
        ]
    )
    told, untold = "headrace", "headrace, without hints"
    title = f"random {kind}, {workers} workers"
    return Section(
        title,
        f"{kind}/s",
        peers[0].name,
        [
            Contestant(told, ours, (job, kind, batches, True)),
            Contestant(untold, ours, (job, kind, batches, False)),
            *peers,
        ],
        [
            Ratio(f"{title}: {told} to {other}", told, (other,))
            for other in (*(peer.name for peer in peers), untold)
        ],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Random samples of files that are not in memory.")
    parser.add_argument(
        "--work", help="folder for the files, which stay there; without: a temporary one"
    )
    parser.add_argument("--gb", type=float, default=2.0, help="of each file (2)")
    parser.add_argument("--batches", type=int, default=150, help="of a turn (150)")
    add_options(parser)
    given = parser.parse_args()
    nbytes = int(given.gb * 1e9)
    with work_folder(given.work) as work:
        prepared(work, f"lines-{nbytes}", lambda folder: text.write_lines(folder, nbytes))
        prepared(work, f"rows-{nbytes}", lambda folder: write_rows(folder, nbytes))
        ahead = {
            path.read_text().strip() for path in Path("/sys/block").glob("*/queue/read_ahead_kb")
        }
        task = (
            f"files of {given.gb:g} GB; the system reads {' or '.join(sorted(ahead)) or '?'} kB "
            "ahead"
        )
        numbers = dict.fromkeys((0, given.workers))
        run_sections(
            [
                section(work, nbytes, kind, n, given.batches)
                for kind in ("lines", "rows")
                for n in numbers
            ],
            given,
            task,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
