"""What lies in a cache folder, and what is removed of it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from headrace.io.array_file import ArrayFile
from headrace.io.atomic import TEMPORARY
from headrace.io.cache.contents import BLOCKS, REST, SAMPLES, cache_entries, remove_entries
from headrace.io.cache.disk_cache import DiskCache
from headrace.memory import machine
from headrace.memory.locks import try_lock, unlock
from headrace.memory.machine import PREFIX, SUFFIX


def filled(folder: Path) -> None:
    for kind in ("lines", "chunks"):
        ArrayFile(str(folder), kind, {"of": kind}, 1, ["<i8"]).write([np.arange(9)])
    cache = DiskCache(str(folder), 1 << 20)
    assert cache.put(DiskCache.key("a", 1, 0), b"x" * 1000)
    (folder / "notes.txt").write_text("not ours")
    (folder / f"{PREFIX}{'0' * 32}{SUFFIX}").write_bytes(b"left by a killed job")
    (folder / f"headrace-lines-{'0' * 32}.bin.abc.part").write_bytes(b"half")


def age(path: str | Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_files_are_told_by_kind(tmp_path: Path) -> None:
    filled(tmp_path)
    entries = cache_entries(str(tmp_path))
    kinds = {entry.what: entry for entry in entries}
    assert set(kinds) == {
        "tables of the lines of texts",
        "tables of the chunks of HDF5 files",
        BLOCKS,
        REST,
    }
    assert sum(entry.nbytes for entry in entries) == sum(
        os.path.getsize(entry.path) for entry in entries
    )
    assert not any("notes" in entry.path for entry in entries) and kinds[BLOCKS].nbytes > 1000
    # the temporary file is too young
    assert kinds[REST].is_abandoned and kinds[REST].path.endswith(SUFFIX)
    assert cache_entries(str(tmp_path / "none")) == []


def test_only_what_is_old_or_abandoned_is_removed(tmp_path: Path) -> None:
    filled(tmp_path)
    (lines,) = [
        entry.path
        for entry in cache_entries(str(tmp_path))
        if entry.path.endswith(".bin") and "lines" in entry.path
    ]
    age(lines, 1000)
    age(tmp_path / f"headrace-lines-{'0' * 32}.bin.abc.part", 4000)
    removed = remove_entries(cache_entries(str(tmp_path)), 500)
    assert {os.path.basename(entry.path) for entry in removed} == {
        os.path.basename(lines),
        f"{PREFIX}{'0' * 32}{SUFFIX}",
        f"headrace-lines-{'0' * 32}.bin.abc.part",
    }
    assert (
        len(remove_entries(cache_entries(str(tmp_path)), 0)) == 2
        and (tmp_path / "notes.txt").exists()
    )
    assert cache_entries(str(tmp_path)) == []


def test_what_a_job_shares_stays(tmp_path: Path) -> None:
    filled(tmp_path)
    path = tmp_path / f"{PREFIX}{'0' * 32}{SUFFIX}"
    fd = os.open(path, os.O_RDONLY)
    assert try_lock(fd)
    try:
        remove_entries(cache_entries(str(tmp_path)), 0)
        assert [
            entry.what for entry in cache_entries(str(tmp_path)) if entry.path == str(path)
        ] == [SAMPLES]
    finally:
        unlock(fd)


def test_a_job_that_opens_a_store_is_not_disturbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever opens one holds the folder's lock, and would take a file that is looked at
    meanwhile for one in use.
    """
    filled(tmp_path)
    path = tmp_path / f"{PREFIX}{'0' * 32}{SUFFIX}"
    monkeypatch.setattr(machine, "_SHORT_PATIENCE", 0)
    (before,) = [entry for entry in cache_entries(str(tmp_path)) if entry.path == str(path)]
    fd = os.open(tmp_path, os.O_RDONLY)
    assert before.what == REST and try_lock(fd)
    try:
        assert [
            entry.what for entry in cache_entries(str(tmp_path)) if entry.path == str(path)
        ] == [SAMPLES]
        assert remove_entries([before], 0) == [] and path.exists()
    finally:
        unlock(fd)
    assert remove_entries([before], 0) == [before] and not path.exists()


def test_temporary_files_are_abandoned_after_an_hour(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), 1 << 20)
    assert cache.put(DiskCache.key("a", 1, 0), b"x" * 1000)
    (block,) = cache_entries(str(tmp_path))
    temporary = Path(f"{block.path}.1-2-1000{TEMPORARY}")
    temporary.write_bytes(b"half")
    assert [entry.what for entry in cache_entries(str(tmp_path))] == [BLOCKS, BLOCKS]
    age(temporary, 4000)
    assert {entry.what: entry.path for entry in cache_entries(str(tmp_path))} == {
        BLOCKS: block.path,
        REST: str(temporary),
    }


def test_others_files_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path)
    monkeypatch.setattr("headrace.io.cache.contents.user_id", lambda: os.getuid() + 1)
    assert remove_entries(cache_entries(str(tmp_path)), 0) == []
