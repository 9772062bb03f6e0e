"""Each process has a handle of its own, and none closes that of another."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace import WorkerHandle

fork = multiprocessing.get_context("fork")


class Connection:
    """What a handle may be: knows who opened it, and whether it was closed."""

    opened = 0

    def __init__(self) -> None:
        type(self).opened += 1
        self.pid, self.closed = os.getpid(), False

    def close(self) -> None:
        self.closed = True


class Logged:
    """Writes down in a file what is done to it, and by which process it was opened."""

    def __init__(self, path: Path) -> None:
        self.path, self.pid = path, os.getpid()
        self.write("opened")

    def write(self, what: str) -> None:
        with open(self.path, "a") as file:
            file.write(f"{what} {self.pid}\n")

    def close(self) -> None:
        self.write("closed")

    def __del__(self) -> None:
        self.write("deleted")


@pytest.fixture(autouse=True)
def _none_opened() -> None:
    Connection.opened = 0


def in_child(function: Any, *args: Any) -> None:
    child = fork.Process(target=function, args=args)
    child.start()
    child.join(30)
    assert child.exitcode == 0


class TestOneProcess:
    def test_opens_at_first_use_and_once(self) -> None:
        handle = WorkerHandle(Connection)
        assert Connection.opened == 0
        assert handle.get() is handle.get() and Connection.opened == 1

    def test_close_and_open_again(self) -> None:
        handle = WorkerHandle(Connection)
        handle.close()  # nothing is open yet
        first = handle.get()
        handle.close()
        handle.close()
        assert first.closed and handle.get() is not first and Connection.opened == 2

    def test_a_closer_of_ones_own(self) -> None:
        closed: list[Any] = []
        handle = WorkerHandle(Connection, closed.append)
        first = handle.get()
        handle.close()
        assert closed == [first] and not first.closed

    def test_what_has_no_close_is_dropped(self) -> None:
        handle = WorkerHandle(dict)
        first = handle.get()
        handle.close()
        assert handle.get() is not first

    def test_an_opener_that_fails_may_succeed_later(self) -> None:
        tries = iter([OSError("not yet"), Connection()])

        def opener() -> Any:
            found = next(tries)
            if isinstance(found, Exception):
                raise found
            return found

        handle = WorkerHandle(opener)
        with pytest.raises(OSError, match="not yet"):
            handle.get()
        assert isinstance(handle.get(), Connection)

    def test_many_threads_share_one(self) -> None:
        handle, barrier, got = WorkerHandle(Connection), threading.Barrier(8), []

        def get() -> None:
            barrier.wait()
            got.append(handle.get())

        threads = [threading.Thread(target=get) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(map(id, got))) == 1 and Connection.opened == 1


class TestProcesses:
    @pytest.mark.parametrize(
        "copied", [lambda h: pickle.loads(pickle.dumps(h)), copy.copy, copy.deepcopy]
    )
    def test_a_copy_opens_for_itself(self, copied: Any) -> None:
        handle = WorkerHandle(Connection, Connection.close)
        first = handle.get()
        other = copied(handle)
        assert other.get() is not first and Connection.opened == 2
        other.close()
        assert not first.closed and handle.get() is first

    def test_a_fork_opens_anew_and_leaves_the_parents_alone(self, tmp_path: Path) -> None:
        log, parent = tmp_path / "log", os.getpid()
        handle = WorkerHandle(partial(Logged, log))
        handle.get()

        def child() -> None:
            handle.close()  # it is the parent's, and stays open
            mine = handle.get()
            assert mine.pid == os.getpid() and handle.get() is mine
            gc.collect()
            handle.close()
            handle.get()

        in_child(child)
        lines = [line.split() for line in log.read_text().splitlines()]
        assert [what for what, pid in lines if int(pid) == parent] == ["opened"]
        assert [what for what, pid in lines if int(pid) != parent][:2] == ["opened", "closed"]
        assert handle.get().pid == parent

    def test_a_fork_of_a_fork(self) -> None:
        handle = WorkerHandle(Connection)
        handle.get()

        def grandchild() -> None:
            assert handle.get().pid == os.getpid()

        def child() -> None:
            assert handle.get().pid == os.getpid()
            in_child(grandchild)
            assert handle.get().pid == os.getpid()

        in_child(child)

    def test_a_fork_while_a_thread_opens(self) -> None:
        """The child must not wait for the lock that the thread held."""
        entered, leave = threading.Event(), threading.Event()
        parent = os.getpid()

        def opener() -> Connection:
            if os.getpid() == parent:
                entered.set()
                leave.wait(60)
            return Connection()

        handle = WorkerHandle(opener)
        thread = threading.Thread(target=handle.get)
        thread.start()
        entered.wait(30)

        def child() -> None:
            assert handle.get().pid == os.getpid()

        try:
            in_child(child)
        finally:
            leave.set()
            thread.join()

    def test_each_thread_of_a_fork_gets_the_forks_handle(self) -> None:
        handle = WorkerHandle(Connection)
        handle.get()

        def child() -> None:
            got: list[Any] = []
            threads = [threading.Thread(target=lambda: got.append(handle.get())) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert {c.pid for c in got} == {os.getpid()}

        in_child(child)
