"""Opening HDF5 files: locks, user blocks, and files that can't be read."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from headrace import AccessError, FileChangedError, FormatError, HDF5Dataset, open_dataset
from headrace.formats.hdf5 import chunks as hdf5_chunks, is_hdf5
from headrace.formats.hdf5.rows import HDF5Source

DATA = np.arange(60, dtype=np.int32).reshape(20, 3)


def write(path: Path, data: Any = DATA, **options: Any) -> Path:
    with h5py.File(path, "w", **options) as file:
        file["data"] = data
        file.create_dataset("gzip", data=data, chunks=(4, 3), compression="gzip")
        file.create_dataset("raw", data=data, chunks=(4, 3))
        file.create_dataset("lzf", data=data, chunks=(4, 3), compression="lzf")
        file["text"] = [f"row {i}" for i in data[:, 0]]
        file.create_dataset("unwritten", data.shape, "i4")
    return path


# -- locks


def test_a_lock_of_a_writer_is_respected(tmp_path: Path) -> None:
    path, linked = write(tmp_path / "a.h5"), tmp_path / "linked.h5"
    with h5py.File(linked, "w") as file:
        file["data"] = h5py.ExternalLink("a.h5", "data")
    with open(path, "rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)  # as HDF5 does when it opens a file for writing
        for opened in (path, linked):
            with pytest.raises(AccessError, match=r"a\.h5 is locked"):
                HDF5Dataset(opened, "data")
    assert HDF5Dataset(path)[1].tolist() == [3, 4, 5]


def test_only_a_disk_without_locks_is_read_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = write(tmp_path / "a.h5"), h5py.File

    class NoLocks(opened):  # type: ignore[misc, valid-type]
        number = 0

        def __init__(self, name: Any, mode: str = "r", locking: Any = None, **options: Any) -> None:
            if locking is not False:
                said = f"unable to lock file, errno = {self.number}, error message = '?'"
                raise OSError(self.number, said)
            super().__init__(name, mode, locking=locking, **options)

    monkeypatch.setattr(h5py, "File", NoLocks)
    for NoLocks.number in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
        assert HDF5Dataset(path)[1].tolist() == [3, 4, 5]
    for NoLocks.number in (errno.EAGAIN, errno.EINTR):
        with pytest.raises(AccessError, match=r"a\.h5"):
            HDF5Dataset(path)


# -- versions


@pytest.mark.parametrize("how", ["rewritten", "replaced"])
def test_a_changed_file_is_an_error_on_every_path(tmp_path: Path, how: str) -> None:
    for name in ("data", "gzip", "raw", "lzf", "text", "unwritten"):
        path = write(tmp_path / f"{name}.h5")
        os.utime(path, ns=(1, 1))
        dataset = HDF5Dataset(path, name, on_error="skip")
        dataset[2]
        other = write(tmp_path / "b.h5", DATA + 1)
        if how == "rewritten":
            path.write_bytes(other.read_bytes())
        else:
            dataset.close()  # as a worker has it, which opens it later
            os.replace(other, path)
        with pytest.raises(FileChangedError, match=rf"{name}\.h5"):
            dataset[19]
        dataset.close()


# -- user blocks


def test_a_user_block_may_come_first(tmp_path: Path) -> None:
    for userblock in (512, 4096):
        path = write(tmp_path / f"{userblock}.mat", userblock_size=userblock)
        with open(path, "r+b") as file:
            file.write(b"MATLAB 7.3 MAT-file".ljust(116) + bytes(8) + b"\0\2IM")
        for name in ("data", "gzip", "raw", "lzf"):
            with HDF5Dataset(path, name) as dataset:
                assert np.array_equal(np.stack(list(dataset)), DATA), name
        assert is_hdf5(path) and isinstance(open_dataset(path), HDF5Dataset)


# -- files that can't be read


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="needs a file whose reading fails")
def test_a_file_that_can_not_be_read_says_so(tmp_path: Path) -> None:
    os.symlink("/proc/self/mem", tmp_path / "a.h5")  # reading its first bytes is an I/O error
    for open_it in (HDF5Dataset, open_dataset):
        with pytest.raises(AccessError, match=r"a\.h5.*Input/output error"):
            open_it(tmp_path / "a.h5")


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_disk_that_fails_is_no_damage_of_a_file(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, text = write(tmp_path / "a.h5"), os.strerror(number)
    dataset, opened = HDF5Dataset(path, "lzf"), h5py.File

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, f"Unable to open file (file read failed: errno = {number})")

    with monkeypatch.context() as patched:
        patched.setattr(h5py.Dataset, "__getitem__", fail)
        with pytest.raises(OSError, match=text):
            dataset[3]
    monkeypatch.setattr(h5py, "File", type("File", (opened,), {"__init__": fail}))
    with pytest.raises(AccessError, match=rf"a\.h5.*{text}"):
        HDF5Dataset(path)
    monkeypatch.undo()
    for name, content in (("a netCDF-3 file.nc", b"CDF\x01" + bytes(28)), ("words.h5", b"words")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(FormatError, match=name):
            HDF5Dataset(tmp_path / name)


def test_offsets_beyond_the_file_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, count = write(tmp_path / "a.h5"), hdf5_chunks._counted

    def huge(*given: Any) -> Any:
        numbers, table = count(*given)
        table[1, 3] = 1 << 50
        return numbers, table

    monkeypatch.setattr(hdf5_chunks, "_counted", huge)
    with pytest.raises(FormatError, match=r"a\.h5.*chunk \(3, 0\) of 'gzip'"):
        HDF5Source(path, "gzip")
