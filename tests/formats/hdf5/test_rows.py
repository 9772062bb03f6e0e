"""What an HDF5 source tells of a file beside its rows, and the errors that name the place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from headrace.errors import DataNotFoundError, FileChangedError, FormatError, MissingNameError
from headrace.formats.hdf5 import is_hdf5
from headrace.formats.hdf5.files import packed_info
from headrace.formats.hdf5.rows import HDF5Source

N = 12
DATA = np.random.default_rng(1).integers(-99, 99, (N, 5)).astype("i4")


def write(path: Path, array: Any = DATA, **how: Any) -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=array, **how)
    return path


def test_rows_without_bytes_and_files_without_rows(tmp_path: Path) -> None:
    rows = HDF5Source(write(tmp_path / "a.h5", np.empty((N, 0), "f4")), "x").read(range(N))
    assert [(row.shape, row.dtype) for row in rows] == [((0,), np.float32)] * N
    empty = HDF5Source(write(tmp_path / "b.h5", np.empty((0, 3), "f4")), "x")
    assert len(empty) == 0 and empty.read([]) == [] and len(empty.blocks()) == 0


def test_fingerprints_tell_layouts_apart_and_not_places(tmp_path: Path) -> None:
    first = HDF5Source(write(tmp_path / "a.h5"), "x").fingerprint()
    assert HDF5Source(write(tmp_path / "b.h5", DATA + 1), "x").fingerprint() == first
    others = [
        write(tmp_path / "c.h5", DATA[1:]),
        write(tmp_path / "d.h5", chunks=(1, 5)),
        write(tmp_path / "e.h5", DATA.astype("f4")),
    ]
    assert len({first, *(HDF5Source(path, "x").fingerprint() for path in others)}) == 4


def test_names_and_columns(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["data"] = np.zeros((4, 2))
        file["deep/good"] = np.arange(4)
        file["short"] = np.arange(3)
        file["one"] = 1
    source = HDF5Source(tmp_path / "a.h5")
    assert source.column("deep/good").tolist() == [0, 1, 2, 3]
    for name in ("short", "one"):
        with pytest.raises(FormatError, match=f"'{name}'"):
            source.column(name)
    with pytest.raises(FormatError, match="'one'"):
        HDF5Source(tmp_path / "a.h5", "one")
    for name in ("none", "deep"):  # a group is none
        with pytest.raises(MissingNameError, match=rf"'{name}'.*: data, deep/good, one, short"):
            HDF5Source(tmp_path / "a.h5", name)
    with pytest.raises(KeyError, match="data, deep/good, one, short"):
        source.column("none")


def test_files_that_are_cut_short_or_are_none(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", np.ones((N, 5000), "u1"))
    source = HDF5Source(path, "x")
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(FileChangedError, match=r"a\.h5"):
        source.read([N - 1])
    source.close()
    with pytest.raises(FormatError, match=r"a\.h5.*truncated"):
        HDF5Source(path, "x")
    (tmp_path / "words.h5").write_text("words")
    for name in ("words.h5", "none.h5", ""):
        assert not is_hdf5(tmp_path / name)
    with pytest.raises(FormatError, match=r"words\.h5"):
        HDF5Source(tmp_path / "words.h5")
    with pytest.raises(DataNotFoundError, match=r"none\.h5"):
        HDF5Source(tmp_path / "none.h5")


def test_what_a_packed_file_says_is_checked(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5")
    assert packed_info(path) is None
    for text in ("{", "[]", '{"version": 1}', '{"version": 99}'):
        with h5py.File(path, "a") as file:
            file.attrs["headrace"] = text
        with pytest.raises(FormatError, match=r"a\.h5.*(damaged|upgrade)"):
            packed_info(path)
