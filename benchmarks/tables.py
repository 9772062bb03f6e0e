"""Compares how fast rows come out of Arrow and Parquet files, at random and in blocks.

    python benchmarks/tables.py [--work DIR] [--rows 300000] [--width 256] [--workers N] [--rounds
    5] [--only NAME ...] [--json]

The benchmark makes a table of an int64, a vector of 256 float32 and a text of about 40 bytes a row,
and has HF datasets save it (an Arrow stream, with its record batches of 1,000 rows) and pyarrow
write it (Parquet, row groups of 4,096 rows, zstd). It stays in DIR. Sections:

random: random rows of the Arrow file in batches of 64, as dicts of tensors and lists of texts:
headrace beside HF datasets' ``with_format("torch")`` with torch's DataLoader, on the same file; and
of the Parquet file, of which HF datasets makes a copy first, which is not timed: headrace, where
all row groups are decoded before the timing.

blocks: an epoch of the Parquet file under ``shuffle="block"``, in batches of 1,024, beside
pyarrow's own scan of the same columns (``ParquetFile.iter_batches``), whose batches are counted and
nothing is made of them: with pyarrow's threads, and with one. A small table stays decoded from
epoch to epoch; "decoded in each epoch" has a memory budget of three times the file, which has no
room for that.

A turn of "random" is as many batches as take a second.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Contestant, Ratio, Section, add_options, run_sections
from folders import prepared, work_folder
from torch.utils.data import DataLoader

import headrace

BATCH, OF_BLOCKS, SECONDS, GROUP = 64, 1024, 1.0, 4096
DRAWN = 1 << 16
"""Rows that are drawn for an epoch of HF datasets, before it is timed."""
Runs = Iterator[Callable[[], int]]


@dataclass(frozen=True)
class Job:
    """Where the files lie."""

    work: Path
    rows: int
    width: int
    workers: int = 0

    @property
    def folder(self) -> str:
        return f"tables-{self.rows}-{self.width}"

    @property
    def saved(self) -> Path:
        return self.work / self.folder / "saved"

    @property
    def parquet(self) -> Path:
        return self.work / self.folder / "rows.parquet"


def _datasets(work: Path) -> Any:
    os.environ["HF_HUB_OFFLINE"], os.environ["HF_HOME"] = "1", str(work / "huggingface")
    import datasets

    datasets.disable_progress_bars()
    return datasets


def write(folder: Path, job: Job) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    random, rows = np.random.default_rng(0), job.rows
    vectors = random.random((rows, job.width), np.float32).reshape(-1)
    texts = [f"row {row} of a table of measurements" + " more" * (row % 3) for row in range(rows)]
    table = pa.table(
        {
            "label": random.integers(0, 1000, rows),
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(vectors), job.width),
            "text": texts,
        }
    )
    pq.write_table(table, folder / "rows.parquet", row_group_size=GROUP, compression="zstd")
    _datasets(job.work).Dataset(table).save_to_disk(str(folder / "saved"))


def turns(batches: Callable[[], Iterable[Any]]) -> Runs:
    """Batches for a second; begun anew where they end, and going on in the next turn."""

    def forever() -> Iterator[Any]:
        while True:
            yield from batches()

    source = forever()

    def run() -> int:
        done, end = 0, time.perf_counter() + SECONDS
        while time.perf_counter() < end:
            done += rows_of(next(source))
        return done

    while True:
        yield run


def rows_of(batch: dict[str, Any]) -> int:
    assert (
        batch["vector"].ndim == 2
        and batch["vector"].dtype == torch.float32
        and batch["label"].dtype == torch.int64
    )
    assert len(batch["text"]) == len(batch["label"]) and isinstance(batch["text"][0], str)
    return len(batch["label"])


# -- random rows


def ours(job: Job, path: Path) -> Runs:
    dataset = headrace.TableDataset(path)
    loader = headrace.create_dataloader(
        dataset, batch_size=BATCH, num_workers=job.workers, shuffle=True
    )
    try:
        # each process has rows of all row groups
        for _ in zip(range(16 * max(1, job.workers)), loader, strict=False):
            pass
        yield from turns(lambda: loader)
    finally:
        loader.close()


class Drawn:
    """A sampler of random indices, drawn anew in each epoch; torch's own would draw a
    permutation of all rows first.
    """

    def __init__(self, length: int) -> None:
        self._length, self._random = length, np.random.default_rng(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self._random.integers(0, self._length, DRAWN).tolist())

    def __len__(self) -> int:
        return DRAWN


def hf(job: Job, path: Path) -> Runs:
    datasets = _datasets(job.work)
    if path.is_dir():
        dataset = datasets.load_from_disk(str(path))
    else:
        dataset = datasets.load_dataset(
            "parquet", data_files=str(path), split="train", cache_dir=str(job.work / "huggingface")
        )
    dataset = dataset.with_format("torch")
    sampler: Any = Drawn(len(dataset))
    loader = DataLoader(
        dataset, BATCH, sampler=sampler, num_workers=job.workers, persistent_workers=job.workers > 0
    )
    yield from turns(lambda: loader)


# -- blocks


def our_blocks(job: Job, stays: bool) -> Runs:
    usage = 0.8 if stays else 3 * job.parquet.stat().st_size
    dataset = headrace.TableDataset(job.parquet, max_memory_usage=usage)
    loader = headrace.create_dataloader(
        dataset, batch_size=OF_BLOCKS, num_workers=job.workers, shuffle="block"
    )

    def run() -> int:
        return sum(map(rows_of, loader))

    try:
        while True:
            yield run
    finally:
        loader.close()


def scan(job: Job, threads: bool) -> Runs:
    import pyarrow.parquet as pq

    def run() -> int:
        with pq.ParquetFile(job.parquet) as file:
            return sum(
                len(batch) for batch in file.iter_batches(batch_size=GROUP, use_threads=threads)
            )

    while True:
        yield run


# -- the tables


def sections(job: Job, workers: int) -> dict[str, list[Section]]:
    numbers = list(dict.fromkeys((0, workers)))

    def of(
        name: str, runs: Any, *arguments: Any, packages: tuple[str, ...] = ()
    ) -> list[Contestant]:
        return [
            Contestant(
                f"{name}, {n} workers",
                runs,
                (Job(job.work, job.rows, job.width, n), *arguments),
                packages,
            )
            for n in numbers
        ]

    random = []
    for title, path in (
        ("an Arrow file that HF datasets saved", job.saved),
        ("a Parquet file", job.parquet),
    ):
        theirs = of("HF datasets", hf, path, packages=("datasets",))
        others = tuple(one.name for one in theirs)
        contestants = of("headrace", ours, path)
        random.append(
            Section(
                f"random rows of {title}, batches of {BATCH}",
                "rows/s",
                others[0],
                [*contestants, *theirs],
                [
                    Ratio(f"random rows of {title}: {one.name}, to HF datasets", one.name, others)
                    for one in contestants
                ],
            )
        )
    scans = [
        Contestant(f"pyarrow's scan, {name}", scan, (job, threads))
        for name, threads in (("its threads", True), ("one thread", False))
    ]
    in_blocks = of("headrace", our_blocks, True)
    if workers > 1:  # one process has all blocks open in any case
        in_blocks.append(
            Contestant(
                f"headrace, {workers} workers, decoded in each epoch",
                our_blocks,
                (replace(job, workers=workers), False),
            )
        )
    blocks = Section(
        f"an epoch of a Parquet file in blocks, batches of {OF_BLOCKS:,}",
        "rows/s",
        scans[0].name,
        [*in_blocks, *scans],
        [
            Ratio(f"blocks: {ours.name}, to {one.name}", ours.name, (one.name,))
            for ours in in_blocks
            for one in scans
        ],
        job.rows,
    )
    return {"random": random, "blocks": [blocks]}


def main() -> int:
    parser = argparse.ArgumentParser(description="Tables: random rows, and blocks.")
    parser.add_argument(
        "--work", help="folder for the files, which stay there; without: a temporary one"
    )
    parser.add_argument("--rows", type=int, default=300_000, help="of the table (300,000)")
    parser.add_argument("--width", type=int, default=256, help="numbers of a row's vector (256)")
    parser.add_argument(
        "--section", nargs="+", choices=("random", "blocks"), default=["random", "blocks"]
    )
    add_options(parser)
    given = parser.parse_args()
    with work_folder(given.work) as work:
        job = Job(work, given.rows, given.width)
        prepared(work, job.folder, lambda folder: write(folder, job))
        chosen = [
            section
            for name, some in sections(job, given.workers).items()
            if name in given.section
            for section in some
        ]
        run_sections(
            chosen,
            given,
            f"{given.rows:,} rows of an int64, {given.width} float32 and a text of about 40 bytes",
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
