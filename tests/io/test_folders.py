"""Whole files below a folder come as they are, with what is missing, changed or no file said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.errors import FileChangedError, FormatError
from headrace.formats.zarr.stores import ChunkFiles
from headrace.io.handles import HINTS
from headrace.io.ranges import WHOLE, ByteRanges

COUNT = 70
CONTENT = [bytes([number]) * number for number in range(COUNT)]
NAMES = [f"{number}/0" for number in range(COUNT)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of files, of which each has as many bytes as its number."""
    for name, content in zip(NAMES, CONTENT, strict=True):
        file = tmp_path / "a" / name
        file.parent.mkdir(parents=True)
        file.write_bytes(content)
    return tmp_path / "a"


def files(latest: int = 1 << 62) -> ChunkFiles:
    made = ChunkFiles()
    made.latest = latest
    return made


def wholes(folder: Path, *names: str) -> ByteRanges:
    return ByteRanges.of((str(folder / name), 0, WHOLE) for name in names)


def views(*lengths: int) -> list[memoryview]:
    return [memoryview(bytearray(length)) for length in lengths]


@pytest.mark.parametrize("hinted", [False, True])
def test_files_come_in_the_order_asked_for(
    folder: Path, hinted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HINTS, "_left", 5 if hinted else 0)
    wanted = wholes(folder, *NAMES[::-1])
    assert files().read(wanted) == CONTENT[::-1]
    buffers = views(*range(COUNT - 1, -1, -1))
    assert files().read_into(wanted, buffers) == []
    assert [buffer.tobytes() for buffer in buffers] == CONTENT[::-1]


def test_missing_files_and_folders(folder: Path) -> None:
    found = files().read(wholes(folder, "1/0", "99/0", "2/0/0", "2/0"))
    assert found == [b"\1", None, None, b"\2\2"]
    assert files().read_into(wholes(folder, "1/0", "99/0"), views(1, 1)) == [1]
    assert files().read(wholes(folder / "b", "1/0")) == [None]


def test_files_of_another_length_are_not_read(folder: Path) -> None:
    buffers = views(2, 2)
    with pytest.raises(FormatError, match="a/1/0 has 1 bytes, not 2"):
        files().read_into(wholes(folder, "2/0", "1/0"), buffers)
    assert [buffer.tobytes() for buffer in buffers] == [b"\2\2", b"\0\0"]


def test_changed_files_and_folders_are_errors(folder: Path) -> None:
    latest = (folder / "1" / "0").stat().st_mtime_ns
    os.utime(folder / "2" / "0", ns=(latest + 1, latest + 1))
    assert files(latest).read(wholes(folder, "1/0")) == [b"\1"]
    with pytest.raises(FileChangedError, match="a/2/0"):
        files(latest).read(wholes(folder, "1/0", "2/0"))
    os.utime(folder / "3", ns=(latest + 1, latest + 1))
    with pytest.raises(FileChangedError, match="a/3 was"):
        files(latest).read(wholes(folder, "3/1"))
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(FormatError, match="a/1 is a folder"):
        files().read(wholes(folder, *NAMES[:5], "1", *NAMES))
    with pytest.raises(FormatError, match="a/1 is a folder"):
        files().read_into(wholes(folder, "1"), views(9))
    assert len(os.listdir("/dev/fd")) == before
