"""Workers that are born deadlocked: a thread holds a lock for ever that each child takes right
after the fork.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from headrace import ConfigError, HeadraceWarning, WorkerError, create_dataloader, pack
from headrace.loader import processes as workers
from headrace.memory.anonymous import Flags
from tests.loader.datasets import Numbers
from tests.testing.test_contract import SquareDataset


class Plant:
    """Dooms the next forks of this process."""

    def __init__(self) -> None:
        self.left, self._is_doomed = 0, False
        self._lock = threading.Lock()
        self.interrupts = False
        os.register_at_fork(
            before=self._count, after_in_child=self._take, after_in_parent=self._interrupt
        )

    def _count(self) -> None:
        self._is_doomed, self.left = self.left > 0, max(0, self.left - 1)

    def _take(self) -> None:
        if self._is_doomed:
            self._lock.acquire()

    def _interrupt(self) -> None:
        if self.interrupts:
            self.interrupts = False
            signal.raise_signal(signal.SIGINT)

    def hold(self, end: threading.Event) -> None:
        """For ever, as seen from a child."""
        with self._lock:
            end.wait()


_plant = Plant()


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Plant]:
    """A lock that another thread holds; looks are quick."""
    monkeypatch.setattr(workers, "LOOKS", 2)
    monkeypatch.setattr(workers, "_LOOK_EVERY", 0.1)
    end = threading.Event()
    thread = threading.Thread(target=_plant.hold, args=(end,), name="holder")
    thread.start()
    yield _plant
    _plant.left = 0
    end.set()
    thread.join()


class Unpicklable(Numbers):
    """Can only be forked."""

    def __init__(self) -> None:
        super().__init__()
        self.made = lambda: 1


Make = Callable[..., Any]
FORKED: dict[str, Any] = {"multiprocessing_context": "fork", "shuffle": False}


def batches_of(loader: Any) -> list[Any]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in loader]


def ours(caught: Any) -> int:
    """How many of the warnings are headrace's: Python 3.12 and later warn of forks beside
    threads.
    """
    return sum(issubclass(warning.category, HeadraceWarning) for warning in caught)


def numbers(n: int, size: int) -> list[list[int]]:
    return [list(range(at, min(at + size, n))) for at in range(0, n, size)]


@pytest.mark.slow
def test_a_hung_newborn_is_started_again(plant: Plant, make_loader: Make) -> None:
    loader = make_loader(Numbers(), batch_size=2, num_workers=2, **FORKED)
    plant.left = 1
    with pytest.warns(HeadraceWarning, match=r"a worker .*by forkserver.*holder") as caught:
        assert batches_of(loader) == numbers(12, 2)
    assert ours(caught) == 1
    assert batches_of(loader) == numbers(12, 2), "persistent workers go on"


def test_what_can_not_be_pickled_is_forked_again(
    plant: Plant, make_loader: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = make_loader(Unpicklable(), batch_size=2, num_workers=1, **FORKED)
    plant.left = 2
    with pytest.warns(HeadraceWarning, match="by fork: .*can't be pickled") as caught:
        assert batches_of(loader) == numbers(12, 2)
    assert ours(caught) == 2
    loader.close()
    monkeypatch.setattr(workers, "_BIRTHS", 2)
    plant.left = 99
    with pytest.warns(HeadraceWarning), pytest.raises(WorkerError, match="hung 2 times"):
        batches_of(loader)
    plant.left = 0
    loader.set_epoch(0)
    assert batches_of(loader) == numbers(12, 2)


def test_ctrl_c_ends_hung_newborns(
    plant: Plant, make_loader: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(pid: int) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "_seconds_of_sleeper", interrupted)
    before = {child.pid for child in psutil.Process().children()}
    loader = make_loader(Numbers(), batch_size=2, num_workers=2, persistent_workers=False, **FORKED)
    plant.left = 2
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        iter(loader)
    assert time.monotonic() - began < workers._PATIENCE, "torch gives each worker that long"
    assert {child.pid for child in psutil.Process().children()} <= before


@pytest.mark.slow
def test_a_worker_without_a_batch_in_its_first_epoch(plant: Plant, make_loader: Make) -> None:
    """Nobody waits for it before the second one, which begins only when all workers have
    answered.
    """
    loader = make_loader(Numbers(2), batch_size=2, num_workers=2, **FORKED)
    iterator = iter(loader)
    first = loader._pool._iterator.workers[0]
    assert next(iterator).tolist() == [0, 1] and first.is_alive()
    loader.close()
    loader = make_loader(Numbers(2), batch_size=2, num_workers=2, **FORKED)
    forks = iter([False, True])
    plant._count = lambda: setattr(plant, "_is_doomed", next(forks, False))
    try:
        for _ in range(2):
            assert batches_of(loader) == [[0, 1]]
    finally:
        del plant._count


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_in_the_midst_of_a_fork_is_not_lost(make_loader: Make) -> None:
    loader = make_loader(Numbers(), batch_size=2, num_workers=1, **FORKED)
    _plant.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        iter(loader)
    loader.set_epoch(0)
    assert batches_of(loader) == numbers(12, 2)


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_while_workers_end_is_not_lost(
    make_loader: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = make_loader(Numbers(), batch_size=2, num_workers=1, persistent_workers=False, **FORKED)
    iterator = iter(loader)
    next(iterator)
    ends = workers.WorkerIterator._shutdown_workers

    def interrupted(deliveries: Any) -> None:
        ends(deliveries)
        raise KeyboardInterrupt

    monkeypatch.setattr(workers.WorkerIterator, "_shutdown_workers", interrupted)
    with pytest.raises(KeyboardInterrupt):
        del iterator
        time.sleep(10)


class Started(workers.WorkerIterator):
    """The workers of an iterator, without anything else of it."""

    def __init__(self, worker: Any, flags: Flags) -> None:
        self._pid = -1  # they are not its own to end
        self._workers = [worker]
        self._workers_done_event = flags  # type: ignore[assignment]


def hung_of(worker: Any, flags: Flags) -> Any:
    return Started(worker, flags).hung_newborn()


def _sleep(doing: str, ready: Any) -> None:
    ready.set()
    while doing == "busy":
        pass
    time.sleep(100)


@pytest.mark.parametrize(
    ("doing", "stopped", "expected"),
    [("sleeping", False, True), ("busy", False, False), ("sleeping", True, False)],
)
@pytest.mark.quick_every(3)
def test_which_newborn_hangs(
    doing: str, stopped: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_LOOK_EVERY", 0.05)
    # on a busy machine it may take a while until it sleeps
    monkeypatch.setattr(workers, "_LONGEST_BIRTH", 20 if expected else 0.4)
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=_sleep, args=(doing, ready), daemon=True)
    process.start()
    assert process.pid is not None
    flags = Flags(1)
    try:
        assert ready.wait(30)
        time.sleep(0.2)
        if stopped:
            os.kill(process.pid, signal.SIGSTOP)
        assert hung_of(process, flags) is (process if expected else None)
        flags.mark(0)
        assert hung_of(process, flags) is None
    finally:
        process.kill()
        process.join()
    assert hung_of(process, Flags(1)) is None, "it is gone"


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("start", "ranks"), [("fork", 1), ("auto", 2)])
def test_some_loaders_beside_busy_threads(start: str, ranks: int) -> None:
    """Many of them: see many_loaders.py."""
    script = str(Path(__file__).parent / "many_loaders.py")
    command = [sys.executable, script, "--loaders", "15", "--start", start, "--ranks", str(ranks)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=380)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"loaders": 15') == ranks


# -- where they end, or can't be started


@pytest.mark.slow
def test_a_program_ends_quietly_with_its_loaders(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    make = "create_dataloader(range(8), num_workers=2, multiprocessing_context='fork')"
    script.write_text(
        "from headrace import create_dataloader\n"
        f"first = {make}\nlist(first)\nsecond = {make}\niterator = iter(second)\n"
    )
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    assert (ran.returncode, ran.stderr) == (0, "")


def _daemonic(results: Any) -> None:
    loader = create_dataloader(Numbers(), batch_size=4, shuffle=False)
    refusals = []
    for start, options in (
        (create_dataloader, {"num_workers": 2}),
        (pack, {"dst": "never", "shard_size": "1MB", "processes": 2}),
    ):
        try:
            start(SquareDataset(), **options)
        except ConfigError as error:
            refusals.append(str(error).split(":")[0])
    results.put((batches_of(loader), str(loader.explain()), refusals))


def test_daemonic_process_loads_by_itself() -> None:
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=_daemonic, args=(results,), daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    batches, explained, refusals = results.get()
    assert batches == numbers(12, 4)
    assert re.search(r"num_workers += 0 .*daemonic", explained)
    assert refusals == ["num_workers=2", "processes=2"]


def test_ctrl_c_at_the_start_leaves_no_worker_that_an_exit_would_wait_for(
    make_loader: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(workers.TorchIterator, "_try_put_index", interrupted)
    loader = make_loader(Numbers(), num_workers=2, persistent_workers=False, **FORKED)
    before = multiprocessing.active_children()
    with pytest.raises(KeyboardInterrupt) as raised:
        iter(loader)
    assert multiprocessing.active_children() == before
    del raised


@pytest.mark.parametrize("begun", ["nothing", "no_flags", "one_worker"])
def test_iterator_that_cannot_begin_leaves_nothing(
    begun: str, monkeypatch: pytest.MonkeyPatch, make_loader: Any
) -> None:
    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    started = iter(range(1))

    def fail(*_: Any) -> None:
        raise OSError("no more")

    def start(process: Any) -> None:
        if next(started, None) is None:
            fail()
        ForkProcess.start(process)

    if begun == "nothing":
        monkeypatch.setattr(workers.TorchIterator.__mro__[1], "__init__", fail)
    elif begun == "no_flags":
        monkeypatch.setattr(workers, "Flags", fail)
    else:
        monkeypatch.setattr(workers._Forked, "start", start)
    loader = make_loader(Numbers(), num_workers=2, persistent_workers=False, **FORKED)
    with pytest.raises(OSError, match="no more") as raised:
        iter(loader)
    del raised
    gc.collect()
    assert not ignored
