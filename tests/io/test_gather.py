"""Gathered ranges are those of the file, from threads and forks; a file cut short is an error,
and no signal.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.io import handles as gather
from headrace.io.handles import Gatherer

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


def gathered(gatherer: Gatherer, path: str, starts: list[int], sizes: list[int]) -> Any:
    return gatherer.read(path, starts, sizes, lambda _: None)


def is_right(gatherer: Gatherer, path: str, seed: int, count: int = 64) -> bool:
    random = np.random.default_rng(seed)
    starts = random.integers(0, len(CONTENT) - 300, count)
    starts[:2] = 0, len(CONTENT) - 300
    sizes = random.integers(0, 301, count)
    spans = zip(starts.tolist(), sizes.tolist(), strict=True)
    expected = b"".join(CONTENT[start : start + size] for start, size in spans)
    return gathered(gatherer, path, starts.tolist(), sizes.tolist()) == expected


def all_right(gatherer: Gatherer, path: str, seeds: range) -> bool:
    return all(is_right(gatherer, path, seed) for seed in seeds)


def test_as_they_lie_in_the_file(
    gatherer: Gatherer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all_right(gatherer, path, range(20))
    gatherer.close()
    assert is_right(gatherer, path, 1)  # opened again
    assert is_right(pickle.loads(pickle.dumps(gatherer)), path, 3)
    monkeypatch.setattr(gather, "_APART", 1)
    assert is_right(gatherer, path, 2, 3000)  # more than the system takes at once


def test_in_threads_and_a_fork(gatherer: Gatherer, path: str) -> None:
    """An inherited one goes on in the child, with scratch memory of its own."""
    assert is_right(gatherer, path, 0)
    pid = os.fork()
    if not pid:
        try:
            os._exit(0 if all_right(gatherer, path, range(200)) else 1)
        finally:
            os._exit(2)
    with ThreadPoolExecutor(4) as threads:
        seeds = [range(number, number + 50) for number in range(4)]
        assert all(threads.map(lambda some: all_right(gatherer, path, some), seeds))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("left", [0, 2 << 20])
def test_a_file_that_is_cut_short_is_no_signal(gatherer: Gatherer, path: str, left: int) -> None:
    assert is_right(gatherer, path, 0)
    os.truncate(path, left)
    assert gathered(gatherer, path, [0, (3 << 20) - 300], [200, 200]) is None
    if left:
        expected = CONTENT[:200] + CONTENT[1 << 20 :][:200]
        assert gathered(gatherer, path, [0, 1 << 20], [200, 200]) == expected
