"""Law 3 and law 7 the hard way: real processes, SIGKILL, and a new process that goes on."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.utils.data import Dataset

from headrace import ImageDataset, WorkerError
from headrace.testing.contract import same
from tests.conftest import mapped_elsewhere, names_in_shm

pytestmark = pytest.mark.slow

JOB = Path(__file__).parent / "job.py"
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(JOB.parents[2]), *filter(None, sys.path)]),
}


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(JOB), *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT
    )


def run(*arguments: object) -> list[str]:
    """The lines of a job that is left alone."""
    with start(*arguments) as job:
        out, err = job.communicate(timeout=100)
    assert job.returncode == 0, err
    return out.splitlines()


def kill(job: subprocess.Popen[str]) -> list[int]:
    """Kills a job; returns the processes that it had started."""
    children = [child.pid for child in psutil.Process(job.pid).children(recursive=True)]
    job.kill()
    job.wait()
    return children


def run_until_killed(*arguments: object) -> tuple[list[str], list[int]]:
    """The lines of a job up to the batch where it is killed, and its workers."""
    with start(*arguments) as job:
        assert job.stdout is not None and job.stderr is not None
        lines = []
        for line in job.stdout:
            if line.startswith("WAITING"):
                return lines, kill(job)
            lines.append(line.rstrip())
        raise AssertionError(job.stderr.read())


def left_since(before: set[str]) -> list[str]:
    """The names that have come, belong to nobody who lives, and stay (others use the folder too,
    and a name comes before its map).
    """
    deadline = time.monotonic() + 10
    while True:
        new = names_in_shm() - before
        left = [name for name in new if not mapped_elsewhere(Path("/dev/shm") / name)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait_until_gone(pids: list[int]) -> list[int]:
    deadline = time.monotonic() + 20
    while (alive := list(filter(is_alive, pids))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive


@pytest.mark.parametrize("mode", ["cached", "streaming"])
def test_a_killed_job_leaves_nothing_and_goes_on(photos: Path, tmp_path: Path, mode: str) -> None:
    whole = run(photos, "lazy", 0, -1, tmp_path / "whole.json")
    before = names_in_shm()
    until = len(whole) // 3 + 3  # in epoch 1
    state = tmp_path / "state.json"
    lines, children = run_until_killed(photos, mode, 2, until, state)
    assert lines == whole[:until] and len(children) >= 2
    assert wait_until_gone(children) == []
    assert left_since(before) == []
    assert run(photos, mode, 0, -1, tmp_path / "later.json", state) == whole[until:]


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_some_rounds_of_kills_and_stops() -> None:
    """Many of them: see kill_rounds.py."""
    script = str(JOB.parent / "kill_rounds.py")
    options = ["--rounds", "10", "--seed", "3", "--load", "2", "--json"]
    command = [sys.executable, script, *options]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=580)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["rounds"] == 10


class Fatal(Dataset[int]):
    """Ends the worker that asks for sample 9."""

    def __init__(self, is_killed: bool) -> None:
        self.is_killed = is_killed

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        if index == 9:
            if self.is_killed:
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(3)
        return index


@pytest.mark.parametrize(
    ("is_killed", "persistent", "said"), [(True, True, "Killed"), (False, False, "status 3")]
)
def test_the_worker_and_the_batch_are_named(
    make_loader: Callable[..., Any], is_killed: bool, persistent: bool, said: str
) -> None:
    options = {"batch_size": 2, "num_workers": 2, "shuffle": False}
    loader = make_loader(Fatal(is_killed), persistent_workers=persistent, **options)
    received = []
    named = rf"epoch 0, while batch \d .*: worker 0 \(pid \d+\) .*{said}"
    with pytest.raises(WorkerError, match=named):
        received.extend(batch.tolist() for batch in loader)
    assert received == [[2 * i, 2 * i + 1] for i in range(len(received))]


class Long(Dataset[str]):
    """Texts that take many writes to a pipe. The second one's worker may have a second to live."""

    def __init__(self, dies: bool = False) -> None:
        self.dies = dies

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> str:
        if self.dies and index == 1:
            threading.Timer(1, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return str(index) * (200 << 20 if self.dies and index == 1 else 5 << 20)


@pytest.mark.parametrize("reaped", [False, True])
def test_a_worker_that_was_killed_in_the_midst_of_a_message(
    make_loader: Callable[..., Any], reaped: bool
) -> None:
    """Its message never ends, and the pipe stays open: what reads it would wait for ever,
    whoever knows of its death already.
    """
    loader = make_loader(Long(), batch_size=1, num_workers=1, shuffle=False)
    iterator = iter(loader)
    assert next(iterator)[0][0] == "0"
    worker = psutil.Process(*loader._pids)
    while worker.num_threads() < 2 or worker.status() != psutil.STATUS_SLEEPING:
        time.sleep(0.05)
    time.sleep(0.5)  # it has made the next batch, and waits for room in the pipe
    worker.kill()
    while worker.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.05)
    if reaped:
        worker.wait()
    with pytest.raises(WorkerError, match="is gone" if reaped else "Killed"):
        list(iterator)
    loader.set_epoch(0)
    assert [texts[0][0] for texts in loader] == [*"012345"]


def test_a_worker_that_is_killed_while_its_message_is_read(make_loader: Callable[..., Any]) -> None:
    loader = make_loader(Long(dies=True), batch_size=1, num_workers=1, shuffle=False)
    with pytest.raises(WorkerError, match="Killed"):
        for _ in loader:
            time.sleep(0.1)


@pytest.mark.quick_every(1)
def test_a_worker_that_dies_between_epochs_unseen(
    photos: Path, make_loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for a batch of its: the next epoch has new workers, and all its batches."""
    dataset = ImageDataset(photos, image_size=16)
    loader = make_loader(dataset, batch_size=4, num_workers=2, seed=3)
    twin = make_loader(dataset, batch_size=4, num_workers=0, seed=3)
    assert same(list(loader), list(twin))
    workers = loader._pool._iterator.workers
    os.kill(workers[1].pid, signal.SIGKILL)
    workers[1].join(10)
    monkeypatch.setattr(type(loader._pool), "is_sound", True)  # as if it died right after the look
    assert same(list(loader), list(twin))
