"""Anonymous memory: all processes see the same bytes, and nothing of them has a name."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import signal
import sys
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.memory.anonymous import SHARED_FROM, AnonymousMemory, SharedArray, SharedInt, is_spawning

pytestmark = pytest.mark.quick_every(3)

METHODS = [m for m in ("fork", "spawn", "forkserver") if m in multiprocessing.get_all_start_methods()]
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def fill_and_answer(memory: AnonymousMemory, number: SharedInt, pipe: Connection) -> None:
    """In a worker: writes what the parent is to see, reports what it sees, and again when the parent has changed it."""
    array = memory.array(0, memory.nbytes // 8, np.int64)
    pipe.send((array[:4].tolist(), number.value))
    array[4:8] = [50, 60, 70, 80]
    number.value += 1
    pipe.send("written")
    pipe.recv()
    pipe.send((array[:4].tolist(), number.value))


def leave_holding(memory: AnonymousMemory) -> None:
    memory.map[:4] = b"here"
    os.kill(os.getpid(), signal.SIGKILL)


def fds_of(label: str) -> int:
    links = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(fd))
        except FileNotFoundError:
            continue
    return sum(f"memfd:headrace-{label}" in link for link in links)


class TestAnonymousMemory:
    @pytest.mark.slow
    @pytest.mark.parametrize("method", METHODS)
    def test_parent_and_worker_see_each_others_writes(self, method: str) -> None:
        context = multiprocessing.get_context(method)
        memory, number = AnonymousMemory(1 << 20), SharedInt(-5)
        array = memory.array(0, 8, np.int64)
        array[:4] = [1, 2, 3, 4]
        ours, theirs = context.Pipe()
        worker = context.Process(target=fill_and_answer, args=(memory, number, theirs))
        worker.start()
        theirs.close()
        assert ours.recv() == ([1, 2, 3, 4], -5)
        assert ours.recv() == "written"
        assert array.tolist() == [1, 2, 3, 4, 50, 60, 70, 80]
        assert number.value == -4
        array[:4], number.value = [9, 8, 7, 6], 1 << 40
        ours.send("look again")
        assert ours.recv() == ([9, 8, 7, 6], 1 << 40)
        worker.join()
        ours.close()
        assert worker.exitcode == 0

    def test_begins_as_zeros_and_is_never_empty(self) -> None:
        assert AnonymousMemory(0).nbytes == 1
        memory = AnonymousMemory(100_000)
        assert not memory.array(0, 100_000, np.uint8).any()
        assert memory.array(0, 0, np.int64).tolist() == []

    def test_arrays_lie_over_the_same_bytes(self) -> None:
        memory = AnonymousMemory(4096)
        memory.array(64, 2, np.int32)[:] = [-1, 7]
        assert memory.array(64, 1, np.int64)[0] == (7 << 32) + 0xFFFFFFFF
        assert memory.map[64:72] == b"\xff\xff\xff\xff\x07\0\0\0"

    def test_an_array_outlives_the_memory_object(self) -> None:
        memory = AnonymousMemory(64)
        array = memory.array(0, 8, np.int64)
        del memory
        array[:] = 3
        assert array.sum() == 24

    @pytest.mark.parametrize("dump", [pickle.dumps, ForkingPickler.dumps, copy.deepcopy, copy.copy])
    def test_cannot_be_pickled_but_to_a_worker(self, dump: Any) -> None:
        assert not is_spawning()
        with pytest.raises(TypeError, match="only while multiprocessing starts a worker"):
            dump(AnonymousMemory(8))

    @linux
    def test_has_no_name_and_ends_with_its_object(self) -> None:
        memory = AnonymousMemory(1 << 20, "nameless-test")
        memory.map[:5] = b"hello"
        mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "nameless-test" in line]
        assert mapped and all("memfd:" in line and line.endswith("(deleted)") for line in mapped)
        assert not any("nameless-test" in name for name in os.listdir("/dev/shm"))
        assert fds_of("nameless-test") > 0
        del memory
        assert fds_of("nameless-test") == 0

    @linux
    def test_pages_cost_nothing_until_they_are_written(self) -> None:
        memory = AnonymousMemory(1 << 40)
        memory.map[1 << 39] = 1
        assert os.fstat(memory.fd).st_blocks * 512 <= 1 << 22

    def test_a_killed_worker_takes_nothing_with_it(self) -> None:
        memory = AnonymousMemory(64)
        worker = multiprocessing.get_context("fork").Process(target=leave_holding, args=(memory,))
        worker.start()
        worker.join()
        assert worker.exitcode == -signal.SIGKILL
        assert memory.map[:4] == b"here"

    def test_without_memfd_a_file_is_unlinked_at_once(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delattr(os, "memfd_create", raising=False)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        memory = AnonymousMemory(4096)
        memory.array(0, 1, np.int64)[0] = 5
        assert list(tmp_path.iterdir()) == []
        assert memory.array(0, 1, np.int64)[0] == 5


class TestSharedInt:
    @pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda x: pickle.loads(pickle.dumps(x))])
    def test_a_copy_has_the_value_and_a_life_of_its_own(self, copied: Any) -> None:
        first = SharedInt(7)
        second = copied(first)
        assert second.value == 7
        first.value, second.value = 8, 9
        assert (first.value, second.value) == (8, 9)

    def test_a_plain_pickle_holds_no_descriptor(self) -> None:
        assert len(pickle.dumps(SharedInt(3))) < 200

    @pytest.mark.parametrize("value", [0, 1, -1, 2**63 - 1, -(2**63)])
    def test_holds_any_64_bits(self, value: int) -> None:
        number = SharedInt()
        number.value = value
        assert number.value == value

    def test_refuses_what_does_not_fit_and_keeps_its_value(self) -> None:
        number = SharedInt(5)
        with pytest.raises(OverflowError):
            number.value = 2**63
        assert number.value == 5

    @linux
    def test_hundreds_share_one_file(self) -> None:
        before = fds_of("int")
        numbers = [SharedInt(value) for value in range(1_000)]
        assert [number.value for number in numbers] == list(range(1_000))
        assert fds_of("int") - before <= 4  # two files, each with its mapping
        del numbers
        assert fds_of("int") <= before + 2

    def test_integers_after_a_fork_are_apart(self) -> None:
        SharedInt()
        ours, theirs = multiprocessing.Pipe()
        with ours, theirs:
            worker = multiprocessing.get_context("fork").Process(target=make_an_int, args=(theirs,))
            worker.start()
            made = [SharedInt(5) for _ in range(3)]
            ours.send("changed")
            assert ours.recv() == [7, 7, 7]
            worker.join()
        assert [number.value for number in made] == [5, 5, 5]

    @pytest.mark.parametrize("method", [method for method in METHODS if method != "spawn"])  # which passes descriptors on as forkserver
    def test_all_of_a_worker_arrive_with_one_descriptor(self, method: str) -> None:
        context = multiprocessing.get_context(method)
        numbers = [SharedInt(value) for value in range(300)]
        ours, theirs = context.Pipe()
        with ours, theirs:
            worker = context.Process(target=add_to_all, args=(numbers, theirs))
            worker.start()
            assert ours.recv() == (sum(range(300)), True)
            worker.join()
        assert [number.value for number in numbers] == list(range(1, 301))


def make_an_int(pipe: Connection) -> None:
    """In a forked worker: integers of its own, while the parent makes some too."""
    made = [SharedInt(7) for _ in range(3)]
    pipe.recv()
    pipe.send([number.value for number in made])


def add_to_all(numbers: list[SharedInt], pipe: Connection) -> None:
    """In a worker: the sum, whether they lie in one memory, and each is made one larger."""
    total = sum(number.value for number in numbers)
    for number in numbers:
        number.value += 1
    pipe.send((total, len({id(number._memory) for number in numbers}) == 1))


def tell_of(arrays: list[SharedArray], pipe: Connection) -> None:
    """In a worker: what arrived, whether it may be written to, and what a worker of this worker would get."""
    context = multiprocessing.get_context("spawn")
    values = [(a.array.shape, str(a.array.dtype), a.array.reshape(-1)[-3:].tolist(), a.array.flags.writeable) for a in arrays]
    if pipe.recv() == "go on":
        worker = context.Process(target=tell_of, args=(arrays, pipe))
        worker.start()
        worker.join()
    pipe.send(values)


class TestSharedArray:
    @pytest.mark.slow
    @pytest.mark.parametrize("method", METHODS)
    def test_travels_to_workers_and_to_theirs(self, method: str) -> None:
        context = multiprocessing.get_context(method)
        given = [
            np.arange(400_000),
            np.arange(300_000, dtype=np.float32).reshape(3, 100_000),
            np.arange(5, dtype=np.uint8),
            np.zeros((0, 7)),
            np.arange(1_000_000)[::2],
        ]
        arrays = [SharedArray(values) for values in given]
        ours, theirs = context.Pipe()
        with ours, theirs:
            worker = context.Process(target=tell_of, args=(arrays, theirs))
            worker.start()
            ours.send("go on")
            ours.send("stop")
            said = [ours.recv(), ours.recv()]
            worker.join()
        wanted = [(v.shape, str(v.dtype), v.reshape(-1)[-3:].tolist(), False) for v in given]
        assert said == [wanted, wanted]
        assert all(np.array_equal(a.array, v) for a, v in zip(arrays, given, strict=True))
        assert [a._memory is not None for a in arrays] == [method != "fork", method != "fork", False, False, method != "fork"]

    def test_is_held_once_when_it_has_travelled(self) -> None:
        context = multiprocessing.get_context("forkserver")
        array = SharedArray(np.arange(SHARED_FROM))
        before, memories = array.array, []
        for _ in range(2):
            worker = context.Process(target=len, args=(array,))
            worker.start()
            worker.join()
            memories.append(array._memory)
        assert memories[0] is memories[1] is not None and not np.shares_memory(array.array, before)
        assert np.shares_memory(array.array, memories[0].array(0, SHARED_FROM, np.int64))

    def test_does_not_copy_what_it_is_given(self) -> None:
        values = np.arange(10)
        assert np.shares_memory(SharedArray(values).array, values)
        assert values.flags.writeable and not SharedArray(values).array.flags.writeable

    @pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda x: pickle.loads(pickle.dumps(x))])
    def test_elsewhere_a_pickle_holds_the_values(self, copied: Any) -> None:
        again = copied(SharedArray(np.arange(SHARED_FROM)))
        assert again._memory is None and len(again) == SHARED_FROM and again.array[-1] == SHARED_FROM - 1
        with pytest.raises(ValueError, match="read-only"):
            again.array[0] = 1
