"""What lies in a cache folder, and what is removed of it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.io.array_file import ArrayFile
from headrace.io.disk_cache import (
    BLOCKS,
    REST,
    SAMPLES,
    CacheEntry,
    DiskCache,
    cache_entries,
    remove_entries,
)
from headrace.memory import machine
from headrace.memory.machine import PREFIX, SUFFIX
from headrace.memory.processes import try_lock, unlock

LEFT = f"{PREFIX}{'0' * 32}{SUFFIX}"
PART = f"headrace-lines-{'0' * 32}.bin.abc.part"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for kind in ("lines", "chunks"):
        ArrayFile(str(tmp_path), kind, {"of": kind}, 1, ["<i8"]).write([np.arange(9)])
    assert DiskCache(str(tmp_path), 1 << 20).put(DiskCache.key("a", 1, 0), b"x" * 1000)
    (tmp_path / "notes.txt").write_text("not ours")
    (tmp_path / LEFT).write_bytes(b"left by a killed job")
    (tmp_path / PART).write_bytes(b"half")
    return tmp_path


def age(path: str | Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    fd = os.open(path, os.O_RDONLY)
    assert try_lock(fd)
    try:
        yield
    finally:
        unlock(fd)


def left_entry(folder: Path) -> CacheEntry:
    (entry,) = [one for one in cache_entries(str(folder)) if one.path.endswith(LEFT)]
    return entry


def test_files_are_told_by_kind(folder: Path) -> None:
    entries = cache_entries(str(folder))
    kinds = {entry.what: entry for entry in entries}
    tables = {"arrays: lines", "arrays: chunks"}
    assert set(kinds) == {*tables, BLOCKS, REST}
    assert all(entry.nbytes == os.path.getsize(entry.path) for entry in entries)
    assert not any("notes" in entry.path for entry in entries)
    assert kinds[BLOCKS].nbytes > 1000
    # the temporary file is too young
    assert kinds[REST].path.endswith(LEFT)
    assert cache_entries(str(folder / "none")) == []


def test_only_what_is_old_or_abandoned_is_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (lines,) = folder.glob("headrace-lines-*.bin")
    age(lines, 1000)
    age(folder / PART, 4000)
    with monkeypatch.context() as patch:
        patch.setattr("headrace.io.disk_cache.user_id", lambda: os.getuid() + 1)
        assert remove_entries(cache_entries(str(folder)), 0) == []  # another user's
    removed = remove_entries(cache_entries(str(folder)), 500)
    assert {os.path.basename(entry.path) for entry in removed} == {lines.name, LEFT, PART}
    assert len(remove_entries(cache_entries(str(folder)), 0)) == 2
    assert (folder / "notes.txt").exists()
    assert cache_entries(str(folder)) == []


def test_what_a_job_shares_or_opens_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens a store holds the folder's lock, and would take a file that is looked at
    meanwhile for one in use.
    """
    monkeypatch.setattr(machine, "_SHORT_PATIENCE", 0)
    before = left_entry(folder)
    assert before.what == REST
    for held in (folder / LEFT, folder):
        with locked(held):
            assert left_entry(folder).what == SAMPLES
            assert remove_entries([before], 0) == []
    assert remove_entries([before], 0) == [before]
    assert not (folder / LEFT).exists()
