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

from headrace.errors import FormatError
from headrace.io import handles as gather
from headrace.io.local_files import LocalFiles
from headrace.io.ranges import ByteRanges

pytestmark = pytest.mark.skipif(not gather._CAN_GATHER, reason="needs anonymous files")
CONTENT = np.random.default_rng(0).integers(32, 127, 3 << 20, np.uint8).tobytes()


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "a").write_bytes(CONTENT)
    return str(tmp_path / "a")


@pytest.fixture
def files() -> Iterator[LocalFiles]:
    made = LocalFiles()
    yield made
    made.close()


def gathered(files: LocalFiles, path: str, starts: list[int], sizes: list[int]) -> Any:
    begins = np.array(starts)
    return files.read_joined(ByteRanges.in_file(path, begins, begins + sizes))


def is_right(files: LocalFiles, path: str, seed: int, count: int = 64) -> bool:
    random = np.random.default_rng(seed)
    starts = random.integers(0, len(CONTENT) - 300, count)
    starts[:2] = 0, len(CONTENT) - 300
    sizes = random.integers(0, 301, count)
    spans = zip(starts.tolist(), sizes.tolist(), strict=True)
    expected = b"".join(CONTENT[start : start + size] for start, size in spans)
    return gathered(files, path, starts.tolist(), sizes.tolist()) == expected


def all_right(files: LocalFiles, path: str, seeds: range) -> bool:
    return all(is_right(files, path, seed) for seed in seeds)


def test_as_they_lie_in_the_file(
    files: LocalFiles, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, pwritev = list[int](), os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *given: writes.append(1) or pwritev(*given))
    assert all_right(files, path, range(20)) and len(writes) == 20
    files.close()
    assert is_right(files, path, 1)  # opened again
    assert is_right(pickle.loads(pickle.dumps(files)), path, 3)
    monkeypatch.setattr(gather, "_APART", 1)
    assert is_right(files, path, 2, 3000)  # more than the system takes at once


def test_in_threads_and_a_fork(files: LocalFiles, path: str) -> None:
    """An inherited one goes on in the child, with scratch memory of its own."""
    assert is_right(files, path, 0)
    pid = os.fork()
    if not pid:
        try:
            os._exit(0 if all_right(files, path, range(200)) else 1)
        finally:
            os._exit(2)
    with ThreadPoolExecutor(4) as threads:
        seeds = [range(number, number + 50) for number in range(4)]
        assert all(threads.map(lambda some: all_right(files, path, some), seeds))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("left", [0, 2 << 20])
def test_a_file_that_is_cut_short_is_no_signal(files: LocalFiles, path: str, left: int) -> None:
    assert is_right(files, path, 0)
    os.truncate(path, left)
    with pytest.raises(FormatError, match="ends before byte"):
        gathered(files, path, [0, (3 << 20) - 300], [200, 200])
    if left:
        expected = CONTENT[:200] + CONTENT[1 << 20 :][:200]
        assert gathered(files, path, [0, 1 << 20], [200, 200]) == expected
