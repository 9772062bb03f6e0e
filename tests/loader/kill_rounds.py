"""Kills, interrupts and stops jobs and their workers at random moments. None may hang, and nothing
may be left.

    PYTHONPATH=src python tests/loader/kill_rounds.py --rounds 300 [--load 4] [--seed N] [--round N]
    [--json]

A round is a job of its own, which goes through epochs for ever, in a mode, with a number of
workers, a start method and a kind of data that follow from (seed, number). At some moment, be it
while it starts, a worker gets SIGKILL, or is stopped for five seconds; or the job itself gets
SIGKILL, SIGTERM or SIGINT. Within ten seconds it has ended, said an error, or goes on; each worker
is gone as soon as its job; and neither the system's shared memory nor the folder of temporary files
holds anything of it. ``--load`` starts processes that compute all the time. A job that something
happens to while it starts is a program of its own; the others are forked from this process, which
has imported torch already.
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
from pathlib import Path
from typing import Any

import psutil

sys.path[:0] = [str(Path(__file__).parents[2])]  # for `tests`, here and in spawned workers

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

    given = json.loads(text)
    given["spec"]["size"] = tuple(given["spec"]["size"])
    dataset = data.open_data(data.Spec(**given["spec"]), given["mode"])
    loader = create_dataloader(dataset, **given["options"])
    while True:
        try:
            iterator = iter(loader)
            pids = [child.pid for child in multiprocessing.active_children()]
            print("WORKERS", *pids, flush=True)
            for _ in iterator:
                print("BATCH", flush=True)
                time.sleep(0.01)
            del iterator
        except WorkerError as error:
            print("ERROR", str(error).replace("\n", " "), flush=True)
            return


def _forked(text: str, folder: Path, output: int, errors: int) -> None:
    """A job in a child of this process."""
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.environ["TMPDIR"], tempfile.tempdir = str(folder), None
    os.chdir(folder.parent)
    job(text)


class Watched:
    """A job that runs, and what it says.

    Args:
        text: for `job`.
        folder: for its temporary files.
        is_forked: else it is a program of its own.
    """

    def __init__(self, text: str, folder: Path, is_forked: bool) -> None:
        self.errors = (folder.parent / "stderr").open("w+")
        read, write = os.pipe()
        self.child: Any = None
        if is_forked:
            arguments = (text, folder, write, self.errors.fileno())
            self.child = multiprocessing.get_context("fork").Process(target=_forked, args=arguments)
            self.child.start()
        else:
            environment = {
                **os.environ,
                "TMPDIR": str(folder),
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            }
            command = [sys.executable, __file__, "--job", text]
            self.program = subprocess.Popen(
                command, stdout=write, stderr=self.errors, env=environment, cwd=folder.parent
            )
        os.close(write)
        self.pid = self.child.pid if is_forked else self.program.pid
        self.output = os.fdopen(read)
        self.batches, self.workers, self.said = 0, list[int](), ""
        self.descendants: dict[int, psutil.Process] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.output:
            word, _, rest = line.strip().partition(" ")
            if word == "BATCH":
                self.batches += 1
            elif word == "WORKERS":
                self.workers = [int(pid) for pid in rest.split()]
            elif word == "ERROR":
                self.said = rest

    def look(self) -> None:
        """Notes all processes of the job."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.pid).children(recursive=True):
                self.descendants[child.pid] = child

    @property
    def status(self) -> int | None:
        """How the job has ended; None: it has not."""
        status: int | None = self.program.poll() if self.child is None else self.child.exitcode
        return status

    @property
    def has_ended(self) -> bool:
        """True if the job itself is gone."""
        return self.status is not None

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
        self.look()
        for process in self.alive():
            with contextlib.suppress(psutil.Error):
                process.kill()
        if self.child is None:
            self.program.kill()
            self.program.wait()
        else:
            self.child.kill()
            self.child.join()
        self.hear_out()
        self.output.close()

    def last_words(self) -> str:
        """The end of what it wrote to stderr."""
        self.errors.seek(0)
        return self.errors.read()[-3000:]


