"""Damages files, and compares what headrace makes of them with h5py and zarr-python: the same, or
an error of its own.

As a program it damages small files at random, tells how often each outcome came, and keeps the
files that break the law:

    python tests/storage/fuzz.py --seconds 600 --seed 3 --keep broken
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tests.storage.mutations import Mutation, damaged, random_mutations  # noqa: E402
from tests.storage.specimens import Files, Specimen, specimens, write  # noqa: E402

Outcome = dict[Any, tuple[str, Any]]
# seconds: what the library can't read in time is not asked of headrace
_LIBRARY_PATIENCE, _PATIENCE = 5.0, 60.0


class Verdict(NamedTuple):
    """What came of one case."""

    name: str
    """For the statistics."""
    breaks: str = ""
    """How it breaks the law, if it does."""


# What is no fault of headrace's, and what is.
SAME, BOTH_RAISE, STRICTER = "the same rows", "both raise", "only headrace raises"
ORIGINAL = "the library raises, and headrace gives the original rows"
ORIGINAL_BESIDE = "the library gives other rows, and headrace the original ones"
REFUSED = "rows that the library refuses"
COMPOSED = "several damages, of which the library minds one, and nothing guards against the other"
MISSED = "the library misses chunks whose keys are damaged, and headrace reads them"
ABOUT = ("length", "how", "missed")  # what an outcome holds beside rows
CRASHED, HUNG = "the library crashed", "the library hung"
BESIDE = "the library crashed or hung when headrace asked it, and not when it was asked alone"
UNSTABLE = "the library gives what lay in memory, and so does headrace through it"


def judge(library: Outcome, ours: Outcome, original: Outcome) -> Verdict:
    """Compares what the library and headrace gave of a damaged file."""
    through_h5py = ours.get("how", ("", ""))[1].startswith("h5py")
    for key, (kind, what) in ours.items():
        if kind == "differs":
            return (
                Verdict(UNSTABLE)
                if through_h5py
                else Verdict("a batch differs from its rows", what)
            )
        if kind == "escaped":
            return Verdict("an error that is not headrace's", f"{key}: {what}")
    if "open" in ours:
        return Verdict(
            BOTH_RAISE
            if "open" in library or all(library[k][0] == "error" for k in library if k not in ABOUT)
            else STRICTER
        )
    names: set[str] = set()
    if "open" not in library and ours["length"] != library["length"]:
        return Verdict(
            "another length",
            f"{ours['length'][1]} rows, and the library has {library['length'][1]}",
        )
    for row in ours:
        if row in ABOUT:
            continue
        mine, theirs = ours[row], library.get("open") or library.get(row, ("error", "no such row"))
        if mine == theirs:
            names.add(SAME)
        elif (theirs[0] == "unstable" or (theirs[0] == "value" and through_h5py)) and mine[
            0
        ] != "error":
            names.add(UNSTABLE)
        elif mine[0] == "error":
            names.add(BOTH_RAISE if theirs[0] == "error" else STRICTER)
        elif mine == original.get(row):
            names.add(ORIGINAL if theirs[0] == "error" else ORIGINAL_BESIDE)
        elif theirs[0] == "error":
            return Verdict(REFUSED, f"row {row}: {mine[1]!r:.300}; the library: {theirs[1]}")
        elif library.get("missed", ("", False))[1]:
            names.add(MISSED)
        else:
            return Verdict(
                "wrong rows", f"row {row}: {mine[1]!r:.300}; the library: {theirs[1]!r:.300}"
            )
    order = (UNSTABLE, MISSED, ORIGINAL_BESIDE, ORIGINAL, STRICTER, BOTH_RAISE, SAME)
    return Verdict(next((name for name in order if name in names), SAME))


class Asker:
    """Asks a worker process about files; starts another where one has crashed or hangs. A
    context manager.
    """

    def __enter__(self) -> Asker:
        ours, theirs = socket.socketpair()
        self.folder = tempfile.mkdtemp(prefix="headrace-fuzz-")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path])),
            "MALLOC_ARENA_MAX": "2",
        }
        command = [
            sys.executable,
            "-m",
            "tests.storage.fuzz_worker",
            str(theirs.fileno()),
            self.folder,
        ]
        self._parent = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            env=environment,
            cwd=ROOT,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        self._pipe, self._pid = Connection(ours.detach()), 0
        self.number, self._original = 0, dict[str, Outcome]()
        return self

    def __exit__(self, *_: Any) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._parent.wait(60)
        self._pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _take(self, patience: float) -> Outcome | str:
        """The next outcome, or how the worker ended."""
        while True:
            if not self._pipe.poll(patience):
                if self._pid:  # which the next one will say, too
                    os.kill(self._pid, signal.SIGUSR1)
                    time.sleep(0.1)
                    os.kill(self._pid, signal.SIGKILL)
                continue
            said = self._pipe.recv()
            if isinstance(said, int):
                self._pid = said
            elif said is not None:
                return said if isinstance(said, dict) else f"{said}{self._trace()}"

    def _trace(self) -> str:
        """Where the worker was that ended, the innermost call first."""
        trace = Path(self.folder, f"{self._pid}.trace")
        self._pid = 0
        return "".join(
            f" < {line.strip()}"
            for line in trace.read_text().splitlines()
            if line.startswith("  File")
        )[:900]

    def ask(
        self, kind: str, files: Files, number: int | None = None
    ) -> tuple[Outcome | str, Outcome | str | None]:
        """What the library makes of the files and what headrace does; or in words how the
        process ended that was to tell.
        """
        self._pipe.send((kind, files, self.number if number is None else number))
        library = self._take(_LIBRARY_PATIENCE)
        return library, None if isinstance(library, str) else self._take(_PATIENCE)

    def original(self, specimen: Specimen) -> Outcome:
        """What the library makes of the undamaged file, which headrace must make of it too."""
        if specimen.name not in self._original:
            for number in range(4):  # in all the ways in which headrace is asked
                library, ours = self.ask(specimen.kind, specimen.files, number)
                same = {key: row for key, row in library.items() if key != "missed"}
                assert isinstance(ours, dict) and ours.pop("how") and same == ours, (
                    f"{specimen.name}: {library} is not {ours}"
                )
            assert isinstance(library, dict)
            self._original[specimen.name] = library
        return self._original[specimen.name]

    def minimal(
        self, specimen: Specimen, mutations: list[Mutation]
    ) -> tuple[Verdict, list[Mutation]]:
        """The verdict, and the mutations that it takes, if it breaks the law."""
        verdict, at = self.verdict(specimen, mutations), 0
        while verdict.breaks and at < len(mutations):
            fewer = mutations[:at] + mutations[at + 1 :]
            other = self.verdict(specimen, fewer)
            if other.breaks:
                verdict, mutations = other, fewer
            else:
                at += 1
        return Verdict(COMPOSED) if verdict.name == REFUSED and len(
            mutations
        ) > 1 else verdict, mutations

    def verdict(self, specimen: Specimen, mutations: list[Mutation]) -> Verdict:
        """Damages a file, and compares."""
        original = self.original(specimen)
        library, ours = self.ask(specimen.kind, damaged(specimen.kind, specimen.files, mutations))
        if isinstance(library, str):
            return Verdict(HUNG if "SIGKILL" in library else CRASHED)
        if isinstance(ours, str):
            in_library = any(
                f"{os.sep}{name}{os.sep}" in ours.split(" < ")[:2][-1] for name in ("h5py", "zarr")
            )
            return Verdict(BESIDE) if in_library else Verdict("headrace crashed or hung", ours)
        assert ours is not None
        return judge(library, ours, original)


def cases(seed: int, name: str = "") -> Iterator[tuple[Specimen, list[Mutation]]]:
    """Damaged files without end."""
    draw, some = (
        random.Random(seed),
        [specimen for specimen in specimens() if name in specimen.name],
    )
    while True:
        yield draw.choice(some), random_mutations(draw)


def show(asker: Asker, seed: int, only: str, number: int) -> None:
    """Prints what the library and headrace make of one case."""
    specimen, mutations = next(itertools.islice(cases(seed, only), number, None))
    asker.number = number
    library, ours = asker.ask(specimen.kind, damaged(specimen.kind, specimen.files, mutations))
    print(f"{specimen.name}: {mutations}\nthe library: {library}\nheadrace: {ours}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a part of the names of the files to damage")
    parser.add_argument("--keep", default="broken", help="the folder for files that break the law")
    parser.add_argument("--case", type=int, help="show what comes of the case of that number alone")
    options = parser.parse_args()
    outcomes: dict[str, Counter[str]] = {}
    examples: dict[str, list[int]] = {}
    tried, broken, start = Counter[str](), 0, time.monotonic()
    with Asker() as asker:
        if options.case is not None:
            show(asker, options.seed, options.only, options.case)
            return 0
        for number, (specimen, mutations) in enumerate(cases(options.seed, options.only)):
            if time.monotonic() - start > options.seconds:
                break
            asker.number = number
            verdict, mutations = asker.minimal(specimen, mutations)
            tried.update(mutation.name for mutation in mutations)
            outcomes.setdefault(specimen.name, Counter())[verdict.name] += 1
            examples.setdefault(verdict.name, []).append(number)
            if verdict.breaks:
                broken += 1
                place = Path(options.keep, f"{options.seed}-{number}")
                place.mkdir(parents=True, exist_ok=True)
                write(specimen.kind, damaged(specimen.kind, specimen.files, mutations), place)
                about = {
                    "file": specimen.name,
                    "mutations": mutations,
                    "what": verdict.name,
                    "how": verdict.breaks,
                }
                (place / "about.json").write_text(json.dumps(about, indent=1))
                print(f"{place}: {specimen.name}: {verdict.name}: {verdict.breaks}", flush=True)
    every = sum(outcomes.values(), Counter[str]())
    print(
        f"{every.total():,} cases of {len(outcomes)} files in {time.monotonic() - start:.0f} s; "
        f"{broken} break the law"
    )
    print("mutations:", ", ".join(f"{name} {count:,}" for name, count in tried.most_common()))
    for name, count in every.most_common():
        print(
            f"{count:8,}  {name}"
            + (f" (cases {', '.join(map(str, examples[name][:12]))})" if count < 1000 else "")
        )
        where = Counter({file: some[name] for file, some in outcomes.items() if some[name]})
        if count < 1000:
            print("          " + "; ".join(f"{file} {n}" for file, n in where.most_common(12)))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
