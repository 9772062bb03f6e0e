"""Runs the lives of a job: each rank a process, each job a process group with a time limit.

A job is run by `python elastic_run.py PEER CHANGE FOLDER`, which `elastic.py` starts, and kills
when its time is up. The ranks of a life have torchrun's environment (one node) and run at the same
time; they exchange nothing but what the peer does of itself. Each writes the samples that it got,
batch for batch, so that nothing is lost when it is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_peers import BILLION, PEERS, Life, Peer


@dataclass(frozen=True)
class Change:
    """A job that is started again: the second life goes on where the first one saved its state.

    Attributes:
        key: its name on the command line.
        title: what the table says.
        lives: one, if there is nothing to go on with.
    """

    key: str
    title: str
    lives: tuple[Life, ...]


CHANGES = (
    Change("fewer", "8 -> 6 ranks, the same global batch", (Life(8, 6, stop=10), Life(6, 8))),
    Change("seven", "8 -> 7 ranks, 6 samples a rank as before", (Life(8, 6, stop=10), Life(7, 6))),
    Change("more", "1 -> 8 ranks, the same global batch", (Life(1, 48, stop=10), Life(8, 6))),
    Change(
        "workers",
        "4 -> 3 workers, 2 ranks",
        (Life(2, 24, workers=4, stop=8), Life(2, 24, workers=3)),
    ),
    Change(
        "killed",
        "a rank is killed: 4 -> 3 ranks, the same global batch",
        (Life(4, 12, stop=10, dies=True), Life(3, 16)),
    ),
    Change("batch", "batches of 12 -> 14, 4 ranks", (Life(4, 12, stop=10), Life(4, 14))),
    Change("skipped", "a sample of one rank can't be read, 8 ranks", (Life(8, 6, skips=True),)),
    Change(
        "billion",
        "10^9 rows, 2 -> 1 ranks",
        (Life(2, 32, stop=10, samples=BILLION), Life(1, 64, stop=10, samples=BILLION)),
    ),
)
SMALL = Change("small", "the same with few rows", (Life(2, 32, stop=10), Life(1, 64, stop=5)))
"""What "billion" takes without its rows: the libraries themselves."""


@dataclass
class Lived:
    """What a life has left behind: the batches of each rank, their states as saved (pickled),
    and the first error.
    """

    batches: list[list[list[int]]] = field(default_factory=list)
    states: list[bytes] = field(default_factory=list)
    error: str | None = None


def count(lives: list[Lived], samples: int) -> dict[str, Any]:
    """What came of an epoch: samples that are missing and that came again, and the least and
    most batches of a rank, of the last life.
    """
    given = [
        number for life in lives for rank in life.batches for batch in rank for number in batch
    ]
    numbers = [len(rank) for rank in lives[-1].batches]
    different = len(set(given))
    return {
        "missing": samples - different,
        "doubled": len(given) - different,
        "batches": [min(numbers), max(numbers)],
    }


def run(peer: Peer, change: Change, folder: Path) -> dict[str, Any]:
    """Runs the lives of a change, and says what came of them; the same as JSON in `folder` after
    each of its parts.
    """
    result: dict[str, Any] = {"at": "the writing of its data"}
    _tell(folder, result)
    if peer.has_files:
        _in_a_process(peer, folder, change.lives[0].samples)
    if peer.start == "fork":
        for module in peer.modules:
            importlib.import_module(module)
    lives: list[Lived] = []
    dealt: list[Any] = [None] * change.lives[0].ranks
    for number, life in enumerate(change.lives):
        result["at"] = (
            ("the first job", "the job that goes on")[number]
            if len(change.lives) > 1
            else "the job"
        )
        _tell(folder, result)
        lived = live(peer, life, dealt, folder)
        lives.append(lived)
        if lived.error is not None:
            return {**result, "error": lived.error, "after": number}
        if number == 0 and life.stop is not None:
            saved = [pickle.loads(state) for state in lived.states]
            kept = lived.states if peer.every_rank else lived.states[:1]
            result["state"] = sum(len(state) for state in kept)
            result["states"] = len(kept)
            try:
                dealt = peer.deal(saved, change.lives[1].ranks)
            except Exception as error:
                return {**result, "error": said(error), "after": 1}
    if change.lives[-1].stop is None:
        result |= count(lives, change.lives[0].samples)
        if change.lives[0].skips:
            result["missing"] -= 1  # the sample that can't be read
    return {**result, "at": "the end"}


def live(peer: Peer, life: Life, states: list[Any], folder: Path) -> Lived:
    """A life: its ranks at the same time, each in a process. A life in which a rank dies ends
    with SIGKILL of the others.
    """
    context: Any = multiprocessing.get_context(peer.start)
    if peer.start == "forkserver":
        context.set_forkserver_preload([*peer.modules, "elastic_peers"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for path in [*folder.glob("rank-*"), *folder.glob("state-*")]:
        path.unlink()
    ranks = [
        context.Process(
            target=_rank,
            args=(peer.name, life, rank, states[rank], port, str(folder)),
            name=f"rank {rank}",
        )
        for rank in range(life.ranks)
    ]
    for process in ranks:
        process.start()
    if life.dies:
        _end_by_force(ranks, life, folder)
    for process in ranks:
        process.join()
    lived = Lived()
    for rank in range(life.ranks):
        lines = (
            (folder / f"rank-{rank}").read_text().splitlines()
            if (folder / f"rank-{rank}").exists()
            else []
        )
        told = [json.loads(line) for line in lines]
        lived.batches.append([line for line in told if isinstance(line, list)][: life.stop])
        lived.error = lived.error or next(
            (line["error"] for line in told if isinstance(line, dict)), None
        )
        if (folder / f"state-{rank}").exists():
            lived.states.append((folder / f"state-{rank}").read_bytes())
    if lived.error is None and not life.dies and any(process.exitcode for process in ranks):
        lived.error = f"ranks ended with status {sorted({process.exitcode for process in ranks})}"
    return lived


def _end_by_force(ranks: list[Any], life: Life, folder: Path) -> None:
    """Kills rank 1 when all have saved, and then the others, as a launcher does."""
    while len(list(folder.glob("state-*"))) < life.ranks and all(
        process.is_alive() for process in ranks
    ):
        time.sleep(0.05)
    for process in (ranks[1], *ranks):
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
            time.sleep(0.2 if process is ranks[1] else 0)


def _rank(name: str, life: Life, rank: int, state: Any, port: int, folder: str) -> None:
    """The process of a rank: iterates, saves at `life.stop`, and ends, or waits to be killed."""
    world = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GLOBAL_RANK": rank,
        "WORLD_SIZE": life.ranks,
        "LOCAL_WORLD_SIZE": life.ranks,
    }
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "NNODES": 1,
        "NODE_RANK": 0,
        "GROUP_RANK": 0,
    }
    os.environ |= {key: str(value) for key, value in (world | place).items()}
    quiet()
    peer = next(peer for peer in PEERS if peer.name == name)
    # a line at a time: what was told is there after SIGKILL
    with open(Path(folder) / f"rank-{rank}", "w", buffering=1) as told:
        try:
            opened = peer.open(Path(folder), life, rank, state)
            batches = iter(opened.batches)
            for done, batch in enumerate(batches, start=1):
                told.write(json.dumps([] if life.samples == BILLION else batch) + "\n")
                if done == life.stop:
                    _save(Path(folder) / f"state-{rank}", opened.state())
                    while life.dies:
                        time.sleep(1)
                    break
        except Exception as error:
            told.write(json.dumps({"error": said(error)}) + "\n")
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()  # a forked process runs none by itself
    os._exit(0)


def _save(path: Path, state: Any) -> None:
    """Writes a state, as a checkpoint holds it: pickled, alone."""
    path.with_suffix(".part").write_bytes(pickle.dumps(state))
    os.replace(path.with_suffix(".part"), path)


def _in_a_process(peer: Peer, folder: Path, samples: int) -> None:
    """Has the data written by a process that ends, so that what it started is not forked into
    the ranks.
    """
    process = multiprocessing.get_context("spawn").Process(
        target=_write, args=(peer.name, str(folder), samples)
    )
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(
            (folder / "failed").read_text()
            if (folder / "failed").exists()
            else f"status {process.exitcode}"
        )


def _write(name: str, folder: str, samples: int) -> None:
    quiet()
    try:
        next(peer for peer in PEERS if peer.name == name).write(Path(folder), samples)
    except BaseException as error:
        (Path(folder) / "failed").write_text(said(error))
        traceback.print_exc()
        os._exit(1)


def quiet() -> None:
    """Peers warn of GPUs, progress and caches, which nobody asked for here."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def said(error: BaseException) -> str:
    """An error in one line, without paths of this machine; of an error of a worker the last
    line, which is the cause.
    """
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()] or [""]
    if "Traceback (most recent call last):" in lines:
        return lines[-1][:300]
    return f"{type(error).__name__}: {' '.join(lines)}".rstrip(": ")[:300]


def _tell(folder: Path, result: dict[str, Any]) -> None:
    (folder / "result.part").write_text(json.dumps(result))
    os.replace(folder / "result.part", folder / "result.json")


def main() -> None:
    name, key, where = sys.argv[1:]
    folder = Path(where)
    quiet()
    peer, change = (
        next(peer for peer in PEERS if peer.name == name),
        next(change for change in (*CHANGES, SMALL) if change.key == key),
    )
    try:
        _tell(folder, run(peer, change, folder))
    except Exception as error:
        at = json.loads((folder / "result.json").read_text())
        _tell(folder, {**at, "error": said(error)})
        traceback.print_exc()


if __name__ == "__main__":
    main()
