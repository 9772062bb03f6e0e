"""A job that loses a node goes on with another number of them, and sees every sample once
(examples/train_multinode.py).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from headrace import ConfigError, ImageDataset, create_dataloader
from headrace.order import World

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent.parent / "examples" / "train_multinode.py"
TINY = ["--global-batch", "6", "--image-size", "16", "--workers", "0", "--device", "cpu"]
MAY_ISOLATE = (
    sys.platform == "linux"
    and os.geteuid() == 0
    and all(map(shutil.which, ("ip", "unshare", "nsenter")))
)


@pytest.fixture
def example(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # what it would set itself
    return scripts("train_multinode")


Lines = list[dict[str, Any]]


def read(folder: Path) -> dict[int, list[tuple[dict[str, Any], Lines]]]:
    """The ledger, read without the example's own reader: life -> the head and the steps of each
    rank.
    """
    lives: dict[int, list[tuple[dict[str, Any], Lines]]] = {}
    for path in folder.iterdir():
        head, *steps = [json.loads(line) for line in path.read_text().splitlines()]
        assert path.name == f"life-{head['life']}-rank-{head['rank']}.jsonl"
        lives.setdefault(head["life"], []).append((head, steps))
    for ranks in lives.values():
        assert sorted(head["rank"] for head, _ in ranks) == list(range(ranks[0][0]["world_size"]))
    return lives


def that_count(folder: Path) -> dict[tuple[int, int], list[int]]:
    """The samples of all ranks, by (epoch, step), of the steps that count: those before the next
    life began.
    """
    lives = read(folder)
    found: dict[tuple[int, int], list[int]] = {}
    for life, ranks in lives.items():
        follower = lives.get(life + 1)
        end = (follower[0][0]["epoch"], follower[0][0]["step"]) if follower else (1 << 62, 0)
        for _, steps in ranks:
            for line in steps:
                if (line["epoch"], line["step"]) < end:
                    found.setdefault((line["epoch"], line["step"]), []).extend(line["indices"])
    return found


def orders(
    path: Path, global_batch: int, epochs: int, seed: int = 42
) -> dict[tuple[int, int], list[int]]:
    """What each step must have seen, by a loader of one rank."""
    with ImageDataset(path, image_size=8, return_index=True) as dataset:
        loader = create_dataloader(dataset, batch_size=global_batch, num_workers=0, seed=seed)
        return {
            (epoch, step): batch[2].tolist()
            for epoch in range(epochs)
            for step, batch in enumerate(loader)
        }


# -- one rank, in this process


def test_killed_job_resumes_from_its_last_checkpoint(
    example: Any,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = [str(photos), *TINY, "--out", str(tmp_path), "--checkpoint-every", "2"]
    write = example.Ledger.write

    def dying(ledger: Any, epoch: int, step: int, *rest: Any, **options: Any) -> None:
        write(ledger, epoch, step, *rest, **options)
        if (epoch, step) == (1, 3):
            raise ConfigError("killed")

    monkeypatch.setattr(example.Ledger, "write", dying)
    assert example.main(options) == 2
    (tmp_path / "checkpoint.pt.unfinished").write_bytes(b"half a checkpoint")
    monkeypatch.setattr(example.Ledger, "write", write)
    assert example.main(options) == 0
    (first, begun), (second, rest) = (
        ranks[0] for _, ranks in sorted(read(tmp_path / "ledger").items())
    )
    assert (first["step"], second["epoch"], second["step"]) == (0, 1, 2)
    again = [(line["epoch"], line["step"]) for line in rest]
    assert again == [(line["epoch"], line["step"]) for line in begun[-2:]] == [(1, 2), (1, 3)]
    assert that_count(tmp_path / "ledger") == orders(photos, 6, 2)
    assert example.main(["--count", "--out", str(tmp_path)]) == 0
    assert "epoch 1: 4 steps, 24 samples, missing 0, duplicated 0" in capsys.readouterr().out
    assert example.main(options) == 0  # there is nothing to do any more
    whole = tmp_path / "whole"
    assert example.main([str(photos), *TINY, "--out", str(whole)]) == 0
    one, other = (
        torch.load(folder / "checkpoint.pt", weights_only=True)["network"]
        for folder in (tmp_path, whole)
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.quick_every(1)
def test_a_global_batch_that_does_not_fit_is_refused(
    example: Any, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [str(photos), *TINY, "--out", str(tmp_path), "--epochs", "1"]
    world = World(0, 4, 0, 4, "a test")
    with ImageDataset(photos) as dataset, pytest.raises(ConfigError, match=r"6 .* 4 ranks"):
        example.build(example.parse(options), world, "cpu", dataset)
    assert example.main(options) == 0
    assert example.main([*options, "--global-batch", "8"]) == 2
    assert "use batch_size=6" in capsys.readouterr().err


# -- the ledger


def write_ledger(folder: Path, files: dict[str, list[dict[str, Any]]]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def head(life: int, rank: int, world_size: int, step: int = 0) -> dict[str, Any]:
    world = {"life": life, "rank": rank, "world_size": world_size}
    return {**world, "samples": 6, "epoch": 0, "step": step}


def step(number: int, *indices: int, padding: tuple[int, ...] = ()) -> dict[str, Any]:
    return {"epoch": 0, "step": number, "indices": indices, "padding": padding}


def test_the_balance_finds_what_is_missing_and_what_came_twice(
    example: Any, tmp_path: Path
) -> None:
    first = {
        "life-1-rank-0": [head(1, 0, 2), step(0, 0), step(1, 1), step(2, 2)],
        "life-1-rank-1": [head(1, 1, 2), step(0, 3), step(1, 4)],
    }
    good = write_ledger(
        tmp_path / "good",
        {**first, "life-2-rank-0": [head(2, 0, 1, 2), step(2, 2, 5, padding=(0,))]},
    )
    with open(good / "life-1-rank-0.jsonl", "a") as file:
        file.write('{"epoch": 0, "ste')  # killed while it wrote
    lives = example.read_lives(good)
    [sums] = example.balance(lives)
    assert (sums.steps, sums.samples, sums.padding) == (3, 6, 1)
    assert (sums.missing, sums.duplicated) == (0, 0)
    assert "life 2 did them again" in "\n".join(example.report(lives))
    for name, begin, missing, duplicated in (("late", 3, 0, 1), ("early", 1, 2, 0)):
        bad = write_ledger(
            tmp_path / name, {**first, "life-2-rank-0": [head(2, 0, 1, begin), step(2, 2, 5)]}
        )
        [sums] = example.balance(example.read_lives(bad))
        assert (sums.missing, sums.duplicated) == (missing, duplicated)
        assert example.main(["--count", "--out", str(tmp_path / "none")]) == 2
        shutil.copytree(bad, tmp_path / name / "ledger")
        assert example.main(["--count", "--out", str(tmp_path / name)]) == 1


def test_a_ledger_without_all_its_ranks_is_no_ledger(example: Any, tmp_path: Path) -> None:
    one = write_ledger(tmp_path / "ledger", {"life-1-rank-1": [head(1, 1, 3)]})
    with pytest.raises(ValueError, match=r"\[0, 2\]"):
        example.read_lives(one)
    assert example.main(["--count", "--out", str(tmp_path)]) == 2
    example.forget(one, 2)
    assert list(one.iterdir())
    example.forget(one, 1)
    assert not list(one.iterdir())


# -- two nodes


def wait_for(what: Callable[[], Any], seconds: float = 240) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert found
    return found


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def demo(out: Path, *options: str) -> subprocess.Popen[str]:
    fixed = ["--demo", "--workers", "1", "--device", "cpu", "--out", str(out)]
    command = [sys.executable, str(SCRIPT), *fixed, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


NEEDS_NETWORKS = pytest.mark.skipif(
    not MAY_ISOLATE, reason="needs networks of its own: root, ip, unshare, nsenter"
)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="node 1"),
        pytest.param(["--lose", "0", "--nproc-per-node", "2"], id="node 0 of 2 x 2 ranks"),
        pytest.param(["--images", "470"], id="padding"),
        pytest.param(["--cut", "--timeout", "5"], id="cut off", marks=NEEDS_NETWORKS),
    ],
)
def test_a_job_that_loses_a_node_sees_every_sample_once(tmp_path: Path, options: list[str]) -> None:
    with demo(tmp_path, *options) as job:
        try:
            said, _ = job.communicate(timeout=500)
        finally:
            job.kill()
    assert job.returncode == 0, said
    out = tmp_path / "demo"
    samples = 470 if "470" in options else 480
    nproc = 2 if "2" in options else 1
    lives = read(out / "ledger")
    assert {life: len(ranks) for life, ranks in lives.items()} == {1: 2 * nproc, 2: nproc}
    begins = {(first["epoch"], first["step"]) for first, _ in lives[2]}
    assert len(begins) == 1 and begins != {(0, 0)}
    last = max((line["epoch"], line["step"]) for _, steps in lives[1] for line in steps)
    # it was lost before its end, and some steps may have been done in vain
    assert min(begins) <= last < (1, 19)
    counted = that_count(out / "ledger")
    for epoch in range(2):
        seen = Counter(
            index for (e, _), indices in counted.items() if e == epoch for index in indices
        )
        assert seen == Counter(range(samples))
    expected = orders(out / f"photos-{samples}", 24, 2)
    assert {at: sorted(indices) for at, indices in counted.items()} == {
        at: sorted(indices) for at, indices in expected.items()
    }
    assert said.rstrip().endswith("all epochs: missing 0, duplicated 0")
    assert "ended by itself with status 1" in said and "lost the other ranks: rank" in said
    if MAY_ISOLATE:
        assert "each in a network of its own" in said


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux kills the children of a process that was killed"
)
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_demo_that_is_ended_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    with demo(tmp_path, "--epochs", "50") as job:
        try:
            ledger = tmp_path / "demo/ledger"
            wait_for(lambda: len(list(ledger.glob("life-1-rank-*.jsonl"))) == 2)
            # two of a launcher, a rank and a worker
            wait_for(lambda: len(psutil.Process(job.pid).children(recursive=True)) >= 6)
            started = psutil.Process(job.pid).children(recursive=True)
            os.kill(job.pid, number)
            job.wait(60)
        finally:
            job.kill()
    wait_for(lambda: all(map(is_gone, started)), 60)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_srun_s_variables_suffice(photos: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    ranks = (0, 1)

    def run(*options: str, outs: tuple[Path, Path] = (tmp_path, tmp_path)) -> list[str]:
        command = [sys.executable, SCRIPT, photos, *TINY, "--timeout", "60", *options, "--out"]
        piped: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        jobs = []
        for rank, out in zip(ranks, outs, strict=True):
            own = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": "0"}
            jobs.append(subprocess.Popen([*command, out], env=environment | own, **piped))
        try:
            said = [job.communicate(timeout=120)[0] for job in jobs]
        finally:
            for job in jobs:
                job.kill()
        return [f"status {job.returncode}: {text}" for job, text in zip(jobs, said, strict=True)]

    assert all(text.startswith("status 0") for text in run("--epochs", "1"))
    counted = {at: sorted(indices) for at, indices in that_count(tmp_path / "ledger").items()}
    assert counted == {at: sorted(indices) for at, indices in orders(photos, 6, 1).items()}
    for text in run("--epochs", "2", outs=(tmp_path / "elsewhere", tmp_path)):
        assert text.startswith("status 2") and "[(1, 0, 0), (2, 0, 4)]" in text
    for text in run("--seed", "7", "--epochs", "2"):
        assert text.startswith("status 2") and "seed was 42, is 7" in text
