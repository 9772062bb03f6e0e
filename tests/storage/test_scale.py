"""An index of very many files stays small, and a further worker costs next to nothing."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace import ImageDataset
from tests.storage.scale import CLASS_SIZE, MadeUp, name_of

pytestmark = pytest.mark.slow

LIMIT = 100  # bytes a sample, beside the bytes of its path
ROOT = Path(__file__).parents[2]


def test_an_index_of_many_files_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    n = 200_000
    monkeypatch.setattr(MadeUp, "listed", 0)
    ImageDataset("madeup://10")
    gc.collect()
    tracemalloc.start()
    dataset = ImageDataset(f"madeup://{n}")
    gc.collect()
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert MadeUp.listed == 2 and len(dataset) == n and len(dataset.classes) == n // CLASS_SIZE
    path_bytes = sum(len(name_of(i)) for i in range(n))
    arrays = [*dataset.sample_source.listing.names.arrays, dataset.targets]
    assert sum(array.nbytes for array in arrays) == path_bytes + 8 * (n + 1) + 8 * n
    assert held - path_bytes < 20 * n < LIMIT * n
    assert peak < 4 * path_bytes + 100 * n  # the file system's own list is most of it
    assert [dataset.samples[i] for i in (0, n - 1)] == [
        (f"{n}/{name_of(0)}", 0),
        (f"{n}/{name_of(n - 1)}", n // CLASS_SIZE - 1),
    ]


@pytest.mark.slow
def test_ten_million_files_and_a_further_worker() -> None:
    n, source = 10_000_000, str(Path(headrace.__file__).parents[1])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "tests.storage.scale", str(n)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert said["bytes_a_sample"] < LIMIT and said["after_workers"] < LIMIT, said
    assert said["classes"] == n // CLASS_SIZE and said["listed"] == 1, said
    assert said["peak"] < 4 << 30, said
    assert said["fork"]["more"] < 5_000_000 and said["spawn"]["more"] < 5_000_000, said
    assert said["fork"]["length"] == said["spawn"]["length"] == n
    assert said["spawn"]["listed"] == 0  # it was built once
