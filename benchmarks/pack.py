"""Compares how fast headrace and its peers pack photographs, and how fast headrace verifies a pack.

    python benchmarks/pack.py PATH [--copies 1] [--task encoded jpeg decoded processes read verify]
    [--rounds 5] [--only NAME ...]
                              [--work DIR] [--json]

The files of a folder of class folders are packed: as they are, re-encoded (longer side at most 256
pixels, quality 90), and decoded (224 x 224, uint8), by two processes or threads where a packer can
use them. Beside headrace and its peers stands the limit: `cp`, and a bare loop that decodes (or
decodes and encodes) in as many processes and writes nothing. headrace checks that each image
decodes, reads back what it has written, and makes it durable; peers do none of this, so a line with
`check="header"` stands beside. All files are in the system's memory. Sizes of what is written are
given, as it is the same job only where they are about the same.
"""

from __future__ import annotations

import argparse
import functools
import io
import itertools
import multiprocessing
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peers
import simplejpeg
import torch
from common import Contestant, Ratio, Section, add_options, run_sections
from folders import prepared, work_folder
from images import _decode_all
from peers import touch
from PIL import Image
from torch.utils.data import Dataset

import headrace
from headrace.packing import verify

SIZE, MAX_SIZE, QUALITY, SHARD = (224, 224), 256, 90, "64MB"
Runs = Iterator[Callable[[], "int | tuple[int, dict[str, float]]"]]
Writer = Callable[["Job", Path], None]


@dataclass(frozen=True)
class Job:
    """What is packed: a folder of class folders, its files with the numbers of their classes, by
    how many processes or threads.
    """

    path: str
    files: tuple[tuple[str, int], ...]
    workers: int
    work: Path


def writing(job: Job, write: Writer, name: str) -> Runs:
    """Epochs that pack everything into a new folder, which goes away behind each of them. The
    files are listed before, as for peers.
    """
    write = (
        functools.partial(write, **{"dataset": _opened(job, write)}) if _is_ours(write) else write
    )
    for number in itertools.count():
        folder = job.work / f"{name}-{os.getpid()}-{number}"
        folder.mkdir()

        def run(folder: Path = folder) -> tuple[int, dict[str, float]]:
            write(job, folder)
            return len(job.files), {
                "MB written": sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 1e6
            }

        try:
            yield run
        finally:
            shutil.rmtree(folder)


def copied(job: Job, folder: Path) -> None:
    subprocess.run(["cp", "-r", job.path, str(folder / "copy")], check=True)


def _is_ours(write: Writer) -> bool:
    return (write.func if isinstance(write, functools.partial) else write) is packed


def _opened(job: Job, write: Writer) -> headrace.ImageDataset:
    size = write.keywords.get("size") if isinstance(write, functools.partial) else None
    return headrace.ImageDataset(job.path, image_size=size)


def packed(
    job: Job,
    folder: Path,
    *,
    dataset: Any = None,
    size: Any = None,
    parts: bool = False,
    **options: Any,
) -> None:
    """By headrace: one file, or parts."""
    dataset = dataset or headrace.ImageDataset(job.path, image_size=size)
    if parts:
        options["shard_size"] = SHARD
    options.setdefault("workers", job.workers)
    headrace.pack(
        dataset,
        folder / ("packed" if parts else "packed.h5"),
        progress=False,
        **options,
    )


def mds(job: Job, folder: Path, decoded: bool = False) -> None:
    streaming = peers._import_streaming()
    columns = {
        "image": f"ndarray:uint8:{SIZE[0]},{SIZE[1]},3" if decoded else "bytes",
        "class": "int",
    }
    with streaming.MDSWriter(out=str(folder / "mds"), columns=columns, size_limit="64mb") as shards:
        for path, target in job.files:
            shards.write(
                {
                    "image": _pixels(path, SIZE) if decoded else Path(path).read_bytes(),
                    "class": target,
                }
            )


