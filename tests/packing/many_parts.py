"""Measures how long a pack of many finished parts takes to find that nothing is left to do.

Makes such a pack first: of images (one file, read by as many names) or of arrays, each part of one
sample, packed by `pack` itself without waiting for the disk. Prints the seconds of the same command
again, in this process, where all is imported and nothing is cached but the system's pages; and with
--profile where they went. Not a test: ``python -m tests.packing.many_parts FOLDER --parts 10000``.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import time
from pathlib import Path

import h5py
import numpy as np
from PIL import Image

from headrace import HDF5Dataset, ImageDataset, pack
from headrace.datasets import BaseDataset
from headrace.packing import pack_status


def make_source(folder: Path, kind: str, count: int) -> Path:
    """So many samples: images in ten class folders, or an HDF5 file."""
    if kind == "arrays":
        with h5py.File(folder / "arrays.h5", "w") as file:
            file["data"] = np.arange(4 * count, dtype=np.float32).reshape(count, 4)
        return folder / "arrays.h5"
    Image.new("RGB", (8, 8), (200, 30, 90)).save(folder / "one.png")
    for number in range(count):
        path = folder / "images" / f"class{number % 10}" / f"{number:06d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        os.link(folder / "one.png", path)
    return folder / "images"


def opened(source: Path) -> BaseDataset:
    """The dataset of a source."""
    return ImageDataset(source) if source.is_dir() else HDF5Dataset(source)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parts", type=int, default=10_000)
    parser.add_argument("--kind", choices=("images", "arrays"), default="images")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    source, out = given.folder / given.kind, given.folder / f"packed-{given.kind}"
    if given.kind == "arrays":
        source = source.with_suffix(".h5")
    if not out.exists():
        os.fsync = lambda fd: None  # type: ignore[assignment]
        start = time.perf_counter()
        source = make_source(given.folder, given.kind, given.parts)
        with opened(source) as dataset:
            pack(dataset, out, shard_size=1, workers=1, progress=False)
        print(f"made {pack_status(out).parts:,} parts in {time.perf_counter() - start:.1f} s")
    for _ in range(3):
        with opened(source) as dataset:
            start, cpu = time.perf_counter(), time.process_time()
            pack(dataset, out, shard_size=1, workers=1, progress=False)
        print(
            f"nothing left to pack after {time.perf_counter() - start:.3f} s, "
            f"{time.process_time() - cpu:.3f} s of them on a core"
        )
    if given.profile:
        with opened(source) as dataset, cProfile.Profile() as profile:
            pack(dataset, out, shard_size=1, workers=1, progress=False)
        pstats.Stats(profile).sort_stats("cumulative").print_stats(25)


if __name__ == "__main__":
    main()
