"""Tables and packed numbers that other libraries wrote give what these libraries read of them."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import hdf5plugin  # noqa: F401  (for h5py: blosc)
import numpy as np
import pytest
import torch

from headrace import FormatError, HDF5Dataset

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parent / "foreign_tables.py"
PACKAGES = {
    "pandas": ("pandas", "tables"),
    "xarray": ("xarray", "netCDF4"),
    "pytables": ("tables",),
}
CASES = {"pandas": 13, "xarray": 60, "pytables": 5}


@pytest.mark.parametrize("kind", PACKAGES)
def test_tables_of_other_libraries(tmp_path: Path, kind: str) -> None:
    if missing := [
        package for package in PACKAGES[kind] if importlib.util.find_spec(package) is None
    ]:
        pytest.skip(
            f"{missing[0]} is not installed: pip install -c constraints.txt -e '.[integration]'"
        )
    run = subprocess.run(
        [sys.executable, SCRIPT, kind, tmp_path], capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 0, run.stderr
    cases = pickle.loads((tmp_path / "expected.pickle").read_bytes())
    assert len(cases) >= CASES[kind]
    wrong = []
    for file, options, samples in cases:
        for direct in (True, False):
            with HDF5Dataset(tmp_path / file, direct=direct, **options) as dataset:
                assert len(dataset) == len(samples), (file, options)
                found = dataset.__getitems__(
                    np.random.default_rng(0).permutation(len(dataset)).tolist()
                )
                for index, sample in zip(
                    np.random.default_rng(0).permutation(len(dataset)).tolist(), found, strict=True
                ):
                    if not same(sample, samples[index]):
                        wrong.append((file, options, index, sample, samples[index]))
                        break
    assert not wrong, wrong[:3]


@pytest.mark.skipif(importlib.util.find_spec("tables") is None, reason="PyTables is not installed")
def test_objects_of_pandas_are_refused(tmp_path: Path) -> None:
    subprocess.run([sys.executable, SCRIPT, "pandas", tmp_path], check=True, timeout=200)
    with pytest.raises(
        FormatError, match=r"'word' holds Python objects as a pickle, .* format='table'"
    ):
        HDF5Dataset(tmp_path / "objects.h5", "df")


def same(sample: Any, row: Any) -> bool:
    """True if a sample is what the library gives, bit by bit, but for the byte order, and NaN."""
    if isinstance(row, tuple):
        return all(map(same, sample, row))
    if isinstance(row, dict):
        return list(sample) == list(row) and all(
            same(value, row[name]) for name, value in sample.items()
        )
    if isinstance(row, str):
        return bool(sample == row)
    ours, theirs = (
        sample.numpy() if isinstance(sample, torch.Tensor) else np.asarray(sample),
        np.asarray(row),
    )
    kinds = ours.dtype == theirs.dtype.newbyteorder("=")
    return (
        kinds
        and ours.shape == theirs.shape
        and np.array_equal(ours, theirs, equal_nan=ours.dtype.kind == "f")
    )
