"""Plants mistakes in a copy of the tree, one at a time, and counts those that the quick tests find.

    python -m tests.planted [--only WORD ...] [--out FILE]

Run it after tests were thinned, moved or rewritten: what was found before must be found after. A
mistake is known by a piece of the source, wherever that stands by now, and the tests by the names
of their files; where either is gone, this says so, and whoever rewrote the code plants the like in
what it has become: in planted.toml.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
_TREE = (
    *("src", "tests", "tools", "examples", "benchmarks", "docs"),
    *("pyproject.toml", "mkdocs.yml", "README.md"),
)


class Mistake(NamedTuple):
    """What is changed, and the test files that should notice."""

    room: str
    what: str
    old: str
    new: str
    tests: list[str]


_LISTED = tomllib.loads((ROOT / "tests" / "planted.toml").read_text(encoding="utf-8"))
MISTAKES = [Mistake(room, **said) for room, listed in _LISTED.items() for said in listed]


def plant(tree: Path, mistake: Mistake) -> tuple[Path, str] | None:
    """Makes the mistake; returns the file, and what it held. None: the source has no such text,
    or several.
    """
    holding = [
        path for path in sorted((tree / "src").rglob("*.py")) if mistake.old in path.read_text()
    ]
    if len(holding) != 1 or holding[0].read_text().count(mistake.old) != 1:
        return None
    before = holding[0].read_text()
    holding[0].write_text(before.replace(mistake.old, mistake.new))
    return holding[0], before


def tests_of(tree: Path, mistake: Mistake) -> list[str]:
    """The test files that are there."""
    return [
        str(path.relative_to(tree))
        for name in mistake.tests
        for path in sorted((tree / "tests").rglob(name))
    ]


def outcome(tree: Path, mistake: Mistake, temporary: Path) -> str:
    """What became of one: "found by TEST", "not found", or that its text or its tests are gone."""
    files = tests_of(tree, mistake)
    if not files:
        return f"GONE: no test file is called {' or '.join(mistake.tests)}"
    planted = plant(tree, mistake)
    if planted is None:
        return f"GONE: not once in the source: {mistake.old.strip()!r}"
    try:
        done = _run(tree, temporary, files)
    finally:
        planted[0].write_text(planted[1])
    lines = [one for one in done.stdout.splitlines() if one.startswith(("FAILED ", "ERROR "))]
    said = lines[0] if lines else ""
    test = said.split(" - ")[0].partition(" ")[2]
    if done.returncode == 0:
        return "not found"
    if done.returncode != 1:
        return f"BROKEN: pytest says {done.returncode}: {said or done.stdout[-300:]}"
    if _run(tree, temporary, [test]).returncode:
        return f"BROKEN: without it {test} fails too"
    return f"found by {test}"


def _run(tree: Path, temporary: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "--durations-min=99"]
    command = [sys.executable, "-m", "pytest", *options, f"--basetemp={temporary}", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, timeout=900
    )


def main() -> int:
    """Plants all, prints a line each; exit code 1 where one is not found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words = "those whose room or description has one of these words"
    parser.add_argument("--only", nargs="+", metavar="WORD", default=[""], help=words)
    parser.add_argument("--out", type=Path, help="a file for the lines, too")
    given = parser.parse_args()
    chosen = [m for m in MISTAKES if any(word in f"{m.room} {m.what}" for word in given.only)]
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        tree = Path(folder) / "tree"
        tree.mkdir()
        for path in filter(Path.exists, (ROOT / name for name in _TREE)):
            if path.is_dir():
                without = shutil.ignore_patterns("__pycache__")
                shutil.copytree(path, tree / path.name, ignore=without)
            else:
                shutil.copy(path, tree / path.name)
        for mistake in chosen:
            began = time.monotonic()
            said = outcome(tree, mistake, Path(folder) / "temporary")
            seconds = time.monotonic() - began
            lines.append(f"{mistake.room}: {mistake.what}: {said} ({seconds:.0f} s)")
            print(lines[-1], flush=True)
    found = sum(": found by " in line for line in lines)
    lines.append(f"{found} of {len(chosen)} found")
    print(lines[-1])
    if given.out is not None:
        given.out.write_text("\n".join(lines) + "\n")
    return 0 if found == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
