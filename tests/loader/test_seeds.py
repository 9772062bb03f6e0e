"""Augmentation depends on (seed, epoch, index, k) alone: not on workers, ranks, modes, or where a
run was resumed.

`order/test_seeding.py` has the generators and where they are found, `datasets/test_base.py` the
ways to one sample, and `test_elastic.py` ranks, workers and resumption for image, HDF5 and Zarr
files. Here are foreign datasets, and an index that comes again, which draws anew, and the same
again.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch.utils.data import Dataset

from headrace.testing.contract import MODES, RandomProbe, same
from tests.order.test_elastic import dealt
from tests.testing.test_contract import SquareDataset

WEIGHTS = [0.0] * 36 + [1, 2, 3, 4, 5, 60]


class Foreign(Dataset[Any]):
    """A plain dataset whose transform draws from every kind of generator."""

    def __init__(self) -> None:
        self.transforms = {"x": [RandomProbe()]}

    def __len__(self) -> int:
        return 42

    def __getitem__(self, index: int) -> Any:
        return self.transforms["x"][0](index)


@pytest.fixture
def loader_of(make_loader: Any) -> Any:
    def make(dataset: Any, world_size: int = 1, rank: int = 0, **options: Any) -> Any:
        common = {"num_workers": 0, "seed": 5, "collate_fn": "list", "enable_monitoring": False}
        common |= {"batch_size": 12 // world_size, "rank": rank, "world_size": world_size}
        return make_loader(dataset, **{**common, **options})

    return make


def check(loader_of: Any, dataset: Any, worlds: Any, workers: int = 0, **options: Any) -> None:
    """The same epoch 1 of one process, of ranks, and of ranks that go on at a step where others
    were; and each sample once, drawn anew.
    """
    alone = loader_of(dataset, **options)
    zero, one = list(alone), list(alone)
    draws = zip(
        *(sample["draws"].tolist() for batch in zero + one for sample in batch), strict=True
    )
    for numbers in draws:  # of one kind of generator
        assert len(set(numbers)) == len(numbers), "random numbers come again"
    state = None
    for step, world_size in enumerate(worlds):
        parts = []
        for rank in range(world_size):
            loader = loader_of(dataset, world_size, rank, num_workers=workers, **options)
            if state is not None:
                loader.load_state_dict(state)
            loader.set_epoch(1)
            parts.append(next(iter(loader)))
        state = json.loads(json.dumps(loader.state_dict()))
        # what comes again so that the ranks have equally many comes last
        assert same(dealt(parts)[: len(one[step])], one[step]), step
        loader.close()


@pytest.mark.parametrize("options", [{}, {"weights": WEIGHTS}])
def test_foreign_datasets_draw_alike_on_all_ranks(loader_of: Any, options: Any) -> None:
    """With weights few indices are drawn again and again: k is the position in the epoch."""
    check(loader_of, Foreign(), (3, 1, 6, 2), **options)
    check(loader_of, Foreign(), (2, 1), workers=2, **options)


@pytest.mark.parametrize("mode", MODES)
def test_an_index_that_comes_again_draws_anew(loader_of: Any, mode: str) -> None:
    with SquareDataset(transform=RandomProbe(), loading_mode=mode, progress=False) as dataset:
        check(loader_of, dataset, (3, 1, 4, 2), weights=WEIGHTS)


def test_an_index_that_comes_again_as_padding_draws_the_same(loader_of: Any) -> None:
    """42 samples on 4 ranks: two come again, the same at every try."""
    last, again = ([list(loader_of(Foreign(), 4, rank))[-1] for rank in range(4)] for _ in "ab")
    assert same(last, again)
