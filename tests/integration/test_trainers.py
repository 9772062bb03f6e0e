"""Trainers train on our loaders as a plain loop does, in two processes, and go on in the middle of
an epoch.

The programs are the recipes of docs/trainers.md, as they stand there, started by torchrun.
`my_project.py` writes down which samples each rank has trained on, and the weights before each
step.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.order import EpochOrder, RankBatches

pytestmark = [pytest.mark.integration, pytest.mark.nightly, pytest.mark.timeout(300)]

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs" / "trainers.md"
RANKS = (0, 1)
TRAIN, VAL, BATCH, SEED, EPOCHS = 37, 13, 4, 7, 3  # as my_project.py and the recipes have them
VAL_BATCHES = 2  # of each rank
SAVED, LOST = 7, 9  # step of the checkpoint, and the one before which the first life ends
PACKAGES = {
    "ddp": "torch",
    "lightning": "lightning",
    "accelerate": "accelerate",
    "huggingface": "transformers",
}


def needs(package: str) -> None:
    """Skips a test whose package is not there; importing it here would take longer than the
    test.
    """
    if importlib.util.find_spec(package) is None:
        pytest.skip(
            f"{package} is not installed: pip install -c constraints.txt -e '.[integration]'"
        )


def torchrun(
    program: Path, *arguments: str, book: Path, stop_at: int | None = None
) -> tuple[int, str]:
    """Runs a program in two processes, in the folder that it lies in or that `book` lies in; its
    status, and what it said.
    """
    book.mkdir(parents=True)
    own = ("PYTEST", "TORCHELASTIC")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    environ |= {
        "BOOK": str(book),
        "STOP_AT": "" if stop_at is None else str(stop_at),
        "PYTHONPATH": os.pathsep.join([str(HERE), str(Path(headrace.__file__).parents[1])]),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(book),
        "HF_HUB_OFFLINE": "1",
    }
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [sys.executable, *ranks, str(program), *arguments],
        cwd=book.parent,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)
        said, _ = process.communicate()
        pytest.fail(f"{program.name} {' '.join(arguments)} hangs:\n{said}")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, said


def recipe(name: str, folder: Path) -> Path:
    """A program of docs/trainers.md, as a file."""
    found = re.search(rf"<!-- recipe: {name} -->\n```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert found, f"{DOCS} has no recipe {name}"
    path = folder / "train.py"
    path.write_text(found[1])
    return path


def lines(book: Path, rank: int, kind: str) -> list[dict[str, Any]]:
    """What a rank has written down of a kind: "train", "val" or "end"."""
    return [
        line
        for line in map(json.loads, (book / f"rank{rank}.jsonl").read_text().splitlines())
        if kind in line
    ]


def expected(rank: int) -> list[list[int]]:
    """The batches of all epochs that headrace's order has for a rank."""
    order = EpochOrder(TRAIN, seed=SEED, global_batch=BATCH * len(RANKS))
    return [
        b.tolist()
        for epoch in range(EPOCHS)
        for b in RankBatches(order.with_epoch(epoch), rank, len(RANKS), BATCH)
    ]


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The book of a bare DDP loop that nothing interrupts."""
    folder = tmp_path_factory.mktemp("plain")
    status, said = torchrun(recipe("ddp", folder), book=folder / "book")
    assert status == 0, said
    return folder / "book"


def test_the_plain_loop_loses_and_doubles_nothing(plain: Path) -> None:
    drawn = [[line["train"] for line in lines(plain, rank, "train")] for rank in RANKS]
    assert drawn == [expected(rank) for rank in RANKS]
    steps = len(drawn[0]) // EPOCHS
    for epoch in range(EPOCHS):
        counts = Counter[int]()
        for batches in drawn:
            counts.update(itertools.chain(*batches[epoch * steps : (epoch + 1) * steps]))
        # 37 samples, 2 ranks: one comes twice
        assert len(counts) == TRAIN and sorted(counts.values())[-2:] == [1, 2]
    weights = [[line["weights"] for line in lines(plain, rank, "train")] for rank in RANKS]
    assert weights[0] == weights[1] and len(set(weights[0])) == len(weights[0])


@pytest.mark.parametrize("name", PACKAGES)
def test_trainer_resumes_within_an_epoch(name: str, plain: Path, tmp_path: Path) -> None:
    needs(PACKAGES[name])
    program, first, second = recipe(name, tmp_path), tmp_path / "first", tmp_path / "second"
    status, said = torchrun(program, book=first, stop_at=LOST)
    assert status != 0 and f"Interrupted: before step {LOST}" in said, said
    status, said = torchrun(program, book=second)
    assert status == 0, said
    assert "HeadraceWarning" not in said and "another DataLoader" not in said, said
    for rank in RANKS:
        before, after = lines(first, rank, "train"), lines(second, rank, "train")
        assert len(before) == LOST and len(after) == len(expected(rank)) - SAVED
        # samples and weights of each step; those after the checkpoint come again
        assert before == lines(plain, rank, "train")[:LOST]
        assert after == lines(plain, rank, "train")[SAVED:]
        assert lines(second, rank, "end")[-1] == lines(plain, rank, "end")[-1]
    ends = [lines(second, rank, "val")[-VAL_BATCHES:] for rank in RANKS]
    validated = [index for end in ends for line in end for index in line["val"]]
    # shares validation out by itself, and hides from the metrics what comes twice
    if name == "huggingface":
        assert set(validated) == set(range(VAL)), said
        assert re.search(rf"'eval_samples': '?{VAL}\b", said), said
    else:
        assert sorted(validated) == list(range(VAL))


def outcomes(cases: list[str], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What each rank got in each case of misuse.py, as far as it came to write it down."""
    book = folder / "book"
    _, said = torchrun(HERE / "misuse.py", *cases, book=book)
    found = {
        case: [json.loads(path.read_text()) for path in sorted(book.glob(f"{case}-rank*.json"))]
        for case in cases
    }
    assert all(found.values()), said
    return found


