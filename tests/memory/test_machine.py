"""One store for all ranks of a machine: made, shared and removed, also where ranks are killed."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import AccessError, WriteError
from headrace.memory import machine
from headrace.memory.machine import open_machine_store
from headrace.memory.processes import try_lock
from headrace.memory.store import MISSING

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="files shared by a machine need Linux"
)
N = 50
CAPACITY = 64 * 1024


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def content(index: int) -> Any:
    return np.full(100, index, np.uint8)


def _hold(folder: Path, channel: Any, indices: list[int]) -> None:
    store = open_machine_store(folder, "key", N, CAPACITY)
    for i in indices:
        store.put(i, content(i))
    channel.send("ready")
    channel.poll(60)
    del store


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


class Other:
    """Another process that has the store open."""

    def __init__(self, folder: Path, indices: list[int]) -> None:
        context = multiprocessing.get_context("forkserver")
        self.channel, theirs = context.Pipe()  # an Event would wait for a killed process
        self.process = context.Process(target=_hold, args=(folder, theirs, indices))

    def __enter__(self) -> Other:
        self.process.start()
        assert self.channel.poll(60)
        return self

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    def __exit__(self, *_: object) -> None:
        self.channel.close()
        self.process.join(30)
        assert not self.process.is_alive()


def test_processes_share_what_they_hold(tmp_path: Path) -> None:
    with Other(tmp_path, [1, 2]):
        store = open_machine_store(tmp_path, "key", N, 10)
        assert store.capacity == CAPACITY  # of its maker
        assert (store.get(1) == content(1)).all() and store.get(3) is MISSING
        assert store.put(3, content(3)) and store.stats()["held"] == 3
        (name,) = files(tmp_path)
        assert os.stat(tmp_path / name).st_mode & 0o777 == 0o600
        another = open_machine_store(tmp_path, "another key", N, CAPACITY)
        assert len(files(tmp_path)) == 2  # what another process uses stays
        del another
    assert (store.get(1) == content(1)).all() and files(tmp_path) == [name]
    del store
    assert files(tmp_path) == []  # the last one removes it


def test_what_a_killed_process_left_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("no store")
    for key in ("key", "another key"):  # the file is used again, or removed
        with Other(tmp_path, [1, 2]) as other:
            other.kill()
        store = open_machine_store(tmp_path, key, N, CAPACITY // 2)
        assert len(store) == 0 and store.get(1) is MISSING and store.capacity == CAPACITY // 2
        assert len(files(tmp_path)) == 2
        del store
        assert files(tmp_path) == ["mine.txt"]


def test_one_process_has_one(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "real"
    (tmp_path / "link").symlink_to("a/real")
    store = open_machine_store(folder, "key", N, CAPACITY)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert open_machine_store(tmp_path / "link", "key", N, CAPACITY) is store
    assert open_machine_store(folder, "key", N + 1, CAPACITY) is not store


def test_a_place_that_takes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taken").write_text("")
    for folder in (tmp_path / "taken", tmp_path / "taken" / "below"):
        with pytest.raises(WriteError, match="taken"):
            open_machine_store(folder, "key", N, CAPACITY)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WriteError, match=str(tmp_path)):
        open_machine_store(tmp_path, "key", N, CAPACITY)


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fstat

    def fstat(fd: int) -> Any:
        found = list(real(fd))
        found[4] += 1
        return os.stat_result(found)

    monkeypatch.setattr(machine.os, "fstat", fstat)
    with pytest.raises(AccessError):
        open_machine_store(tmp_path, "key", N, CAPACITY)


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    store = open_machine_store(tmp_path, "key", N, CAPACITY)
    (name,) = files(tmp_path)
    del store
    (tmp_path / "precious").write_text("data")
    (tmp_path / name).symlink_to("precious")
    with pytest.raises(WriteError):
        open_machine_store(tmp_path, "key", N, CAPACITY)
    assert (tmp_path / "precious").read_text() == "data"


@pytest.mark.parametrize("policy", ["keep", "lru"])
def test_a_disk_that_becomes_full_ends_admission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    store = open_machine_store(tmp_path, "key", N, CAPACITY, policy)
    store.put(1, content(1))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        assert not store.put(2, content(1))
        assert store.header.full and store.write_error is not None
    assert (store.get(1) == content(1)).all() and store.get(2) is MISSING
    assert store.stats()["held"] == 1


def test_a_folder_locked_by_a_stopped_process_is_an_error(tmp_path: Path) -> None:
    with (
        machine._locked_folder(tmp_path),
        pytest.raises(OSError),
        machine._locked_folder(tmp_path, patience=0.05),
    ):
        pass


def _fill_and_stay(folder: Path, channel: Any, number: int) -> None:
    channel.send("here")
    store = open_machine_store(folder, "key", N, CAPACITY)
    for i in range(N):
        store.put((i + number) % N, content((i + number) % N))
    channel.poll(60)
    del store


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    held = set()
    for round_ in range(40):
        ours, theirs = context.Pipe()
        with ours, theirs:
            processes = [
                context.Process(target=_fill_and_stay, args=(tmp_path, theirs, k)) for k in range(3)
            ]
            for process in processes:
                process.start()
            assert ours.poll(30)
            time.sleep(0.0005 * round_)
            for process in processes:
                process.kill()
                process.join()
        store = open_machine_store(tmp_path, "key", N, CAPACITY)
        held.add(len(files(tmp_path)))
        assert len(store) == 0
        assert all(store.put(i, content(i)) for i in range(N))
        assert all((store.get(i) == content(i)).all() for i in range(N))
        del store
        assert files(tmp_path) == []
    assert held == {1}


@pytest.mark.slow
def test_a_worker_that_outlives_its_parent_keeps_the_lock(tmp_path: Path) -> None:
    """So that nobody makes the file anew under it; a new job shares it instead."""
    with Other(tmp_path, [1]) as other:
        duplicate = os.open(tmp_path / files(tmp_path)[0], os.O_RDWR)
        assert try_lock(duplicate, shared=True)  # as a worker's inherited descriptor would
        other.kill()
        store = open_machine_store(tmp_path, "key", N, CAPACITY)
        assert (store.get(1) == content(1)).all()
        del store
        os.close(duplicate)
