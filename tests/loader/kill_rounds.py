"""Kills, interrupts and stops jobs and their workers at random moments. None may hang, and nothing
may be left.

    PYTHONPATH=src python tests/loader/kill_rounds.py --rounds 300 [--load 4] [--seed N] [--round N]
    [--json]

A round is a job of its own, which goes through epochs for ever, in a mode, with a number of
workers, a start method and a kind of data that follow from (seed, number). At some moment, be it
while it starts, a worker gets SIGKILL, or is stopped for five seconds; or the job itself gets
SIGKILL, SIGTERM or SIGINT. Within ten seconds it has ended, said an error, or goes on; each worker
is gone as soon as its job; and neither the system's shared memory nor the folder of temporary files
holds anything of it. ``--load`` starts processes that compute all the time.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

sys.path[:0] = [str(Path(__file__).parents[2])]  # for `tests`, here and in spawned workers

from headrace.testing.contract import MODES  # noqa: E402
from tests.conftest import mapped_elsewhere  # noqa: E402
from tests.loader import soak_data as data  # noqa: E402

LIMIT = 10.0  # seconds for everything that must happen
START = 120.0  # seconds until a job has its first batch, on a machine that others load
STOPPED = 5.0
EVENTS = ("kill a worker", "stop a worker", "SIGKILL", "SIGTERM", "SIGINT")
HOW = ("own", "photos", "rows", "wrapped", "foreign", "stream")
SHM = Path("/dev/shm")


# --- the job --------------------------------------------------------------------------------------


def job(text: str) -> None:
    """Goes through epochs for ever; says a line a batch, and one with its workers an epoch."""
    from headrace import WorkerError, create_dataloader

    spec, mode, options = json.loads(text)
    dataset = data.open_data(data.Spec(**{**spec, "size": tuple(spec["size"])}), mode)
    loader = create_dataloader(dataset, **options)
    try:
        while True:
            iterator = iter(loader)
            pids = [child.pid for child in multiprocessing.active_children()]
            print("WORKERS", *pids, flush=True)
            for _ in iterator:
                print("BATCH", flush=True)
                time.sleep(0.01)
            del iterator
    except WorkerError as error:
        print("ERROR", str(error).replace("\n", " "), flush=True)


class Watched:
    """A job that runs, and what it says. `folder` is for its temporary files."""

    def __init__(self, text: str, folder: Path) -> None:
        self.errors = (folder.parent / "stderr").open("w+")
        paths = os.pathsep.join(filter(None, sys.path))
        self.program = subprocess.Popen(
            [sys.executable, __file__, "--job", text],
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": paths},
            cwd=folder.parent,
            text=True,
        )
        self.pid = self.program.pid
        self.batches, self.said = 0, ""
        self.workers: list[int] = []
        self.descendants: dict[int, psutil.Process] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.program.stdout or ():
            word, _, rest = line.strip().partition(" ")
            if word == "BATCH":
                self.batches += 1
            elif word == "WORKERS":
                self.workers = [int(pid) for pid in rest.split()]
            elif word == "ERROR":
                self.said = rest

    @property
    def has_ended(self) -> bool:
        """True if the job itself is gone; else notes all of its processes."""
        if self.program.poll() is not None:
            return True
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.pid).children(recursive=True):
                self.descendants[child.pid] = child
        return False

    def hear_out(self) -> None:
        """Waits for the last of what it has said."""
        self._reader.join(LIMIT)

    def alive(self) -> list[psutil.Process]:
        """Its other processes that are still there."""
        found = []
        for child in self.descendants.values():
            with contextlib.suppress(psutil.Error):
                if child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
        return found

    def end(self) -> None:
        """Ends it and all of its processes by force."""
        for process in [] if self.has_ended else self.alive():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.program.kill()
        self.program.wait()
        self.hear_out()
        assert self.program.stdout is not None
        self.program.stdout.close()
        self.errors.close()

    def last_words(self) -> str:
        """The end of what it wrote to stderr."""
        self.errors.seek(0)
        return self.errors.read()[-3000:]


# --- a round --------------------------------------------------------------------------------------


class Wrong(Exception):
    """What a round found."""


def until(condition: Callable[[], Any], seconds: float) -> bool:
    """True if something came in time. The clock stands still while nobody runs."""
    for _ in range(int(seconds / 0.05)):
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())


class Round:
    """A job, and what happens to it."""

    def __init__(self, seed: int, number: int, folder: Path) -> None:
        self.rng = rng = random.Random(f"{seed}:{number}")
        self.event, self.mode = rng.choice(EVENTS), rng.choice(MODES)
        self.of_worker = "worker" in self.event
        start = rng.choices(("fork", "forkserver", "spawn", None), (12, 2, 1, 6))[0]
        workers = rng.choice((1, 2, 3) if self.of_worker else (0, 1, 2, 3))
        spec = data.draw_spec(rng, str(folder), rng.choice(HOW))
        self.spec = dataclasses.replace(spec, is_slow=rng.random() < 0.5)
        self.options: dict[str, Any] = {"batch_size": rng.choice((1, 4, 9)), "seed": 1}
        self.options |= data.draw_workers(rng, workers, start)
        # new workers that are not forked begin with their imports
        self._limit = LIMIT
        if start in ("spawn", "forkserver") and workers:
            self._limit, self.options["persistent_workers"] = START, True
        self.is_early = not self.of_worker and rng.random() < 0.3
        self.delay = rng.random() * (6 if self.is_early else 2)
        self._temporary = folder / "tmp"
        self._temporary.mkdir()
        self._shm = set(os.listdir(SHM))

    def __str__(self) -> str:
        when = f"{self.delay:.2f} s after {'its start' if self.is_early else 'its first batch'}"
        return f"{self.event} {when}; {self.spec.how}, mode {self.mode}, {self.options}"

    def play(self) -> str:
        """Raises `Wrong`; else the outcome."""
        text = json.dumps([dataclasses.asdict(self.spec), self.mode, self.options])
        watched = Watched(text, self._temporary)
        try:
            if not self.is_early and not until(lambda: watched.batches or watched.has_ended, START):
                raise Wrong(f"no batch within {START:g} s")
            time.sleep(self.delay)
            if watched.has_ended:
                raise Wrong(f"it ended by itself with status {watched.program.returncode}")
            outcome = self._worker(watched) if self.of_worker else self._whole(watched)
            if not watched.has_ended and not watched.said:
                os.kill(watched.pid, signal.SIGTERM)
            if not until(lambda: watched.has_ended, LIMIT):
                raise Wrong(f"{LIMIT:g} s after its end the job is still there")
            # a worker that still imports what it needs ends when it has
            if not until(lambda: not watched.alive(), self._limit):
                raise Wrong(f"its processes are still there: {watched.alive()}")
            if not until(lambda: not self._left(watched), LIMIT):
                raise Wrong(f"left: {self._left(watched)}")
            return outcome
        except Wrong as error:
            raise Wrong(f"{error}\n{watched.last_words()}") from None
        finally:
            watched.end()

    def _worker(self, watched: Watched) -> str:
        if not watched.workers:
            return "no worker was there"
        victim = self.rng.choice(watched.workers)
        try:
            if self.event == "kill a worker":
                os.kill(victim, signal.SIGKILL)
            else:
                os.kill(victim, signal.SIGSTOP)
                time.sleep(STOPPED)
                os.kill(victim, signal.SIGCONT)
        except ProcessLookupError:
            return "the worker was gone already"
        before = watched.batches
        enough = before + 3 * 4 * 4
        until(lambda: watched.has_ended or watched.said or watched.batches > enough, self._limit)
        if watched.has_ended:
            watched.hear_out()
        if not watched.said and watched.has_ended:
            raise Wrong(f"the job ended with status {watched.program.returncode} without an error")
        if not watched.said and watched.batches == before:
            raise Wrong(f"{self._limit:g} s after {self.event} there was neither batch nor error")
        if watched.said and self.event == "stop a worker":
            raise Wrong(f"a worker that was stopped for {STOPPED:g} s ended its job")
        return "an error" if watched.said else "goes on"

    def _whole(self, watched: Watched) -> str:
        os.kill(watched.pid, getattr(signal, self.event))
        if until(lambda: watched.has_ended, LIMIT):
            return "early" if self.is_early else "ended"
        # Python drops a KeyboardInterrupt that comes in a destructor; in ours it must not
        words = watched.last_words()
        is_lost = self.event == "SIGINT" and "Exception ignored in" in words
        if not is_lost or "/src/headrace/" in words:
            raise Wrong(f"{LIMIT:g} s after {self.event} the job is still there")
        os.kill(watched.pid, signal.SIGINT)
        if not until(lambda: watched.has_ended, LIMIT):
            raise Wrong(f"{LIMIT:g} s after a second SIGINT the job is still there")
        return "ended by a second, the first was lost in a destructor of another library"

    def _left(self, watched: Watched) -> list[Path]:
        # see conftest.py
        own = f"sem.headrace-{watched.pid}-"
        left = list(self._temporary.rglob("*"))
        for name in set(os.listdir(SHM)) - self._shm:
            is_other_s = name.startswith("sem.") or mapped_elsewhere(SHM / name)
            if name.startswith(own) or not is_other_s:
                left.append(SHM / name)
        return left


# --- all of them ----------------------------------------------------------------------------------


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Kills jobs and their workers at random moments.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--load", type=int, default=0, help="processes that compute beside")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--round", type=int, default=None, help="play this one alone")
    parser.add_argument("--json", action="store_true", help="the summary alone")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    # a shell has its background jobs, and theirs, ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if args.job:
        job(args.job)
        return 0
    busy = [sys.executable, "-c", "while True: sum(range(10_000))"]
    load = [subprocess.Popen(busy) for _ in range(args.load)]
    outcomes: Counter[str] = Counter()
    failed: list[int] = []
    try:
        with tempfile.TemporaryDirectory(prefix="kills-") as name:
            data.make_files(Path(name))
            for number in range(args.rounds) if args.round is None else [args.round]:
                folder = Path(tempfile.mkdtemp(prefix=f"round-{number}-", dir=name))
                for each in ("photos", "rows.h5"):
                    os.symlink(os.path.join(name, each), folder / each)
                played, began = Round(args.seed, number, folder), time.monotonic()
                try:
                    outcomes[f"{played.event}: {played.play()}"] += 1
                except Wrong as error:
                    failed.append(number)
                    print(f"round {number}: {played}\n  {error}", file=sys.stderr, flush=True)
                if not args.json:
                    print(f"round {number}: {time.monotonic() - began:.1f} s, {played}", flush=True)
                shutil.rmtree(folder)
    finally:
        for process in load:
            process.kill()
            process.wait()
    rounds = outcomes.total() + len(failed)
    summary = {"rounds": rounds, "failed": failed, **dict(sorted(outcomes.items()))}
    print(json.dumps(summary), flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
