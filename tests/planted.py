"""Plants mistakes in a copy of the tree, one at a time, and counts those that the quick tests find.

    python -m tests.planted [--only WORD ...] [--out FILE]

Run it after tests were thinned, moved or rewritten: what was found before must be found after. A mistake is known by a piece of the source,
wherever that stands by now, and the tests by the names of their files; where either is gone, this says so, and whoever rewrote the code
plants the like in what it has become.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
_TREE = ("src", "tests", "tools", "examples", "benchmarks", "docs", "pyproject.toml", "mkdocs.yml", "README.md")


class Mistake(NamedTuple):
    """What is changed, and the test files that should notice."""

    room: str
    what: str
    old: str
    new: str
    tests: tuple[str, ...]


MISTAKES = [
    Mistake(
        "order",
        "seed 1 of epoch 0 is seed 0 of epoch 1",
        'derive_keys("samples", seed, epoch, count=1 + KEY_COUNT)',
        'derive_keys("samples", seed + epoch, count=1 + KEY_COUNT)',
        ("test_lanes.py", "test_epoch.py"),
    ),
    Mistake("order", "a rank is left without a last batch", "self._handed = world\n", "self._handed = 0\n", ("test_ranks.py",)),
    Mistake("order", "rare samples are drawn first", "/ self._weights[part]", "* self._weights[part]", ("test_drawn.py",)),
    Mistake(
        "order",
        "batches hold samples of any length",
        'np.argsort(-self.lengths[members], kind="stable")',
        "np.arange(members.size)",
        ("test_drawn.py",),
    ),
    Mistake("order", "a share may be shared out again to two", "if ranks > 1:", "if ranks > world_size:", ("test_shares.py",)),
    Mistake("memory", "an LRU outgrows its bytes", "self._make_room(size, 1)", "self._make_room(0, 1)", ("test_lru.py",)),
    Mistake(
        "memory",
        "the smallest limit counts, whatever is used of it",
        "return min(limits, key=lambda limit: limit.headroom)",
        "return min(limits, key=lambda limit: limit.total)",
        ("test_limits.py",),
    ),
    Mistake(
        "memory",
        "what a reservation gives back stays reserved",
        "account.nbytes += nbytes - self.nbytes",
        "account.nbytes += nbytes",
        ("test_budget.py",),
    ),
    Mistake(
        "memory",
        "slots of the ring never come back",
        "given_back = _Return(lease, self._free.append)",
        "given_back = _Return(lease, print)",
        ("test_ring.py",),
    ),
    Mistake(
        "monitor",
        "memory of the main process is not counted",
        "sum(pss_of(pid) for pid in pids)",
        "sum(pss_of(pid) for pid in pids[1:])",
        ("test_stats.py",),
    ),
    Mistake(
        "monitor",
        "the peak is the last value",
        "max(self._peak_used, self._limit.used)",
        "self._limit.used",
        ("monitor/test_memory.py",),
    ),
    Mistake(
        "io",
        "a damaged block of the disk cache is used",
        " and google_crc32c.value(content[_HEAD.size :]) == checksum)",
        ")",
        ("test_disk_cache.py",),
    ),
    Mistake(
        "io",
        "an overloaded server is not asked again",
        "frozenset({408, 425, 429, *range(500, 600)})",
        "frozenset({408, 425, *range(500, 503)})",
        ("io/remote/test_client.py",),
    ),
    Mistake(
        "io",
        "a file changed in place is read on",
        "version_of(os.fstat(fd)) != known and",
        "version_of(os.fstat(fd)).size != known.size and",
        ("tar/test_source.py", "text/test_source.py"),
    ),
    Mistake("storage", "samples of two folders become one", "key = folder + slash + stem", "key = stem", ("tar/test_source.py",)),
    Mistake(
        "storage",
        "CRLF across two pieces ends two lines",
        "if after_cr and data[0] != LF:",
        "if after_cr:",
        ("text/test_lines.py",),
    ),
    Mistake(
        "storage",
        "a chunk that was never written is read from byte 0",
        "offsets, sizes, masks = table\n",
        "offsets, sizes, masks = table[0], np.maximum(table[1], 1), table[2]\n",
        ("hdf5/test_matrix.py", "hdf5/test_tables.py"),
    ),
    Mistake(
        "modes",
        "cache_size in bytes is no limit",
        "capacity = min(capacity, most // ranks)",
        "pass",
        ("test_modes.py",),
    ),
    Mistake("modes", "eager begins whatever the budget", "if not budget.fits(part):", "if False:", ("test_modes.py",)),
    Mistake(
        "datasets",
        "negative indices of a view are other samples",
        "return chosen % max(1, length)\n",
        "return abs(chosen)\n",
        ("test_base.py",),
    ),
    Mistake(
        "datasets",
        "an empty class folder is passed over",
        'if os.fsencode(f) not in number and not f.startswith(".")]',
        "if False]",
        ("test_labels.py", "test_image.py"),
    ),
    Mistake("datasets", "a flip turns upside down", "value[:, ::-1] if flip", "value[::-1] if flip", ("test_augment.py",)),
    Mistake(
        "datasets",
        "each worker streams everything",
        "for step in range(worker, len(batches), workers):",
        "for step in range(0, len(batches), 1):",
        ("test_streaming.py",),
    ),
    Mistake(
        "collate",
        "padding on the left comes behind",
        'start = 0 if self.side == "right" else length - len(row)',
        "start = 0",
        ("test_pad.py",),
    ),
    Mistake("collate", "a loss counts the padding of labels", "IGNORED = -100", "IGNORED = 0", ("collate/test_text.py",)),
    Mistake(
        "loader",
        "a HuggingFace dataset is asked for the format of its samples",
        'dataset.format["type"] is None',
        'dataset.sample_format["type"] is None',
        ("test_module.py",),
    ),
    Mistake(
        "loader",
        "a loader may run ahead of its quota",
        "if self.counts[i] * total >= self.weights[i] * coming:",
        "if self.counts[i] * total > self.weights[i] * coming + total:",
        ("test_multi.py",),
    ),
    Mistake(
        "loader",
        "a state of another global batch is accepted",
        'if state.get("global_batch") != parameters["global_batch"]:',
        "if False:",
        ("test_state.py",),
    ),
    Mistake("packing", "an interrupted pack leaves its file", "if not self._committed:", "if False:", ("test_part.py",)),
    Mistake("profiling", "one size below the largest", "while fails - fits > 1:", "while fails - fits > 2:", ("test_tune.py",)),
    Mistake(
        "testing",
        "other dtypes are the same",
        "return a.dtype == b.dtype and a.shape == b.shape and a.tobytes()",
        "return a.shape == b.shape and a.tobytes()",
        ("test_contract.py",),
    ),
    Mistake("cli", "damaged files are exit code 0", "return 0 if is_sound else 1", "return 0", ("test_main.py",)),
]


def plant(tree: Path, mistake: Mistake) -> tuple[Path, str] | None:
    """Makes the mistake; returns the file, and what it held. None: the source has no such text, or several."""
    holding = [path for path in sorted((tree / "src").rglob("*.py")) if mistake.old in path.read_text()]
    if len(holding) != 1 or holding[0].read_text().count(mistake.old) != 1:
        return None
    before = holding[0].read_text()
    holding[0].write_text(before.replace(mistake.old, mistake.new))
    return holding[0], before


def tests_of(tree: Path, mistake: Mistake) -> list[str]:
    """The test files that are there."""
    return [str(path.relative_to(tree)) for name in mistake.tests for path in sorted((tree / "tests").rglob(name))]


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
    said = next((line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))), "")
    test = said.split(" - ")[0].partition(" ")[2]
    if done.returncode == 0:
        return "not found"
    if done.returncode != 1:
        return f"BROKEN: pytest says {done.returncode}: {said or done.stdout[-300:]}"
    return f"BROKEN: without it {test} fails too" if _run(tree, temporary, [test]).returncode else f"found by {test}"


def _run(tree: Path, temporary: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "--durations=0", "--durations-min=99"]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [*command, f"--basetemp={temporary}", *tests], cwd=tree, env=environment, capture_output=True, text=True, timeout=900
    )


def main() -> int:
    """Plants all, prints a line each; exit code 1 where one is not found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="those whose room or description has one of these words")
    parser.add_argument("--out", type=Path, help="a file for the lines, too")
    given = parser.parse_args()
    chosen = [m for m in MISTAKES if not given.only or any(word in f"{m.room} {m.what}" for word in given.only)]
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        tree = Path(folder) / "tree"
        tree.mkdir()
        for name in _TREE:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif (ROOT / name).exists():
                shutil.copy(ROOT / name, tree / name)
        for mistake in chosen:
            began = time.monotonic()
            said = outcome(tree, mistake, Path(folder) / "temporary")
            lines.append(f"{mistake.room}: {mistake.what}: {said} ({time.monotonic() - began:.0f} s)")
            print(lines[-1], flush=True)
    found = sum(": found by " in line for line in lines)
    lines.append(f"{found} of {len(chosen)} found")
    print(lines[-1])
    if given.out is not None:
        given.out.write_text("\n".join(lines) + "\n")
    return 0 if found == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
