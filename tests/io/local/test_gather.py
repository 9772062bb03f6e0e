"""Gathered ranges are those of the file, from threads and forks; a file cut short is an error,
and no signal.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import SampleError, TextCollator, TextDataset
from headrace.datasets.core.batch import Collating
from headrace.datasets.core.ways import choose_way
from headrace.io.local import gather
from headrace.io.local.files import LocalFiles
from headrace.io.local.gather import Gatherer
from headrace.order import BatchRequest

pytestmark = pytest.mark.skipif(not gather._IS_LINUX, reason="needs anonymous files")
CONTENT = np.random.default_rng(0).integers(32, 127, 3 << 20, np.uint8).tobytes()


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "a").write_bytes(CONTENT)
    return str(tmp_path / "a")


@pytest.fixture
def gatherer() -> Iterator[Gatherer]:
    made = Gatherer()
    yield made
    made.close()


def some(seed: int, count: int = 64) -> tuple[list[int], list[int]]:
    random = np.random.default_rng(seed)
    starts = random.integers(0, len(CONTENT) - 300, count)
    starts[:2] = 0, len(CONTENT) - 300
    return starts.tolist(), random.integers(0, 301, count).tolist()


def is_right(gatherer: Gatherer, path: str, seed: int, count: int = 64) -> bool:
    starts, sizes = some(seed, count)
    expected = b"".join(
        CONTENT[start : start + size] for start, size in zip(starts, sizes, strict=True)
    )
    return gatherer.read(path, starts, sizes, lambda _: None) == expected


def all_right(gatherer: Gatherer, path: str, seeds: range) -> bool:
    return all(is_right(gatherer, path, seed) for seed in seeds)


def test_as_they_lie_in_the_file(
    gatherer: Gatherer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all_right(gatherer, path, range(20))
    gatherer.close()
    assert is_right(gatherer, path, 1)  # opened again
    monkeypatch.setattr(gather, "_APART", 1)
    assert is_right(gatherer, path, 2, 3000)  # more than the system takes at once


def test_in_threads_and_forks(gatherer: Gatherer, path: str) -> None:
    assert is_right(gatherer, path, 0)
    child: Any = multiprocessing.get_context("fork").Pool(1)
    with child, ThreadPoolExecutor(4) as threads:
        theirs = child.apply_async(all_right_of_parent, (path, range(200)))
        assert all(
            threads.map(
                lambda number: all_right(gatherer, path, range(number, number + 50)), range(4)
            )
        )
        assert theirs.get(60)
        child.close()
        child.join()
    assert is_right(pickle.loads(pickle.dumps(gatherer)), path, 3)  # and nothing is left of it


def all_right_of_parent(path: str, seeds: range) -> bool:
    made = Gatherer()
    try:
        return all_right(made, path, seeds)
    finally:
        made.close()


def test_an_inherited_one(gatherer: Gatherer, path: str) -> None:
    """Goes on in the child, with scratch memory of its own."""
    assert is_right(gatherer, path, 0)
    pid = os.fork()
    if not pid:
        try:
            os._exit(0 if all_right(gatherer, path, range(300)) else 1)
        finally:
            os._exit(2)
    assert all_right(gatherer, path, range(300, 600))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_not_by_this_way(gatherer: Gatherer, path: str, tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(CONTENT[: gather.LEAST - 1])
    assert gatherer.read(str(tmp_path / "small"), [0, 900_000], [5, 5], lambda _: None) is None
    assert gatherer.read(path, [0, 100], [100, 100], lambda _: None) is None  # close together
    assert gatherer.read(path, [0, 1 << 21], [1 << 20, 1], lambda _: None) is None  # too long
    assert gatherer.read(path, [], [], lambda _: None) in (None, b"")
    with pytest.raises(FileNotFoundError):
        gatherer.read(path + "x", [0, 1 << 20], [1, 1], lambda _: None)


@pytest.mark.parametrize("left", [0, 5000, 2 << 20])
def test_a_file_that_is_cut_short_is_no_signal(gatherer: Gatherer, path: str, left: int) -> None:
    assert is_right(gatherer, path, 0)
    os.truncate(path, left)
    assert gatherer.read(path, [0, (3 << 20) - 300], [200, 200], lambda _: None) is None
    if left > 1 << 20:
        assert (
            gatherer.read(path, [0, 1 << 20], [200, 200], lambda _: None)
            == CONTENT[:200] + CONTENT[1 << 20 :][:200]
        )


@pytest.mark.falls_back
def test_lines_of_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"line {number} of a text {'x' * (number % 90)}" for number in range(30_000)]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    with TextDataset(tmp_path, unit="line", max_length=None) as dataset:
        chosen = [len(lines) - 1]
        chosen += np.random.default_rng(1).permutation(len(lines))[:63].tolist()
        collate = TextCollator()
        way = choose_way(dataset, Collating(collate))
        filled: Any = way.make(BatchRequest(chosen)).batch
        plain = collate(dataset.__getitems__(chosen))
        assert all(np.array_equal(filled[name], plain[name]) for name in plain)
        monkeypatch.setattr(LocalFiles, "check_open", lambda *_: None)
        os.truncate(tmp_path / "a.txt", 1 << 20)
        with pytest.raises(SampleError, match="the file is cut short"):
            way.make(BatchRequest([*chosen, len(lines) - 1]))
