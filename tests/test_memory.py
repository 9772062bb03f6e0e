"""A job stays within its budget (law 5), all its processes together: benchmarks/memory.py on a
smaller set.
"""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.data.make import make_photos

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PSS is Linux's"),
]
BUDGET = 300_000_000  # batches of 64 float32 images of 224 x 224 take 38.5 MB each


@pytest.fixture(scope="module")
def many_photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_photos(tmp_path_factory.mktemp("many"), per_class=256)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", ["lazy", "eager", "cached", "streaming"])
def test_a_job_stays_within_its_budget(
    scripts: Any, many_photos: Path, mode: str, workers: int
) -> None:
    measure = scripts("memory").measure
    idle = measure(str(many_photos), "idle", workers, "1GB")["growth"]
    one = measure(str(many_photos), mode, workers, str(BUDGET) + "B")
    assert one["refused"] is None
    assert 50e6 < one["growth"] - idle < 1.05 * BUDGET
