"""Starts workers over and over on HDF5 files and Zarr stores, and compares every batch.

    python tests/datasets/rounds.py [--rounds 50] [--methods fork forkserver spawn] [--kinds NAME
    ...]

Each round is a new iterator with new workers; in every second combination the parent has read from
the dataset before they start, both itself and through the library that may not survive a fork. A
round that takes longer than --patience seconds is a hang: the stacks of all threads are printed,
and the exit status is 1.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import h5py
import numcodecs
import numpy as np
import torch
import zarr

from headrace import HDF5Dataset, ZarrDataset, create_dataloader

ROWS = np.random.default_rng(1).integers(0, 256, (24, 9, 7), dtype=np.uint8)
KINDS = [
    "h5",
    "h5 by h5py",
    "zarr 2",
    "zarr 2 by zarr-python",
    "zarr 3 in shards",
    "zarr 3 in shards by zarr-python",
]
METHODS = ["fork", "forkserver", "spawn"]


def write(folder: Path) -> None:
    """A file of each kind."""
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset(
            "data", data=ROWS, chunks=(2, 9, 7), compression="gzip", shuffle=True, fletcher32=True
        )
    root = zarr.open_group(folder / "2.zarr", mode="w", zarr_format=2)
    root.create_array(
        "data", shape=ROWS.shape, dtype="u1", chunks=(2, 9, 7), compressors=numcodecs.Zstd(3)
    )[...] = ROWS
    root = zarr.open_group(folder / "3.zarr", mode="w")
    root.create_array("data", shape=ROWS.shape, dtype="u1", chunks=(2, 9, 7), shards=(8, 9, 7))[
        ...
    ] = ROWS


def dataset(folder: Path, kind: str) -> Any:
    direct = " by " not in kind
    if kind.startswith("h5"):
        return HDF5Dataset(folder / "a.h5", direct=direct)
    return ZarrDataset(
        folder / ("2.zarr" if kind.startswith("zarr 2") else "3.zarr"), "data", direct=direct
    )


def run(
    folder: Path, kind: str, method: str, has_read: bool, rounds: int, patience: float
) -> float:
    """Runs the rounds of one combination; gives the seconds of the longest.

    Raises:
        AssertionError: a batch is wrong.
    """
    data = dataset(folder, kind)
    if has_read:
        data.__getitems__([1, 5, 3])
        with h5py.File(folder / "a.h5") as file:
            assert np.array_equal(file["data"][3], ROWS[3])
        assert np.array_equal(zarr.open_group(folder / "2.zarr", mode="r")["data"][3], ROWS[3])
    longest = 0.0
    for turn in range(rounds):
        faulthandler.dump_traceback_later(patience, exit=True)
        start = time.perf_counter()
        options: dict[str, Any] = {
            "num_workers": 2,
            "persistent_workers": False,
            "multiprocessing_context": method,
        }
        loader = create_dataloader(data, batch_size=5, shuffle=True, seed=turn, **options)
        found = torch.cat(list(loader)).numpy()
        loader.close()
        assert sorted(row.tobytes() for row in found) == sorted(row.tobytes() for row in ROWS), (
            kind,
            method,
            has_read,
            turn,
        )
        if has_read and turn % 5 == 0:
            assert np.array_equal(data[turn % len(ROWS)], ROWS[turn % len(ROWS)])
        longest = max(longest, time.perf_counter() - start)
    faulthandler.cancel_dump_traceback_later()
    data.close()
    return longest


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Starts workers over and over on HDF5 files and Zarr stores."
    )
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument(
        "--patience", type=float, default=60, help="seconds after which a round hangs"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        for method, kind, has_read in itertools.product(given.methods, given.kinds, (False, True)):
            longest = run(Path(folder), kind, method, has_read, given.rounds, given.patience)
            said = {
                "method": method,
                "kind": kind,
                "parent_has_read": has_read,
                "rounds": given.rounds,
                "longest": round(longest, 2),
            }
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
