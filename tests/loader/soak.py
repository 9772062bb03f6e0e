"""Runs a loader for as long as one likes, whatever is done to it, and checks that it stays right
and small.

    PYTHONPATH=src python tests/loader/soak.py --minutes 30 [--seed N] [--workers 2] [--round N]

Round after round it makes a dataset and a loader, goes through some epochs, and does to each what
users and errors do: it is left early, iterated twice at once, broken by errors, closed, resumed
elsewhere; batches are kept, and written into. (For deaths see kill_rounds.py.) Each batch is
compared with that of a loader without workers that nothing happens to. Now and then everything is
dropped, and what is left is counted. A round follows from (seed, number): ``--round N`` plays that
one again and again.

It ends with a summary; the exit status is 1 if anything was wrong. A hang of two minutes is wrong
too.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import dataclasses
import faulthandler
import gc
import json
import multiprocessing
import os
import random
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

from headrace import SampleError, create_dataloader
from headrace.testing.contract import MODES, same

sys.path[:0] = [str(Path(__file__).parents[2])]  # for `tests`, here and in spawned workers

from tests.conftest import mapped_elsewhere  # noqa: E402
from tests.loader import soak_data as data  # noqa: E402

EVENTS = ("whole", "early", "early", "twins", "resumed", "closed", "raising", "raising")
HANG = 120  # seconds of one operation
LOOKS = 40  # times that growth is measured
AT_LEAST = 6  # however short the run is
OURS = ("headrace.", "tests.loader.soak_data")  # modules whose objects are counted
# What may come and go: arenas of malloc and stacks of threads; bytes, see `Growth.found`.
LIMITS = {"maps": 24, "memory": 24 << 20}
# the first rounds, so that the shortest run does everything once: event, dataset, form, start
# method, workers
TOUR = [
    ("whole", "photos", "image", "fork", 2),
    ("early", "own", "nested", "fork", 0),
    ("twins", "foreign", "nested", "fork", 2),
    ("raising", "own", "nested", "fork", 2),
    ("early", "joined", "image", "fork", 2),
    ("resumed", "photos", "image", "fork", 0),
    ("resumed", "joined", "nested", "fork", 2),
    ("closed", "rows", "image", "fork", 2),
    ("whole", "wrapped", "nested", "forkserver", 2),
    ("twins", "own", "view", "fork", 1),
    ("resumed", "own", "draws", "spawn", 1),
]


class Wrong(Exception):
    """What the soak found."""


# --- an epoch, batch by batch ---------------------------------------------------------------------


def without_workers(options: dict[str, Any]) -> dict[str, Any]:
    names = ("prefetch_factor", "persistent_workers", "multiprocessing_context")
    return {**{k: v for k, v in options.items() if k not in names}, "num_workers": 0}


class Twin:
    """A loader in this process that nothing happens to: what must come."""

    def __init__(self, spec: data.Spec, options: dict[str, Any]) -> None:
        dataset = data.open_data(dataclasses.replace(spec, is_slow=False), "lazy")
        self.loader = create_dataloader(dataset, **without_workers(options))

    def epoch(self, epoch: int) -> list[tuple[list[int], Any]]:
        """Indices and values of each batch."""
        self.loader.set_epoch(epoch)
        indices = list(self.loader.batch_sampler)
        return list(zip(indices, self.loader, strict=True))


class Walk:
    """An iterator of a loader from an epoch and a batch on, whose batches are compared with those
    that must come.
    """

    def __init__(
        self,
        round_: Round,
        loader: Any,
        epoch: int,
        start: int = 0,
        bad: tuple[int, ...] = (),  # samples whose batches must fail
        place: str = "",
    ) -> None:
        self.round, self.soak, self.epoch = round_, round_.soak, epoch
        self.start = self.at = start
        self.workers, self.bad = loader.num_workers, bad
        self.batches = round_.twin.epoch(epoch)
        if bad:
            data.set_trap(round_.spec, place, bad)
        self.soak.watch()
        self.iterator = iter(loader)
        self.soak.counts["epochs"] += 1
        if loader.epoch != epoch:
            raise Wrong(f"the loader is in epoch {loader.epoch}, expected {epoch}")

    def step(self) -> bool:
        """Receives and checks a batch, or an error; False at the end."""
        where = f"epoch {self.epoch}, batch {self.at}"
        indices, expected = [], None
        if self.at < len(self.batches):
            indices, expected = self.batches[self.at]
        fails = any(self.round.spec.inner(index) in self.bad for index in indices)
        self.soak.watch()
        try:
            batch = next(self.iterator)
        except StopIteration:
            if indices:
                raise Wrong(f"{where}: the epoch ended, expected {len(self.batches)}") from None
            return False
        except (data.Planned, SampleError) as error:
            if not fails:
                raise
            self._check_error(error, where)
        else:
            if not indices or fails:
                raise Wrong(f"{where}: a batch came, expected an error or the end")
            if not same(batch, expected):
                text = f"is {str(batch)[:300]}, expected {str(expected)[:300]}"
                raise Wrong(f"{where}: the batch of samples {indices} {text}")
            self.soak.counts["batches"] += 1
            self.soak.use(batch, where, self.round.rng)
        self.at += 1
        return True

    def _check_error(self, error: Exception, where: str) -> None:
        self.soak.counts["exceptions"] += 1
        worker = f"worker {(self.at - self.start) % self.workers}, " if self.workers else ""
        notes = "\n".join(getattr(error, "__notes__", []))
        if f"headrace: in {worker}{where}" not in notes or "planned for" not in str(error):
            raise Wrong(f"{where}: got {error!r} with {notes!r}") from error
        if self.workers and "Traceback" not in str(error.__cause__):
            raise Wrong(f"{where}: {error!r} lacks the worker's traceback") from error

    def rest(self) -> None:
        """The batches up to the end."""
        while self.step():
            pass

    def some(self) -> None:
        """A random number of the batches to come."""
        for _ in range(self.round.rng.randint(0, len(self.batches) - self.at)):
            self.step()


# --- a round --------------------------------------------------------------------------------------


class Round:
    """A dataset, a loader over it, and what is done to them."""

    def __init__(self, soak: Soak, number: int) -> None:
        self.soak, self.rng = soak, random.Random(f"{soak.seed}:{number}")
        self.is_tour = number < len(TOUR)
        if self.is_tour:
            self.event, how, form, self.start, workers = TOUR[number]
            self.spec = data.draw_spec(self.rng, soak.folder, how, form)
        else:
            self.event = ""
            self.start = self.rng.choices(("fork", "forkserver", "spawn"), (96, 3, 1))[0]
            self.spec = data.draw_spec(self.rng, soak.folder)
            workers = self.rng.choices((soak.workers, 1, 0), (70, 15, 15))[0]
        self.mode = self.rng.choice(MODES)
        self.options = data.draw_options(self.rng, self.spec, workers, self.start)
        self.twin = Twin(self.spec, self.options)
        self.has_trap = self.spec.how in ("own", "foreign", "joined")
        self.epoch = 0

    def __str__(self) -> str:
        return f"{self.event}: {self.spec}, mode {self.mode}, {self.options}"

    def play(self) -> None:
        """Some epochs with an event each."""
        self.soak.watch()
        dataset = data.open_data(self.spec, self.mode)
        self.loader = create_dataloader(dataset, **self.options)
        for _ in range(1 if self.is_tour or self.start != "fork" else self.rng.randint(1, 5)):
            if not self.is_tour:
                self.event = self.rng.choice(EVENTS if self.has_trap else EVENTS[:-2])
            getattr(self, self.event)()
            if self.event in ("raising", "closed"):
                self.whole()  # whatever happened, the next epoch is as it should be
        self._close(self.loader, dataset)

    def _close(self, *things: Any) -> None:
        self.soak.watch()
        for thing in things:
            if hasattr(thing, "close"):
                thing.close()

    def walk(self, **trap: Any) -> Walk:
        """A new iterator, sometimes of an epoch that is named."""
        if self.rng.random() < 0.3:
            self.epoch = self.rng.randrange(9)
            self.loader.set_epoch(self.epoch)
        self.epoch += 1
        return Walk(self, self.loader, self.epoch - 1, **trap)

    def _checked_state(self, walk: Walk, when: str) -> dict[str, Any]:
        state: dict[str, Any] = self.loader.state_dict()
        saved, received = (state["epoch"], state["batches"]), (walk.epoch, walk.at)
        if saved != received:
            raise Wrong(f"{when} the state says {saved}, epoch and batches received: {received}")
        return state

    # -- events

    def whole(self) -> None:
        self.walk().rest()

    def early(self) -> None:
        walk = self.walk()
        walk.some()
        self._checked_state(walk, "after an early break")

    def twins(self) -> None:
        """Two iterators at once; one may be dropped."""
        walks = [self.walk(), self.walk()]
        for _ in range(len(walks[0].batches)):
            self.rng.choice(walks).step()
        for walk in walks[self.rng.randrange(2) :]:
            walk.rest()

    def closed(self) -> None:
        """A loader that is closed under an iterator, which lives on."""
        walk = self.walk()
        walk.some()
        self.loader.close()
        walk.rest()

    def raising(self) -> None:
        """An epoch in which some samples raise."""
        # what is held, or was read ahead by an iterator before, is not read again
        may_read = self.spec.how == "own" and self.mode == "lazy"
        place = "read" if may_read and self.rng.random() < 0.5 else "finish"
        number = self.rng.randint(1, min(4, self.spec.n))
        bad = tuple(self.rng.sample(range(self.spec.n), number))
        walk = self.walk(bad=bad, place=place)
        walk.rest() if self.is_tour or self.rng.random() < 0.8 else walk.some()
        del walk
        self.spec.trap.unlink()

    def resumed(self) -> None:
        """The rest of an epoch out of another loader, over another dataset with the same data."""
        walk = self.walk()
        walk.some()
        state = json.loads(json.dumps(self._checked_state(walk, "in the middle of an epoch")))
        # after the last batch too: that the epoch is at its end, nobody has been told
        epoch, start = walk.epoch, walk.at
        if self.rng.random() < 0.5:
            del walk
        workers = data.draw_workers(
            self.rng, self.rng.choice((0, 1, self.soak.workers)), self.start
        )
        dataset = data.open_data(self.spec, self.rng.choice(MODES))
        loader = create_dataloader(dataset, **{**without_workers(self.options), **workers})
        loader.load_state_dict(state)
        Walk(self, loader, epoch, start).rest()
        Walk(self, loader, epoch + 1).rest()
        self._close(loader, dataset)


# --- what is left ---------------------------------------------------------------------------------


class Figures(NamedTuple):
    """What this process and its children take when every loader is closed and every batch
    dropped.
    """

    memory: int  # anonymous and shared memory: PSS without files
    maps: int
    shm: int
    objects: int  # of classes of headrace's and of the soak's datasets
    fds: int
    threads: int
    children: int


class Growth:
    """Looks at what is left, again and again."""

    def __init__(self) -> None:
        self._shm = self._names()
        self.looks: list[Figures] = []

    def look(self) -> None:
        """Notes the figures, as soon as all that is on its way out is gone."""
        before, deadline = None, time.monotonic() + 10
        while before != (before := self._counts()) and time.monotonic() < deadline:
            multiprocessing.active_children()
            time.sleep(0.05)
            gc.collect()
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)
        pids = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
        new = [Path("/dev/shm") / name for name in self._names() - self._shm]
        shm = sum(not mapped_elsewhere(path) for path in new)
        maps = len(Path("/proc/self/maps").read_bytes().splitlines())
        objects = sum(str(type(o).__module__).startswith(OURS) for o in gc.get_objects())
        self.looks.append(Figures(sum(map(_memory_of, pids)), maps, shm, objects, *before))

    @staticmethod
    def _counts() -> tuple[int, int, int]:
        children = psutil.Process().children(recursive=True)
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(children)

    @staticmethod
    def _names() -> set[str]:
        return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()

    def found(self) -> list[str]:
        """What has grown between the first third of the looks and the last.

        Of things that can be counted even one is too many: it is a leak if every late look has more
        than each early one. Memory never comes back to the byte, since malloc keeps what is
        fragmented: in runs of two minutes the first and the last look were up to 18 MB apart. So
        medians count, and the limit does not grow with the time. Files are left out of PSS, for
        pages of torch's libraries are shared out among all processes of the machine.
        """
        third = max(1, len(self.looks) // 3)
        grown = []
        for name in Figures._fields:
            early, late = (
                [getattr(look, name) for look in looks]
                for looks in (self.looks[:third], self.looks[-third:])
            )
            if name in LIMITS:
                has_grown = median(late) - median(early) > LIMITS[name]
            else:
                has_grown = min(late) > max(early)
            if has_grown:
                grown.append(f"{name}: {early} in early looks, {late} in late ones")
        return grown


def _memory_of(pid: int) -> int:
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        words = [line.split() for line in lines]
        return sum(int(w[1]) << 10 for w in words if w[0] in ("Pss_Anon:", "Pss_Shmem:"))
    return 0


# --- the whole ------------------------------------------------------------------------------------


class Kept(NamedTuple):
    """A batch, or a part of one, that must stay as it is until it is dropped."""

    value: Any
    twin: Any
    where: str
    due: int  # rounds that have been played when it is dropped


class Soak:
    """Plays rounds until the time is over or something is wrong."""

    def __init__(self, args: argparse.Namespace, seed: int, folder: str) -> None:
        self.seconds, self.workers, self.only = 60 * args.minutes, args.workers, args.round
        self.seed, self.folder = seed, folder
        self.counts: Counter[str] = Counter()
        self.kept: list[Kept] = []
        self.growth = Growth()
        self.round: Round | None = None
        self.number = self.played = 0
        self.failure = ""
        self._began = time.monotonic()

    def run(self) -> None:
        """Sets `failure` if anything was wrong."""
        try:
            while self.elapsed < self.seconds or len(self.growth.looks) < AT_LEAST:
                self.number = self.played if self.only is None else self.only
                self.round = Round(self, self.number)
                self.round.play()
                self.counts[self.round.event] += 1
                self.played += 1
                self._drop(self.played)
                if self._is_look_due:
                    self._drop(sys.maxsize)
                    self.round = None
                    self.watch()
                    self.growth.look()
            self.failure = "; ".join(self.growth.found())
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            traceback.print_exc()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    @property
    def _is_look_due(self) -> bool:
        """After the tour and a fifth of the time; then regularly."""
        warm = self.seconds / 5
        due = warm + len(self.growth.looks) * (self.seconds - warm) / LOOKS
        return self.played >= len(TOUR) and self.elapsed >= due

    def use(self, batch: Any, where: str, rng: random.Random) -> None:
        """Keeps a batch or a part of it, or writes into it, or neither."""
        arrays = [array for array in data.arrays_in(batch) if len(array.shape)]
        draw = rng.random()
        if draw < 0.4:
            self.counts["batches written"] += 1
            for array in arrays:
                if isinstance(array, torch.Tensor) or array.flags.writeable:
                    array[...] = rng.randrange(100)
        elif draw > 0.85:
            part = batch
            if arrays and rng.random() < 0.6:
                part = rng.choice(arrays)[::2]
            due = self.played + rng.randint(1, 6)
            self.kept.append(Kept(part, copy.deepcopy(part), f"round {self.number}, {where}", due))
            self.counts["batches kept"] += 1

    def _drop(self, until: int) -> None:
        for kept in self.kept:
            if kept.due <= until and not same(kept.value, kept.twin):
                raise Wrong(f"what was kept since {kept.where} was overwritten")
        self.kept = [kept for kept in self.kept if kept.due > until]

    @staticmethod
    def watch() -> None:
        """Something else is done from now on; where that hangs, the stacks are printed."""
        faulthandler.dump_traceback_later(HANG, exit=True)

    def summary(self) -> str:
        """What happened, as JSON."""
        looks = self.growth.looks
        summary: dict[str, Any] = {
            "status": "failed" if self.failure else "ok",
            "seed": self.seed,
            "minutes": round(self.elapsed / 60, 2),
            "rounds": self.played,
            **dict(sorted(self.counts.items())),
            "looks": len(looks),
        }
        if looks:
            pairs = zip(looks[0], looks[-1], strict=True)
            summary["growth"] = dict(zip(Figures._fields, pairs, strict=True))
        if self.failure:
            summary |= {"failure": self.failure, "round": self.number, "playing": str(self.round)}
        return json.dumps(summary)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Loads for a long time, and checks everything.")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("--workers", type=int, default=2, choices=range(1, 9))
    parser.add_argument(
        "--round", type=int, default=None, help="play this round alone, again and again"
    )
    args = parser.parse_args()
    multiprocessing.set_forkserver_preload(["headrace"])
    seed = random.SystemRandom().randrange(1 << 20) if args.seed is None else args.seed
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        data.make_files(Path(folder))
        soak = Soak(args, seed, folder)
        soak.run()
        print(soak.summary(), flush=True)
    return bool(soak.failure)


if __name__ == "__main__":
    sys.exit(main())
