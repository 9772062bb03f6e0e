"""Compares how fast random samples come out of chunked arrays.

    python benchmarks/arrays.py [PHOTOS] [--side 96 224] [--samples 8192 4096] [--workers N]
    [--rounds 5] [--layouts NAME ...]
                                [--only NAME ...] [--work FOLDER] [--json]

Photographs (those of a folder, again and again until there are enough, or made ones), uint8 [side,
side, 3], in HDF5 files and Zarr stores of several layouts, read in batches of 64 in random order,
and in a block shuffle. Beside headrace stand a plain DataLoader over h5py (`ds[i]`, and one sorted
fancy index a batch), zarr-python (also with the codecs of zarrs, and with its fused pipeline),
xbatcher and tensorstore's own threads; and the limit: `pread` and decode in a bare loop in as many
processes, into buffers that are used again. All files are in the page cache. Contestants that are
slow draw fewer samples an epoch; so do all where a random sample costs a chunk of many.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from array_peers import (
    BATCH,
    FUSED,
    Job,
    Layout,
    bare_loop,
    ours,
    plain,
    sorted_fancy,
    tensorstore_gather,
    xbatcher_rows,
    zarr_rows,
)
from common import Contestant, Ratio, Section, add_options, run_sections
from folders import prepared, work_folder

import headrace

LAYOUTS = [
    Layout("contiguous", None),
    Layout("1 a chunk, raw", 1),
    Layout("16 a chunk, raw", 16),
    Layout("128 a chunk, raw", 128),
    Layout("1 a chunk, gzip", 1, "gzip"),
    Layout("16 a chunk, gzip", 16, "gzip"),
    Layout("128 a chunk, gzip", 128, "gzip"),
    Layout("1 a chunk, zstd", 1, "zstd"),
    Layout("16 a chunk, zstd", 16, "zstd"),
    Layout("128 a chunk, zstd", 128, "zstd"),
    Layout("1 a chunk, blosc", 1, "blosc"),
    Layout("Zarr 2, 1 a chunk, raw", 1, zarr=2),
    Layout("Zarr 3, 1 a chunk, zstd", 1, "zstd", zarr=3),
    Layout("Zarr 3, shards of 256, 1 a chunk, raw", 1, zarr=3, shard=256),
    Layout("Zarr 3, shards of 256, 1 a chunk, zstd", 1, "zstd", zarr=3, shard=256),
    Layout("Zarr 3, shards of 256, 16 a chunk, zstd", 16, "zstd", zarr=3, shard=256),
]

PLUGIN_CODECS = ("zstd", "blosc")
"""Codecs that h5py has from hdf5plugin."""


def images(
    photos: str | None, samples: int, side: int, step: int
) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    """So many images at a time: the first one's number, and [images, side, side, 3]."""
    if photos is not None:
        found = headrace.ImageDataset(
            photos, image_size=side, normalize=False, loading_mode="cached"
        )
        for start in range(0, samples, step):
            some = [found[index % len(found)] for index in range(start, min(start + step, samples))]
            pixels = [one[0] if isinstance(one, tuple) else one for one in some]
            yield start, torch.stack(pixels).permute(0, 2, 3, 1).numpy()
        return
    random = np.random.default_rng(0)
    for start in range(0, samples, step):
        count = min(step, samples - start)
        corners = torch.from_numpy(random.uniform(20, 200, (count, 3, 4, 4)))
        smooth = (
            torch.nn.functional.interpolate(corners, (side, side), mode="bilinear")
            .permute(0, 2, 3, 1)
            .numpy()
        )
        yield (
            start,
            (smooth + random.normal(0, 2, (count, side, side, 1))).clip(0, 255).astype(np.uint8),
        )


def lacks_plugin(layout: Layout) -> bool:
    """True if h5py can't write a layout here."""
    return (
        layout.zarr is None
        and layout.codec in PLUGIN_CODECS
        and importlib.util.find_spec("hdf5plugin") is None
    )


def write_file(folder: Path, photos: str | None, samples: int, side: int, layout: Layout) -> None:
    if layout.zarr is not None:
        write_store(folder / "data.zarr", photos, samples, side, layout)
        return
    with h5py.File(folder / "data.h5", "w", libver="latest") as file:
        chunks = None if layout.rows is None else (min(layout.rows, samples), side, side, 3)
        options: dict[str, Any] = (
            {"compression": "gzip", "compression_opts": 4} if layout.codec == "gzip" else {}
        )
        if layout.codec in PLUGIN_CODECS:
            import hdf5plugin

            options = dict(
                hdf5plugin.Zstd(3)
                if layout.codec == "zstd"
                else hdf5plugin.Blosc("zstd", 3, hdf5plugin.Blosc.SHUFFLE)
            )
        rows = file.create_dataset(
            "data", (samples, side, side, 3), np.uint8, chunks=chunks, **options
        )
        for start, some in images(photos, samples, side, layout.rows or 64):
            rows[start : start + len(some)] = some


