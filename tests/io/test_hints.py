"""A slow disk is told of the bytes that a batch needs, which changes no sample."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from headrace import HDF5Dataset
from headrace.io import handles as hints
from headrace.io.handles import HINTS
from headrace.io.local_files import LocalFiles
from headrace.io.ranges import ByteRanges
from tests.data.gallery import gallery_at, write_gallery

pytestmark = [
    pytest.mark.skipif(not hints._CAN_TELL, reason="the system can't be told"),
    pytest.mark.slow,
]
ROWS = np.random.default_rng(0).integers(0, 256, (60, 40, 50), np.uint8)


@pytest.fixture(autouse=True)
def calm() -> Iterator[None]:
    HINTS.__init__()  # type: ignore[misc]
    yield
    HINTS.__init__()  # type: ignore[misc]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """What the system is told from now on, whatever the disk: path, first byte, bytes."""
    found: list[tuple[str, int, int]] = []
    tell = os.posix_fadvise

    def telling(fd: int, start: int, nbytes: int, advice: int) -> None:
        if advice == os.POSIX_FADV_WILLNEED:
            found.append((os.readlink(f"/proc/self/fd/{fd}"), start, nbytes))
        tell(fd, start, nbytes, advice)

    monkeypatch.setattr(os, "posix_fadvise", telling)
    monkeypatch.setattr(hints, "_CALM", -1e9)  # anything is slow
    monkeypatch.setattr(hints, "_waits", itertools.count().__next__)
    HINTS._left = 1
    return found


def test_for_a_while_after_slow_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(hints.time, "perf_counter", lambda: now)
    monkeypatch.setattr(hints, "_waits", lambda: 7)
    watch = hints.Hints()
    watch.note((-1.0, 6), 0, 0)
    watch.note((-64 * 9e-6, 6), 64, 0)
    watch.note((-64 * 9e-6 - 0.0009, 6), 64, 1_000_000)  # many bytes take their time
    now = 0.001
    for _ in range(2):
        watch.note((0.0, 7), 64, 6400)
    assert not watch.are_wanted, "another process had the core"
    watch.note((0.0, 6), 64, 6400)
    assert not watch.are_wanted, "once proves little"
    watch.note((0.0, 6), 64, 6400)
    for _ in range(hints._BATCHES):
        assert watch.are_wanted
        watch.note((now, 6), 64, 6400)  # fast, by the hints
    assert not watch.are_wanted, "a batch without them shows whether they are needed"
    for _ in range(2):
        watch.note((0.0, 6), 64, 6400)
    assert watch.are_wanted


def write_rows(folder: Path, **how: Any) -> None:
    """Three files."""
    folder.mkdir(exist_ok=True)
    for number, rows in enumerate(np.split(ROWS, 3)):
        with h5py.File(folder / f"{number}.h5", "w") as file:
            file.create_dataset("x", data=rows, **how)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of all formats; more lines than are read at once."""
    made = tmp_path_factory.mktemp("gallery")
    write_gallery(made)
    lines = (f"line {number} {'x' * (number % 70)}\n" for number in range(200_000))
    (made / "texts" / "lines.txt").write_text("".join(lines))
    write_rows(made / "chunks", chunks=(4, 40, 25), compression="gzip")
    return made


@pytest.mark.parametrize("name", ["image files", "chunks", "zarr shards", "lines"])
def test_samples_are_the_same(name: str, folder: Path, tmp_path: Path, told: Any) -> None:
    makers = gallery_at(folder, tmp_path)
    makers["chunks"] = partial(HDF5Dataset, folder / "chunks", "x")
    with makers[name](loading_mode="lazy") as dataset:
        order = np.random.default_rng(1).integers(0, len(dataset), 50).tolist()
        told.clear()
        HINTS._left = 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hints, "_CALM", 1e9)
            wanted = [repr(sample) for sample in dataset.__getitems__(order)]
        assert not told
        HINTS._left = 1
        assert [repr(sample) for sample in dataset.__getitems__(order)] == wanted
        assert HINTS.are_wanted
        assert told


def test_of_a_sample_by_itself(tmp_path: Path, told: Any) -> None:
    """It is read at once: to tell the system first takes longer than most reads."""
    write_rows(tmp_path)
    with HDF5Dataset(tmp_path / "0.h5", "x") as dataset:
        dataset[0]  # the file is opened
        told.clear()
        HINTS._left = 1
        assert np.array_equal(dataset[7], ROWS[7]) and told == []


def test_of_nothing(tmp_path: Path, told: Any) -> None:
    """0 bytes would mean: all that follow."""
    (tmp_path / "a").write_bytes(b"abcdef")
    with open(tmp_path / "a", "rb") as file:
        HINTS.give(file.fileno(), [(1, 0), (2, 3)])
    assert told == [(str(tmp_path / "a"), 2, 3)]


def test_opening_many_files_is_no_slow_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [str(tmp_path / f"{number}") for number in range(64)]
    for path in paths:
        Path(path).write_bytes(bytes(100))
    ranges = ByteRanges.of((path, 0, 100) for path in paths)
    noted: list[float] = []
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(HINTS, "note", lambda began, *_: noted.append(now - began[0]))
    opens = os.open

    def slow(*given: Any, **named: Any) -> int:
        nonlocal now
        now += 0.005
        return opens(*given, **named)

    monkeypatch.setattr(os, "open", slow)
    LocalFiles().read_into(ranges, [memoryview(bytearray(100)) for _ in paths])
    assert noted == [0.0] and now == pytest.approx(64 * 0.005)
