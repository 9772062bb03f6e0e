"""How each contestant of `stream.py` reads samples from a server.

Each function is a contestant (see `common.py`) that gives batches of uint8 images and their numbers
out of files that lie on the server in its own format, as the peer's own documentation shows it
first, with the settings that it recommends. Each epoch begins with nothing: a new dataset, new
workers and an empty folder for the peer's local copies; from there to the last batch it is timed.
It is no epoch where a sample is missing or comes twice, or where the server sent fewer bytes than
the samples have.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import http.client
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from folders import prepared
from stream_server import counts, tell
from torch.utils.data import DataLoader

import headrace

BATCH, PIECE, CONNECTIONS = 64, 4 << 20, 8
MIXED = 1000
"""Samples that a shuffle mixes, where it is one of a buffer."""
BUCKET, KEY = "data", "nobody"
"""Of S3; the server looks at no signature."""
Runs = Iterator[Callable[[], tuple[int, dict[str, float]]]]


@dataclass(frozen=True)
class Job:
    """The task of all contestants of a section.

    Attributes:
        server: its URL; what it serves is `work`.
        work: the folder of the bucket, of `samples.npy` (uint8 [samples, side, side, 3]) and of
            local copies.
        shuffle: or in stored order.
        latency, bandwidth: seconds before each answer, bytes a second.
        shard: bytes of a shard, about.
    """

    server: str
    work: Path
    samples: int
    side: int
    shuffle: bool
    latency: float
    bandwidth: float
    shard: int
    workers: int

    @property
    def row(self) -> int:
        """Bytes of a sample."""
        return self.side * self.side * 3

    @property
    def in_shard(self) -> int:
        """Samples of a shard."""
        return max(1, self.shard // self.row)

    @property
    def least(self) -> int:
        """Bytes that the server sends in an epoch, at least."""
        return self.samples * self.row

    def rows(self) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = np.load(self.work / "samples.npy", mmap_mode="r")[
            : self.samples
        ]
        return found

    def written(self, format: str, write: Callable[[Path], None]) -> str:
        """The prefix in the bucket of this job's files in a format, which `write` writes where
        they aren't there yet.
        """
        bucket = self.work / BUCKET
        bucket.mkdir(exist_ok=True)
        return prepared(bucket, f"{format}-{self.samples}-{self.side}-{self.shard}", write).name

    @property
    def loader(self) -> dict[str, Any]:
        """What every torch DataLoader gets."""
        return {"num_workers": self.workers}


def epochs(
    job: Job, begin: Callable[[str], contextlib.AbstractContextManager[Iterable[tuple[Any, Any]]]]
) -> Runs:
    """Epochs of a contestant: `begin` gets an empty folder for local copies, and gives (images,
    numbers) batch by batch.
    """
    while True:
        tell(job.server, latency=job.latency, bandwidth=job.bandwidth)
        local = tempfile.mkdtemp(prefix="local-", dir=job.work)
        counts(job.server)

        def run(local: str = local) -> tuple[int, dict[str, float]]:
            start, used, first, seen = (
                time.perf_counter(),
                cpu_seconds(),
                float("nan"),
                list[torch.Tensor](),
            )
            with begin(local) as batches:
                for images, numbers in batches:
                    if not seen:
                        first = time.perf_counter() - start
                    assert images.dtype == torch.uint8 and tuple(images.shape[1:]) == (
                        job.side,
                        job.side,
                        3,
                    ), images.shape
                    images[:, ::32, ::32].sum()
                    seen.append(torch.as_tensor(numbers))
            return len(torch.cat(seen)), {
                "first batch, ms": 1000 * first,
                "CPU, s": cpu_seconds() - used,
                **_judged(job, torch.cat(seen)),
            }

        yield run
        gc.collect()
        shutil.rmtree(local, ignore_errors=True)


def cpu_seconds() -> float:
    """Of this process, and of its children that have ended."""
    return sum(os.times()[:4])


def _judged(job: Job, seen: torch.Tensor) -> dict[str, float]:
    """What the server counted, if the epoch was one."""
    served = counts(job.server)
    if not torch.equal(seen.sort().values, torch.arange(job.samples)):
        raise RuntimeError(
            f"{len(seen)} samples, {len(seen.unique())} of them different, not {job.samples}"
        )
    if served["bytes"] < job.least:
        raise RuntimeError(
            f"the server sent {served['bytes']:,} bytes: the rest came out of a cache"
        )
    if job.shuffle and bool((seen.diff() > 0).all()):
        raise RuntimeError("the samples came in stored order")
    return {"requests": served["requests"], "MB": served["bytes"] / 1e6}


# -- headrace


def write_h5(job: Job, folder: Path) -> None:
    """Shards of contiguous rows."""
    rows = job.rows()
    for start in range(0, job.samples, job.in_shard):
        some = rows[start : start + job.in_shard]
        with h5py.File(folder / f"train-{start // job.in_shard:06d}.h5", "w") as shard:
            shard["data"] = some
            shard["index"] = np.arange(start, start + len(some))


def ours(job: Job, format: str, has_index: bool = True) -> Runs:
    """A StreamingDataset of tar or HDF5 shards by plain HTTP, the index of which an epoch before
    has kept, or nobody.
    """
    write = write_tars if format == "tar" else write_h5
    shards = urls(job, job.written(format, lambda folder: write(job, folder)), f".{format}")
    kept = tempfile.mkdtemp(prefix="index-", dir=job.work)
    options: dict[str, Any] = (
        {"decode": {"bin": _Image(job.side), "cls": int}}
        if format == "tar"
        else {"target_name": "index"}
    )

    @contextlib.contextmanager
    def begin(local: str) -> Iterator[Iterable[tuple[Any, Any]]]:
        with headrace.StreamingDataset(
            shards, buffer_size=MIXED, cache_dir=kept if has_index else local, **options
        ) as dataset:
            shuffle = "block" if job.shuffle else False
            loader = headrace.create_dataloader(
                dataset, batch_size=BATCH, shuffle=shuffle, **job.loader
            )
            yield ((batch["bin"], batch["cls"]) for batch in loader) if format == "tar" else loader
            loader.close()

    try:
        yield from epochs(job, begin)
    finally:
        shutil.rmtree(kept)


def their_shards(job: Job, format: str) -> Runs:
    """The same MDS shards or chunks of LitData as their own library reads, by plain HTTP."""
    write = {"mds": write_mds, "litdata": write_litdata}[format]
    prefix = job.written(format, functools.partial(write, job))
    url = f"{job.server}/{BUCKET}/{prefix}/index.json"

    @contextlib.contextmanager
    def begin(local: str) -> Iterator[Iterable[tuple[Any, Any]]]:
        with headrace.ColumnsDataset(url, loading_mode="streaming", cache_dir=local) as dataset:
            shuffle = "block" if job.shuffle else False
            loader = headrace.create_dataloader(
                dataset, batch_size=BATCH, shuffle=shuffle, **job.loader
            )
            yield ((batch["image"], batch["index"]) for batch in loader)
            loader.close()

    yield from epochs(job, begin)


class _Image:
    """Bytes -> an image."""

    def __init__(self, side: int) -> None:
        self.shape = (side, side, 3)

    def __call__(self, data: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(self.shape)


# -- peers


def write_mds(job: Job, folder: Path) -> None:
    from peers import _import_streaming

    columns = {"image": f"ndarray:uint8:{job.side},{job.side},3", "index": "int"}
    writer = _import_streaming().MDSWriter
    with writer(out=str(folder), columns=columns, size_limit=job.shard) as shards:
        for number, image in enumerate(job.rows()):
            shards.write({"image": image, "index": number})


def mosaicml_streaming(job: Job) -> Runs:
    """MDS shards out of S3, by boto3."""
    os.environ |= {
        "S3_ENDPOINT_URL": job.server,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    from peers import _import_streaming

    streaming = _import_streaming()
    remote = f"s3://{BUCKET}/{job.written('mds', functools.partial(write_mds, job))}"

    @contextlib.contextmanager
    def begin(local: str) -> Iterator[Iterable[tuple[Any, Any]]]:
        dataset = streaming.StreamingDataset(
            remote=remote, local=local, shuffle=job.shuffle, batch_size=BATCH
        )
        # or its forked workers share the connection that brought the index, and mix their answers:
        for stream in dataset.streams:
            # without TLS nothing notices, and samples are wrong (they were, in some runs)
            stream._downloader.clean_up()
        loader: DataLoader[Any] = DataLoader(dataset, BATCH, **job.loader)
        yield ((batch["image"], batch["index"]) for batch in loader)
        del loader, dataset

    for run in epochs(job, begin):
        yield run
        streaming.base.util.clean_stale_shared_memory()


def _litdata_sample(number: int, job: Job) -> dict[str, Any]:
    return {"image": torch.from_numpy(job.rows()[number].copy()), "index": number}


def write_litdata(job: Job, folder: Path) -> None:
    os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"  # or it asks PyPI for a newer one
    import litdata as ld

    ld.optimize(
        fn=functools.partial(_litdata_sample, job=job),
        inputs=list(range(job.samples)),
        output_dir=str(folder),
        chunk_bytes=job.shard,
        num_workers=1,
    )
    # `optimize` sets "spawn" for the whole process
    multiprocessing.set_start_method(None, force=True)


def litdata(job: Job) -> Runs:
    """Its chunks out of S3, by obstore, which is what it takes where that is installed."""
    os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"
    import litdata as ld
    from litdata.streaming import downloader

    # its obstore refuses a server without TLS, and storage_options don't reach it
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True

    remote = f"s3://{BUCKET}/{job.written('litdata', functools.partial(write_litdata, job))}"
    options = {
        "endpoint_url": job.server,
        "aws_access_key_id": KEY,
        "aws_secret_access_key": KEY,
        "region_name": "us-east-1",
    }

    @contextlib.contextmanager
    def begin(local: str) -> Iterator[Iterable[tuple[Any, Any]]]:
        dataset = ld.StreamingDataset(
            remote, cache_dir=local, shuffle=job.shuffle, storage_options=options
        )
        loader = ld.StreamingDataLoader(dataset, batch_size=BATCH, **job.loader)
        yield ((batch["image"], batch["index"]) for batch in loader)

    yield from epochs(job, begin)


class _Decoded:
    """A sample of a tar file -> an image and its number."""

    def __init__(self, side: int) -> None:
        self._image = _Image(side)

    def __call__(self, sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
        return self._image(sample["bin"]), int(sample["cls"])


def write_tars(job: Job, folder: Path) -> None:
    """Shards in the convention of WebDataset."""
    import io
    import tarfile

    rows = job.rows()
    for start in range(0, job.samples, job.in_shard):
        with tarfile.open(
            folder / f"train-{start // job.in_shard:06d}.tar", "w", format=tarfile.USTAR_FORMAT
        ) as shard:
            for number in range(start, min(start + job.in_shard, job.samples)):
                for ending, content in (
                    ("bin", rows[number].tobytes()),
                    ("cls", str(number).encode()),
                ):
                    member = tarfile.TarInfo(f"{number:08d}.{ending}")
                    member.size = len(content)
                    shard.addfile(member, io.BytesIO(content))


def urls(job: Job, prefix: str, ending: str) -> list[str]:
    """Of the job's files, by plain HTTP."""
    return [
        f"{job.server}/{BUCKET}/{prefix}/{path.name}"
        for path in sorted((job.work / BUCKET / prefix).glob(f"*{ending}"))
    ]


