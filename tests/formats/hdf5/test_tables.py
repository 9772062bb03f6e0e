"""The chunk table of a file is cached, and trusted only where it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from headrace.errors import FormatError
from headrace.formats.hdf5 import chunks as hdf5_chunks
from headrace.formats.hdf5.rows import HDF5Source

DATA = np.arange(60, dtype=np.int32).reshape(20, 3)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The datasets whose chunks were counted; tables are kept from three chunks on."""
    found: list[str] = []
    count = hdf5_chunks._counted

    def noted(dataset: Any, *rest: Any) -> Any:
        found.append(dataset.name)
        return count(dataset, *rest)

    monkeypatch.setattr(hdf5_chunks, "KEPT_FROM", 3)
    monkeypatch.setattr(hdf5_chunks, "_counted", noted)
    return found


def write(path: Path, **datasets: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, data in datasets.items():
            file.create_dataset(name, data=data, chunks=(2, 3), compression="gzip")
    return path


def rows(path: Path, name: str, cache: Path | None = None) -> Any:
    source = HDF5Source(path, name, cache_dir=cache)
    found = np.stack(source.read(range(len(source))))
    source.close()
    return found


def test_a_table_is_counted_once(
    tmp_path: Path, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.h5", x=DATA, y=DATA + 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "not yet" / "there"))
    for cache, folder in (
        (tmp_path / "cache", tmp_path / "cache"),
        (None, tmp_path / "not yet" / "there" / "headrace"),
    ):
        counted.clear()
        for _ in range(2):
            assert np.array_equal(rows(path, "x", cache), DATA)
            assert np.array_equal(rows(path, "y", cache), DATA + 1)
        assert counted == ["/x", "/y"] and len(list(folder.iterdir())) == 2


def test_offsets_beyond_the_file_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, count = write(tmp_path / "a.h5", x=DATA), hdf5_chunks._counted

    def huge(*given: Any) -> Any:
        numbers, table = count(*given)
        table[1, 3] = 1 << 50
        return numbers, table

    monkeypatch.setattr(hdf5_chunks, "_counted", huge)
    with pytest.raises(FormatError, match=r"a\.h5.*chunk \(3, 0\) of 'x'"):
        HDF5Source(path, "x")