def _pixels(path: str, size: tuple[int, int] | None) -> np.ndarray[Any, Any]:
    """As a user of these packers decodes: by Pillow."""
    with Image.open(path) as image:
        rgb = image.convert("RGB")
        return np.array(
            rgb if size is None else rgb.resize((size[1], size[0]), Image.Resampling.BILINEAR)
        )


def _read_sample(sample: tuple[str, int]) -> dict[str, Any]:
    return {"image": Path(sample[0]).read_bytes(), "class": sample[1]}


def _decoded_sample(sample: tuple[str, int]) -> dict[str, Any]:
    return {"image": torch.from_numpy(_pixels(sample[0], SIZE)), "class": sample[1]}


def litdata(job: Job, folder: Path, decoded: bool = False) -> None:
    os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"  # or it asks for a newer one
    import litdata as ld

    fn = _decoded_sample if decoded else _read_sample
    ld.optimize(
        fn=fn,
        inputs=list(job.files),
        output_dir=str(folder / "litdata"),
        chunk_bytes="64MB",
        num_workers=job.workers,
    )


def webdataset(job: Job, folder: Path) -> None:
    import webdataset as wds

    with wds.ShardWriter(
        str(folder / "train-%06d.tar"), maxcount=100_000, maxsize=64e6, verbose=0
    ) as shards:
        for number, (path, target) in enumerate(job.files):
            shards.write(
                {"__key__": f"{number:08d}", "jpg": Path(path).read_bytes(), "cls": target}
            )


