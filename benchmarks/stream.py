"""Compares how fast samples are streamed from a server, and how soon the first batch comes.

    python benchmarks/stream.py [PHOTOS] [--latency 1 20 100] [--order shuffled stored] [--samples
    32768] [--side 96] [--shard MB]
                                [--bandwidth MB] [--workers N] [--rounds 5] [--quick] [--only NAME
                                ...] [--work FOLDER] [--json]

Images of uint8 [side, side, 3] (28 kB), in shards on a server on loopback that waits before each
answer and shares out its bandwidth (`stream_server.py`), read in batches of 64 by each contestant's
own reader of its own format. Every epoch is cold: from the making of dataset and loader to the last
batch, with empty folders for local copies. The limit is what eight connections get that only read.
Of each epoch the time to the first batch, the requests and the bytes that the server sent are
counted.

`--quick` is a look of about two minutes: 20 ms, fewer samples, two rounds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from arrays import images
from common import Contestant, Ratio, Section, add_options, run_sections
from folders import work_folder
from stream_peers import (
    BATCH,
    Job,
    connections,
    litdata,
    mosaicml_streaming,
    ours,
    their_shards,
    webdataset,
)
from stream_server import StreamServer

OURS = {
    "headrace, HDF5": ("h5",),
    "headrace, HDF5, without an index": ("h5", False),
    "headrace, tar": ("tar",),
}
THEIRS = {
    "headrace, MDS": ("mds", "MosaicML Streaming", "mosaicml-streaming"),
    "headrace, LitData's chunks": ("litdata", "LitData", "litdata"),
}
LIMIT = "limit: 8 connections"
PEERS = [
    Contestant("MosaicML Streaming", mosaicml_streaming, packages=("mosaicml-streaming",)),
    Contestant("LitData", litdata, packages=("litdata",)),
    Contestant("WebDataset", webdataset, packages=("webdataset",)),
]


def section(job: Job) -> Section:
    order = "shuffled" if job.shuffle else "stored order"
    title = f"{order}, {1000 * job.latency:g} ms"
    contestants = [Contestant(name, ours, (job, *how)) for name, how in OURS.items()]
    contestants += [
        Contestant(name, their_shards, (job, format), (package,))
        for name, (format, _, package) in THEIRS.items()
    ]
    contestants += [
        Contestant(one.name, one.runs, (job,), one.packages)
        for one in [*PEERS, Contestant(LIMIT, connections)]
    ]
    ratios = [
        Ratio(f"{title}: {one} / best peer", one, tuple(peer.name for peer in PEERS))
        for one in OURS
    ]
    ratios += [
        Ratio(f"{title}: {one} / {library}", one, (library,))
        for one, (_, library, _) in THEIRS.items()
    ]
    ratios += [
        Ratio(f"{title}: {one} / limit", one, (LIMIT,))
        for one in (*OURS, *(peer.name for peer in PEERS))
    ]
    return Section(title, "samples/s", LIMIT, contestants, ratios, job.samples)


def write_samples(work: Path, photos: str | None, samples: int, side: int) -> None:
    """All samples in one array, out of which each contestant writes its own files."""
    path = work / "samples.npy"
    if path.exists() and np.load(path, mmap_mode="r").shape == (samples, side, side, 3):
        return
    unfinished = work / "samples.unfinished.npy"
    rows = np.lib.format.open_memmap(unfinished, "w+", np.uint8, (samples, side, side, 3))
    for start, some in images(photos, samples, side, 64):
        rows[start : start + len(some)] = some
    rows.flush()
    unfinished.rename(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("photos", nargs="?", help="a folder of images; without, images are made")
    parser.add_argument(
        "--latency",
        type=float,
        nargs="+",
        metavar="MS",
        default=[1, 20, 100],
        help="before each answer (1 20 100)",
    )
    parser.add_argument(
        "--order", nargs="+", choices=["shuffled", "stored"], default=["shuffled", "stored"]
    )
    parser.add_argument("--samples", type=int, default=32768)
    parser.add_argument("--side", type=int, default=96, help="pixels (96: 28 kB)")
    parser.add_argument(
        "--shard",
        type=float,
        metavar="MB",
        default=16,
        help="size of a shard, in every format (16)",
    )
    parser.add_argument(
        "--bandwidth", type=float, metavar="MB", default=400, help="of the server, a second (400)"
    )
    parser.add_argument("--quick", action="store_true", help="20 ms, 4,096 samples, 2 rounds")
    parser.add_argument(
        "--work", help="a folder for the files, which stays; else they are written anew and removed"
    )
    add_options(parser)
    given = parser.parse_args()
    if given.quick:
        given.latency, given.samples, given.rounds = [20], 4096, 2
    with work_folder(given.work) as work:
        write_samples(work, given.photos, given.samples, given.side)
        with StreamServer(work) as server:
            rest = (given.bandwidth * 1e6, int(given.shard * 1e6), given.workers)
            sections = [
                section(
                    Job(
                        server.url,
                        work,
                        given.samples,
                        given.side,
                        order == "shuffled",
                        latency / 1000,
                        *rest,
                    )
                )
                for latency in given.latency
                for order in given.order
            ]
            about = (
                f"{given.workers} workers, batches of {BATCH}, {given.samples:,} samples of "
                f"{given.side**2 * 3 / 1000:.1f} kB"
            )
            run_sections(
                sections,
                given,
                f"{about} in shards of {given.shard:g} MB; the server gives {given.bandwidth:g} "
                "MB/s",
            )


if __name__ == "__main__":
    main()
