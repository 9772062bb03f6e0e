"""How fast do random samples come out of chunked arrays?

    python benchmarks/arrays.py [--samples 3000] [--side 96 224] [--workers N] [--rounds 5] [--only NAME ...] [--layouts NAME ...] [--json]

Photograph-like images, uint8 [side, side, 3], in HDF5 files and Zarr stores of several layouts, read in batches of 64 in random order,
and in a block shuffle. Beside headrace stand a plain DataLoader over h5py (`ds[i]`, and one sorted fancy index a batch) or zarr-python,
tensorstore's own threads, and the limit for HDF5: `pread` and decode in a bare loop in as many processes, into buffers that are used
again. All files are in the page cache.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from common import Contestant, Ratio, Section, add_options, prepared, run_sections, work_folder
from torch.utils.data import DataLoader, Dataset

import headrace

BATCH = 64
Runs = Iterator[Callable[[], int]]


@dataclass(frozen=True)
class Layout:
    """How a file is laid out."""

    name: str
    rows: int | None
    """Samples a chunk; None: contiguous."""
    codec: str | None = None
    zarr: int | None = None
    """Version of the Zarr format; None: HDF5."""
    shard: int | None = None
    """Samples a shard."""


LAYOUTS = [
    Layout("contiguous", None),
    Layout("1 a chunk, raw", 1),
    Layout("16 a chunk, raw", 16),
    Layout("128 a chunk, raw", 128),
    Layout("1 a chunk, gzip", 1, "gzip"),
    Layout("16 a chunk, gzip", 16, "gzip"),
    Layout("128 a chunk, gzip", 128, "gzip"),
    Layout("Zarr 2, 1 a chunk, raw", 1, zarr=2),
    Layout("Zarr 3, 1 a chunk, zstd", 1, "zstd", zarr=3),
    Layout("Zarr 3, shards of 256, 1 a chunk, raw", 1, zarr=3, shard=256),
    Layout("Zarr 3, shards of 256, 1 a chunk, zstd", 1, "zstd", zarr=3, shard=256),
    Layout("Zarr 3, shards of 256, 16 a chunk, zstd", 16, "zstd", zarr=3, shard=256),
]


@dataclass(frozen=True)
class Job:
    """A file, and how it is read."""

    path: str
    samples: int
    side: int
    layout: Layout
    workers: int

    @property
    def row(self) -> tuple[int, int, int]:
        return self.side, self.side, 3


def images(samples: int, side: int, step: int) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    random = np.random.default_rng(0)
    for start in range(0, samples, step):
        count = min(step, samples - start)
        coarse = random.integers(0, 256, (count, side // 8 + 1, side // 8 + 1, 3)).repeat(8, 1).repeat(8, 2)[:, :side, :side]
        yield start, (coarse + random.integers(-6, 7, coarse.shape)).clip(0, 255).astype(np.uint8)


def write_file(folder: Path, samples: int, side: int, layout: Layout) -> None:
    if layout.zarr is not None:
        write_store(folder / "data.zarr", samples, side, layout)
        return
    with h5py.File(folder / "data.h5", "w", libver="latest") as file:
        chunks = None if layout.rows is None else (min(layout.rows, samples), side, side, 3)
        options = {} if layout.codec is None else {"compression": layout.codec, "compression_opts": 4}
        rows = file.create_dataset("data", (samples, side, side, 3), np.uint8, chunks=chunks, **options)
        for start, some in images(samples, side, layout.rows or 64):
            rows[start : start + len(some)] = some


def write_store(path: Path, samples: int, side: int, layout: Layout) -> None:
    import zarr

    compressors = None if layout.codec is None else [zarr.codecs.ZstdCodec(level=3)]
    shards = None if layout.shard is None else (layout.shard, side, side, 3)
    root = zarr.open_group(path, mode="w", zarr_format=layout.zarr)
    shape, chunks = (samples, side, side, 3), (layout.rows, side, side, 3)
    rows = root.create_array("data", shape=shape, dtype="u1", chunks=chunks, shards=shards, compressors=compressors)
    for start, some in images(samples, side, layout.shard or layout.rows or 64):
        rows[start : start + len(some)] = some


def look(batches: Any) -> int:
    """Through an epoch as a training loop would: looks at each batch, holds none."""
    count = 0
    for batch in batches:
        count += len(batch)
        batch[:, ::32, ::32].sum()
    return count


def ours(job: Job, shuffle: bool | str) -> Runs:
    dataset: Any = headrace.HDF5Dataset(job.path) if job.layout.zarr is None else headrace.ZarrDataset(job.path, "data")
    loader = headrace.create_dataloader(dataset, batch_size=BATCH, shuffle=shuffle, num_workers=job.workers)
    try:
        while True:
            yield lambda: look(loader)
    finally:
        loader.close()


class Rows(Dataset[torch.Tensor]):
    """What people write over h5py: opened in each worker, one sample at a time."""

    def __init__(self, path: str) -> None:
        self._path, self._rows = path, None
        with h5py.File(path) as file:
            self._count = len(file["data"])

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> Any:
        if self._rows is None:
            self._rows = h5py.File(self._path)["data"]
        return self._rows

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.rows[index])


class SortedRows(Rows):
    """One sorted fancy index a batch."""

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        order = np.argsort(indices)
        found = self.rows[np.sort(indices)]
        batch = np.empty_like(found)
        batch[order] = found
        return torch.from_numpy(batch)


class ZarrRows(Dataset[torch.Tensor]):
    """The same over zarr-python."""

    def __init__(self, path: str) -> None:
        import zarr

        self._path, self._rows = path, None
        self._count = zarr.open_group(path, mode="r")["data"].shape[0]

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        import zarr

        if self._rows is None:
            self._rows = zarr.open_group(self._path, mode="r")["data"]
        return torch.from_numpy(self._rows[index])


def tensorstore_gather(job: Job) -> Runs:
    """A batch by one index array, in tensorstore's own threads; no worker processes."""
    import tensorstore

    driver = "zarr" if job.layout.zarr == 2 else "zarr3"
    rows = tensorstore.open({"driver": driver, "kvstore": {"driver": "file", "path": f"{job.path}/data"}}).result()

    def epoch() -> int:
        count = 0
        for indices in np.array_split(np.random.permutation(job.samples), max(1, job.samples // BATCH)):
            batch = torch.from_numpy(rows[indices].read().result())
            batch[:, ::32, ::32].sum()
            count += len(batch)
        return count

    while True:
        yield epoch


def plain(job: Job) -> Runs:
    rows: Any = Rows(job.path) if job.layout.zarr is None else ZarrRows(job.path)
    loader = DataLoader(rows, BATCH, shuffle=True, num_workers=job.workers, persistent_workers=job.workers > 0)
    while True:
        yield lambda: look(loader)


def sorted_fancy(job: Job) -> Runs:
    options: dict[str, Any] = {"collate_fn": lambda batch: batch, "persistent_workers": job.workers > 0}
    loader = DataLoader(SortedRows(job.path), BATCH, shuffle=True, num_workers=job.workers, **options)
    while True:
        yield lambda: look(loader)


def _bare_loop(job: Job, connection: Any, seed: int) -> None:
    """Reads random rows, or their chunks, and decodes them, into eight buffers in turn."""
    with h5py.File(job.path) as file:
        rows = file["data"]
        nbytes = int(np.prod(job.row))
        if rows.chunks is None:
            table = rows.id.get_offset() + np.arange(job.samples) * nbytes
            sizes = np.full(job.samples, nbytes)
        else:
            found: list[Any] = []
            rows.id.chunk_iter(found.append)
            found.sort(key=lambda info: info.chunk_offset)
            height = rows.chunks[0]
            table, sizes = np.array([info.byte_offset for info in found]), np.array([info.size for info in found])
            if job.layout.codec is None:
                table = table[np.arange(job.samples) // height] + np.arange(job.samples) % height * nbytes
                sizes = np.full(job.samples, nbytes)
    height = (job.layout.rows or 1) if job.layout.codec else 1
    fd = os.open(job.path, os.O_RDONLY)
    buffers = [np.empty((BATCH, nbytes), np.uint8) for _ in range(8)]
    scratch = memoryview(bytearray(int(sizes.max())))
    random = np.random.default_rng(seed)
    turn = 0
    while connection.recv():
        for index in random.permutation(job.samples)[: job.samples // max(1, job.workers)].tolist():
            row = memoryview(buffers[turn // BATCH % 8][turn % BATCH])
            turn += 1
            if job.layout.codec is None:
                os.preadv(fd, [row], int(table[index]))
                continue
            size = int(sizes[index // height])
            os.preadv(fd, [scratch[:size]], int(table[index // height]))
            data = zlib.decompress(scratch[:size])
            row[:] = data[index % height * nbytes : (index % height + 1) * nbytes]
        connection.send(True)


def bare_loop(job: Job) -> Runs:
    context = multiprocessing.get_context("fork")
    pairs = [context.Pipe() for _ in range(max(1, job.workers))]
    processes = [context.Process(target=_bare_loop, args=(job, theirs, n), daemon=True) for n, (_, theirs) in enumerate(pairs)]
    for process in processes:
        process.start()

    def epoch() -> int:
        for connection, _ in pairs:
            connection.send(True)
        for connection, _ in pairs:
            connection.recv()
        return job.samples // len(pairs) * len(pairs)

    try:
        while True:
            yield epoch
    finally:
        for connection, _ in pairs:
            connection.send(False)


def zarr_section(job: Job) -> Section:
    own, block, plainly, store = "headrace", "headrace, block shuffle", "zarr-python, DataLoader", "tensorstore"
    title = f"{job.layout.name}, {int(np.prod(job.row)) / 1000:.0f} kB"
    contestants = [
        Contestant(own, ours, (job, True)),
        Contestant(block, ours, (job, "block")),
        Contestant(plainly, plain, (job,), ("zarr",)),
        Contestant(store, tensorstore_gather, (job,), ("tensorstore",)),
    ]
    ratios = [Ratio(f"{title}: headrace / zarr-python", own, (plainly,)), Ratio(f"{title}: headrace / tensorstore", own, (store,))]
    if job.layout.rows != 1:
        ratios.append(Ratio(f"{title}: block shuffle / zarr-python", block, (plainly,)))
    return Section(title, "samples/s", plainly, contestants, ratios)


def section(job: Job) -> Section:
    if job.layout.zarr is not None:
        return zarr_section(job)
    size = int(np.prod(job.row)) / 1000
    own, block, index, fancy, limit = "headrace", "headrace, block shuffle", "h5py ds[i]", "h5py sorted fancy", "limit: a bare loop"
    title = f"{job.layout.name}, {size:.0f} kB"
    contestants = [
        Contestant(own, ours, (job, True)),
        Contestant(block, ours, (job, "block")),
        Contestant(index, plain, (job,)),
        Contestant(limit, bare_loop, (job,)),
    ]
    ratios = [Ratio(f"{title}: headrace / h5py ds[i]", own, (index,)), Ratio(f"{title}: headrace / the limit", own, (limit,))]
    if job.layout.rows is not None:
        contestants.insert(3, Contestant(fancy, sorted_fancy, (job,)))
        ratios.append(Ratio(f"{title}: headrace / sorted fancy", own, (fancy,)))
    if job.layout.codec and job.layout.rows != 1:
        ratios.append(Ratio(f"{title}: block shuffle / h5py ds[i]", block, (index,)))
    return Section(title, "samples/s", index, contestants, ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=3000)
    parser.add_argument("--side", type=int, nargs="+", default=[96, 224])
    parser.add_argument("--layouts", nargs="+", metavar="NAME", help="layouts whose names have one of these in them")
    parser.add_argument("--work", help="a folder for the files, which stays; else they are written anew and removed")
    add_options(parser)
    given = parser.parse_args()
    with work_folder(given.work) as work:
        jobs = []
        for side in given.side:
            for layout in LAYOUTS:
                if given.layouts and not any(part.lower() in layout.name.lower() for part in given.layouts):
                    continue
                name = f"{layout.name.replace(' ', '-').replace(',', '')}-{side}-{given.samples}"
                folder = prepared(work, name, lambda folder, side=side, layout=layout: write_file(folder, given.samples, side, layout))
                file = folder / ("data.h5" if layout.zarr is None else "data.zarr")
                jobs.append(Job(str(file), given.samples, side, layout, given.workers))
        task = f"{given.samples:,} samples, {given.workers} workers, batches of {BATCH}"
        run_sections([section(job) for job in jobs], given, task)


if __name__ == "__main__":
    main()