class _Decoded(Dataset[tuple[Any, int]]):
    """What FFCV's writer takes: pixels."""

    def __init__(self, job: Job, size: tuple[int, int] | None) -> None:
        self.job, self.size = job, size

    def __len__(self) -> int:
        return len(self.job.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, target = self.job.files[index]
        return _pixels(path, self.size), target


def ffcv(job: Job, folder: Path, decoded: bool = False) -> None:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    image = (
        RGBImageField(write_mode="raw")
        if decoded
        else RGBImageField(write_mode="jpg", max_resolution=MAX_SIZE, jpeg_quality=QUALITY)
    )
    writer = DatasetWriter(
        str(folder / "train.beton"), {"image": image, "label": IntField()}, num_workers=job.workers
    )
    writer.from_indexed_dataset(_Decoded(job, SIZE if decoded else None))


def bare(job: Job, work: Callable[[list[str]], int]) -> Runs:
    """Each process takes its part of the files; nothing is written, and nothing travels."""
    parts = [
        [path for path, _ in job.files[worker :: job.workers]] for worker in range(job.workers)
    ]
    with multiprocessing.get_context("fork").Pool(job.workers) as pool:
        while True:
            yield lambda: sum(pool.map(work, parts, chunksize=1))


def _reencode_all(paths: list[str]) -> int:
    """Decodes at the fraction that libjpeg offers, resizes and encodes."""
    torch.set_num_threads(1)
    for path in paths:
        with Image.open(io.BytesIO(Path(path).read_bytes())) as image:
            scale = MAX_SIZE / max(image.size)
            size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
            image.draft("RGB", size)
            pixels = np.array(image.convert("RGB").resize(size, Image.Resampling.BILINEAR))
        simplejpeg.encode_jpeg(pixels, quality=QUALITY, colorsubsampling="420")
    return len(paths)


decode_all = functools.partial(_decode_all, size=SIZE)


def reading(job: Job) -> Runs:
    """headrace's loader on its own file of re-encoded images."""

    def write(folder: Path) -> None:
        packed(job, folder, store="jpeg", max_size=MAX_SIZE, quality=QUALITY)

    dataset = headrace.ImageDataset(
        prepared(job.work, "headrace-jpeg", write) / "packed.h5", image_size=SIZE
    )
    loader = headrace.create_dataloader(
        dataset, batch_size=64, shuffle=True, num_workers=job.workers
    )
    try:
        while True:
            yield lambda: touch(loader)
    finally:
        loader.close()


def reading_ffcv(job: Job, whole: bool) -> Runs:
    from ffcv.fields.decoders import CenterCropRGBImageDecoder, RandomResizedCropRGBImageDecoder

    if whole:  # see peers.ffcv
        decoder = RandomResizedCropRGBImageDecoder(SIZE, scale=(1.0, 1.0), ratio=(0.01, 100.0))
    else:
        decoder = CenterCropRGBImageDecoder(SIZE, ratio=1)
    beton = prepared(job.work, "ffcv-jpeg", functools.partial(ffcv, job)) / "train.beton"
    settings = peers.Job(job.path, job.files, True, job.workers, 64, SIZE, job.work)
    yield from peers.ffcv_epochs(str(beton), decoder, settings)


def verifying(job: Job, store: str) -> Runs:
    """Verifies parts; a sample is 1 MB, so that speeds are rates."""
    path = _parts(job, store)
    megabytes = sum(file.stat().st_size for file in path.iterdir()) // 1_000_000
    while True:

        def run() -> int:
            assert verify(path, progress=False).ok
            return megabytes

        yield run


def reading_through(job: Job, store: str) -> Runs:
    path = _parts(job, store)
    files = sorted(map(str, path.iterdir()))
    megabytes = sum(map(os.path.getsize, files)) // 1_000_000

    def run() -> int:
        with open(os.devnull, "wb") as nowhere:
            subprocess.run(["cat", *files], check=True, stdout=nowhere)
        return megabytes

    while True:
        yield run


def _parts(job: Job, store: str) -> Path:
    def write(folder: Path) -> None:
        packed(job, folder, parts=True, store=store, size=SIZE if store == "decoded" else None)

    return prepared(job.work, f"parts-{store}", write) / "packed"


HEADRACE, HEADER, PARTS = (
    "headrace, one file",
    "headrace, one file, check header",
    "headrace, parts",
)
MDS, LITDATA, WEBDATASET, FFCV = "MosaicML Streaming (MDS)", "LitData", "WebDataset", "FFCV"
PACKAGES = {
    MDS: ("mosaicml-streaming",),
    LITDATA: ("litdata",),
    WEBDATASET: ("webdataset",),
    FFCV: ("ffcv",),
}


def contestants(job: Job, task: str, writers: dict[str, Writer]) -> list[Contestant]:
    return [
        Contestant(name, writing, (job, write, f"{task}-{number}"), PACKAGES.get(name, ()))
        for number, (name, write) in enumerate(writers.items())
    ]


def encoded(job: Job) -> Section:
    check: dict[str, Any] = {"check": "header"}
    writers = {
        "limit: cp -r": copied,
        HEADER: functools.partial(packed, **check),
        "headrace, parts, check header": functools.partial(packed, parts=True, **check),
        "headrace, parts, check header, 2 processes": functools.partial(
            packed, parts=True, processes=2, workers=1, **check
        ),
        HEADRACE: packed,
        MDS: mds,
        LITDATA: litdata,
        WEBDATASET: webdataset,
    }
    ratios = [
        Ratio("encoded: headrace, check header / cp", HEADER, ("limit: cp -r",)),
        Ratio("encoded: headrace, check header / MDS", HEADER, (MDS,)),
        Ratio(
            "encoded: headrace, parts, check header / MDS", "headrace, parts, check header", (MDS,)
        ),
    ]
    return Section(
        "encoded", "img/s", MDS, contestants(job, "encoded", writers), ratios, len(job.files)
    )


def jpeg(job: Job) -> Section:
    options: dict[str, Any] = {"store": "jpeg", "max_size": MAX_SIZE, "quality": QUALITY}
    limit = "limit: decode, resize, encode"
    writers = {
        HEADRACE: functools.partial(packed, **options),
        PARTS: functools.partial(packed, parts=True, **options),
        "headrace, parts, 2 processes": functools.partial(
            packed, parts=True, processes=2, workers=1, **options
        ),
        FFCV: ffcv,
    }
    made = [Contestant(limit, bare, (job, _reencode_all)), *contestants(job, "jpeg", writers)]
    ratios = [
        Ratio("jpeg: headrace / FFCV", HEADRACE, (FFCV,)),
        Ratio("jpeg: headrace / limit", HEADRACE, (limit,)),
    ]
    return Section("jpeg", "img/s", FFCV, made, ratios, len(job.files))


def decoded(job: Job) -> Section:
    options: dict[str, Any] = {"store": "decoded", "size": SIZE}
    limit = "limit: bare decode loop"
    writers = {
        HEADRACE: functools.partial(packed, **options),
        PARTS: functools.partial(packed, parts=True, **options),
        MDS: functools.partial(mds, decoded=True),
        LITDATA: functools.partial(litdata, decoded=True),
        FFCV: functools.partial(ffcv, decoded=True),
    }
    made = [Contestant(limit, bare, (job, decode_all)), *contestants(job, "decoded", writers)]
    ratios = [
        Ratio("decoded: headrace / bare decode loop", HEADRACE, (limit,)),
        Ratio("decoded: headrace / best peer", HEADRACE, (MDS, LITDATA, FFCV)),
    ]
    return Section("decoded", "img/s", limit, made, ratios, len(job.files))


def processes(job: Job) -> Section:
    options: dict[str, Any] = {
        "store": "jpeg",
        "max_size": MAX_SIZE,
        "quality": QUALITY,
        "parts": True,
        "workers": 1,
    }
    one, two = "1 process, 1 thread", "2 processes, 1 thread each"
    writers = {
        one: functools.partial(packed, **options),
        two: functools.partial(packed, processes=2, **options),
    }
    made = contestants(job, "processes", writers)
    return Section(
        "processes",
        "img/s",
        one,
        made,
        [Ratio("jpeg: 2 processes / 1", two, (one,))],
        len(job.files),
    )


def read(job: Job) -> Section:
    whole, crop = "FFCV, whole images", "FFCV, centre crop (has less to do)"
    made = [
        Contestant("headrace", reading, (job,)),
        *(
            Contestant(name, reading_ffcv, (job, name == whole), PACKAGES[FFCV])
            for name in (whole, crop)
        ),
    ]
    ratios = [Ratio(f"read: headrace / {name}", "headrace", (name,)) for name in (whole, crop)]
    return Section("read", "img/s", whole, made, ratios, len(job.files))


def verified(job: Job) -> Section:
    made, ratios = [], []
    for store in ("encoded", "decoded"):
        cat, one = f"cat, {store}", f"verify, {store}"
        made.append(Contestant(cat, reading_through, (job, store)))
        made.append(Contestant(one, verifying, (job, store)))
        ratios.append(Ratio(f"{one} / cat", one, (cat,)))
    return Section("verify", "MB/s", "cat, encoded", made, ratios)


TASKS = {
    "encoded": encoded,
    "jpeg": jpeg,
    "decoded": decoded,
    "processes": processes,
    "read": read,
    "verify": verified,
}


def copies_of(path: str, copies: int, work: Path) -> str:
    """A folder with each file so many times."""

    def write(folder: Path) -> None:
        for file, _ in headrace.ImageDataset(path).samples:
            (folder / Path(file).parent.name).mkdir(exist_ok=True)
            for number in range(copies):
                shutil.copy(file, folder / Path(file).parent.name / f"{number}-{Path(file).name}")

    return str(prepared(work, f"copies-{copies}", write))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", help="a folder of class folders of JPEG files")
    parser.add_argument("--copies", type=int, default=1, help="of each file, to have more of them")
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument(
        "--work", metavar="DIR", help="where everything is written (default: a temporary folder)"
    )
    add_options(parser)
    given = parser.parse_args()
    with work_folder(given.work) as work:
        path = copies_of(given.path, given.copies, work)
        files = tuple(
            (os.fspath(file), int(target)) for file, target in headrace.ImageDataset(path).samples
        )
        job = Job(path, files, given.workers, work)
        nbytes = sum(os.path.getsize(file) for file, _ in files)
        task = f"{len(files):,} photographs, {nbytes / 1e6:,.0f} MB, {given.workers} workers"
        run_sections([TASKS[name](job) for name in given.task], given, task)


if __name__ == "__main__":
    main()
