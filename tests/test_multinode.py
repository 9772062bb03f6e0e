"""A job that loses a node goes on with another number of them, and sees every sample once
(examples/train_multinode.py).
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import ConfigError, ImageDataset, create_dataloader
from headrace.order import World

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent.parent / "examples" / "train_multinode.py"
STREAMS = SCRIPT.with_name("stream_multinode.py")
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


def in_any_order(found: dict[tuple[int, int], list[int]]) -> dict[tuple[int, int], list[int]]:
    return {at: sorted(indices) for at, indices in found.items()}


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


# -- two nodes


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
        seen = [counted[at] for at in counted if at[0] == epoch]
        assert sorted(itertools.chain(*seen)) == list(range(samples))
    assert in_any_order(counted) == in_any_order(orders(out / f"photos-{samples}", 24, 2))
    assert said.rstrip().endswith("all epochs: missing 0, duplicated 0")
    assert "ended by itself with status 1" in said and "lost the other ranks: rank" in said
    if MAY_ISOLATE:
        assert "each in a network of its own" in said


# -- shards, examples/stream_multinode.py


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_streaming_job_that_loses_a_node_is_exactly_once(tmp_path: Path) -> None:
    command = [sys.executable, str(STREAMS), "--demo", "--images", "400", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    logs = "".join(log.read_text() for log in (tmp_path / "demo").glob("*.log"))
    said = done.stdout + done.stderr + logs
    assert done.returncode == 0, said
    assert "life 1: 4 ranks" in done.stdout, said
    assert re.search(r"node 1: SIGKILL to its \d+ processes", done.stdout), said
    assert re.search(r"node 0: ended by itself with status [1-9]", done.stdout), said
    begin = re.search(r"life 2: 2 ranks, \d+ steps, from epoch 0 step (\d+)", done.stdout)
    assert begin and int(begin[1]) > 0, said  # it went on, and did not begin anew
    assert "all epochs: missing 0, duplicated 0" in done.stdout
    sent = re.search(r"the server sent ([\d.]+) MB .* for 2 epochs of ([\d.]+) MB", done.stdout)
    assert sent and float(sent[1]) >= float(sent[2]) > 0  # through the server, and not around it
