"""Opening HDF5 files: locks, user blocks, and files that can't be read."""

from __future__ import annotations

import errno
import fcntl
import os
import tarfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from headrace import (
    AccessError,
    FileChangedError,
    FormatError,
    HDF5Dataset,
    create_dataloader,
    open_dataset,
)
from headrace.storage.hdf5.files import is_hdf5

pytestmark = pytest.mark.slow

DATA = np.arange(60, dtype=np.int32).reshape(20, 3)


def write(path: Path, data: Any = DATA, **options: Any) -> Path:
    with h5py.File(path, "w", **options) as file:
        file["data"] = data
        file.create_dataset("gzip", data=data, chunks=(4, 3), compression="gzip")
        file.create_dataset("raw", data=data, chunks=(4, 3))
        file.create_dataset("lzf", data=data, chunks=(4, 3), compression="lzf")
        file.create_dataset("scaled", data=data, chunks=(4, 3), scaleoffset=0)
        file["text"] = [f"row {i}" for i in data[:, 0]]
        file.create_dataset("unwritten", data.shape, "i4")
    return path


# -- locks


def test_a_lock_of_a_writer_is_respected(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5")
    with open(path, "rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)  # as HDF5 does when it opens a file for writing
        with pytest.raises(
            AccessError,
            match=(
                r"a\.h5 is locked: another process has it open for writing: wait until it has "
                r"closed"
            ),
        ):
            HDF5Dataset(path)
        with pytest.raises(AccessError, match=r"a\.h5 is locked"):
            HDF5Dataset(linked(tmp_path), "data")
    assert HDF5Dataset(path)[1].tolist() == [3, 4, 5]


def linked(folder: Path) -> Path:
    with h5py.File(folder / "linked.h5", "w") as file:
        file["data"] = h5py.ExternalLink("a.h5", "data")
    return folder / "linked.h5"


@pytest.mark.parametrize(
    "number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EAGAIN, errno.EINTR]
)
def test_only_a_disk_without_locks_is_read_without(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = write(tmp_path / "a.h5"), h5py.File
    said = (
        f"Unable to synchronously open file (unable to lock file, errno = {number}, error message "
        f"= '{os.strerror(number)}')"
    )

    class NoLocks(opened):  # type: ignore[misc, valid-type]
        def __init__(self, name: Any, mode: str = "r", locking: Any = None, **options: Any) -> None:
            if locking is not False:
                raise OSError(number, said)
            super().__init__(name, mode, locking=locking, **options)

    monkeypatch.setattr(h5py, "File", NoLocks)
    if number in (errno.EAGAIN, errno.EINTR):
        with pytest.raises(AccessError, match=r"a\.h5 is locked|a\.h5 can't be locked"):
            HDF5Dataset(path)
    else:
        assert HDF5Dataset(path)[1].tolist() == [3, 4, 5]


# -- versions


@pytest.mark.quick_every(7)
@pytest.mark.parametrize("name", ["data", "gzip", "raw", "lzf", "scaled", "text", "unwritten"])
@pytest.mark.parametrize("how", ["rewritten", "replaced"])
def test_a_changed_file_is_an_error_on_every_path(tmp_path: Path, name: str, how: str) -> None:
    path = write(tmp_path / "a.h5")
    os.utime(path, ns=(1, 1))
    dataset = HDF5Dataset(path, name, on_error="skip")
    dataset[2]
    other = write(tmp_path / "b.h5", DATA + 1)
    if how == "rewritten":
        path.write_bytes(other.read_bytes())
    else:
        dataset.close()  # as a worker has it, which opens it later
        os.replace(other, path)
    with pytest.raises(FileChangedError, match=r"a\.h5 has been changed since it was opened"):
        dataset[19]
    dataset.close()


def test_a_file_replaced_before_workers_read_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5")
    os.utime(path, ns=(1, 1))
    loader = create_dataloader(
        HDF5Dataset(path, "text", on_error="skip"), batch_size=4, num_workers=1
    )
    os.replace(write(tmp_path / "b.h5", DATA + 1), path)
    with pytest.raises(FileChangedError, match=r"a\.h5 has been changed"):
        list(loader)


# -- user blocks


@pytest.mark.parametrize("userblock", [512, 1024, 4096])
def test_a_user_block_may_come_first(tmp_path: Path, userblock: int) -> None:
    path = write(tmp_path / "a.mat", userblock_size=userblock)
    with open(path, "r+b") as file:
        file.write(b"MATLAB 7.3 MAT-file".ljust(116) + bytes(8) + b"\0\2IM")
    assert is_hdf5(path)
    for name in ("data", "gzip", "raw", "lzf"):
        dataset = HDF5Dataset(path, name)
        assert all(np.array_equal(dataset[i], DATA[i]) for i in range(20))
    assert isinstance(open_dataset(path), HDF5Dataset)


def test_offsets_after_a_user_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As some versions of HDF5 counted them."""
    from headrace.storage.hdf5 import chunks as hdf5_chunks

    path, counted = write(tmp_path / "a.h5", userblock_size=512), hdf5_chunks._counted

    def relative(*arguments: Any) -> Any:
        numbers, table = counted(*arguments)
        table[0] -= 512
        return numbers, table

    monkeypatch.setattr(hdf5_chunks, "_counted", relative)
    for name in ("gzip", "raw"):
        dataset = HDF5Dataset(path, name)
        assert (
            np.array_equal(dataset[7], DATA[7])
            and "HDF5 lists its chunks without" in dataset.explain()
        )


def test_a_tar_of_hdf5_files_is_no_hdf5_file(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        tar.add(write(tmp_path / "a.h5"), "a.h5")
    assert (tmp_path / "a.tar").read_bytes()[512:520] == b"\x89HDF\r\n\x1a\n" and not is_hdf5(
        tmp_path / "a.tar"
    )


# -- files that can't be read


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="needs a file whose reading fails")
def test_a_file_that_can_not_be_read_says_so(tmp_path: Path) -> None:
    os.symlink("/proc/self/mem", tmp_path / "a.h5")  # reading its first bytes is an I/O error
    for open_it in (HDF5Dataset, open_dataset):
        with pytest.raises(
            AccessError, match=r"a\.h5 can't be read: Input/output error: .*disk or the mount"
        ):
            open_it(tmp_path / "a.h5")


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_disk_that_fails_is_no_damage_of_a_file(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.h5")
    said = OSError(
        number, f"Unable to synchronously open file (file read failed: errno = {number})"
    )
    dataset, text, opened = HDF5Dataset(path, "lzf"), os.strerror(number), h5py.File

    def fail(*_: Any, **__: Any) -> Any:
        raise said

    with monkeypatch.context() as patched:
        patched.setattr(h5py.Dataset, "__getitem__", fail)
        with pytest.raises(OSError, match=rf"can't be read: {text}"):
            dataset[3]
    monkeypatch.setattr(h5py, "File", type("File", (opened,), {"__init__": fail}))
    with pytest.raises(AccessError, match=rf"a\.h5 can't be read: {text}"):
        HDF5Dataset(path)
    (tmp_path / "words.h5").write_text("words")
    with pytest.raises(FormatError, match=r"words\.h5 is no HDF5 file, whatever its name says"):
        HDF5Dataset(tmp_path / "words.h5")
    (tmp_path / "classic.nc").write_bytes(b"CDF\x01" + bytes(28))
    with pytest.raises(
        FormatError,
        match=r"classic\.nc is a netCDF-3 file, and no HDF5 file: convert it to netCDF-4",
    ):
        HDF5Dataset(tmp_path / "classic.nc")
