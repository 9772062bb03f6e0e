"""Measures how long a dataset in mode eager takes to hold many small blocks.

    python benchmarks/eager.py [--blocks 115551] [--rounds 5] [--only NAME ...] [--work FOLDER]
    [--json]

Rows of 16 float32, each a chunk of its own: of an HDF5 file, and of a Zarr store without shards,
where each is a file. A turn opens the dataset and takes the first batch of a block shuffle, by when
all rows are held. Beside it h5py and zarr-python read the array at once. All files are in the page
cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from common import Contestant, Ratio, Section, add_common_options, run_sections
from folders import prepared, work_folder

from headrace import HDF5Dataset, ZarrDataset, create_dataloader

WIDTH, NAME = 16, "rows"


def write_hdf5(folder: Path, blocks: int) -> None:
    rows = np.random.default_rng(0).random((blocks, WIDTH), np.float32)
    with h5py.File(folder / "rows.h5", "w") as file:
        stored = file.create_dataset(NAME, (blocks, WIDTH), np.float32, chunks=(1, WIDTH))
        for number, row in enumerate(rows):
            stored.id.write_direct_chunk((number, 0), row.tobytes())


def write_zarr(folder: Path, blocks: int) -> None:
    import zarr

    rows = np.random.default_rng(0).random((blocks, WIDTH), np.float32)
    group: Any = zarr.open_group(folder / "rows.zarr", mode="w")
    stored = group.create_array(
        NAME, shape=rows.shape, chunks=(1, WIDTH), dtype=rows.dtype, compressors=None
    )
    stored[:] = rows


def eager(path: str, blocks: int) -> Iterator[Any]:
    """Turns from the opening of the file to the first batch."""
    while True:

        def run() -> int:
            cls: Any = HDF5Dataset if path.endswith(".h5") else ZarrDataset
            with cls(path, NAME, loading_mode="eager") as dataset:
                next(iter(create_dataloader(dataset, batch_size=64, shuffle="block", seed=7)))
                held = dataset.held.stats()["held"]
            assert held == blocks, f"{held} of {blocks} are held"
            return blocks

        yield run


def whole_hdf5(path: str, blocks: int) -> Iterator[Any]:
    while True:

        def run() -> int:
            with h5py.File(path, "r") as file:
                assert file[NAME][:].shape == (blocks, WIDTH)
            return blocks

        yield run


def whole_zarr(path: str, blocks: int) -> Iterator[Any]:
    import zarr

    while True:

        def run() -> int:
            group: Any = zarr.open_group(path, mode="r")
            assert group[NAME][:].shape == (blocks, WIDTH)
            return blocks

        yield run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=115_551, help="rows, each a chunk (115,551)")
    parser.add_argument(
        "--work", help="a folder for the files, which stays; else they are written anew and removed"
    )
    add_common_options(parser, rounds="openings that count, after one that doesn't")
    given = parser.parse_args()
    with work_folder(given.work) as work:
        sections = []
        for title, file, write, peer, whole in (
            ("HDF5", "rows.h5", write_hdf5, "h5py, the whole array", whole_hdf5),
            (
                "Zarr, a file a chunk",
                "rows.zarr",
                write_zarr,
                "zarr-python, the whole array",
                whole_zarr,
            ),
        ):
            folder = prepared(
                work,
                f"{file}-{given.blocks}",
                lambda folder, write=write: write(folder, given.blocks),
            )
            arguments = str(folder / file), given.blocks
            contestants = [
                Contestant("headrace, eager", eager, arguments),
                Contestant(peer, whole, arguments),
            ]
            ratio = Ratio(f"{title}: eager / {peer}", "headrace, eager", (peer,))
            sections.append(Section(title, "blocks/s", peer, contestants, [ratio]))
        run_sections(
            sections,
            given,
            f"{given.blocks:,} chunks of {WIDTH * 4} bytes, from opening to the first batch",
        )


if __name__ == "__main__":
    main()