# --- a round --------------------------------------------------------------------------------------


class Wrong(Exception):
    """What a round found."""


def until(condition: Any, seconds: float) -> bool:
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
        self.event, self.mode, how = rng.choice(EVENTS), rng.choice(data.MODES), rng.choice(HOW)
        self.start = rng.choices(("fork", "forkserver", "spawn", None), (12, 2, 1, 6))[0]
        workers = rng.choice((1, 2, 3)) if "worker" in self.event else rng.choice((0, 1, 2, 3))
        self.spec = dataclasses.replace(
            data.draw_spec(rng, str(folder), how, "image"), is_slow=rng.random() < 0.5
        )
        self.options: dict[str, Any] = {
            "batch_size": rng.choice((1, 4, 9)),
            "num_workers": workers,
            "seed": 1,
        }
        if workers:
            # others may take longer to start than the limit
            lasting = rng.random() < 0.5 or self.start in ("spawn", "forkserver")
            self.options |= {
                "persistent_workers": lasting,
                "prefetch_factor": rng.choice((1, 2, 4)),
            }
            self.options["multiprocessing_context"] = self.start
        # new workers that are not forked begin with their imports
        self._limit = LIMIT if self.start in ("fork", None) else START
        self.is_early = "worker" not in self.event and rng.random() < 0.3
        self.delay = rng.random() * (6 if self.is_early else 2)
        self._temporary = folder / "tmp"
        self._temporary.mkdir()
        self._shm = set(os.listdir(SHM)) if SHM.is_dir() else set()

    def __str__(self) -> str:
        when = f"{self.delay:.2f} s after {'its start' if self.is_early else 'its first batch'}"
        return (
            f"{self.event} {when}; {self.spec.how} of {self.spec.n}, mode {self.mode}, "
            f"{self.options}"
        )

    def play(self) -> str:
        """Raises `Wrong`; else the outcome."""
        text = json.dumps(
            {"spec": dataclasses.asdict(self.spec), "mode": self.mode, "options": self.options}
        )
        watched = Watched(text, self._temporary, not self.is_early)
        try:
            if not self.is_early and not until(lambda: watched.batches or watched.has_ended, START):
                raise Wrong(f"no batch within {START:g} s")
            time.sleep(self.delay)
            watched.look()
            if watched.has_ended:
                raise Wrong(f"it ended by itself with status {watched.status}")
            outcome = self._worker(watched) if "worker" in self.event else self._whole(watched)
            if not watched.has_ended and not watched.said:
                os.kill(watched.pid, signal.SIGTERM)
            if not until(lambda: watched.has_ended, LIMIT):
                raise Wrong(f"{LIMIT:g} s after its end the job is still there")
            self._gone(watched)
            return outcome
        except Wrong as error:
            raise Wrong(f"{error}\n{self._looked_at(watched)}") from None
        finally:
            watched.end()
            watched.errors.close()

    def _worker(self, watched: Watched) -> str:
        workers = list(watched.workers)
        if not workers:
            return "no worker was there"
        victim = self.rng.choice(workers)
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
        goes_on = until(
            lambda: watched.has_ended or watched.said or watched.batches > before + 3 * 4 * 4,
            self._limit,
        )
        watched.look()
        if not goes_on and watched.batches == before:
            raise Wrong(
                f"{self._limit:g} s after {self.event} (pid {victim}) there was neither a batch "
                "nor an error nor the end"
            )
        if self.event == "stop a worker" and (watched.said or watched.has_ended):
            raise Wrong(
                f"a worker that was stopped for {STOPPED:g} s ended its job: {watched.said}"
            )
        if watched.has_ended:
            watched.hear_out()
        outcome = "an error" if watched.said or watched.has_ended else "goes on"
        if outcome == "an error" and not watched.said:
            raise Wrong(f"the job ended with status {watched.status} without an error of ours")
        return outcome

    def _whole(self, watched: Watched) -> str:
        os.kill(watched.pid, getattr(signal, self.event))
        if until(lambda: watched.look() or watched.has_ended, LIMIT):
            return "early" if self.is_early else "ended"
        # Python drops a KeyboardInterrupt that comes in a destructor; in ours it must not
        words = watched.last_words()
        if (
            self.event != "SIGINT"
            or "Exception ignored in" not in words
            or "/src/headrace/" in words
        ):
            raise Wrong(f"{LIMIT:g} s after {self.event} the job is still there")
        os.kill(watched.pid, signal.SIGINT)
        if not until(lambda: watched.look() or watched.has_ended, LIMIT):
            raise Wrong(f"{LIMIT:g} s after a second SIGINT the job is still there")
        return "ended by a second, the first was lost in a destructor of another library"

    def _gone(self, watched: Watched) -> None:
        """Raises what is left."""
        # a worker that still imports what it needs ends when it has
        if not until(lambda: not watched.alive(), self._limit):
            raise Wrong(
                f"{self._limit:g} s after the job's end its processes are still there: "
                f"{watched.alive()}"
            )

        # see conftest.py
        prefixes = tuple(f"sem.headrace-{pid}-" for pid in (os.getpid(), watched.pid))

        def left() -> list[Path]:
            new = (
                {name for name in os.listdir(SHM) if name not in self._shm}
                if SHM.is_dir()
                else set()
            )
            # of whose processes none is left
            ours = {name for name in new if name.startswith(prefixes)}
            others = [
                name
                for name in new - ours
                if not name.startswith("sem.") and not mapped_elsewhere(SHM / name)
            ]
            return [*(SHM / name for name in (*ours, *others)), *self._temporary.rglob("*")]

        if not until(lambda: not left(), LIMIT):
            raise Wrong(f"left: {', '.join(map(str, left()))}")

    def _looked_at(self, watched: Watched) -> str:
        lines = []
        for process in watched.alive():
            with contextlib.suppress(psutil.Error):  # it ends while it is looked at
                lines.append(
                    f"  {process.pid} {process.ppid()} {process.status()} "
                    f"{process.cmdline()[-1][:60]!r}"
                )
        for pid in [watched.pid, *(process.pid for process in watched.alive())]:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                command = ["py-spy", "dump", "--pid", str(pid)]
                lines.append(
                    subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
                )
        return "\n".join([*lines, watched.last_words()])