def once(ranks: list[dict[str, Any]], n: int, doubled: int) -> bool:
    """True if each of n samples has come, and `doubled` of them twice."""
    drawn = [index for rank in ranks for batch in rank["batches"] for index in batch]
    return set(drawn) == set(range(n)) and len(drawn) == n + doubled


def test_accelerate_takes_a_loader_as_it_is_or_is_told(tmp_path: Path) -> None:
    needs("accelerate")
    refused = ["sharded_again", "sampler_sharded_again", "batches_sharded_again", "skipped"]
    # where the first process alone reads, the others fail with it: last
    found = outcomes(
        ["prepared", "prepared_for_one", "prepared_random_sampler", *refused, "dispatched"],
        tmp_path,
    )
    order = EpochOrder(TRAIN, seed=42, global_batch=8)
    for number, rank in enumerate(found["prepared"]):
        assert rank["same"] and "leaves a headrace loader as it is" in rank["warnings"][0]
        batches = [batch.tolist() for batch in RankBatches(order, number, 2, BATCH)]
        assert rank["batches"] == batches
    for case, said in (
        ("prepared_for_one", "another DataLoader was made"),
        ("prepared_random_sampler", "Accelerate shards this loader"),
    ):
        # Accelerate fills the last batches of all ranks: 5 batches of 4, twice
        assert once(found[case], TRAIN, 40 - TRAIN)
        assert all(said in " ".join(rank["warnings"]) for rank in found[case])
    for case in [*refused, "dispatched"]:
        said = "load_state_dict(state)" if case == "skipped" else "samples would be lost"
        assert all(said in rank["error"] for rank in found[case]), case
    assert [len(found[case]) for case in refused] == [2] * 4


def test_lightning_makes_loaders_anew_without_losing_samples(tmp_path: Path) -> None:
    needs("lightning")
    found = outcomes(
        ["made_too_early", "passed_loaders", "predicted", "overfitted", "own_sampler"], tmp_path
    )
    for number, rank in enumerate(found["made_too_early"]):
        assert (
            "made as rank 0 of 1" in rank["error"] and f"says rank {number} of 2" in rank["error"]
        )
    assert once([{"batches": rank["batches"][:5]} for rank in found["passed_loaders"]], TRAIN, 1)
    assert once([{"batches": rank["batches"][5:]} for rank in found["passed_loaders"]], TRAIN, 1)
    assert once(found["predicted"], VAL, 0)
    assert once(found["own_sampler"], TRAIN, 1)
    # the first two batches, and again
    assert once([{"batches": rank["batches"][:2]} for rank in found["overfitted"]], 16, 0)
    assert all(
        rank["batches"][:2] == rank["batches"][2:] and not rank["warnings"]
        for rank in found["overfitted"]
    )
