"""Plants mistakes in a copy of the tree, one at a time, and counts those that the quick tests find.

    python -m tests.planted [--only WORD ...] [--out FILE]

Run it after tests were thinned, moved or rewritten: what was found before must be found after. A
mistake is known by a piece of the source, wherever that stands by now, and the tests by the names
of their files; where either is gone, this says so, and whoever rewrote the code plants the like in
what it has become.
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
_TREE = (
    "src",
    "tests",
    "tools",
    "examples",
    "benchmarks",
    "docs",
    "pyproject.toml",
    "mkdocs.yml",
    "README.md",
)


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
    Mistake(
        "order",
        "a rank is left without a last batch",
        "self._handed = world\n",
        "self._handed = 0\n",
        ("test_ranks.py",),
    ),
    Mistake(
        "order",
        "rare samples are drawn first",
        "/ self._weights[part]",
        "* self._weights[part]",
        ("test_drawn.py",),
    ),
    Mistake(
        "order",
        "batches hold samples of any length",
        'np.argsort(-self.lengths[members], kind="stable")',
        "np.arange(members.size)",
        ("test_drawn.py",),
    ),
    Mistake(
        "order",
        "a share may be shared out again to two",
        "if ranks > 1:",
        "if ranks > world_size:",
        ("test_shares.py",),
    ),
    Mistake(
        "memory",
        "an LRU outgrows its bytes",
        "while self.currsize > self.maxsize or (",
        "while (",
        ("test_lru.py",),
    ),
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
        "max(self._peak_used, limit.used)",
        "limit.used",
        ("monitor/test_memory.py",),
    ),
    Mistake(
        "io",
        "a damaged block of the disk cache is used",
        "        and google_crc32c.value(content[_HEAD.size :]) == checksum\n",
        "",
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
    Mistake(
        "storage",
        "samples of two folders become one",
        "key = folder + slash + stem",
        "key = stem",
        ("tar/test_source.py",),
    ),
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
    Mistake(
        "modes",
        "eager begins whatever the budget",
        "if not budget.fits(part):",
        "if False:",
        ("test_modes.py",),
    ),
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
        "if os.fsencode(composed(f)) not in number and not is_hidden_part(os.fsencode(f))",
        "if False",
        ("test_labels.py", "test_image.py"),
    ),
    Mistake(
        "datasets",
        "a flip turns upside down",
        "value[:, ::-1] if flip",
        "value[::-1] if flip",
        ("test_augment.py",),
    ),
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
    Mistake(
        "collate",
        "a loss counts the padding of labels",
        "masked_fill_(~counts, IGNORED)",
        "masked_fill_(~counts, 0)",
        ("collate/test_text.py",),
    ),
    Mistake(
        "loader",
        "a HuggingFace dataset is asked for the format of its samples",
        'dataset.format["type"] is None',
        'dataset.sample_format["type"] is None',
        ("test_module.py",),
    ),
    Mistake(
        "loader",
        "the user's kernels don't wait for the copy of their batch",
        "accelerator.wait(stream, copy.done)",
        "pass",
        ("test_prefetcher.py",),
    ),
    Mistake(
        "loader",
        "memory of a batch is reused while a kernel is still to read it",
        "accelerator.keep(tensor, stream)",
        "pass",
        ("test_prefetcher.py",),
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
    Mistake(
        "packing",
        "an interrupted pack leaves its file",
        "if not self._committed:",
        "if False:",
        ("test_part.py",),
    ),
    Mistake(
        "profiling",
        "one size below the largest",
        "while fails - fits > 1:",
        "while fails - fits > 2:",
        ("test_tune.py",),
    ),
    Mistake(
        "testing",
        "other dtypes are the same",
        "return a.dtype == b.dtype and a.shape == b.shape and a.tobytes()",
        "return a.shape == b.shape and a.tobytes()",
        ("test_contract.py",),
    ),
    Mistake(
        "cli",
        "damaged files are exit code 0",
        "codes.append(0 if result.ok else 1)",
        "codes.append(0)",
        ("test_main.py",),
    ),
    Mistake(
        "order",
        "a rank counts one index too few",
        "self.num_samples: int = len(range(self.rank, self.total_size, world))",
        "self.num_samples: int = len(range(self.rank, self.total_size - world, world))",
        ("order/test_ranks.py", "test_sampler.py"),
    ),
    Mistake(
        "order",
        "padding repeats the last sample",
        "positions %= self.order.n\n",
        "positions = np.minimum(positions, self.order.n - 1)\n",
        ("order/test_ranks.py", "order/test_elastic.py"),
    ),
    Mistake(
        "order",
        "a lane gets another lane's share",
        "return (count - 1 - np.arange(self.interleave, dtype=np.int64)) // self.interleave + 1",
        "return np.full(self.interleave, count // self.interleave, dtype=np.int64)",
        ("order/test_lanes.py",),
    ),
    Mistake(
        "memory",
        "a lock between processes is not released",
        "fcntl.lockf(self._fd, fcntl.LOCK_UN, 1)",
        "pass",
        ("memory/test_store.py",),
    ),
    Mistake(
        "memory",
        "a sample that is torn is returned",
        "return (header, pieces) if self._is_held(index, position) else None",
        "return header, pieces",
        ("memory/test_store.py",),
    ),
    Mistake(
        "memory",
        "a cache holds one sample more than its limit",
        "if self.max_items is not None and len(self) >= self.max_items:",
        "if self.max_items is not None and len(self) > self.max_items:",
        ("memory/test_store.py",),
    ),
    Mistake(
        "io",
        "of ranges that overlap the shorter end counts",
        "np.maximum.accumulate(end[first:last], out=end[first:last])",
        "pass",
        ("io/test_ranges.py",),
    ),
    Mistake(
        "io",
        "requests have any length",
        "if most is not None and (stops - starts > most).any():",
        "if False:",
        ("io/test_ranges.py",),
    ),
    Mistake(
        "io",
        "two versions of a file share blocks of the disk cache",
        "hashlib.blake2b(repr((url, version, number)).encode()",
        "hashlib.blake2b(repr((url, number)).encode()",
        ("test_disk_cache.py",),
    ),
    Mistake(
        "io",
        "a write that fails leaves its file",
        "with contextlib.suppress(OSError):\n            os.unlink(temporary)\n        raise",
        "raise",
        ("packing/test_part.py", "io/test_array_file.py", "cache/test_contents.py"),
    ),
    Mistake(
        "storage",
        "a chunk at the edge is one short",
        "slice(at, min(at + chunk, extent))\n",
        "slice(at, min(at + chunk, extent - 1))\n",
        ("hdf5/test_matrix.py",),
    ),
    Mistake(
        "storage",
        "fletcher32 is not compared",
        'raise FormatError("wrong checksum (fletcher32), the file is damaged") from error',
        "return _sized(np.frombuffer(data, np.uint8)[:-4], size)",
        ("storage/test_codecs.py", "hdf5/test_matrix.py", "hdf5/test_rows.py"),
    ),
    Mistake(
        "storage",
        "crc32c is not compared",
        "if len(whole) < 4 or google_crc32c.value(whole[:-4]) != int.from_bytes(",
        "if len(whole) < 4 or 0 > int.from_bytes(",
        ("storage/test_codecs.py", "zarr/test_matrix.py", "storage/test_damage.py"),
    ),
    Mistake(
        "storage",
        "a fill value is ignored",
        "        dataset.fillvalue\n        if dataset.dtype == dtype",
        "        np.zeros((), dtype)[()]\n        if dataset.dtype == dtype",
        ("hdf5/test_matrix.py", "hdf5/test_rows.py", "test_read_rows.py"),
    ),
    Mistake(
        "storage",
        "a codec that was skipped is undone",
        "if not skipped >> number & 1:",
        "if True:",
        ("hdf5/test_matrix.py",),
    ),
    Mistake(
        "storage",
        "what is left over after shuffled bytes is lost",
        "out[whole:] = flat[whole:]",
        "pass",
        (
            "storage/test_codecs.py",
            "hdf5/test_matrix.py",
        ),
    ),
    Mistake(
        "storage",
        "a column that comes twice in a sparse row counts once",
        "np.add.at(sums, np.cumsum(is_new) - 1, values)",
        "sums[:] = values[is_new]",
        ("sparse/test_rows.py", "test_sparse.py"),
    ),
    Mistake(
        "storage",
        "the last patch is left out",
        "return room // stride + 1 if self.edges",
        "return room // stride if self.edges",
        ("datasets/test_zarr.py",),
    ),
    Mistake(
        "storage",
        "mirrored padding repeats the edge",
        "return np.minimum(places, 2 * size - 2 - places)",
        "return np.minimum(places, 2 * size - 1 - places)",
        ("datasets/test_zarr.py",),
    ),
    Mistake(
        "storage",
        "documents of a pack begin at byte 0",
        "return self._begin + self.short[0] * self.dtype.itemsize",
        "return self.short[0] * self.dtype.itemsize",
        ("packing/test_texts.py",),
    ),
    Mistake(
        "loader",
        "the state of an epoch's end begins that epoch again",
        "self.next_epoch, self._is_named = position.epoch + has_ended, False",
        "self.next_epoch, self._is_named = position.epoch, False",
        ("loader/test_state.py", "loader/test_loader.py"),
    ),
    Mistake(
        "loader",
        "a state of another seed is accepted",
        '_COMPARED = ("shuffle", "seed", "interleave"',
        '_COMPARED = ("shuffle", "interleave"',
        ("loader/test_state.py",),
    ),
    Mistake(
        "loader",
        "a state of other blocks is accepted",
        'if state.get("shuffle") == parameters["shuffle"] and state.get("blocks")',
        'if False and state.get("blocks")',
        ("loader/test_state.py",),
    ),
    Mistake(
        "collate",
        "columns of another length are stacked",
        "if not isinstance(value, (tuple, list)) or len(value) != width:",
        "if not isinstance(value, (tuple, list)):",
        ("collate/test_stack.py",),
    ),
    Mistake(
        "collate",
        "tensors of other dtypes are stacked",
        "            or tensor.dtype != first.dtype\n",
        "",
        ("collate/test_stack.py",),
    ),
    Mistake(
        "monitor",
        "waiting is a fraction of all workers' time",
        '"wait_fraction": self.wait_time / max(total, 1e-9)',
        '"wait_fraction": 1 - self.wait_time / max(total, 1e-9)',
        ("monitor/test_stats.py",),
    ),
    Mistake(
        "packing",
        "a pack with a missing sample is sound",
        "return not self.bad",
        "return True",
        ("packing/test_verify.py",),
    ),
    Mistake(
        "packing",
        "a part's sidecar is not compared",
        "if entry != sidecar.entry(plan):",
        "if False:",
        ("packing/test_parts.py", "packing/test_verify.py"),
    ),
    Mistake(
        "tokenizer",
        "a text is cut one token too late",
        "if max_length is None or len(ids) <= max_length:",
        "if max_length is None or len(ids) <= max_length + 1:",
        ("test_tokenizer.py",),
    ),
    Mistake(
        "tokenizer",
        "ids that don't fit are stored",
        'return "uint16" if size <= 1 << 16 else "int32"',
        'return "uint16"',
        ("test_tokenizer.py",),
    ),
    Mistake(
        "arguments",
        "integers may be fractions",
        "if number is None or (least is not None and not least <= number < 2**63):",
        "if number is None:",
        ("test_arguments.py", "loader/test_config.py"),
    ),
    Mistake(
        "order",
        "a split's parts share a sample",
        "is_first = np.diff((np.arange(n + 1) * counts[0] + shift % n) // n) > 0",
        "is_first = np.diff((np.arange(n + 1) * counts[0] + shift % n) // n) >= 0",
        ("order/test_splits.py",),
    ),
    Mistake(
        "previewing",
        "bright pixels are dark",
        "return (part.clip(0, 1) * 255).round().astype(np.uint8)",
        "return (255 - part.clip(0, 1) * 255).round().astype(np.uint8)",
        ("previewing/test_preview.py",),
    ),
    Mistake(
        "inspecting",
        "a row's chunks are decoded once for all rows",
        "        inner * chunk,\n",
        "        chunk,\n",
        ("inspecting/test_inspect.py", "inspecting/test_hdf5.py"),
    ),
    Mistake(
        "datasets",
        "orientation 6 turns the other way",
        "6: lambda a: a.swapaxes(0, 1)[:, ::-1],",
        "6: lambda a: a.swapaxes(0, 1)[::-1],",
        ("image/test_pixels.py",),
    ),
    Mistake(
        "datasets",
        "a view has the targets of the whole",
        "return targets if targets is None else targets[chosen]",
        "return targets if targets is None else targets[: len(chosen)]",
        ("core/test_base.py", "image/test_labels.py"),
    ),
    Mistake(
        "datasets",
        "two views have one fingerprint",
        'whole.encode() + chosen.astype("<i8").tobytes(), digest_size=16',
        "whole.encode(), digest_size=16",
        ("core/test_base.py", "loader/test_state.py"),
    ),
    Mistake(
        "datasets",
        "a skipped sample is not counted",
        'self.counts["skipped"] += 1\n',
        "pass\n",
        ("testing/test_contract.py",),
    ),
    Mistake(
        "datasets",
        "a null is a number",
        "if self.valid is not None and not self.valid[rows].all():",
        "if False:",
        ("table/test_table.py",),
    ),
    Mistake(
        "datasets",
        "what is drawn goes on in the training's own process",
        "with preserved_rng(self.seeder(dataset)):\n            yield",
        "yield",
        ("loader/test_seeds.py", "core/test_base.py"),
    ),
    Mistake(
        "profiling",
        "a size that is never tried fits",
        "number = min(2 * fits, limit) if fails > limit else (fits + fails) // 2",
        "number = min(2 * fits + 1, limit) if fails > limit else (fits + fails) // 2",
        ("profiling/test_tune.py",),
    ),
    Mistake(
        "cli",
        "of several files the last one's exit code counts",
        "return 1 if 1 in codes else max(codes)",
        "return codes[-1]",
        ("cli/test_main.py",),
    ),
    Mistake(
        "loader",
        "the state counts batches that are still on their way",
        "self._cursor.at, self._last_nbytes = at, delivered.nbytes",
        "self._cursor.at, self._last_nbytes = at._replace(batches=at.batches + 1), "
        "delivered.nbytes",
        ("loader/test_state.py", "loader/test_loader.py"),
    ),
    Mistake(
        "loader",
        "a world size that does not divide is no error",
        'if state.get("samples") != samples:',
        "if False:",
        ("loader/test_elastic.py", "loader/test_state.py"),
    ),
    Mistake(
        "io",
        "a whole file has the length of an empty one",
        "is_whole: npt.NDArray[np.bool_] = (self.stop == WHOLE) & (self.start >= 0)",
        "is_whole: npt.NDArray[np.bool_] = (self.stop == WHOLE) & (self.start > 0)",
        ("io/test_ranges.py", "io/test_files.py"),
    ),
    Mistake(
        "storage",
        "a zstd frame of any size is decoded",
        "if said != size and said != -1:",
        "if False:",
        ("storage/test_malicious_sizes.py", "zarr/test_matrix.py", "storage/test_damage.py"),
    ),
    Mistake(
        "storage",
        "a gzip chunk that is cut short is whole",
        "if len(out) < size or not stream.eof:",
        "if len(out) < size:",
        (
            "storage/test_codecs.py",
            "storage/test_damage.py",
            "hdf5/test_matrix.py",
            "zarr/test_matrix.py",
        ),
    ),
    Mistake(
        "storage",
        "reading shards begins at the next chunk's place",
        "starts.append(-1 if row is None else row[2 * chunk])",
        "starts.append(-1 if row is None else row[2 * chunk] + 1)",
        ("zarr/test_matrix.py",),
    ),
    Mistake(
        "storage",
        "a sparse row takes its neighbour's first value",
        "places = np.repeat(self.indptr[order] - indptr[:-1], sizes) + np.arange(indptr[-1])",
        "places = np.repeat(self.indptr[order] - indptr[:-1], sizes) + np.arange(indptr[-1]) - 1",
        ("sparse/test_rows.py", "datasets/test_sparse.py"),
    ),
]


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
    said = next(
        (line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))), ""
    )
    test = said.split(" - ")[0].partition(" ")[2]
    if done.returncode == 0:
        return "not found"
    if done.returncode != 1:
        return f"BROKEN: pytest says {done.returncode}: {said or done.stdout[-300:]}"
    return (
        f"BROKEN: without it {test} fails too"
        if _run(tree, temporary, [test]).returncode
        else f"found by {test}"
    )


def _run(tree: Path, temporary: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "--durations=0",
        "--durations-min=99",
    ]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [*command, f"--basetemp={temporary}", *tests],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )


def main() -> int:
    """Plants all, prints a line each; exit code 1 where one is not found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="WORD",
        help="those whose room or description has one of these words",
    )
    parser.add_argument("--out", type=Path, help="a file for the lines, too")
    given = parser.parse_args()
    chosen = [
        m
        for m in MISTAKES
        if not given.only or any(word in f"{m.room} {m.what}" for word in given.only)
    ]
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        tree = Path(folder) / "tree"
        tree.mkdir()
        for name in _TREE:
            if (ROOT / name).is_dir():
                shutil.copytree(
                    ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__")
                )
            elif (ROOT / name).exists():
                shutil.copy(ROOT / name, tree / name)
        for mistake in chosen:
            began = time.monotonic()
            said = outcome(tree, mistake, Path(folder) / "temporary")
            lines.append(
                f"{mistake.room}: {mistake.what}: {said} ({time.monotonic() - began:.0f} s)"
            )
            print(lines[-1], flush=True)
    found = sum(": found by " in line for line in lines)
    lines.append(f"{found} of {len(chosen)} found")
    print(lines[-1])
    if given.out is not None:
        given.out.write_text("\n".join(lines) + "\n")
    return 0 if found == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
