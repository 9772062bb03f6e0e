"""A slow disk is told of the bytes that a batch needs, which changes no sample."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

from headrace import HDF5Dataset, ImageDataset, TextDataset, ZarrDataset
from headrace.io.local import hints
from headrace.io.local.hints import HINTS

pytestmark = [
    pytest.mark.skipif(not hints._CAN_TELL, reason="the system can't be told"),
    pytest.mark.slow,
]
WAITED: hints.Began = 0.0, -1
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
    waits = itertools.count()
    monkeypatch.setattr(hints, "_waits", lambda: next(waits))
    HINTS._left = HINTS._watched = 1
    return found


class TestWhen:
    def test_for_a_while_after_slow_reads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        times = iter([64 * 9e-6, 64 * 9e-6 + 0.0009, 0.001, *[0.0] * 100])
        monkeypatch.setattr(hints.time, "perf_counter", lambda: next(times))
        watch = hints.Hints()
        watch.note(WAITED, 0, 0)  # nothing is learnt of nothing
        watch.note(WAITED, 64, 0)
        watch.note(WAITED, 64, 1_000_000)  # many bytes take their time
        assert not watch.are_wanted
        watch.note(WAITED, 64, 6400)
        for _ in range(hints._LONG):
            assert watch.are_wanted
            watch.note(WAITED, 64, 6400)
        assert not watch.are_wanted

    def test_waits_are_counted_at_first_and_after_slow_reads(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A read that did not wait is none of a slow disk: another process had the core."""
        seconds = 0.0
        monkeypatch.setattr(hints.time, "perf_counter", lambda: seconds)
        monkeypatch.setattr(hints, "_waits", lambda: 7)
        watch = hints.Hints()
        for _ in range(hints._LONG):
            assert watch.begin() == (0.0, 7)
            watch.note((0.0, 7), 64, 6400)
        assert watch.begin() == (0.0, None)  # all is fast, and nobody asks
        seconds = 1.0
        watch.note((0.0, None), 64, 6400)
        for _ in range(hints._SHORT):  # believed
            assert watch.are_wanted
            assert watch.begin() == (1.0, 7)
            watch.note((0.0, 7), 64, 6400)  # as slow, and did not wait
        assert not watch.are_wanted
        watch.note((0.0, 6), 64, 6400)
        assert watch.are_wanted


def _images(photos: Path, tmp_path: Path) -> Any:
    return ImageDataset(photos, image_size=8, targets=None)


def _rows(photos: Path, tmp_path: Path, **how: Any) -> Any:
    for number in range(3):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file.create_dataset("x", data=ROWS[20 * number : 20 * number + 20], **how)
    return HDF5Dataset(sorted(tmp_path.glob("*.h5")), "x")


def _chunks(photos: Path, tmp_path: Path) -> Any:
    return _rows(photos, tmp_path, chunks=(4, 40, 25), compression="gzip")


def _zarr(photos: Path, tmp_path: Path) -> Any:
    zarr.create_array(str(tmp_path / "a.zarr"), data=ROWS, chunks=(4, 40, 50), shards=(20, 40, 50))
    return ZarrDataset(tmp_path / "a.zarr")


def line(number: int) -> str:
    return f"line {number} {'x' * (number % 70)}\n"


def _lines(photos: Path, tmp_path: Path) -> Any:
    (tmp_path / "a.txt").write_text("".join(map(line, range(200_000))))
    return TextDataset(tmp_path / "a.txt", unit="line", max_length=None, cache_dir=tmp_path)


@pytest.mark.parametrize("kind", [_images, _chunks, _zarr, _lines])
def test_samples_are_the_same(
    kind: Callable[..., Any], tiny_photos: Path, tmp_path: Path, told: Any
) -> None:
    with kind(tiny_photos, tmp_path) as dataset:
        order = np.random.default_rng(1).permutation(len(dataset))[:50].tolist()
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


def test_of_the_bytes_of_rows_in_all_files_before_one_is_read(
    tmp_path: Path, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(29, "Illegal seek")

    with _rows(tmp_path, tmp_path) as dataset:
        dataset.__getitems__([0])  # opened
        told.clear()
        dataset.__getitems__([41, 3, 22, 4])
        begin = h5py.File(tmp_path / "0.h5")["x"].id.get_offset()
        wanted = [("0.h5", 3, 4000), ("1.h5", 2, 2000), ("2.h5", 1, 2000)]  # neighbours: one read
        found = [(os.path.basename(path), start - begin, size) for path, start, size in told[:3]]
        assert found == [(name, 2000 * row, size) for name, row, size in wanted]
        monkeypatch.setattr(os, "posix_fadvise", refuse)
        assert np.array_equal(dataset.__getitems__([7])[0], ROWS[7])


def test_of_nothing(tmp_path: Path, told: Any) -> None:
    """0 bytes would mean: all that follow."""
    (tmp_path / "a").write_bytes(b"abcdef")
    with open(tmp_path / "a", "rb") as file:
        HINTS.give(file.fileno(), [(1, 0), (2, 3)])
    assert told == [(str(tmp_path / "a"), 2, 3)]


@pytest.mark.parametrize(
    ("kind", "name"), [(_images, "photos/1.jpg"), (_rows, "1.h5"), (_lines, "a.txt")]
)
def test_an_error_is_that_of_the_sample(
    kind: Callable[..., Any], name: str, tiny_photos: Path, tmp_path: Path, told: Any
) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(3):
        shutil.copy(next(tiny_photos.rglob("*.jpg")), photos / f"{number}.jpg")
    with kind(photos, tmp_path) as dataset:
        said = []
        for is_told in (False, True):
            dataset.close()
            os.truncate(tmp_path / name, 10)
            HINTS._left = int(is_told)
            with pytest.raises(Exception) as caught:
                dataset.__getitems__([0, 25, 50] if kind is _rows else [0, 1, 2])
            said.append((type(caught.value), str(caught.value)))
        assert said[0] == said[1]
