"""Compares how fast headrace and its peers give batches of JPEG files.

    python benchmarks/images.py PATH [--workers N] [--batch 64] [--rounds 5] [--limit N] [--only
    NAME ...] [--work DIR] [--json]

The files of a folder of class folders become batches of 3 x 224 x 224, whole images resized
(bilinear, aspect not kept), in a full shuffle: float32 normalised by ImageNet's statistics, and
then uint8. Each batch is touched. Beside headrace and its peers stand a DataLoader as torchvision's
users write it, a plain DataLoader over headrace's own dataset (what the way of a batch is worth),
and the limit: a bare decode loop in as many processes. `peers.py` says how each peer is used. Peers
that aren't installed are named.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import peers
import simplejpeg
import torch
from common import Contestant, Ratio, Section, add_options, run_sections
from folders import prepared, work_folder
from peers import Job, Runs, touch
from torch.utils.data import DataLoader

import headrace

SIZE = (224, 224)
HEADRACE, TORCHVISION, LIMIT = (
    "headrace lazy",
    "torchvision-style DataLoader",
    "limit: bare decode loop (uint8)",
)
# what runs each, the packages of which it needs one
PEERS: dict[str, tuple[Callable[..., Runs], tuple[str, ...]]] = {
    "FFCV": (peers.ffcv, ("ffcv",)),
    "FFCV, centre crop": (functools.partial(peers.ffcv, whole=False), ("ffcv",)),
    "DALI (CPU)": (peers.dali, ("nvidia-dali-cuda130", "nvidia-dali-cuda120")),
    "SPDL": (peers.spdl, ("spdl-io",)),
    "HF datasets": (peers.hf_datasets, ("datasets",)),
    "WebDataset": (peers.webdataset, ("webdataset",)),
    "MosaicML Streaming": (peers.mosaicml_streaming, ("mosaicml-streaming",)),
    "LitData": (peers.litdata, ("litdata",)),
}


def ours(job: Job) -> Runs:
    dataset = headrace.ImageDataset(
        job.path, image_size=job.size, normalize=job.normalize, loading_mode="lazy"
    )
    loader = headrace.create_dataloader(
        dataset, batch_size=job.batch, shuffle=True, num_workers=job.workers
    )
    try:
        while True:
            yield lambda: touch(loader)
    finally:
        loader.close()


def same_decoder(job: Job) -> Runs:
    dataset = headrace.ImageDataset(
        job.path, image_size=job.size, normalize=job.normalize, loading_mode="lazy"
    )
    loader = DataLoader(dataset, job.batch, shuffle=True, **job.loader)
    while True:
        yield lambda: touch(loader)


def bare_decode(job: Job) -> Runs:
    """Each process decodes its part of the files, in their order; nothing travels."""
    workers = max(1, job.workers)
    parts = [
        ([path for path, _ in job.files[worker::workers]], job.size) for worker in range(workers)
    ]
    with multiprocessing.get_context("fork").Pool(workers) as pool:

        def run() -> int:
            return sum(pool.starmap(_decode_all, parts, chunksize=1))

        while True:
            yield run


def _decode_all(paths: list[str], size: tuple[int, int]) -> int:
    torch.set_num_threads(1)
    pixels, out = np.empty(1 << 20, np.uint8), torch.empty((3, *size), dtype=torch.uint8)
    for path in paths:
        with open(path, "rb") as file:
            data = file.read()
        height, width, _, _ = simplejpeg.decode_jpeg_header(data)
        if pixels.size < height * width * 3:
            pixels = np.empty(height * width * 3, np.uint8)
        image = torch.from_numpy(simplejpeg.decode_jpeg(data, "RGB", buffer=pixels)).permute(
            2, 0, 1
        )[None]
        out.copy_(
            torch.nn.functional.interpolate(image, size=size, mode="bilinear", antialias=True)[0]
        )
    return len(paths)


def section(job: Job) -> Section:
    contestants = [
        Contestant(LIMIT, bare_decode, (job,)),
        Contestant(HEADRACE, ours, (job,)),
        Contestant("headrace's dataset, plain DataLoader", same_decoder, (job,)),
        Contestant(TORCHVISION, peers.torchvision_style, (job,)),
        *(Contestant(name, runs, (job,), packages) for name, (runs, packages) in PEERS.items()),
    ]
    title = "float32 normalised" if job.normalize else "uint8"
    against = {
        "best peer": tuple(PEERS),
        "torchvision-style": (TORCHVISION,),
        "bare decode loop": (LIMIT,),
    }
    chosen = (
        ("best peer", "torchvision-style") if job.normalize else ("bare decode loop", "best peer")
    )
    ratios = [Ratio(f"{title}: headrace lazy / {name}", HEADRACE, against[name]) for name in chosen]
    return Section(title, "img/s", TORCHVISION, contestants, ratios, samples=len(job.files))


def some_of(path: str, limit: int, work: Path) -> str:
    """A folder with copies of so many of the files, from all classes."""
    samples = headrace.ImageDataset(path).samples
    chosen = [samples[i * len(samples) // limit][0] for i in range(min(limit, len(samples)))]

    def write(folder: Path) -> None:
        for file in map(Path, chosen):
            (folder / file.parent.name).mkdir(exist_ok=True)
            shutil.copy(file, folder / file.parent.name)

    return str(prepared(work, f"some-{limit}-{_digest(chosen)}", write))


def _digest(paths: list[str]) -> str:
    """Of names and sizes: a folder of peers' files is used again for the same images only."""
    return hashlib.blake2b(
        "\n".join(f"{path} {os.path.getsize(path)}" for path in paths).encode(), digest_size=6
    ).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", help="a folder of class folders of JPEG files")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--limit", type=int, metavar="N", help="use only N of the images")
    parser.add_argument(
        "--work",
        metavar="DIR",
        help="where the peers' files are written, and kept (default: a temporary folder)",
    )
    add_options(parser)
    given = parser.parse_args()
    with work_folder(given.work) as work:
        path = (
            os.path.abspath(given.path)
            if given.limit is None
            else some_of(given.path, given.limit, work)
        )
        files = tuple(
            (os.fspath(file), int(target)) for file, target in headrace.ImageDataset(path).samples
        )
        own = work / f"images-{_digest([file for file, _ in files])}"
        own.mkdir(exist_ok=True)
        jobs = [
            Job(path, files, normalize, given.workers, given.batch, SIZE, own)
            for normalize in (True, False)
        ]
        task = f"{len(files):,} images, {given.workers} workers, batches of {given.batch}"
        run_sections([section(job) for job in jobs], given, task)


if __name__ == "__main__":
    main()
