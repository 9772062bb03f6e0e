"""Compares how fast samples of a Zarr store come from a server, and how soon the first batch comes.

    python benchmarks/stream_zarr.py [--rows 1 8 32] [--latency MS] [--samples 4096] [--side 96]
    [--bandwidth MB] [--workers N]
                                     [--rounds 5] [--only NAME ...] [--work FOLDER] [--json]

Images of uint8 [side, side, 3] (28 kB) in a Zarr store of version 3, zstd, without shards, with 1,
8 or 32 samples a chunk, on the server of `stream.py` (20 ms before each answer), read shuffled in
batches of 64. Every epoch is cold: from the opening of the store to the last batch, with nothing
kept on this machine. Beside headrace stand insitubatch (Python 3.12 on; its block shuffle, no
workers) and xbatcher (batches of 64 samples that lie one after the other, in random order: what it
reads fastest), both by obstore as S3.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Contestant, Ratio, Section, add_options, run_sections
from folders import work_folder
from stream import write_samples
from stream_peers import BATCH, BUCKET, KEY, MIXED, Job, Runs, epochs
from stream_server import StreamServer
from torch.utils.data import DataLoader

import headrace

OURS, PEERS = "headrace", ("insitubatch", "xbatcher")


@dataclass(frozen=True)
class ZarrJob(Job):
    """A `Job` over a store.

    Attributes:
        rows: samples a chunk.
    """

    rows_a_chunk: int = 1

    @property
    def least(self) -> int:
        chunks = self.work / self.store() / "data" / "c"
        return sum(file.stat().st_size for file in chunks.rglob("*") if file.is_file())

    def store(self) -> str:
        """The path of the store on the server, which is written where it isn't there yet."""
        return f"{BUCKET}/{self.written(f'zarr{self.rows_a_chunk}', self._write)}/data.zarr"

    def _write(self, folder: Path) -> None:
        import zarr

        root, rows = zarr.open_group(folder / "data.zarr", mode="w", zarr_format=3), self.rows()
        zstd, names = [zarr.codecs.ZstdCodec(level=3)], ["sample", "y", "x", "channel"]
        shape, chunks = (
            (self.samples, self.side, self.side, 3),
            (self.rows_a_chunk, self.side, self.side, 3),
        )
        array = root.create_array(
            "data", shape=shape, dtype="u1", chunks=chunks, compressors=zstd, dimension_names=names
        )
        for start in range(0, self.samples, 256):
            array[start : start + 256] = rows[start : start + 256]
        numbers = root.create_array(
            "index", shape=shape[:1], dtype="i8", chunks=shape[:1], dimension_names=names[:1]
        )
        numbers[...] = np.arange(self.samples)
        zarr.consolidate_metadata(folder / "data.zarr")


def ours(job: ZarrJob) -> Runs:
    url = f"{job.server}/{job.store()}"

    @contextlib.contextmanager
    def begin(local: str) -> Iterator[Iterable[tuple[Any, Any]]]:
        options: dict[str, Any] = {
            "dataset_name": "data",
            "target_name": "index",
            "cache_dir": local,
        }
        with headrace.StreamingDataset(url, buffer_size=MIXED, **options) as dataset:
            loader = headrace.create_dataloader(
                dataset, batch_size=BATCH, shuffle="block", **job.loader
            )
            yield loader
            loader.close()

    yield from epochs(job, begin)


def _object_store(job: ZarrJob, path: str) -> Any:
    """The store by obstore, as S3."""
    import obstore
    import zarr

    options: dict[str, Any] = {
        "endpoint": job.server,
        "access_key_id": KEY,
        "secret_access_key": KEY,
        "region": "us-east-1",
        "client_options": {"allow_http": True},
    }
    return zarr.storage.ObjectStore(
        obstore.store.from_url(f"s3://{path}", **options), read_only=True
    )


