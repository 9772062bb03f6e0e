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

from headrace.memory import WorkerHandle
from tests.io.remote.reading import in_threads

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
    def test_opens_at_first_use_and_again_once_closed(self) -> None:
        handle = WorkerHandle(Connection)
        handle.close()
        assert Connection.opened == 0
        assert in_threads(8, lambda _: handle.get()) == [handle.get()] * 8
        assert Connection.opened == 1
        first = handle.get()
        handle.close()
        handle.close()
        assert first.closed
        assert handle.get() is not first
        assert Connection.opened == 2

    def test_a_closer_of_ones_own_or_none(self) -> None:
        closed: list[Any] = []
        handle = WorkerHandle(Connection, closed.append)
        first = handle.get()
        handle.close()
        assert closed == [first]
        assert not first.closed
        without: WorkerHandle[Any] = WorkerHandle(dict)
        first = without.get()
        without.close()
        assert without.get() is not first

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


class TestProcesses:
    def test_a_copy_opens_for_itself(self) -> None:
        handle = WorkerHandle(Connection, Connection.close)
        first = handle.get()
        for other in (pickle.loads(pickle.dumps(handle)), copy.copy(handle), copy.deepcopy(handle)):
            assert other.get() is not first
            other.close()
        assert not first.closed
        assert handle.get() is first

    def test_a_fork_opens_anew_and_leaves_the_parents_alone(self, tmp_path: Path) -> None:
        log, parent = tmp_path / "log", os.getpid()
        handle = WorkerHandle(partial(Logged, log))
        handle.get()

        def child() -> None:
            handle.close()  # it is the parent's, and stays open
            mine = handle.get()
            assert mine.pid == os.getpid()
            assert in_threads(4, lambda _: handle.get()) == [mine] * 4
            in_child(grandchild)
            assert handle.get() is mine
            gc.collect()
            handle.close()
            handle.get()

        def grandchild() -> None:
            assert handle.get().pid == os.getpid()

        in_child(child)
        lines = [line.split() for line in log.read_text().splitlines()]
        assert [what for what, pid in lines if int(pid) == parent] == ["opened"]
        theirs = [(what, pid) for what, pid in lines if int(pid) != parent]
        assert [what for what, pid in theirs if pid == theirs[0][1]][:2] == ["opened", "closed"]
        assert handle.get().pid == parent

    def test_a_fork_while_a_thread_opens(self) -> None:
        """The child must not wait for the lock that the thread held."""
        entered, leave = threading.Event(), threading.Event()
        parent = os.getpid()

        def opener() -> Connection:
            if os.getpid() == parent:
                entered.set()
                leave.wait(60)
            return Connection()

        def child() -> None:
            assert handle.get().pid == os.getpid()

        handle = WorkerHandle(opener)
        thread = threading.Thread(target=handle.get)
        thread.start()
        entered.wait(30)
        try:
            in_child(child)
        finally:
            leave.set()
            thread.join()