def webdataset(job: Job) -> Runs:
    """Tar shards by HTTP, which it has `curl` read. Its shuffle mixes shards, and `MIXED`
    samples.
    """
    import webdataset as wds

    shards = urls(job, job.written("tar", lambda folder: write_tars(job, folder)), ".tar")

    @contextlib.contextmanager
    def begin(local: str) -> Iterator[Iterable[tuple[Any, Any]]]:
        dataset = wds.WebDataset(shards, shardshuffle=len(shards) if job.shuffle else False)
        if job.shuffle:
            dataset = dataset.shuffle(MIXED)
        dataset = dataset.map(_Decoded(job.side)).batched(BATCH)
        yield wds.WebLoader(dataset, batch_size=None, **job.loader)

    yield from epochs(job, begin)


# -- the limit


def connections(job: Job) -> Runs:
    """The limit: as many bytes, by eight connections that do nothing but read ranges into
    buffers that are used again.
    """

    def write(folder: Path) -> None:
        with open(folder / "rows.bin", "wb") as file:
            job.rows().tofile(file)

    path = f"/{BUCKET}/{job.written('bare', write)}/rows.bin"
    size = job.samples * job.row
    while True:
        tell(job.server, latency=job.latency, bandwidth=job.bandwidth)

        def run() -> tuple[int, dict[str, float]]:
            counts(job.server)  # what a contestant that failed has left
            start, used, lock, ends = time.perf_counter(), cpu_seconds(), threading.Lock(), [0.0]
            first = BATCH * job.row  # the first request is as long as a batch
            pieces = iter(
                [(0, first), *((at, min(at + PIECE, size)) for at in range(first, size, PIECE))]
            )

            def work(number: int) -> None:
                connection, buffer = (
                    http.client.HTTPConnection(job.server.removeprefix("http://")),
                    memoryview(bytearray(PIECE)),
                )
                while True:
                    with lock:
                        piece = next(pieces, None)
                    if piece is None:
                        break
                    connection.request(
                        "GET", path, headers={"Range": f"bytes={piece[0]}-{piece[1] - 1}"}
                    )
                    answer, got = connection.getresponse(), 0
                    while got < piece[1] - piece[0]:
                        more = answer.readinto(buffer[got : piece[1] - piece[0]])
                        if not more:
                            raise RuntimeError("the server ended an answer early")
                        got += more
                    if piece[0] == 0:
                        ends[0] = time.perf_counter() - start
                connection.close()

            threads = [
                threading.Thread(target=work, args=(number,)) for number in range(CONNECTIONS)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            served = counts(job.server)
            if served["bytes"] != size:
                raise RuntimeError(f"{served['bytes']:,} bytes, not {size:,}")
            figures = {"first batch, ms": 1000 * ends[0], "CPU, s": cpu_seconds() - used}
            return job.samples, {**figures, "requests": served["requests"], "MB": size / 1e6}

        yield run


if sys.platform != "linux":
    raise SystemExit("the server of this benchmark uses Linux's sendfile")
