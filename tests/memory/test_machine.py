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
from headrace.memory.locks import try_lock
from headrace.memory.machine import PREFIX, SharedFile, open_machine_store
from headrace.memory.store import MISSING, SampleStore

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="files shared by a machine need Linux"),
    pytest.mark.quick_every(3),
]
N = 50
CAPACITY = 64 * 1024


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def content(index: int) -> Any:
    return np.full(100 + index, index, np.uint8)


def _hold(folder: Path, channel: Any, indices: list[int]) -> None:
    store = open_machine_store(folder, "key", N, CAPACITY)
    for i in indices:
        store.put(i, content(i))
    channel.send("ready")
    channel.poll(60)
    del store


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
        assert len(files(tmp_path)) == 1
        assert os.stat(tmp_path / files(tmp_path)[0]).st_mode & 0o777 == 0o600


def test_the_last_one_removes_it(tmp_path: Path) -> None:
    store = open_machine_store(tmp_path, "key", N, CAPACITY)
    with Other(tmp_path, [1]):
        assert len(files(tmp_path)) == 1
    assert (store.get(1) == content(1)).all() and len(files(tmp_path)) == 1
    del store
    assert files(tmp_path) == []


def test_what_a_killed_process_left_is_not_trusted_but_used(tmp_path: Path) -> None:
    with Other(tmp_path, [1, 2]) as other:
        other.kill()
    assert len(files(tmp_path)) == 1
    store = open_machine_store(tmp_path, "key", N, CAPACITY // 2)
    assert len(store) == 0 and store.get(1) is MISSING and store.capacity == CAPACITY // 2
    del store
    assert files(tmp_path) == []


def test_leftovers_of_killed_processes_are_removed(tmp_path: Path) -> None:
    with Other(tmp_path, [1]) as other:
        other.kill()
    (tmp_path / "mine.txt").write_text("no store")
    store = open_machine_store(tmp_path, "another key", N, CAPACITY)
    assert len(files(tmp_path)) == 2
    del store
    assert files(tmp_path) == ["mine.txt"]


def test_what_another_process_uses_stays(tmp_path: Path) -> None:
    with Other(tmp_path, [1]):
        other = open_machine_store(tmp_path, "another key", N, CAPACITY)
        assert len(files(tmp_path)) == 2
        del other
        assert (open_machine_store(tmp_path, "key", N, CAPACITY).get(1) == content(1)).all()


def test_one_process_has_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    store = open_machine_store(tmp_path / "real", "key", N, CAPACITY)
    assert open_machine_store(tmp_path / "link", "key", N, CAPACITY) is store
    assert open_machine_store(tmp_path / "real", "key", N + 1, CAPACITY) is not store


def test_a_missing_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    store = open_machine_store(tmp_path / "a" / "b", "key", N, CAPACITY)
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert store.put(0, "x")


@pytest.mark.parametrize("kind", ["a file", "a file in place of a folder"])
def test_a_folder_that_is_none(tmp_path: Path, kind: str) -> None:
    (tmp_path / "taken").write_text("")
    folder = tmp_path / "taken" if kind == "a file" else tmp_path / "taken" / "below"
    with pytest.raises(WriteError, match=r"taken.*pass another cache_dir"):
        open_machine_store(folder, "key", N, CAPACITY)


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fstat

    def fstat(fd: int) -> Any:
        found = list(real(fd))
        found[4] += 1
        return os.stat_result(found)

    monkeypatch.setattr(machine.os, "fstat", fstat)
    with pytest.raises(AccessError, match="no file of this user's"):
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


def test_a_full_disk_at_the_start_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WriteError, match="No space left on device; pass another cache_dir"):
        open_machine_store(tmp_path, "key", N, CAPACITY)


@pytest.mark.parametrize("policy", ["keep", "lru"])
def test_a_disk_that_becomes_full_ends_admission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    store = open_machine_store(tmp_path, "key", N, CAPACITY, policy)
    store.put(1, content(1))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        assert not store.put(2, content(2))
        assert store.is_full and store.write_error is not None
    assert (store.get(1) == content(1)).all() and store.get(2) is MISSING
    assert store.stats()["held"] == 1


def test_a_real_full_disk(tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands for it: writing beyond is an error of the system, in mapped memory it would be SIGBUS."""
    import resource

    store = open_machine_store(tmp_path, "key", N, CAPACITY)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (store._log_at + 1000, hard))
        accepted = [store.put(i, content(i)) for i in range(20)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert any(accepted) and not all(accepted)
    assert all((store.get(i) is not MISSING) is accepted[i] for i in range(20))


def test_a_stopped_process_in_the_door_is_an_error_and_no_hang(tmp_path: Path) -> None:
    with machine._door(tmp_path), pytest.raises(OSError, match="resume or end it"), machine._door(tmp_path, patience=0.05):
        pass


def _race(folder: Path, start: Any, results: Any, number: int) -> None:
    start.wait()
    store = open_machine_store(folder, "key", N, CAPACITY)
    for i in range(N):
        store.put((i + number) % N, content((i + number) % N))
    wrong = sum(not (found is MISSING or (found == content(i)).all()) for i in range(N) if (found := store.get(i)) is not None)
    results.put((wrong, os.stat(store._memory.fd).st_ino, len(store)))
    start.wait()  # nobody leaves before all have it


def test_many_that_start_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    start, results = context.Barrier(5), context.SimpleQueue()
    processes = [context.Process(target=_race, args=(tmp_path, start, results, k * 9)) for k in range(4)]
    for process in processes:
        process.start()
    start.wait(60)
    found = [results.get() for _ in processes]
    start.wait(60)
    for process in processes:
        process.join(30)
    assert {wrong for wrong, _, _ in found} == {0} and len({inode for _, inode, _ in found}) == 1
    assert max(held for _, _, held in found) == N  # each sample once
    assert files(tmp_path) == []


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
            processes = [context.Process(target=_fill_and_stay, args=(tmp_path, theirs, k)) for k in range(3)]
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
        assert all(store.put(i, content(i)) for i in range(N)) and all((store.get(i) == content(i)).all() for i in range(N))
        del store
        assert files(tmp_path) == []
    assert held == {1}


def _look(store: SampleStore, results: Any) -> None:
    results.put([i for i in range(N) if store.get(i) is not MISSING])
    store.put(7, content(7))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_get_it(tmp_path: Path, method: str) -> None:
    store = open_machine_store(tmp_path, "key", N, CAPACITY)
    store.put(1, content(1))
    context = multiprocessing.get_context(method)
    results = context.SimpleQueue()
    worker = context.Process(target=_look, args=(store, results))
    worker.start()
    assert results.get() == [1]
    worker.join()
    assert (store.get(7) == content(7)).all()
    assert [name.startswith(PREFIX) for name in files(tmp_path)] == [True]  # the worker's end did not remove it
    del store
    assert files(tmp_path) == []


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


def test_pages_are_given_back(tmp_path: Path) -> None:
    memory = SharedFile(str(tmp_path / f"{PREFIX}x.mem"), 4096, 1 << 20)
    memory.write(8192, memoryview(b"x" * 65536))
    before = os.fstat(memory.fd).st_blocks
    memory.punch(8192 + 1, 8192 + 65536 - 1)
    assert os.fstat(memory.fd).st_blocks < before
    assert memory.map[8192:8193] == b"x" and memory.map[16384:16385] == b"\0"
