"""Runs contestants in turn, round after round, and prints how they compare.

Each contestant lives in a process of its own, so that the threads and settings of one don't reach
another, and one that crashes or hangs takes nobody with it. They are started before the first round
and run an epoch each in every round. After its epoch a contestant gets the time to come to rest
before the next one starts, and the CPU time that it takes while it isn't its turn is counted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from folders import temporary_folder

LIMIT = 1200.0
"""Seconds after which a contestant that doesn't answer is given up."""
ALWAYS = ("torch", "numpy", "headrace", "pillow", "simplejpeg", "h5py")
_Runs = Iterator[Callable[[], "int | tuple[int, dict[str, float]]"]]


@dataclass(frozen=True)
class Contestant:
    """One line of a table.

    Attributes:
        name: what the table says.
        runs: a function at the top of a module, called in the contestant's process; gives callables
            that run an epoch each and return how many samples (or batches) it had, and, if there
            are any, other figures of that epoch by name, such as the seconds to the first batch.
            What stands before a `yield` makes an epoch ready, what stands behind it puts something
            away: neither is timed.
        arguments: what `runs` is called with.
        packages: distributions, one of which must be installed.
        checkout: of headrace, whose package and scripts are used; None: this one.
    """

    name: str
    runs: Callable[..., _Runs]
    arguments: tuple[Any, ...] = ()
    packages: tuple[str, ...] = ()
    checkout: str | None = None


@dataclass(frozen=True)
class Ratio:
    """A line of results: the speed of `name`, divided by that of the fastest contestant in
    `others`.
    """

    label: str
    name: str
    others: tuple[str, ...]


@dataclass
class Figures:
    """What was measured of a contestant: a figure for each round, or why there is none."""

    speeds: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    more: dict[str, list[float]] = field(default_factory=dict)
    """Other figures that a contestant gives of itself."""
    cpu_after: list[float] = field(default_factory=list)
    """CPU seconds from the end of an epoch until the contestant was at rest."""
    cpu_outside: list[float] = field(default_factory=list)
    """CPU seconds from then to its next epoch, while others ran."""
    failed: str | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.speeds) if self.speeds else float("nan")


@dataclass(frozen=True)
class Section:
    """A table: contestants at the same task.

    Attributes:
        title: what the task is.
        unit: of the speeds, such as "img/s".
        base: the contestant to which the ratios in the table's first column are.
        contestants: in the order of the table.
        ratios: the lines at the end.
        samples: how many an epoch has; a contestant that gives another number is named. None: turns
            aren't single epochs.
    """

    title: str
    unit: str
    base: str
    contestants: Sequence[Contestant]
    ratios: Sequence[Ratio]
    samples: int | None = None


class _Runner:
    """The process of a contestant, seen from outside."""

    def __init__(self, contestant: Contestant, folder: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(contestant, theirs, folder), name=contestant.name
        )
        with code_of(contestant.checkout):
            self.process.start()
        theirs.close()
        self.figures, self._known, self._rest = Figures(), set[psutil.Process](), 0.0
        self._answer()

    def epoch(self, counts: bool) -> None:
        """One epoch; `counts` is False in the warm-up."""
        if self.figures.failed:
            return
        outside = self._cpu() - self._rest
        self._send("epoch")
        answer = self._answer()
        if answer is None:
            self.figures.speeds.clear()
            self.close()
            return
        count, seconds, more = answer
        after = self._come_to_rest()
        if counts:
            self.figures.speeds.append(count / seconds)
            self.figures.counts.append(count)
            for name, value in more.items():
                self.figures.more.setdefault(name, []).append(value)
            self.figures.cpu_after.append(round(after, 2))
            self.figures.cpu_outside.append(round(outside, 2))

    def close(self) -> None:
        """Ends the process, and what it may have left running; may be called again."""
        if self.connection.closed:
            return
        self._tree()
        if self.process.is_alive() and not self.figures.failed:
            self._send("close")
            self.process.join(30)
        left = [process for process in self._tree() if process.is_running()]
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.join()
        self.connection.close()

    def _send(self, what: str) -> None:
        with contextlib.suppress(OSError):
            self.connection.send(what)

    def _answer(self) -> Any:
        """What the contestant says; None, and `figures.failed` is set, where it is an error or
        nothing.
        """
        try:
            if not self.connection.poll(LIMIT):
                self.figures.failed = f"no answer in {LIMIT:.0f} s"
                return None
            kind, value = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(10)
            self.figures.failed = f"its process ended with exit code {self.process.exitcode}"
            return None
        if kind == "error":
            self.figures.failed = value
            return None
        return value

    def _tree(self) -> list[psutil.Process]:
        """The process and all that it ever started, as far as they were seen: a child outlives
        its parent here too.
        """
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(self.process.pid)
            self._known |= {root, *root.children(recursive=True)}
        return list(self._known)

    def _cpu(self) -> float:
        seconds = 0.0
        for process in self._tree():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                seconds += times.user + times.system
        return seconds

    def _come_to_rest(self, longest: float = 10.0) -> float:
        """Waits until the contestant takes no more CPU time (a tenth of a core counts as rest);
        the CPU time that it took till then.
        """
        first = last = self._cpu()
        end = time.monotonic() + longest
        while time.monotonic() < end:
            time.sleep(0.2)
            now = self._cpu()
            if now - last <= 0.02:
                break
            last = now
        self._rest = self._cpu()
        return self._rest - first


