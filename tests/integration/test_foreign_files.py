"""HDF5 files that other libraries wrote give what these libraries read, and `headrace info` tells
who wrote them.
"""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import hdf5plugin  # noqa: F401  (for h5py: blosc, blosc2 and bzip2)
import numpy as np
import pytest

from headrace import HDF5Dataset

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

HERE = Path(__file__).parent
FILES = {"netcdf4": ("netCDF4", 19), "pytables": ("tables", 20)}
"""Package and least number of arrays of each kind of foreign_files.py."""


def written(script: str, kind: str, package: str, folder: Path) -> Any:
    """What a script has written into a folder, as the library itself reads it."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is missing: pip install -c constraints.txt -e '.[integration]'")
    command = [sys.executable, HERE / script, kind, folder]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    return pickle.loads((folder / "expected.pickle").read_bytes())


def same(sample: Any, row: Any) -> bool:
    """True if a sample is the row that the library gives, bit by bit."""
    if isinstance(sample, dict):
        return all(same(value, row[name]) for name, value in sample.items())
    if isinstance(sample, tuple):
        return all(map(same, sample, row))
    if isinstance(sample, str | list):
        return bool(sample == (row.decode() if isinstance(row, bytes) else row))
    ours, theirs = np.asarray(sample), np.asarray(row)
    if theirs.dtype != ours.dtype:  # truth values are bits in the file; and the other byte order
        theirs = theirs.astype(ours.dtype)
    if ours.shape != theirs.shape:
        return False
    is_float = ours.dtype.kind == "f"  # a library may make another NaN
    return ours.tobytes() == theirs.tobytes() or np.array_equal(ours, theirs, equal_nan=is_float)


def wrong_row(dataset: Any, rows: list[Any]) -> int | None:
    """The first row of a shuffled epoch that is another one."""
    assert len(dataset) == len(rows)
    order = np.random.default_rng(0).permutation(len(rows))
    for indices in np.array_split(order, len(rows) // 7 + 1):
        for index, sample in zip(indices, dataset.__getitems__(indices.tolist()), strict=True):
            if not same(sample, rows[index]):
                return int(index)
    return None


@pytest.mark.parametrize("kind", FILES)
def test_arrays_of_other_libraries(tmp_path: Path, kind: str) -> None:
    package, least = FILES[kind]
    expected = written("foreign_files.py", kind, package, tmp_path)
    assert len(expected) >= least
    for (file, name), rows in expected.items():
        for direct in (True, False):
            with HDF5Dataset(tmp_path / file, name, direct=direct) as dataset:
                assert wrong_row(dataset, rows) is None, (file, name, dataset.explain())
