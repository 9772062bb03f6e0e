"""Whole files below a folder come as they are, with what is missing, changed or no file said."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.errors import FileChangedError, FormatError
from headrace.io.handles import WorkerFiles
from headrace.io.local import folders
from headrace.io.local.files import changed
from headrace.io.local.folders import FolderReader
from headrace.io.local.hints import HINTS

pytestmark = pytest.mark.skipif(
    not folders.IS_SUPPORTED, reason="names are looked up from a descriptor"
)
Make = Callable[..., FolderReader]


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Make]:
    descriptors: WorkerFiles[int] = WorkerFiles()

    def make(folder: str = "a", latest: int | None = None) -> FolderReader:
        return FolderReader(
            descriptors,
            str(tmp_path / folder),
            time.time_ns() + 10**9 if latest is None else latest,
            changed,
        )

    yield make
    descriptors.close()


def write(folder: Path, count: int) -> list[str]:
    """As many files, of which each has as many bytes as its number."""
    for number in range(count):
        file = folder / "a" / f"{number}" / "0"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes([number]) * number)
    return [f"{number}/0" for number in range(count)]


@pytest.mark.parametrize("hinted", [False, True])
def test_files_come_in_the_order_asked_for(
    tmp_path: Path, reader: Make, hinted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HINTS, "_left", 5 if hinted else 0)
    names = write(tmp_path, 70)[::-1]
    assert reader().read(names) == [bytes([number]) * number for number in range(70)][::-1]
    buffers = [memoryview(bytearray(number)) for number in range(70)][::-1]
    assert reader().read_into(names, buffers) == list(range(70))[::-1]
    assert [buffer.tobytes() for buffer in buffers] == [
        bytes([number]) * number for number in range(70)
    ][::-1]


def test_missing_files_and_folders(tmp_path: Path, reader: Make) -> None:
    write(tmp_path, 3)
    assert reader().read(["1/0", "7/0", "2/0/0", "2/0"]) == [b"\1", None, None, b"\2\2"]
    assert reader().read_into(["1/0", "7/0"], [memoryview(bytearray(1))] * 2) == [1, -1]
    assert reader("b").read(["1/0"]) == [None]
    assert reader("a/1/0").read(["x"]) == [None]


def test_files_of_another_length_are_not_read(tmp_path: Path, reader: Make) -> None:
    write(tmp_path, 4)
    buffers = [memoryview(bytearray(2)) for _ in range(3)]
    assert reader().read_into(["1/0", "2/0", "3/0"], buffers) == [1, 2, 3]
    assert [buffer.tobytes() for buffer in buffers] == [b"\0\0", b"\2\2", b"\0\0"]


def test_changed_files_and_folders_are_errors(tmp_path: Path, reader: Make) -> None:
    write(tmp_path, 4)
    latest = (tmp_path / "a" / "1" / "0").stat().st_mtime_ns
    os.utime(tmp_path / "a" / "2" / "0", ns=(latest + 1, latest + 1))
    assert reader(latest=latest).read(["1/0"]) == [b"\1"]
    with pytest.raises(FileChangedError, match="a/2/0 has been changed"):
        reader(latest=latest).read(["1/0", "2/0"])
    with pytest.raises(IsADirectoryError, match="a/1"):
        reader().read(["1"])
    with pytest.raises(IsADirectoryError, match="a/1"):
        reader().read_into(["1"], [memoryview(bytearray(9))])


def test_no_descriptor_is_left_open(tmp_path: Path, reader: Make) -> None:
    names = write(tmp_path, 40)
    reader().read(names)  # which opens the folder
    before = len(os.listdir("/dev/fd"))
    reader().read(names)
    with pytest.raises(IsADirectoryError):
        reader().read([*names[:5], "1", *names])
    assert len(os.listdir("/dev/fd")) == before


def test_files_that_one_call_does_not_read(
    tmp_path: Path, reader: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, pread, preadv = write(tmp_path, 9), os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: pread(fd, min(size, 3), offset))
    monkeypatch.setattr(
        os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:3]], offset)
    )
    assert reader().read(names) == [bytes([number]) * number for number in range(9)]
    buffer = memoryview(bytearray(8))
    assert reader().read_into(["8/0"], [buffer]) == [8] and buffer.tobytes() == b"\10" * 8
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: b"")
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: 0)
    with pytest.raises(FormatError, match="8/0 ends before byte 8"):
        reader().read(["8/0"])


def test_a_pickle_reads_the_same(tmp_path: Path, reader: Make) -> None:
    write(tmp_path, 3)
    copy = pickle.loads(pickle.dumps(reader()))
    assert copy.read(["2/0"]) == [b"\2\2"]
    copy._descriptors.close()
