"""Runs a loader for as long as one likes, whatever is done to it, and checks that it stays right
and small.

    PYTHONPATH=src python tests/loader/soak.py --minutes 30 [--seed N] [--workers 2] [--round N]
    [--json]

Round after round it makes a dataset and a loader, goes through some epochs, and does to each what
users, errors and the kernel do: it is left early, iterated twice at once, broken by errors and
SIGKILL, resumed elsewhere; batches are kept, and written into. Each batch is compared with what an
`Oracle` makes of its indices (soak_data.py). Now and then everything is dropped, and what is left
is counted. A round follows from (seed, number): ``--round N`` plays that one again and again.

It ends with a summary; the exit status is 1 if anything was wrong. A hang of a minute is wrong too.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import json
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil
import torch

from headrace import SampleError, WorkerError, create_dataloader
from headrace.monitor.stats import pss_of

sys.path[:0] = [str(Path(__file__).parents[2])]  # for `tests`, here and in spawned workers

from tests.conftest import mapped_elsewhere  # noqa: E402
from tests.loader import soak_data as data  # noqa: E402
from tests.loader.soak_data import Planned, Walk, Wrong, checksum  # noqa: E402

BEAT = 0.5  # seconds
HANG = 120  # beats of one operation
DEATH = 60  # beats until a worker's death is an error: torch looks every 5 seconds
LOOKS = 40  # times that growth is measured
AT_LEAST = 6  # however short the run is
OURS = ("headrace.", "tests.loader.soak_data")  # modules whose objects are counted
MAPS = 24  # mappings that may come and go: arenas of malloc, stacks of threads
GROWTH = 24 << 20  # bytes; see `Growth.said`
# the first rounds, so that the shortest run does everything once: event, dataset, form, start
# method, workers
TOUR = [
    ("whole", "photos", "image", "fork", 2),
    ("early", "own", "dict", "fork", 0),
    ("twins", "foreign", "nested", "fork", 2),
    ("raising", "own", "nested", "fork", 2),
    ("killed", "own", "ragged", "fork", 2),
    ("exiting", "joined", "words", "fork", 2),
    ("resumed", "photos", "image", "fork", 0),
    ("resumed", "stream", "image", "fork", 2),
    ("closed", "rows", "image", "fork", 2),
    ("hoarded", "tensors", "image", "fork", 2),
    ("raising", "subset", "dict", "fork", 0),
    ("whole", "wrapped", "dict", "forkserver", 2),
    ("killed", "own", "image", "forkserver", 2),
    ("early", "pages", "dict", "fork", 2),
    ("twins", "own", "view", "fork", 1),
    ("resumed", "own", "draws", "spawn", 1),
]


# --- a round --------------------------------------------------------------------------------------


class Round:
    """A dataset, a loader over it, and what is done to them."""

    def __init__(self, soak: Soak, number: int) -> None:
        self.soak, self.rng, self.number = soak, random.Random(f"{soak.seed}:{number}"), number
        self.is_tour = number < len(TOUR)
        event, how, form, start, workers = (
            TOUR[number] if self.is_tour else (None, None, None, None, None)
        )
        self.event = event or ""
        self.start = start or self.rng.choices(("fork", "forkserver", "spawn"), (96, 3, 1))[0]
        self.spec = data.draw_spec(self.rng, soak.folder, how, form)
        self.mode = self.rng.choice(data.MODES)
        self.oracle = data.Oracle(self.spec)
        if workers is None:
            workers = self.rng.choices((soak.workers, 1, 0), (70, 15, 15))[0]
        self.options = data.draw_options(
            self.rng, self.spec, min(workers, soak.workers), self.start
        )
        self.has_trap = self.spec.how in ("own", "foreign", "subset", "joined", "pages")
        self.error: type[Exception] = Planned
        self.epoch = 0

    def __str__(self) -> str:
        said = ", ".join(
            f"{name}={value}" for name, value in self.options.items() if value is not None
        )
        return (
            f"{self.event}: {self.spec.how} of {self.spec.n} {self.spec.form} {self.spec.size}, "
            f"mode {self.mode}, {said}"
        )

    def play(self) -> None:
        """Some epochs with an event each."""
        self.soak.watch("opening")
        dataset = data.open_data(self.spec, self.mode)
        self.loader = create_dataloader(dataset, **self.options)
        for _ in range(1 if self.is_tour or self.start != "fork" else self.rng.randint(1, 5)):
            if not self.is_tour:
                self.event = self.rng.choice(self._fitting())
            getattr(self, self.event)()
            if self.event in ("raising", "killed", "exiting", "closed"):
                self.whole()  # whatever happened, the next epoch is as it should be
        self._note_ring()
        steps = len(self.oracle.order(dataset, self.options, 0))
        if self.spec.how != "stream" and len(self.loader) != steps:
            raise Wrong(f"len(loader) is {len(self.loader)}, expected {steps}")
        self._close(self.loader, dataset)

    def _fitting(self) -> list[str]:
        events = ["whole", "early", "early", "twins", "resumed", "closed", "hoarded"]
        # each death takes the 5 seconds after which torch looks
        if self.options["num_workers"] and self.rng.random() < 0.3:
            events += ["killed", "killed", "exiting"] if self.has_trap else ["killed"]
        return events + ["raising", "raising"] * self.has_trap

    def _note_ring(self) -> None:
        for name, value in self.loader.get_stats().items():
            if name in ("ring_grown", "ring_copied"):
                self.soak.counts[name] += value
            elif name.startswith("ring_"):
                self.soak.counts[f"{name}, most"] = max(self.soak.counts[f"{name}, most"], value)

    def _close(self, *things: Any) -> None:
        self.soak.watch("closing")
        for thing in things:
            if hasattr(thing, "close"):
                thing.close()

    def walk(self, bad: tuple[int, ...] = ()) -> Walk:
        """A new iterator, sometimes of an epoch that is named."""
        if self.rng.random() < 0.3:
            self._name_epoch()
        self.epoch += 1
        return Walk(self, self.loader, self.options, self.epoch - 1, bad=bad)

    def _name_epoch(self) -> None:
        self.epoch = self.rng.randrange(9)
        self.loader.set_epoch(self.epoch)

    def _checked_state(self, walk: Walk, when: str) -> dict[str, Any]:
        state: dict[str, Any] = self.loader.state_dict()
        if (state["epoch"], state["batches"]) != (walk.epoch, walk.at):
            said = f"epoch {state['epoch']} and {state['batches']} batches"
            raise Wrong(
                f"{when} the state says {said}, and what came are epoch {walk.epoch} and "
                f"{walk.at} batches"
            )
        return state

    # -- events

    def whole(self) -> None:
        """An epoch from its beginning to its end."""
        self.walk().rest()

    def early(self) -> None:
        """An epoch that is left early."""
        walk = self.walk()
        walk.some()
        self._checked_state(walk, "after an early break")
        self.soak.counts["early breaks"] += 1

    def twins(self) -> None:
        """Two or three iterators at once; some are dropped."""
        walks = [self.walk() for _ in range(self.rng.choice((2, 2, 3)))]
        for _ in range(2 * len(walks[0].batches)):
            self.rng.choice(walks).step()
        self.rng.shuffle(walks)
        if self.rng.random() < 0.5:
            walks.pop()
        for walk in walks:
            walk.rest()
        self.soak.counts["iterators at once"] += 1

    def closed(self) -> None:
        """A loader that is closed under an iterator, which lives on."""
        walk = self.walk()
        walk.some()
        self.loader.close()
        walk.rest()

    def hoarded(self) -> None:
        """An epoch whose batches are all kept."""
        self.soak.is_hoarding = True
        self.whole()
        self.soak.is_hoarding = False

    def raising(self) -> None:
        """An epoch in which some samples raise."""
        is_read = self._draw_place() == "read"
        self.error = SampleError if is_read else Planned
        bad = tuple(self.rng.sample(range(self.spec.n), self.rng.randint(1, min(4, self.spec.n))))
        self.spec.trap.set("raise", "read" if is_read else "finish", bad)
        walk = self.walk(bad)
        walk.rest() if self.is_tour or self.rng.random() < 0.8 else walk.some()
        del walk
        self.spec.trap.clear()

    def _draw_place(self) -> str:
        """Where a sample fails; what is held, or was read ahead by an iterator before, is not
        read again.
        """
        return (
            "read"
            if self.spec.how == "own" and self.mode == "lazy" and self.rng.random() < 0.5
            else "finish"
        )

    def resumed(self) -> None:
        """The rest of an epoch out of another loader, over another dataset with the same data."""
        walk, is_stream = self.walk(), self.spec.how == "stream"
        walk.some(most=len(walk.batches) - is_stream)
        state = self._checked_state(walk, "in the middle of an epoch")
        state = self.rng.choice((json.loads(json.dumps(state)), pickle.loads(pickle.dumps(state))))
        # after the last batch too: that the epoch is at its end, nobody has been told
        epoch, start = walk.epoch, walk.at
        if self.rng.random() < 0.5:
            del walk
        workers = (
            self.options["num_workers"] if is_stream else self.rng.choice((0, 1, self.soak.workers))
        )
        options = {**self.options, **data.draw_workers(self.rng, workers, self.start)}
        dataset = data.open_data(self.spec, self.rng.choice(data.MODES))
        loader = create_dataloader(dataset, **options)
        loader.load_state_dict(state)
        Walk(self, loader, options, epoch, start).rest()
        Walk(self, loader, options, epoch + 1).rest()
        self.soak.counts["resumes"] += 1
        self._close(loader, dataset)

    # -- deaths

    def killed(self) -> None:
        """Workers that get SIGKILL: at any moment, or in the middle of a batch."""
        if self.has_trap and self.rng.random() < 0.3:
            self._die_at_a_sample("kill")
        else:
            self._die("SIGKILLs", delay=self.rng.choice((0.0, 0.005, 0.05)) * self.rng.random())

    def exiting(self) -> None:
        """A worker that calls os._exit."""
        self._die_at_a_sample("exit")

    def _die_at_a_sample(self, action: str) -> None:
        place, index = self._draw_place(), self.rng.randrange(self.spec.n)
        self.spec.trap.set(action, place, [index])
        self._die("SIGKILLs" if action == "kill" else "exits", index=index)
        self.spec.trap.clear()

    def _die(self, kind: str, index: int | None = None, delay: float = 0.0) -> None:
        """An epoch that ends with an error, unless it is through before the death; with all that
        came before it right.

        torch's handler of SIGCHLD may raise anywhere in the main thread, so all that is done until
        the dead are buried stands here.
        """
        walk: Walk | None = None
        victims: list[Any] = []
        death: tuple[str, bool] | None = None
        try:
            walk = self.walk()
            if index is None:
                victims = self._kill(walk, delay)
            walk.rest()
            self._bury(victims)
        except (WorkerError, RuntimeError) as error:
            if "worker" not in str(error) or (
                type(error) is WorkerError and f"died in epoch {self.epoch - 1}" not in str(error)
            ):
                raise
            death = (
                type(error).__name__,
                any(
                    frame.name == "__next__" for frame in traceback.extract_tb(error.__traceback__)
                ),
            )
        with contextlib.suppress(RuntimeError):
            self._bury(victims)
        self.soak.counts[kind] += max(0, len(victims) - 1) if index is None else death is not None
        if walk is not None:
            self._check_death(death, walk, index)
        self._name_epoch()

    def _kill(self, walk: Walk, delay: float) -> list[Any]:
        if self.rng.random() < 0.7:
            walk.some()
        # some die while they wait for somebody to take their batches
        time.sleep(self.rng.choice((0.0, 0.03)))
        workers = sorted(multiprocessing.active_children(), key=lambda worker: worker.pid or 0)
        victims = self.rng.sample(workers, self.rng.randint(1, len(workers))) if workers else []
        timer = threading.Timer(delay, lambda: [victim.kill() for victim in victims])
        timer.start()
        # they are reaped before anybody waits for their batches, as when another loader starts
        # workers
        if self.rng.random() < 0.3:
            self._bury([timer, *victims])
        return [timer, *victims]

    @staticmethod
    def _bury(victims: list[Any]) -> None:
        for victim in victims:
            victim.join(DEATH * BEAT)

    def _check_death(self, death: tuple[str, bool] | None, walk: Walk, index: int | None) -> None:
        """Was it said, in time, and does the state hold what was received?"""
        beats, where = self.soak.beats - walk.asked, f"epoch {walk.epoch}, batch {walk.at}"
        if death is None:
            if index is not None and any(
                index in map(self.spec.inner, batch) for batch in walk.batches
            ):
                raise Wrong(
                    f"epoch {walk.epoch}: a worker died at sample {index}, and nobody said so"
                )
            return
        name, is_inside_next = death
        self.soak.counts[f"deaths as {name}"] += 1
        if beats > DEATH:
            raise Wrong(f"{where}: {beats * BEAT:.0f} s until the {name} of a death")
        # elsewhere the user's own line was broken off, and who can say whether it had the batch?
        if is_inside_next:
            self._checked_state(walk, f"after the {name} of a death")


# --- what is left ---------------------------------------------------------------------------------


class Figures(NamedTuple):
    """What this process and its children take when every loader is closed and every batch
    dropped.
    """

    memory: int  # anonymous and shared memory: PSS without files
    pss: int
    fds: int
    threads: int
    tasks: int
    children: int
    shm: int
    maps: int
    objects: int  # of classes of headrace's and of the soak's datasets


class Growth:
    """Looks at what is left, again and again."""

    def __init__(self) -> None:
        self._shm = self._names()
        self.looks: list[Figures] = []

    def look(self) -> None:
        """Notes the figures, as soon as all that is on its way out is gone."""
        before, deadline = None, time.monotonic() + 10
        while before != (before := self._counts()) or (
            multiprocessing.active_children() and time.monotonic() < deadline
        ):
            time.sleep(0.05)
            gc.collect()
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)
        pids = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
        shm = [
            name
            for name in self._names() - self._shm
            if not mapped_elsewhere(Path("/dev/shm") / name)
        ]
        maps = len(Path("/proc/self/maps").read_bytes().splitlines())
        objects = sum(
            str(type(o).__module__).startswith(OURS) and not isinstance(o, type)
            for o in gc.get_objects()
        )
        self.looks.append(
            Figures(
                sum(map(_memory_of, pids)), sum(map(pss_of, pids)), *before, len(shm), maps, objects
            )
        )

    @staticmethod
    def _counts() -> tuple[int, int, int, int]:
        children = psutil.Process().children(recursive=True)
        return (
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            len(os.listdir("/proc/self/task")),
            len(children),
        )

    @staticmethod
    def _names() -> set[str]:
        return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()

    def said(self) -> list[str]:
        """What has grown between the first third of the looks and the last.

        Of things that can be counted even one is too many: it is a leak if every late look has more
        than each early one. (Only now and then more: something was on its way out.) Memory never
        comes back to the byte, since malloc keeps what is fragmented, and more so after the largest
        round so far: in runs of two minutes the first and the last look were up to 18 MB apart,
        mostly 2 to 8, in steps and not in a slope. So medians count, after malloc has given back
        what it can, and the limit does not grow with the time: in half an hour a leak of some 300
        bytes a batch passes it. Files are left out of PSS, for pages of torch's libraries are
        shared out among all processes of the machine that happen to run: the whole of it moves by
        80 MB.
        """
        third = max(1, len(self.looks) // 3)
        early, late, found = self.looks[:third], self.looks[-third:], []
        for name in ("fds", "threads", "tasks", "children", "shm", "objects"):
            if min(getattr(f, name) for f in late) > (most := max(getattr(f, name) for f in early)):
                found.append(
                    f"{name}: at most {most} in early looks, {getattr(late[-1], name)} in the last"
                )
        for name, limit in (("maps", MAPS), ("memory", GROWTH)):
            first, last = (median(getattr(f, name) for f in looks) for looks in (early, late))
            if last - first > limit:
                found.append(
                    f"{name}: {first:,.0f} in early looks, {last:,.0f} in late ones (medians)"
                )
        return found


def _memory_of(pid: int) -> int:
    with contextlib.suppress(OSError):
        lines = [
            line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        ]
        return sum(int(line[1]) << 10 for line in lines if line[0] in ("Pss_Anon:", "Pss_Shmem:"))
    return 0


# --- the whole ------------------------------------------------------------------------------------


class Kept(NamedTuple):
    """A batch, or a part of one, that must stay as it is until it is dropped."""

    value: Any
    crc: int
    number: int  # of its round
    where: str
    due: int  # rounds that have been played when it is dropped


class Soak:
    """Plays rounds until the time is over or something is wrong."""

    def __init__(
        self, seconds: float, seed: int, workers: int, only: int | None, as_json: bool, folder: str
    ) -> None:
        self.seconds, self.seed, self.workers, self.only, self.folder = (
            seconds,
            seed,
            workers,
            only,
            folder,
        )
        self.as_json = as_json
        self.counts: Counter[str] = Counter()
        self.kept: list[Kept] = []
        self.growth = Growth()
        self.is_hoarding = self.is_growth = False
        self.round: Round | None = None
        self.number = self.played = 0
        self.failure = ""
        self.beats, self._began = 0, time.monotonic()
        self._doing = "begin", 0

    def run(self) -> None:
        """Sets `failure` if anything was wrong."""
        threading.Thread(target=self._guard, daemon=True).start()
        try:
            while not self._is_over:
                # where not even `_guard` gets its turn
                faulthandler.dump_traceback_later(10 * HANG * BEAT, exit=True)
                self.number = self.played if self.only is None else self.only
                self.round = Round(self, self.number)
                self.round.play()
                self.played += 1
                self._drop(self.played)
                if self._is_look_due:
                    self._drop(sys.maxsize)
                    self.round = None
                    self.watch("looking")
                    self.growth.look()
            self.failure = "; ".join(self.growth.said())
            self.is_growth = bool(self.failure)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            traceback.print_exc()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    @property
    def _is_over(self) -> bool:
        return self.elapsed >= self.seconds and len(self.growth.looks) >= AT_LEAST

    @property
    def _is_look_due(self) -> bool:
        """After the tour and a fifth of the time; then regularly."""
        warm = self.seconds / 5
        due = warm + len(self.growth.looks) * (self.seconds - warm) / LOOKS
        return self.played >= len(TOUR) and self.elapsed >= due

    # -- batches that are kept

    def use(self, batch: Any, where: str, rng: random.Random) -> None:
        """Keeps a batch, or writes into it, or neither."""
        draw = rng.random()
        if draw < 0.4:
            self.counts["batches written"] += 1
            for array in data.arrays_in(batch):
                if isinstance(array, torch.Tensor) or array.flags.writeable:
                    array[...] = rng.randrange(100)
        if self.is_hoarding or draw < 0.05 or draw > 0.9:
            part = self._part(batch, rng)
            self.kept.append(
                Kept(part, checksum(part), self.number, where, self.played + rng.randint(1, 6))
            )
            self.counts["batches kept"] += 1

    def _part(self, batch: Any, rng: random.Random) -> Any:
        """A batch, or one tensor of it, or a view of one."""
        arrays = [array for array in data.arrays_in(batch) if len(array.shape)]
        array = rng.choice(arrays) if arrays and rng.random() < 0.6 else None
        if array is None or rng.random() < 0.3:
            return batch if array is None else array
        if (
            isinstance(array, torch.Tensor)
            and array.dtype is not torch.bfloat16
            and rng.random() < 0.5
        ):
            array = array.numpy()
        return array[len(array) // 2 :: 2]

    def _drop(self, until: int) -> None:
        for kept in self.kept:
            if kept.due <= until and checksum(kept.value) != kept.crc:
                now, self.number = self.number, kept.number
                raise Wrong(f"what was kept since {kept.where} was overwritten by round {now}")
        self.kept = [kept for kept in self.kept if kept.due > until]

    # -- hangs

    def watch(self, doing: str) -> int:
        """Says what is done from now on, and gives the time in beats."""
        self._doing = doing, self.beats
        return self.beats

    def _guard(self) -> None:
        """Ends the process if one operation takes a minute, with the stacks of all that can say
        theirs.

        Time is counted in beats of this thread: where the whole machine stands still for a while,
        so do they.
        """
        while self.beats - self._doing[1] < HANG:
            time.sleep(BEAT)
            self.beats += 1
        self.failure = f"hangs since {HANG * BEAT:.0f} s in {self._doing[0]}"
        for child in multiprocessing.active_children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid or 0, signal.SIGUSR1)  # forked ones dump their stacks
        faulthandler.dump_traceback(all_threads=True)
        time.sleep(1)
        print(report(self), flush=True)
        os._exit(1)


def summary(soak: Soak) -> dict[str, Any]:
    """What happened."""
    looks = soak.growth.looks
    return {
        "status": "failed" if soak.failure else "ok",
        "seed": soak.seed,
        "minutes": round(soak.elapsed / 60, 2),
        "rounds": soak.played,
        **dict(sorted(soak.counts.items())),
        "looks": len(looks),
        "memory, MB": [look.memory >> 20 for look in looks],
        "growth": {
            name: [getattr(looks[0], name), getattr(looks[-1], name)] for name in Figures._fields
        }
        if looks
        else {},
        **(
            {"failure": soak.failure, "round": soak.number, "playing": str(soak.round)}
            if soak.failure
            else {}
        ),
    }


def report(soak: Soak) -> str:
    """The summary as text; a failure is said on stderr too."""
    said = summary(soak)
    if soak.failure:
        print(f"soak: seed {soak.seed}, round {soak.number}: {soak.failure}", file=sys.stderr)
        how = f"--minutes {soak.seconds / 60:g}" if soak.is_growth else f"--round {soak.number}"
        print(
            f"  {soak.round}\n  again: python tests/loader/soak.py --seed {soak.seed} --workers "
            f"{soak.workers} {how}",
            file=sys.stderr,
        )
    if soak.as_json:
        return json.dumps(said)
    rows = {
        **said,
        **{
            f"growth: {name}": f"{first:,} -> {last:,}"
            for name, (first, last) in said.pop("growth").items()
        },
    }
    return "\n".join(
        f"{name:<28} {value:,}" if isinstance(value, int) else f"{name:<28} {value}"
        for name, value in rows.items()
    )


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Loads for a long time, and checks everything.")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("--workers", type=int, default=2, choices=range(1, 9))
    parser.add_argument(
        "--round", type=int, default=None, help="play this round alone, again and again"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    faulthandler.register(signal.SIGUSR1)
    multiprocessing.set_forkserver_preload(["headrace"])
    seed = random.SystemRandom().randrange(1 << 20) if args.seed is None else args.seed
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        data.make_files(Path(folder))
        soak = Soak(60 * args.minutes, seed, args.workers, args.round, args.json, folder)
        soak.run()
        print(report(soak), flush=True)
    return bool(soak.failure)


if __name__ == "__main__":
    sys.exit(main())
