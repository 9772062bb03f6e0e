"""Whole files below a folder come as they are, with what is missing, changed or no file said."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.errors import FileChangedError
from headrace.io import local_files as folders
from headrace.io.handles import HINTS
from headrace.io.local_files import FolderReader, changed

pytestmark = pytest.mark.skipif(
    not folders.IS_SUPPORTED, reason="names are looked up from a descriptor"
)
COUNT = 70
CONTENT = [bytes([number]) * number for number in range(COUNT)]
NAMES = [f"{number}/0" for number in range(COUNT)]
Make = Callable[..., FolderReader]


@pytest.fixture
def reader(tmp_path: Path) -> Make:
    """Makes readers of a folder of files, of which each has as many bytes as its number."""
    for name, content in zip(NAMES, CONTENT, strict=True):
        file = tmp_path / "a" / name
        file.parent.mkdir(parents=True)
        file.write_bytes(content)

    def make(folder: str = "a", latest: int | None = None) -> FolderReader:
        if latest is None:
            latest = time.time_ns() + 10**9
        return FolderReader(str(tmp_path / folder), latest, changed)

    return make


def views(*lengths: int) -> list[memoryview]:
    return [memoryview(bytearray(length)) for length in lengths]


@pytest.mark.parametrize("hinted", [False, True])
def test_files_come_in_the_order_asked_for(
    reader: Make, hinted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HINTS, "_left", 5 if hinted else 0)
    numbers = range(COUNT - 1, -1, -1)
    assert reader().read(NAMES[::-1]) == CONTENT[::-1]
    buffers = views(*numbers)
    assert reader().read_into(NAMES[::-1], buffers) == list(numbers)
    assert [buffer.tobytes() for buffer in buffers] == CONTENT[::-1]


def test_missing_files_and_folders(reader: Make) -> None:
    assert reader().read(["1/0", "99/0", "2/0/0", "2/0"]) == [b"\1", None, None, b"\2\2"]
    assert reader().read_into(["1/0", "99/0"], views(1, 1)) == [1, -1]
    assert reader("b").read(["1/0"]) == [None]
    assert reader("a/1/0").read(["x"]) == [None]


def test_files_of_another_length_are_not_read(reader: Make) -> None:
    buffers = views(2, 2, 2)
    assert reader().read_into(["1/0", "2/0", "3/0"], buffers) == [1, 2, 3]
    assert [buffer.tobytes() for buffer in buffers] == [b"\0\0", b"\2\2", b"\0\0"]


def test_changed_files_and_folders_are_errors(tmp_path: Path, reader: Make) -> None:
    latest = (tmp_path / "a" / "1" / "0").stat().st_mtime_ns
    os.utime(tmp_path / "a" / "2" / "0", ns=(latest + 1, latest + 1))
    assert reader(latest=latest).read(["1/0"]) == [b"\1"]
    with pytest.raises(FileChangedError, match="a/2/0"):
        reader(latest=latest).read(["1/0", "2/0"])
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(IsADirectoryError, match="a/1"):
        reader().read([*NAMES[:5], "1", *NAMES])
    with pytest.raises(IsADirectoryError, match="a/1"):
        reader().read_into(["1"], views(9))
    assert len(os.listdir("/dev/fd")) == before