def insitubatch(job: ZarrJob) -> Runs:
    """Its split of everything, in blocks of as many chunks as hold what a shuffle of headrace's
    mixes; one process, as it wants it.
    """
    import insitubatch as its

    path = job.store()

    @contextlib.contextmanager
    def begin(local: str) -> Iterator[Iterable[tuple[Any, Any]]]:
        store = _object_store(job, path)
        geometries = its.open_geometries(store, variables=["data"])
        manifest = its.split_by_chunk(geometries["data"], fractions=(1.0, 0.0, 0.0))
        blocks = max(16, MIXED // job.rows_a_chunk)
        dataset = its.InSituDataset(
            store, manifest, geometries=geometries, batch_size=BATCH, block_chunks=blocks
        )
        yield (
            (
                torch.from_numpy(batch.arrays["data"]),
                torch.from_numpy(np.array(batch.sample_indices)),
            )
            for batch in dataset.train
        )
        its.close_store(store)

    yield from epochs(job, begin)


class _Batches(torch.utils.data.Dataset[Any]):
    """xbatcher's batches, each with the numbers of its samples."""

    def __init__(self, job: ZarrJob, path: str) -> None:
        import xarray
        import xbatcher

        data = xarray.open_zarr(_object_store(job, path), consolidated=True, chunks=None)["data"]
        self._batches = xbatcher.BatchGenerator(
            data, {"sample": BATCH, "y": job.side, "x": job.side, "channel": 3}
        )

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.from_numpy(np.array(self._batches[number].values))
        return images, torch.arange(number * BATCH, number * BATCH + len(images))


def xbatcher(job: ZarrJob) -> Runs:
    """In a plain DataLoader, whose workers are spawned, since zarr-python and obstore are open
    by then.
    """
    path = job.store()

    @contextlib.contextmanager
    def begin(local: str) -> Iterator[Iterable[tuple[Any, Any]]]:
        context = "spawn" if job.workers else None
        yield DataLoader(
            _Batches(job, path),
            batch_size=None,
            shuffle=True,
            multiprocessing_context=context,
            **job.loader,
        )

    yield from epochs(job, begin)


def xbatcher_alone(job: ZarrJob) -> Runs:
    """Without workers, which take seconds to be spawned."""
    path = job.store()

    @contextlib.contextmanager
    def begin(local: str) -> Iterator[Iterable[tuple[Any, Any]]]:
        yield DataLoader(_Batches(job, path), batch_size=None, shuffle=True)

    yield from epochs(job, begin)


def section(job: ZarrJob) -> Section:
    title = f"{job.rows_a_chunk} a chunk, {1000 * job.latency:g} ms"
    contestants = [
        Contestant(OURS, ours, (job,)),
        Contestant(PEERS[0], insitubatch, (job,), ("insitubatch",)),
        Contestant(PEERS[1], xbatcher, (job,), ("xbatcher",)),
        Contestant(f"{PEERS[1]}, no workers", xbatcher_alone, (job,), ("xbatcher",)),
    ]
    ratios = [
        Ratio(f"{title}: {OURS} / {other.name}", OURS, (other.name,)) for other in contestants[1:]
    ]
    return Section(title, "samples/s", OURS, contestants, ratios, job.samples)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 8, 32], help="samples a chunk (1 8 32)"
    )
    parser.add_argument(
        "--latency", type=float, metavar="MS", default=20, help="before each answer (20)"
    )
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--side", type=int, default=96, help="pixels (96: 28 kB)")
    parser.add_argument(
        "--bandwidth", type=float, metavar="MB", default=400, help="of the server, a second (400)"
    )
    parser.add_argument(
        "--work", help="a folder for the files, which stays; else they are written anew and removed"
    )
    add_options(parser)
    given = parser.parse_args()
    with work_folder(given.work) as work:
        write_samples(work, None, given.samples, given.side)
        with StreamServer(work) as server:
            rest = (given.latency / 1000, given.bandwidth * 1e6, 1, given.workers)
            jobs = [
                ZarrJob(server.url, work, given.samples, given.side, True, *rest, rows)
                for rows in given.rows
            ]
            about = (
                f"{given.workers} workers, batches of {BATCH}, {given.samples:,} samples of "
                f"{given.side**2 * 3 / 1000:.1f} kB"
            )
            run_sections(
                [section(job) for job in jobs],
                given,
                f"{about}; the server gives {given.bandwidth:g} MB/s",
            )


if __name__ == "__main__":
    main()