def write_store(path: Path, photos: str | None, samples: int, side: int, layout: Layout) -> None:
    import zarr

    compressors = None if layout.codec is None else [zarr.codecs.ZstdCodec(level=3)]
    shards = None if layout.shard is None else (layout.shard, side, side, 3)
    root = zarr.open_group(path, mode="w", zarr_format=layout.zarr)
    shape, chunks = (samples, side, side, 3), (layout.rows, side, side, 3)
    names = ["sample", "y", "x", "channel"]
    more: dict[str, Any] = (
        {"dimension_names": names}
        if layout.zarr == 3
        else {"attributes": {"_ARRAY_DIMENSIONS": names}}
    )
    rows = root.create_array(
        "data",
        shape=shape,
        dtype="u1",
        chunks=chunks,
        shards=shards,
        compressors=compressors,
        **more,
    )
    for start, some in images(photos, samples, side, layout.shard or layout.rows or 64):
        rows[start : start + len(some)] = some


# -- sections

OWN, BLOCK, LIMIT = "headrace", "headrace, block shuffle", "limit: a bare loop"


def zarr_section(job: Job, title: str) -> Section:
    plainly, fused, codecs, gathered, generated = (
        "zarr-python, DataLoader",
        "zarr-python, fused pipeline",
        "zarr-python with zarrs",
        "tensorstore",
        "xbatcher",
    )
    contestants = [
        Contestant(OWN, ours, (job, True)),
        Contestant(BLOCK, ours, (job, "block")),
        Contestant(plainly, zarr_rows, (job,), ("zarr",)),
        Contestant(codecs, zarr_rows, (job, "zarrs"), ("zarrs",)),
        Contestant(gathered, tensorstore_gather, (job,), ("tensorstore",)),
        Contestant(generated, xbatcher_rows, (job,), ("xbatcher",)),
        Contestant(LIMIT, bare_loop, (job,)),
    ]
    pairs = [(OWN, plainly), (OWN, codecs), (OWN, gathered), (OWN, generated), (OWN, LIMIT)]
    if _has_fused_pipeline():
        contestants.insert(3, Contestant(fused, zarr_rows, (job, "fused")))
        pairs.insert(1, (OWN, fused))
    return Section(title, "samples/s", plainly, contestants, _ratios(job, title, pairs, plainly))


def _has_fused_pipeline() -> bool:
    """True for zarr-python from 3.3 on, which wants Python 3.12."""
    import zarr.core.codec_pipeline

    return hasattr(zarr.core.codec_pipeline, FUSED.rpartition(".")[2])


def hdf5_section(job: Job, title: str) -> Section:
    index, fancy = "h5py ds[i]", "h5py sorted fancy"
    contestants = [
        Contestant(OWN, ours, (job, True)),
        Contestant(BLOCK, ours, (job, "block")),
        Contestant(index, plain, (job,)),
        Contestant(LIMIT, bare_loop, (job,)),
    ]
    pairs = [(OWN, index), (OWN, LIMIT)]
    if job.layout.rows is not None:
        contestants.insert(3, Contestant(fancy, sorted_fancy, (job,)))
        pairs.insert(1, (OWN, fancy))
    return Section(title, "samples/s", index, contestants, _ratios(job, title, pairs, index))


def _ratios(job: Job, title: str, pairs: Sequence[tuple[str, str]], naive: str) -> list[Ratio]:
    found = [
        Ratio(f"{title}: {one} / {other.removeprefix('limit: ')}", one, (other,))
        for one, other in pairs
    ]
    if job.layout.codec and job.layout.rows != 1:
        found.append(Ratio(f"{title}: block shuffle / {naive}", BLOCK, (naive,)))
    return found


def section(job: Job) -> Section:
    title = f"{job.layout.name}, {int(np.prod(job.row)) / 1000:.0f} kB"
    return (hdf5_section if job.layout.zarr is None else zarr_section)(job, title)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("photos", nargs="?", help="a folder of images; without, images are made")
    parser.add_argument(
        "--side", type=int, nargs="+", default=[96, 224], help="pixels (96 224: 28 and 151 kB)"
    )
    parser.add_argument(
        "--samples",
        type=int,
        nargs="+",
        default=[8192, 4096],
        help="images of each of these sizes (8192 4096)",
    )
    parser.add_argument(
        "--layouts", nargs="+", metavar="NAME", help="layouts whose names have one of these in them"
    )
    parser.add_argument(
        "--work", help="a folder for the files, which stays; else they are written anew and removed"
    )
    add_options(parser)
    given = parser.parse_args()
    task = f"{given.workers} workers, batches of {BATCH}"
    wanted = [
        layout
        for layout in LAYOUTS
        if not given.layouts or any(part.lower() in layout.name.lower() for part in given.layouts)
    ]
    layouts = [layout for layout in wanted if not lacks_plugin(layout)]
    if len(layouts) < len(wanted):
        task += "; without HDF5 by zstd and blosc, since hdf5plugin is not installed"
    with work_folder(given.work) as work:
        jobs = []
        for side, samples in zip(given.side, given.samples, strict=True):
            for layout in layouts:
                name = f"{layout.name.replace(' ', '-').replace(',', '')}-{side}-{samples}"
                how = (given.photos, samples, side, layout)
                folder = prepared(work, name, lambda folder, how=how: write_file(folder, *how))
                file = folder / ("data.h5" if layout.zarr is None else "data.zarr")
                jobs.append(Job(str(file), samples, side, layout, given.workers))
        run_sections([section(job) for job in jobs], given, task)


if __name__ == "__main__":
    main()
