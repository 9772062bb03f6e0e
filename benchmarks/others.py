"""Compares how fast samples come out of shards of MosaicML Streaming and LitData, by headrace and
by these libraries.

    python benchmarks/others.py PATH [--limit N] [--workers 2] [--rounds 5] [--only NAME ...]
                                [--work FOLDER] [--json]

The same shards for both: JPEG photographs, which become float32 3 x 224 x 224 (the libraries decode
with Pillow, as in `images.py`), and rows of 2,048 tokens (MDS, int32). All files are in the page
cache; epochs are shuffled. Then how often a second each gets from nothing to its first batch.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peers
from common import Contestant, Ratio, Section, add_options, run_sections
from folders import prepared, work_folder
from peers import Job, Runs
from torch.utils.data import DataLoader

import headrace

SIZE = (224, 224)
TOKENS, ROWS = 2048, 20_000
HEADRACE = "headrace"


def images(job: Job, folder_of: Callable[[Job], Path]) -> Runs:
    """Photographs in shards of another library."""
    dataset = headrace.ImageDataset(
        folder_of(job), column="image", targets="class", image_size=SIZE
    )
    loader = headrace.create_dataloader(dataset, batch_size=job.batch, num_workers=job.workers)
    try:
        while True:
            yield lambda: peers.touch(loader)
    finally:
        loader.close()


def token_folder(job: Job) -> Path:
    """MDS shards of rows of tokens."""
    streaming = peers._import_streaming()

    def write(folder: Path) -> None:
        drawn = np.random.default_rng(0)
        columns = {"tokens": f"ndarray:int32:{TOKENS}"}
        with streaming.MDSWriter(out=str(folder), columns=columns) as shards:
            for _ in range(ROWS):
                shards.write({"tokens": drawn.integers(0, 50_000, TOKENS, np.int32)})

    return prepared(job.work, "mds-tokens", write)


def count(batches: Any, rows_of: Callable[[Any], Any]) -> int:
    """Goes through an epoch, and looks at each batch."""
    rows = 0
    for batch in batches:
        tokens = rows_of(batch)
        rows += len(tokens)
        tokens[:, ::64].sum()
    return rows


def tokens(job: Job) -> Runs:
    dataset = headrace.open_dataset(token_folder(job), columns="tokens")
    loader = headrace.create_dataloader(dataset, batch_size=job.batch, num_workers=job.workers)
    try:
        while True:
            yield lambda: count(loader, lambda batch: batch)
    finally:
        loader.close()


def their_tokens(job: Job) -> Runs:
    streaming = peers._import_streaming()
    dataset = streaming.StreamingDataset(
        local=str(token_folder(job)), shuffle=True, batch_size=job.batch
    )
    loader: DataLoader[Any] = DataLoader(dataset, job.batch, **job.loader)
    while True:
        yield lambda: count(loader, lambda batch: batch["tokens"])


def starts(runs: Callable[..., Runs], *given: Any) -> Runs:
    """Dataset, loader and workers are made anew, and give a batch."""

    def first(batches: Any, images_of: Callable[[Any], Any] = lambda batch: batch[0]) -> int:
        len(images_of(next(iter(batches))))
        return 1

    peers.touch = first  # a contestant has its process for itself

    def start() -> int:
        made = runs(*given)
        count = next(made)()
        made.close()
        gc.collect()  # MosaicML Streaming refuses a second dataset beside the first
        return count

    while True:
        yield start


def section(title: str, unit: str, library: str, ours: Any, theirs: Any, package: str) -> Section:
    contestants = [ours, Contestant(library, *theirs, (package,))]
    ratio = Ratio(f"{title}: headrace / {library}", HEADRACE, (library,))
    return Section(title, unit, library, contestants, [ratio])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", help="a folder of class folders of JPEG files")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--limit", type=int, metavar="N", help="use only N of the images")
    parser.add_argument("--work", help="a folder for the shards, which stay")
    add_options(parser)
    given = parser.parse_args()
    with work_folder(given.work) as work:
        samples = headrace.ImageDataset(given.path).samples[: given.limit]
        files = tuple((str(path), int(target)) for path, target in samples)
        job = Job(given.path, files, True, given.workers, given.batch, SIZE, work)
        mds = Contestant(HEADRACE, images, (job, peers.mds_folder), ("mosaicml-streaming",))
        chunks = Contestant(HEADRACE, images, (job, peers.litdata_folder), ("litdata",))
        rows = Contestant(HEADRACE, tokens, (job,), ("mosaicml-streaming",))
        mosaicml, lightning = "MosaicML Streaming", "LitData"
        theirs = (peers.mosaicml_streaming, (job,))
        first_mds = Contestant(
            HEADRACE, starts, (images, job, peers.mds_folder), ("mosaicml-streaming",)
        )
        first_chunks = Contestant(
            HEADRACE, starts, (images, job, peers.litdata_folder), ("litdata",)
        )
        run_sections(
            [
                section("JPEG in MDS", "img/s", mosaicml, mds, theirs, "mosaicml-streaming"),
                section(
                    "JPEG in LitData's chunks",
                    *("img/s", lightning, chunks, (peers.litdata, (job,)), "litdata"),
                ),
                section(
                    f"Rows of {TOKENS:,} tokens in MDS",
                    *("rows/s", mosaicml, rows, (their_tokens, (job,)), "mosaicml-streaming"),
                ),
                section(
                    "First batches of JPEG in MDS",
                    *("starts/s", mosaicml, first_mds),
                    *((starts, (peers.mosaicml_streaming, job)), "mosaicml-streaming"),
                ),
                section(
                    "First batches of JPEG in LitData's chunks",
                    *("starts/s", lightning, first_chunks),
                    *((starts, (peers.litdata, job)), "litdata"),
                ),
            ],
            given,
            f"{len(files):,} images, {given.workers} workers, batches of {given.batch}",
        )


if __name__ == "__main__":
    main()
