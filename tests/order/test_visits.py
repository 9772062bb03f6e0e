"""How often blocks are read, beside what each process takes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from headrace.order import EpochOrder, RankBatches, visits as visits_module
from headrace.order.visits import estimate_readings


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    shuffle=st.sampled_from([False, True, "block"]),
    world=st.integers(1, 4),
    workers=st.integers(0, 3),
    batch=st.integers(1, 5),
    drop_last=st.booleans(),
)
def test_small_epochs_are_counted(
    sizes: list[int], shuffle: bool, world: int, workers: int, batch: int, drop_last: bool
) -> None:
    n = sum(sizes)
    order = EpochOrder(
        n, shuffle=shuffle, blocks=sizes, global_batch=batch * world, interleave=2, turns=2
    )
    batches = RankBatches(order, 0, world, batch, drop_last=drop_last)
    block_of = np.repeat(np.arange(len(sizes)), sizes)
    pairs = set()
    for rank in range(world):
        own = RankBatches(order, rank, world, batch, drop_last=drop_last)
        for step in range(len(own)):
            for index in own.batch(step).tolist():
                pairs.add((int(block_of[index]), rank, step % max(1, workers)))
    readings = estimate_readings(batches, workers, sizes)
    assert len(pairs) - batches.padding <= readings <= len(pairs)


@pytest.mark.parametrize(("workers", "size"), [(4, 20), (5, 20), (5, 4000)])
def test_long_epochs_are_estimated(
    workers: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [size] * 2000
    order = EpochOrder(
        2000 * size, shuffle="block", blocks=sizes, global_batch=64, interleave=8, turns=12
    )
    batches = RankBatches(order, 0, 2, 32)
    exact = estimate_readings(batches, workers, sizes) if size < 100 else None
    monkeypatch.setattr(visits_module, "MOST", 20_000)
    readings = estimate_readings(batches, workers, sizes)
    if exact is not None:
        assert readings == pytest.approx(exact, rel=0.05)
    else:  # none comes wholly within so few samples: each process reads each block
        assert 1 <= readings / 2000 <= 2 * workers
