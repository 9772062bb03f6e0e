"""Workers start on arrays by every start method, whatever the parent has read before, and never
hang.

Each round is a new iterator with new workers, all of whose batches are compared. Before and in
between the parent reads from the dataset, through the library that may not survive a fork.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numcodecs
import numpy as np
import pytest
import torch
import zarr

from headrace import HDF5Dataset, ZarrDataset

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROWS = np.random.default_rng(1).integers(0, 256, (24, 9, 7), dtype=np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of each kind."""
    folder = tmp_path_factory.mktemp("rounds")
    packed = {"chunks": (2, 9, 7), "compression": "gzip", "shuffle": True, "fletcher32": True}
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("data", data=ROWS, **packed)
    root = zarr.open_group(folder / "2.zarr", mode="w", zarr_format=2)
    root.create_array("data", data=ROWS, chunks=(2, 9, 7), compressors=numcodecs.Zstd(3))
    root = zarr.open_group(folder / "3.zarr", mode="w")
    root.create_array("data", data=ROWS, chunks=(2, 9, 7), shards=(8, 9, 7))
    return folder


def read_here(folder: Path, dataset: Any) -> None:
    dataset.__getitems__([1, 5, 3])
    with h5py.File(folder / "a.h5") as file:
        assert np.array_equal(file["data"][3], ROWS[3])
    assert np.array_equal(zarr.open_group(folder / "2.zarr", mode="r")["data"][3], ROWS[3])


@pytest.mark.parametrize(
    ("method", "rounds"),
    [
        ("fork", 4),
        pytest.param("fork", 20, marks=pytest.mark.nightly),
        pytest.param("forkserver", 1, marks=pytest.mark.nightly),
        pytest.param("spawn", 1, marks=pytest.mark.nightly),
    ],
)
def test_workers_start_over_and_over(
    folder: Path, make_loader: Any, method: str, rounds: int
) -> None:
    expected = sorted(row.tobytes() for row in ROWS)
    for name in ("a.h5", "2.zarr", "3.zarr"):
        cls = HDF5Dataset if name == "a.h5" else ZarrDataset
        dataset = cls(folder / name, "data", direct=False)
        read_here(folder, dataset)
        options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": method}
        for turn in range(rounds):
            loader = make_loader(dataset, batch_size=5, shuffle=True, seed=turn, **options)
            found = torch.cat(list(loader)).numpy()
            loader.close()
            assert sorted(row.tobytes() for row in found) == expected, (name, turn)
        read_here(folder, dataset)
        dataset.close()
