"""Compares how fast `headrace.read_rows` gives random rows as one array, in one process, with
h5py's and zarr-python's fancy indexing.

    python benchmarks/read_rows.py [--side 96] [--samples 8192] [--rows 1024] [--rounds 5]
    [--layouts NAME ...] [--only NAME ...]
                                   [--work FOLDER] [--json]

Made photographs, uint8 [side, side, 3], in HDF5 files and Zarr stores of several layouts. A turn
draws other rows, as many in each. h5py takes them sorted and each once, as it wants them, and NumPy
puts them in order; beside it stands `ds[i]` row by row. headrace opens the file in each call, or is
given a dataset that is open. All files are in the page cache.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from array_peers import Job, Layout, Runs
from arrays import write_file
from common import Contestant, Ratio, Section, add_common_options, run_sections
from folders import prepared, work_folder

import headrace

LAYOUTS = [
    Layout("contiguous", None),
    Layout("16 a chunk, raw", 16),
    Layout("128 a chunk, raw", 128),
    Layout("1 a chunk, gzip", 1, "gzip"),
    Layout("16 a chunk, gzip", 16, "gzip"),
    Layout("128 a chunk, gzip", 128, "gzip"),
    Layout("Zarr 3, 16 a chunk, zstd", 16, "zstd", zarr=3),
    Layout("Zarr 3, shards of 256, 16 a chunk, zstd", 16, "zstd", zarr=3, shard=256),
]
OPENS, OPEN, FANCY, INDEX, SELECTION = (
    "headrace",
    "headrace, open dataset",
    "h5py fancy",
    "h5py ds[i]",
    "zarr-python",
)


def drawn(job: Job, read: Callable[[Any], Any]) -> Runs:
    """Turns of so many rows each, as one array."""
    for turn in itertools.count():
        indices = np.random.default_rng(turn).integers(0, job.samples, job.workers)

        def run(indices: Any = indices) -> int:
            rows = read(indices)
            assert rows.shape == (len(indices), *job.row)
            return len(rows)

        yield run


def opens(job: Job) -> Runs:
    return drawn(job, lambda indices: headrace.read_rows(job.path, "data", indices))


def is_open(job: Job) -> Runs:
    cls: Any = headrace.HDF5Dataset if job.layout.zarr is None else headrace.ZarrDataset
    dataset = cls(job.path, "data")
    return drawn(job, lambda indices: headrace.read_rows(dataset, None, indices))


def fancy(job: Job) -> Runs:
    rows = h5py.File(job.path, "r")["data"]

    def read(indices: Any) -> Any:
        once, places = np.unique(indices, return_inverse=True)
        return rows[once][places]

    return drawn(job, read)


def one_by_one(job: Job) -> Runs:
    rows = h5py.File(job.path, "r")["data"]
    return drawn(job, lambda indices: np.stack([rows[index] for index in indices]))


def selection(job: Job) -> Runs:
    import zarr

    rows: Any = zarr.open_group(job.path, mode="r")["data"]
    return drawn(job, lambda indices: rows.get_orthogonal_selection((indices,)))


def section(job: Job) -> Section:
    """One layout; the job's `workers` are the rows of a turn."""
    title = f"{job.layout.name}, {int(np.prod(job.row)) / 1000:.0f} kB, {job.workers:,} rows a call"
    peers = (
        [(FANCY, fancy), (INDEX, one_by_one)]
        if job.layout.zarr is None
        else [(SELECTION, selection)]
    )
    contestants = [Contestant(OPENS, opens, (job,)), Contestant(OPEN, is_open, (job,))]
    contestants += [Contestant(name, runs, (job,)) for name, runs in peers]
    ratios = [
        Ratio(f"{title}: {one} / {other}", one, (other,))
        for other, _ in peers
        for one in (OPENS, OPEN)
    ]
    return Section(title, "rows/s", peers[0][0], contestants, ratios)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--side", type=int, default=96, help="pixels (96: 28 kB)")
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=1024, help="rows of a call (1024)")
    parser.add_argument(
        "--layouts", nargs="+", metavar="NAME", help="layouts whose names have one of these in them"
    )
    parser.add_argument(
        "--work", help="a folder for the files, which stays; else they are written anew and removed"
    )
    add_common_options(parser, rounds="calls that count, after one that doesn't")
    given = parser.parse_args()
    with work_folder(given.work) as work:
        jobs = []
        for layout in LAYOUTS:
            if given.layouts and not any(
                part.lower() in layout.name.lower() for part in given.layouts
            ):
                continue
            name = f"{layout.name.replace(' ', '-').replace(',', '')}-{given.side}-{given.samples}"
            how = (None, given.samples, given.side, layout)
            folder: Path = prepared(work, name, lambda folder, how=how: write_file(folder, *how))
            file = folder / ("data.h5" if layout.zarr is None else "data.zarr")
            jobs.append(Job(str(file), given.samples, given.side, layout, given.rows))
        run_sections(
            [section(job) for job in jobs], given, f"one process, {given.rows:,} rows a call"
        )


if __name__ == "__main__":
    main()