# --- all of them ----------------------------------------------------------------------------------


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Kills jobs and their workers at random moments.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--load", type=int, default=0, help="processes that compute beside")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--round", type=int, default=None, help="play this one alone")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        job(args.job)
        return 0
    # a shell has its background jobs, and theirs, ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    load = [
        subprocess.Popen([sys.executable, "-c", "while True: sum(range(10_000))"])
        for _ in range(args.load)
    ]
    outcomes, failures = Counter[str](), []
    name = tempfile.mkdtemp(prefix="kills-")  # its end is nothing that a forked job inherits
    try:
        data.make_files(Path(name))
        for number in range(args.rounds) if args.round is None else [args.round]:
            folder = Path(tempfile.mkdtemp(prefix=f"round-{number}-", dir=name))
            for each in ("photos", "rows.h5"):
                os.symlink(os.path.join(name, each), folder / each)
            played, began = Round(args.seed, number, folder), time.monotonic()
            try:
                outcomes[f"{played.event}: {played.play()}"] += 1
            except Wrong as error:
                failures.append(number)
                print(f"round {number}: {played}\n  {error}", file=sys.stderr, flush=True)
            if not args.json:
                print(f"round {number}: {time.monotonic() - began:.1f} s, {played}", flush=True)
            shutil.rmtree(folder)
    finally:
        shutil.rmtree(name)
        for process in load:
            process.kill()
            process.wait()
    said = {
        "rounds": sum(outcomes.values()) + len(failures),
        "seed": args.seed,
        "failed": failures,
        **dict(sorted(outcomes.items())),
    }
    print(json.dumps(said), flush=True)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
