"""Anonymous memory: all processes see the same bytes, and nothing of them has a name."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import sys
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest

from headrace.memory.anonymous import (
    SHARED_FROM,
    AnonymousMemory,
    SharedArray,
    SharedInt,
    is_spawning,
)

METHODS = [
    m for m in ("fork", "spawn", "forkserver") if m in multiprocessing.get_all_start_methods()
]
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def fds_of(label: str) -> int:
    links = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(fd))
        except FileNotFoundError:
            continue
    return sum(f"memfd:headrace-{label}" in link for link in links)


class TestAnonymousMemory:
    def test_holds_zeros_and_outlives_its_object(self) -> None:
        assert AnonymousMemory(0).nbytes == 1
        memory = AnonymousMemory(4096)
        array = memory.array(64, (8,), np.int32)
        assert not array.any() and memory.array(0, (0,), np.int64).tolist() == []
        array[:2] = [-1, 7]
        assert memory.map[64:72] == b"\xff\xff\xff\xff\x07\0\0\0"
        del memory
        assert array.sum() == 6

    def test_cannot_be_pickled_but_to_a_worker(self) -> None:
        assert not is_spawning()
        for dump in (pickle.dumps, ForkingPickler.dumps, copy.copy):
            with pytest.raises(TypeError):
                dump(AnonymousMemory(8))

    @linux
    def test_has_no_name_and_ends_with_its_object(self) -> None:
        memory = AnonymousMemory(1 << 20, "nameless-test")
        assert fds_of("nameless-test") > 0
        assert not any("nameless-test" in name for name in os.listdir("/dev/shm"))
        del memory
        assert fds_of("nameless-test") == 0

    def test_without_memfd_a_file_is_unlinked_at_once(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.delattr(os, "memfd_create", raising=False)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        memory = AnonymousMemory(4096)
        memory.array(0, (1,), np.int64)[0] = 5
        assert list(tmp_path.iterdir()) == []
        assert memory.array(0, (1,), np.int64)[0] == 5


def change_all(memory: AnonymousMemory, numbers: list[SharedInt], pipe: Connection) -> None:
    """In a worker: says what it sees, twice, and changes it itself."""
    array = memory.array(0, (8,), np.int64)
    for _ in range(2):
        pipe.send((array[:4].tolist(), sum(number.value for number in numbers)))
        array[4:8] = [50, 60, 70, 80]
        for number in numbers:
            number.value += 1
        pipe.send("written")
        pipe.recv()
    pipe.send(len({id(number._memory) for number in numbers}))


@pytest.mark.parametrize(
    "method",
    [*METHODS[:1], *(pytest.param(method, marks=pytest.mark.slow) for method in METHODS[1:])],
)
def test_parent_and_worker_see_each_others_writes(method: str) -> None:
    context = multiprocessing.get_context(method)
    memory, numbers = AnonymousMemory(1 << 20), [SharedInt(value) for value in range(300)]
    array = memory.array(0, (8,), np.int64)
    array[:4] = [1, 2, 3, 4]
    ours, theirs = context.Pipe()
    with ours, theirs:
        worker = context.Process(target=change_all, args=(memory, numbers, theirs))
        worker.start()
        assert ours.recv() == ([1, 2, 3, 4], sum(range(300))) and ours.recv() == "written"
        assert array.tolist() == [1, 2, 3, 4, 50, 60, 70, 80]
        assert [number.value for number in numbers] == list(range(1, 301))
        array[:4], numbers[0].value = [9, 8, 7, 6], 1 << 40
        ours.send("look again")
        assert ours.recv() == ([9, 8, 7, 6], sum(range(2, 301)) + (1 << 40))
        assert ours.recv() == "written"
        ours.send("end")
        assert ours.recv() <= 2  # descriptors: one holds 512 integers
        worker.join()
    assert worker.exitcode == 0


class TestSharedInt:
    def test_a_copy_has_a_life_of_its_own(self) -> None:
        first = SharedInt(7)
        for second in (copy.deepcopy(first), copy.copy(first), pickle.loads(pickle.dumps(first))):
            assert second.value == 7
            second.value = 9
            assert (first.value, second.value) == (7, 9)

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


def make_an_int(pipe: Connection) -> None:
    """In a forked worker: integers of its own, while the parent makes some too."""
    made = [SharedInt(7) for _ in range(3)]
    pipe.recv()
    pipe.send([number.value for number in made])


def tell_of(arrays: list[SharedArray], pipe: Connection) -> None:
    """In a worker: what arrived, and what a worker of this worker would get."""
    context = multiprocessing.get_context("spawn")
    values = [described(one.array) for one in arrays]
    if pipe.recv() == "go on":
        worker = context.Process(target=tell_of, args=(arrays, pipe))
        worker.start()
        worker.join()
    pipe.send(values)


def described(values: np.ndarray) -> tuple[object, ...]:
    return values.shape, str(values.dtype), values.reshape(-1)[-3:].tolist(), values.flags.writeable


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
        wanted = [(*described(values)[:3], False) for values in given]
        assert said == [wanted, wanted]
        assert all(np.array_equal(a.array, v) for a, v in zip(arrays, given, strict=True))
        is_mapped = method != "fork"
        mapped = [one._memory is not None for one in arrays]
        assert mapped == [is_mapped, is_mapped, False, False, is_mapped]

    def test_elsewhere_a_pickle_holds_the_values(self) -> None:
        values = np.arange(SHARED_FROM)
        array = SharedArray(values)
        assert np.shares_memory(array.array, values) and values.flags.writeable
        for again in (copy.copy(array), pickle.loads(pickle.dumps(array))):
            assert again._memory is None
            assert (len(again), again.array[-1]) == (SHARED_FROM, SHARED_FROM - 1)
            with pytest.raises(ValueError):
                again.array[0] = 1