def _serve(contestant: Contestant, connection: Connection, folder: str) -> None:
    """The life of a contestant's process. What it prints goes to a file."""
    log = os.open(os.path.join(folder, f"{os.getpid()}.log"), os.O_CREAT | os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    # the platform's own again for workers, as in a user's process
    multiprocessing.set_start_method(None, force=True)
    try:
        runs = contestant.runs(*contestant.arguments)
        run = next(runs)
        connection.send(("ready", True))
        while _asked(connection) == "epoch":
            start = time.perf_counter()
            found = run()
            seconds = time.perf_counter() - start
            count, more = found if isinstance(found, tuple) else (found, {})
            if count == 0:
                raise RuntimeError("an epoch without samples")
            run = next(runs)
            connection.send(("epoch", (count, seconds, more)))
        runs.close()  # type: ignore[attr-defined]
    except BaseException as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            connection.send(
                ("error", shortened(" ".join(f"{type(error).__name__}: {error}".split())))
            )


def shortened(text: str) -> str:
    """At most 300 characters: an error of a worker has its traceback first, and what it says
    last.
    """
    return text if len(text) <= 300 else f"{text[:80]} ... {text[-215:]}"


def _asked(connection: Connection) -> str:
    """What the contestant is to do; "close" where the process that asks is gone."""
    try:
        return str(connection.recv())
    except EOFError:
        return "close"


@contextlib.contextmanager
def code_of(checkout: str | None) -> Iterator[None]:
    """Inside, a spawned process imports headrace and the scripts of this folder from another
    checkout; None: from this one.
    """
    main = sys.modules["__main__"]
    if checkout is None:
        yield
        return
    path, file, scripts = (
        list(sys.path),
        str(main.__file__),
        Path(checkout).resolve() / "benchmarks",
    )
    sys.path[:] = [
        str(scripts),
        str(scripts.parent / "src"),
        *(entry for entry in path if Path(entry) != Path(__file__).parent),
    ]
    main.__file__ = str(scripts / Path(file).name)
    try:
        yield
    finally:
        sys.path[:], main.__file__ = path, file


def race(contestants: Sequence[Contestant], rounds: int) -> dict[str, Figures]:
    """All contestants in turn, `rounds` times after one that isn't counted."""
    figures: dict[str, Figures] = {}
    runners: dict[str, _Runner] = {}
    with temporary_folder() as folder:
        try:
            for contestant in contestants:
                if contestant.packages and version_of(contestant.packages) is None:
                    figures[contestant.name] = Figures(failed="not installed")
                    continue
                say(f"{contestant.name}: makes ready")
                runner = runners[contestant.name] = _Runner(contestant, folder)
                figures[contestant.name] = runner.figures
            for round_ in range(rounds + 1):
                # in turn, so that a drift of the machine hits all alike
                for name, runner in runners.items():
                    say(f"round {round_} of {rounds}: {name}")
                    runner.epoch(counts=round_ > 0)
        finally:
            say("")
            for runner in runners.values():
                runner.close()
    return figures


def say(what: str) -> None:
    """Where things stand, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)


def version_of(packages: Sequence[str]) -> str | None:
    """The version of the first of these distributions that is installed."""
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return None


def machine(packages: Iterable[Sequence[str]]) -> dict[str, Any]:
    """Where this runs, and the versions of what runs: of each of these sequences the first that
    is installed.
    """
    found: dict[str, Any] = {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_name(),
        "python": platform.python_version(),
    }
    found["memory"] = f"{psutil.virtual_memory().total / 1e9:.0f} GB"
    for names in [*((name,) for name in ALWAYS), *packages]:
        version = version_of(names)
        if version is not None:
            found[next(p for p in names if version_of([p]))] = version
    return found


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def ratios_of(section: Section, figures: Mapping[str, Figures]) -> list[dict[str, Any]]:
    """The section's ratios: the median of those of the single rounds, the lowest and the
    highest.
    """
    rows: list[dict[str, Any]] = []
    for ratio in section.ratios:
        ours = figures.get(ratio.name, Figures()).speeds
        rivals = [name for name in ratio.others if figures.get(name, Figures()).speeds]
        if not ours or not rivals:
            rows.append({"label": ratio.label, "ratio": None})
            continue
        best = max(rivals, key=lambda name: figures[name].median)
        each = [a / b for a, b in zip(ours, figures[best].speeds, strict=True)]
        of = {"numerator": ratio.name, "denominator": best}
        rows.append(
            {
                "label": ratio.label,
                **of,
                "ratio": statistics.median(each),
                "min": min(each),
                "max": max(each),
            }
        )
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    add_common_options(parser, rounds="epochs that count, after one that doesn't")


def add_common_options(parser: argparse.ArgumentParser, rounds: str) -> None:
    """Those of every script; `rounds` says what a round is."""
    parser.add_argument("--rounds", type=int, default=5, help=rounds)
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        help="contestants whose names have one of these in them",
    )
    parser.add_argument(
        "--against",
        metavar="CHECKOUT",
        help="another checkout of headrace, whose contestants run beside these",
    )
    parser.add_argument("--json", action="store_true")


def run_sections(sections: Sequence[Section], given: argparse.Namespace, task: str) -> None:
    """Runs the sections one after the other, and prints them as text or as JSON."""
    results = []
    if given.against:
        sections = [_against(section, given.against) for section in sections]
    everybody = [contestant for section in sections for contestant in section.contestants]
    for section in sections:
        chosen = [
            c
            for c in section.contestants
            if not given.only or any(part.lower() in c.name.lower() for part in given.only)
        ]
        figures = race(chosen, given.rounds)
        results.append((section, figures, ratios_of(section, figures)))
        if not given.json:
            show(section, figures, given.rounds)
    where = machine(contestant.packages for contestant in everybody)
    if given.json:
        found = {
            section.title: _as_json(section, figures, ratios)
            for section, figures, ratios in results
        }
        json.dump(
            {"task": task, "arguments": vars(given), "machine": where, "sections": found},
            sys.stdout,
            indent=1,
        )
        print()
        return
    rows = [row for _, _, ratios in results for row in ratios]
    width = max(len(row["label"]) for row in rows)
    print()
    for row in rows:
        if row["ratio"] is None:
            print(f"{row['label']:<{width}}  not measured")
        else:
            print(
                f"{row['label']:<{width}} {row['ratio']:>6.2f}x   {row['min']:.2f} to "
                f"{row['max']:.2f}   to {row['denominator']}"
            )
    print(f"\n{task}\n" + ", ".join(f"{k} {v}" for k, v in where.items()))


def is_ours(name: str) -> bool:
    """True if a contestant runs headrace."""
    return "headrace" in name and "(" not in name


def twin_of(name: str, checkout: str) -> str:
    """What a contestant is called that runs the code of another checkout."""
    return f"{name} ({checkout})"


def _against(section: Section, checkout: str) -> Section:
    """The section with each contestant of headrace twice, and the ratio of both."""
    contestants, ratios = [], list(section.ratios)
    for contestant in section.contestants:
        contestants.append(contestant)
        if is_ours(contestant.name):
            twin = twin_of(contestant.name, checkout)
            contestants.append(replace(contestant, name=twin, checkout=checkout))
            ratios.append(
                Ratio(f"{section.title}: {contestant.name} / {checkout}", contestant.name, (twin,))
            )
    return replace(section, contestants=contestants, ratios=ratios)


def _as_json(
    section: Section, figures: Mapping[str, Figures], ratios: list[dict[str, Any]]
) -> dict[str, Any]:
    rows = {
        name: {"failed": one.failed}
        if not one.speeds
        else {"median": one.median, "min": min(one.speeds), "max": max(one.speeds), **vars(one)}
        for name, one in figures.items()
    }
    return {"unit": section.unit, "ratios": ratios, "contestants": rows}


def show(section: Section, figures: Mapping[str, Figures], rounds: int) -> None:
    """The section as a table, and what is to be said of it."""
    width = max(map(len, figures), default=0) + 2
    base = figures.get(section.base, Figures()).median
    print(f"\n{section.title} (median of {rounds} epochs; ratio: to {section.base})")
    print(f"{'':<{width}} {'ratio':>7} {section.unit:>11}   min to max")
    for name, one in figures.items():
        if one.failed or not one.speeds:
            print(f"{name:<{width}} {'-':>7} {'-':>11}   {one.failed}")
            continue
        ratio = f"{one.median / base:.2f}x" if base == base else "-"
        more = "".join(
            f"; {label} {statistics.median(values):,.4g}" for label, values in one.more.items()
        )
        print(
            f"{name:<{width}} {ratio:>7} {one.median:>11,.0f}   {min(one.speeds):,.0f} to "
            f"{max(one.speeds):,.0f}{more}"
        )
    for name, one in figures.items():
        if section.samples is not None and set(one.counts) - {section.samples}:
            print(
                f"note: {name} gave {min(one.counts):,} to {max(one.counts):,} samples an epoch, "
                f"not {section.samples:,}"
            )
        if one.speeds and max(one.cpu_after) >= 0.15:
            print(
                f"note: {name} took up to {max(one.cpu_after):.2f} s of CPU time between its last "
                "batch and the next contestant"
            )
        if one.speeds and max(one.cpu_outside) >= 0.15:
            print(
                f"note: {name} took up to {max(one.cpu_outside):.2f} s of CPU time while others ran"
            )
