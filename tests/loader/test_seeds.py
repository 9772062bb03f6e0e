"""Augmentation depends on (seed, epoch, index, k) alone: not on workers, ranks, modes, or where a
run was resumed.

`order/test_seeding.py` has the generators and where they are found, `datasets/test_base.py` the
ways to one sample, and `test_elastic.py` ranks, workers and resumption for image, HDF5 and Zarr
files, with a transform that draws from everything at once. Here each kind of generator stands
alone, wherever a transform may hold it; and an index that comes again draws anew, and the same
again.
"""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from headrace.testing.contract import MODES, same
from tests.order.test_elastic import dealt
from tests.testing.test_contract import SquareDataset

GENERATORS = ("random", "numpy", "torch", "Generator", "RandomState", "Random", "torch.Generator")
HOLDERS = ("attribute", "list", "tuple", "dict")


class Augment:
    """Its input, and a number that it drew."""

    def __init__(self, kind: str, holder: str) -> None:
        self.kind, self.holder = kind, holder
        generator: Any = None
        if kind == "Generator":
            generator = np.random.default_rng(1)
        elif kind == "RandomState":
            generator = np.random.RandomState(1)
        elif kind == "Random":
            generator = random.Random(1)
        elif kind == "torch.Generator":
            generator = torch.Generator().manual_seed(1)
        self.held: Any = generator
        if holder == "list":
            self.held = ["a", generator]
        elif holder == "tuple":
            self.held = (generator, 1)
        elif holder == "dict":
            self.held = {"x": [{"rng": generator}]}

    def _generator(self) -> Any:
        if self.holder == "list":
            return self.held[1]
        if self.holder == "tuple":
            return self.held[0]
        return self.held["x"][0]["rng"] if self.holder == "dict" else self.held

    def __call__(self, value: Any) -> tuple[int, float]:
        generator = self._generator()
        if self.kind == "random":
            return int(value[0]), random.random()
        if self.kind == "numpy":
            return int(value[0]), float(np.random.standard_normal())
        if self.kind.startswith("torch"):
            return int(value[0]), float(torch.rand((), generator=generator))
        return int(value[0]), float(
            generator.normal() if self.kind != "Random" else generator.random()
        )


class Foreign(Dataset[tuple[int, float]]):
    """A plain dataset with such a transform."""

    def __init__(self, transform: Augment) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 42

    def __getitem__(self, index: int) -> tuple[int, float]:
        return self.transform([index])


def foreign(kind: str = "Generator", holder: str = "list") -> Foreign:
    return Foreign(Augment(kind, holder))


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
    drawn = [sample[1] for batch in zero + one for sample in batch]
    assert len(set(drawn)) == len(drawn), "random numbers come again"
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


@pytest.mark.parametrize("kind", GENERATORS)
def test_each_generator_in_each_place(loader_of: Any, kind: str) -> None:
    number = GENERATORS.index(kind)
    for holder in HOLDERS[: 1 if number < 3 else 4]:
        mode = MODES[number % 4]
        transform = Augment(kind, holder)
        with SquareDataset(transform=transform, loading_mode=mode, progress=False) as dataset:
            check(loader_of, dataset, (3, 1, 4, 2))
        check(loader_of, foreign(kind, holder), (2, 6, 1, 3))


@pytest.mark.parametrize(
    ("kind", "workers"), [("torch", 2), pytest.param("Generator", 3, marks=pytest.mark.slow)]
)
def test_generators_in_workers(loader_of: Any, kind: str, workers: int) -> None:
    check(loader_of, foreign(kind, "attribute"), (2, 1, 3, 1), workers=workers)


WEIGHTS = [0.0] * 36 + [1, 2, 3, 4, 5, 60]


@pytest.mark.parametrize("mode", MODES)
def test_an_index_that_comes_again_draws_anew(loader_of: Any, mode: str) -> None:
    """Few indices, drawn with replacement: k is the position in the epoch, whoever makes the
    sample.
    """
    transform = Augment("torch", "attribute")
    with SquareDataset(transform=transform, loading_mode=mode, progress=False) as dataset:
        check(loader_of, dataset, (3, 1, 4, 2), weights=WEIGHTS)
    if mode == "lazy":
        check(loader_of, foreign(), (3, 1, 4, 2), weights=WEIGHTS)
        check(loader_of, foreign("random", "attribute"), (2, 1), workers=2, weights=WEIGHTS)


def test_an_index_that_comes_again_as_padding_draws_the_same(loader_of: Any) -> None:
    """42 samples on 4 ranks: two come again, the same at every try."""
    last, again = ([list(loader_of(foreign(), 4, rank))[-1] for rank in range(4)] for _ in "ab")
    assert same(last, again)
