"""Signals that go to all processes of a job, as SLURM and Kubernetes send them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from torch.utils.data import Dataset

from headrace import create_dataloader
from tests.loader.signal_job import BATCHES, MORE

JOB = Path(__file__).parent / "signal_job.py"
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(JOB.parents[2]), *filter(None, sys.path)]),
}


def start(method: str, state: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(JOB), method, str(state)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
    )


def batches_of(lines: list[str]) -> list[list[int]]:
    found = [line.split()[1:] for line in lines if line.startswith("batch")]
    return [[int(number) for number in numbers] for numbers in found]


@pytest.mark.slow
@pytest.mark.timeout(100)
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_job_saves_an_exact_state_after_sigterm(tmp_path: Path, method: str) -> None:
    state = tmp_path / "state.json"
    with start(method, state) as job:
        assert job.stdout is not None
        lines = []
        for line in job.stdout:
            lines.append(line)
            if len(lines) == 5:
                os.killpg(job.pid, signal.SIGUSR1)
                os.killpg(job.pid, signal.SIGTERM)
        assert job.stderr is not None
        assert (job.wait(30), job.stderr.read()) == (0, "")
    handled = {tuple(map(int, line.split()[1:])) for line in lines if line.startswith("handler")}
    assert handled == {(signal.SIGUSR1, job.pid), (signal.SIGTERM, job.pid)}, "in no worker"
    before = batches_of(lines)
    assert 5 + MORE <= len(before) + 1 < BATCHES
    workers = [int(pid) for pid in lines[-1].split()[1:]]
    assert len(workers) == 2 and not any(map(psutil.pid_exists, workers))
    with start(method, state) as job:
        out, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    numbers = list(range(2 * BATCHES))
    loader = create_dataloader(numbers, batch_size=2, shuffle=True, seed=3, num_workers=0)
    assert before + batches_of(out.splitlines()) == [batch.tolist() for batch in loader]


class Stuck(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index:
            time.sleep(1000)
        return index


@pytest.mark.slow
def test_a_worker_that_does_not_end_is_killed() -> None:
    options = {"batch_size": 1, "shuffle": False, "num_workers": 1}
    loader = create_dataloader(Stuck(), multiprocessing_context="fork", **options)
    with loader:
        batches = iter(loader)
        next(batches)
        (pid,) = loader._pids
    assert not psutil.pid_exists(pid)
    del batches
