"""Flags that workers and their parent share."""

import multiprocessing

import pytest

from headrace.memory.anonymous import Flags


def mark(flags: Flags) -> None:
    flags.mark(1)


@pytest.mark.parametrize("start", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_a_worker_sets_its_own_flag_alone(start: str) -> None:
    flags = Flags(3)
    worker = multiprocessing.get_context(start).Process(target=mark, args=(flags,))
    worker.start()
    worker.join()
    assert [flags.has_begun(number) for number in range(3)] == [False, True, False]
    assert not flags.is_set()
    flags.mark(1, False)
    flags.set()
    assert flags.is_set() and not any(map(flags.has_begun, range(3)))
