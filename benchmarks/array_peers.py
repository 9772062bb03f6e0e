"""How headrace, its peers and a bare loop read random rows of a chunked array.

Each function is a contestant (see `common.py`), as the peer's own documentation shows it first,
over the file of a `Job`.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

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

    @property
    def drawn(self) -> int:
        """Samples of an epoch in random order."""
        rows = self.layout.rows or 1
        return (
            self.samples
            if self.layout.codec is None or rows == 1
            else max(2 * BATCH, self.samples // rows)
        )

    @property
    def drawn_slowly(self) -> int:
        """The same for a contestant that takes some milliseconds a sample."""
        return min(self.drawn, 1024)


def look(batches: Any) -> int:
    """Through an epoch as a training loop would: looks at each batch, holds none."""
    count = 0
    for batch in batches:
        count += len(batch)
        batch[:, ::32, ::32].sum()
    return count


def turns(epoch: Callable[[], int]) -> Runs:
    """Epochs of at least half a second in all, so that how one starts and ends does not count
    for more than it does elsewhere.
    """

    def turn() -> int:
        count, end = 0, time.perf_counter() + 0.5
        while time.perf_counter() < end:
            count += epoch()
        return count

    while True:
        yield turn


def ours(job: Job, shuffle: bool | str) -> Runs:
    dataset: Any = (
        headrace.HDF5Dataset(job.path)
        if job.layout.zarr is None
        else headrace.ZarrDataset(job.path, "data")
    )
    how: dict[str, Any] = {"shuffle": shuffle}
    if shuffle is True and job.drawn < job.samples:
        how = {"sampler": RandomSampler(range(job.samples), num_samples=job.drawn)}
    loader = headrace.create_dataloader(dataset, batch_size=BATCH, num_workers=job.workers, **how)
    try:
        yield from turns(lambda: look(loader))
    finally:
        loader.close()


class Rows(Dataset[torch.Tensor]):
    """What people write over h5py: opened in each worker, one sample at a time."""

    def __init__(self, job: Job) -> None:
        self._job, self._rows = job, None

    def __len__(self) -> int:
        return self._job.samples

    @property
    def rows(self) -> Any:
        if self._rows is None:
            if self._job.layout.codec in ("zstd", "blosc"):
                import hdf5plugin  # noqa: F401
            self._rows = h5py.File(self._job.path)["data"]
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


FUSED = "zarr.core.codec_pipeline.FusedCodecPipeline"


class ZarrRows(Rows):
    """The same over zarr-python, with the codecs of zarrs or its fused pipeline if asked for."""

    def __init__(self, job: Job, codecs: str | None = None) -> None:
        super().__init__(job)
        self._codecs = codecs

    @property
    def rows(self) -> Any:
        if self._rows is None:
            import zarr

            if self._codecs == "zarrs":
                import zarrs  # noqa: F401

                zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
            if self._codecs == "fused":
                zarr.config.set({"codec_pipeline.path": FUSED})
            self._rows = zarr.open_group(self._job.path, mode="r")["data"]
        return self._rows


def drawn_batches(job: Job, rows: Dataset[torch.Tensor], count: int, **options: Any) -> Runs:
    """A plain DataLoader in random order."""
    sampler = RandomSampler(range(job.samples), num_samples=count)
    loader = DataLoader(
        rows,
        BATCH,
        sampler=sampler,
        num_workers=job.workers,
        persistent_workers=job.workers > 0,
        **options,
    )
    yield from turns(lambda: look(loader))


def plain(job: Job) -> Runs:
    return drawn_batches(job, Rows(job), job.drawn)


def sorted_fancy(job: Job) -> Runs:
    return drawn_batches(job, SortedRows(job), job.drawn_slowly, collate_fn=_as_it_is)


def _as_it_is(batch: Any) -> Any:
    return batch


def zarr_rows(job: Job, codecs: str | None = None) -> Runs:
    return drawn_batches(job, ZarrRows(job, codecs), job.drawn_slowly)


def xbatcher_rows(job: Job) -> Runs:
    """xbatcher's generator of single samples, in a DataLoader; its workers are spawned, since
    zarr-python is open by then.
    """
    import xarray
    import xbatcher
    from xbatcher.loaders.torch import MapDataset

    data = xarray.open_zarr(job.path, consolidated=False, chunks=None)["data"]
    rows = MapDataset(
        xbatcher.BatchGenerator(data, {"sample": 1, "y": job.side, "x": job.side, "channel": 3})
    )
    return drawn_batches(
        job, rows, job.drawn_slowly, multiprocessing_context="spawn" if job.workers else None
    )


def tensorstore_gather(job: Job) -> Runs:
    """A batch by one index array, in tensorstore's own threads; no worker processes."""
    import tensorstore

    driver = "zarr" if job.layout.zarr == 2 else "zarr3"
    rows = tensorstore.open(
        {"driver": driver, "kvstore": {"driver": "file", "path": f"{job.path}/data"}}
    ).result()

    def epoch() -> int:
        count = 0
        for indices in np.array_split(
            np.random.permutation(job.samples)[: job.drawn], max(1, job.drawn // BATCH)
        ):
            batch = torch.from_numpy(rows[indices].read().result())
            batch[:, ::32, ::32].sum()
            count += len(batch)
        return count

    yield from turns(epoch)


# -- the limit


class Place(NamedTuple):
    """Where a row lies, or the chunk that holds it."""

    file: int
    offset: int
    nbytes: int
    is_encoded: bool


def stored(job: Job) -> tuple[list[str], list[Place]]:
    """The files, and the place of each row, or of each chunk where these are encoded."""
    nbytes, height = int(np.prod(job.row)), job.layout.rows or job.samples
    files, chunks = hdf5_chunks(job) if job.layout.zarr is None else zarr_chunks(job)
    if job.layout.codec is not None:
        return files, chunks
    places = [(*chunks[row // height][:2], row % height) for row in range(job.samples)]
    return files, [
        Place(file, offset + within * nbytes, nbytes, False) for file, offset, within in places
    ]


def hdf5_chunks(job: Job) -> tuple[list[str], list[Place]]:
    """HDF5 stores a chunk as it is where its filter would make it no smaller, and says so in the
    chunk's filter mask.
    """
    with h5py.File(job.path) as file:
        rows = file["data"]
        if rows.chunks is None:
            return [job.path], [Place(0, rows.id.get_offset(), rows.nbytes, False)]
        found: list[Any] = []
        rows.id.chunk_iter(found.append)
    found.sort(key=lambda info: info.chunk_offset)
    return [job.path], [
        Place(0, info.byte_offset, info.size, not info.filter_mask) for info in found
    ]


def zarr_chunks(job: Job) -> tuple[list[str], list[Place]]:
    height, shard = job.layout.rows or 1, job.layout.shard
    count = -(-job.samples // (shard or height))
    files = [
        f"{job.path}/data/{f'{n}.0.0.0' if job.layout.zarr == 2 else f'c/{n}/0/0/0'}"
        for n in range(count)
    ]
    if shard is None:
        return files, [
            Place(number, 0, os.path.getsize(path), True) for number, path in enumerate(files)
        ]
    chunks = []
    for number, path in enumerate(files):
        data = Path(path).read_bytes()
        index = np.frombuffer(data[-4 - 16 * (shard // height) : -4], "<u8").reshape(-1, 2).tolist()
        chunks += [Place(number, *place, True) for place in index]
    return files, chunks[: -(-job.samples // height)]


def decoder(codec: str | None, most: int) -> Callable[[memoryview], Any]:
    if codec == "gzip":
        from isal import isal_zlib

        return isal_zlib.decompress
    if codec == "blosc":
        from numcodecs import blosc

        return blosc.decompress
    import zstandard

    return functools.partial(zstandard.ZstdDecompressor().decompress, max_output_size=most)


def _bare_loop(job: Job, connection: Any, seed: int) -> None:
    """Reads random rows, or their chunks, and decodes them, into eight buffers in turn."""
    nbytes, codec = int(np.prod(job.row)), job.layout.codec
    height = (job.layout.rows or 1) if codec else 1
    files, places = stored(job)
    fds = [os.open(path, os.O_RDONLY) for path in files] if len(files) < 256 else None
    buffers = [np.empty((BATCH, nbytes), np.uint8) for _ in range(8)]
    scratch = memoryview(bytearray(max(place.nbytes for place in places)))
    random, turn, decode = np.random.default_rng(seed), 0, decoder(codec, height * nbytes)
    while connection.recv():
        for index in random.permutation(job.samples)[: job.drawn // max(1, job.workers)].tolist():
            row = memoryview(buffers[turn // BATCH % 8][turn % BATCH])
            turn += 1
            file, offset, size, is_encoded = places[index // height]
            fd = os.open(files[file], os.O_RDONLY) if fds is None else fds[file]
            if codec is None:
                os.preadv(fd, [row], offset)
            else:
                os.preadv(fd, [scratch[:size]], offset)
                rows = memoryview(decode(scratch[:size])) if is_encoded else scratch
                row[:] = rows[index % height * nbytes : (index % height + 1) * nbytes]
            if fds is None:
                os.close(fd)
        connection.send(True)


def bare_loop(job: Job) -> Runs:
    context = multiprocessing.get_context("fork")
    pairs = [context.Pipe() for _ in range(max(1, job.workers))]
    processes = [
        context.Process(target=_bare_loop, args=(job, theirs, n), daemon=True)
        for n, (_, theirs) in enumerate(pairs)
    ]
    for process, (_, theirs) in zip(processes, pairs, strict=True):
        process.start()
        theirs.close()

    def epoch() -> int:
        for connection, _ in pairs:
            connection.send(True)
        for connection, _ in pairs:
            connection.recv()
        return job.drawn // len(pairs) * len(pairs)

    try:
        yield from turns(epoch)
    finally:
        for connection, _ in pairs:
            connection.send(False)
