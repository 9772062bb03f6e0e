"""HDF5 files that other libraries wrote give what these libraries read."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import hdf5plugin  # noqa: F401  (for h5py: blosc2 and bzip2)
import numpy as np
import pytest
import torch

from headrace import FormatError, HDF5Dataset, create_dataloader

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parent / "foreign_files.py"
PACKAGES = {"netcdf4": "netCDF4", "pytables": "tables", "anndata": "anndata", "matlab": "h5py"}
DATASETS = {"netcdf4": 19, "pytables": 29, "anndata": 27, "matlab": 6}


@pytest.mark.parametrize("kind", PACKAGES)
def test_files_of_other_libraries(tmp_path: Path, kind: str) -> None:
    if importlib.util.find_spec(PACKAGES[kind]) is None:
        pytest.skip(
            f"{PACKAGES[kind]} is not installed: pip install -c constraints.txt -e '.[integration]'"
        )
    run = subprocess.run(
        [sys.executable, SCRIPT, kind, tmp_path], capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 0, run.stderr
    expected = pickle.loads((tmp_path / "expected.pickle").read_bytes())
    assert len(expected) >= DATASETS[kind]
    wrong = []
    for (file, name), rows in expected.items():
        for direct in (True, False):
            if rows is None:
                with pytest.raises(FormatError):
                    HDF5Dataset(tmp_path / file, name, direct=direct)
                continue
            dataset = HDF5Dataset(tmp_path / file, name, direct=direct)
            for batch in create_dataloader(list(range(len(dataset))), batch_size=7, seed=1):
                found = dataset.__getitems__(batch.tolist())
                if not all(
                    same(sample, rows[index])
                    for index, sample in zip(batch.tolist(), found, strict=True)
                ):
                    wrong.append((file, name, direct, dataset.explain()))
                    break
            assert len(dataset) == len(rows)
            dataset.close()
    assert not wrong


def same(sample: Any, row: Any) -> bool:
    """Is a sample the row that the library gives, bit by bit?"""
    if isinstance(sample, dict):
        return all(same(value, row[name]) for name, value in sample.items())
    if isinstance(sample, (str, list)):
        return bool(sample == (row.decode() if isinstance(row, bytes) else row))
    assert isinstance(sample, torch.Tensor)
    ours, theirs = sample.numpy(), np.asarray(row)
    if theirs.dtype != ours.dtype:  # truth values are bits in the file; and the other byte order
        theirs = theirs.astype(ours.dtype)
    return ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes()
