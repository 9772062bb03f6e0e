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
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from headrace.testing.contract import MODES, same
from tests.order.test_elastic import dealt
from tests.testing.test_contract import SquareDataset

pytestmark = pytest.mark.quick_every(10)

GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "random": (lambda: None, lambda _: random.random()),
    "numpy.random": (lambda: None, lambda _: float(np.random.standard_normal())),
    "torch": (lambda: None, lambda _: float(torch.randn(()))),
    "Generator": (lambda: np.random.default_rng(1), lambda g: float(g.random())),
    "RandomState": (lambda: np.random.RandomState(1), lambda g: float(g.rand())),
    "Random": (lambda: random.Random(1), lambda g: float(g.gauss(0, 1))),
    "torch.Generator": (
        lambda: torch.Generator().manual_seed(1),
        lambda g: float(torch.rand((), generator=g)),
    ),
}
HOLDERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "attribute": (lambda g: g, lambda held: held),
    "list": (lambda g: ["a", g], lambda held: held[1]),
    "tuple": (lambda g: (g, 1), lambda held: held[0]),
    "dict": (lambda g: {"x": [{"rng": g}]}, lambda held: held["x"][0]["rng"]),
}
CASES = [
    (g, h)
    for g in GENERATORS
    for h in HOLDERS
    if h == "attribute" or GENERATORS[g][0]() is not None
]


class Augment:
    """Its input, and a number that it drew."""

    def __init__(self, generator: str, holder: str) -> None:
        self.kind, self.holder = generator, holder
        self.held = HOLDERS[holder][0](GENERATORS[generator][0]())

    def __call__(self, value: Any) -> tuple[int, float]:
        return int(value[0]), GENERATORS[self.kind][1](HOLDERS[self.holder][1](self.held))


class Foreign(Dataset[tuple[int, float]]):
    """A plain dataset with such a transform."""

    def __init__(self, transform: Augment) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 42

    def __getitem__(self, index: int) -> tuple[int, float]:
        return self.transform([index])


@pytest.fixture
def loader_of(make_loader: Any) -> Any:
    def make(dataset: Any, world_size: int = 1, rank: int = 0, **options: Any) -> Any:
        said = {
            "num_workers": 0,
            "seed": 5,
            "collate_fn": "list",
            "enable_monitoring": False,
            **options,
        }
        return make_loader(
            dataset, batch_size=12 // world_size, rank=rank, world_size=world_size, **said
        )

    return make


def check(
    loader_of: Any, make: Callable[[], Any], worlds: Any, workers: int = 0, **options: Any
) -> None:
    """The same epoch 1 of one process, of ranks, and of ranks that go on at a step where others
    were; and each sample once, drawn anew.
    """
    alone = loader_of(make(), **options)
    zero, one = list(alone), list(alone)
    drawn = [sample for batch in zero + one for sample in batch]
    assert len({sample[1] for sample in drawn}) == len(drawn), "random numbers come again"
    state, seen = None, list[Any]()
    for step, world_size in enumerate(worlds):
        parts = []
        for rank in range(world_size):
            loader = loader_of(make(), world_size, rank, num_workers=workers, **options)
            if state is not None:
                loader.load_state_dict(state)
            loader.set_epoch(1)
            iterator = iter(loader)
            parts.append(next(iterator))
            del iterator
        state = json.loads(json.dumps(loader.state_dict()))
        # what comes again so that the ranks have equally many comes last
        seen.append(dealt(parts)[: len(one[step])])
        loader.close()
    assert same(seen, one)


@pytest.mark.quick_every(7)
@pytest.mark.parametrize(("generator", "holder"), CASES)
def test_each_generator_in_each_place(loader_of: Any, generator: str, holder: str) -> None:
    number = CASES.index((generator, holder))
    mode = MODES[number % 4]
    with SquareDataset(
        transform=Augment(generator, holder), loading_mode=mode, progress=False
    ) as dataset:
        check(loader_of, lambda: dataset, (3, 1, 4, 2))
    check(loader_of, lambda: Foreign(Augment(generator, holder)), (2, 6, 1, 3))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("generator", "holder"), CASES)
def test_each_generator_in_each_place_with_workers(
    loader_of: Any, generator: str, holder: str, mode: str
) -> None:
    with SquareDataset(
        transform=Augment(generator, holder), loading_mode=mode, progress=False
    ) as dataset:
        check(loader_of, lambda: dataset, (3, 1, 4, 2), workers=2)
    check(loader_of, lambda: Foreign(Augment(generator, holder)), (2, 6, 1, 3), workers=3)


@pytest.mark.parametrize("generator", ["torch", "Generator"])
def test_generators_in_workers(loader_of: Any, generator: str) -> None:
    check(loader_of, lambda: Foreign(Augment(generator, "attribute")), (2, 1, 3, 1), workers=2)


WEIGHTS = [0.0] * 36 + [1, 2, 3, 4, 5, 60]


@pytest.mark.parametrize("make", [SquareDataset, Foreign])
@pytest.mark.parametrize("mode", MODES)
def test_an_index_that_comes_again_draws_anew_on_every_rank(
    loader_of: Any, make: Any, mode: str
) -> None:
    """Few indices, drawn with replacement: k is the position in the epoch, whoever makes the
    sample.
    """
    if make is Foreign:
        check(
            loader_of, lambda: Foreign(Augment("Generator", "list")), (3, 1, 4, 2), weights=WEIGHTS
        )
        return
    with SquareDataset(
        transform=Augment("torch", "attribute"), loading_mode=mode, progress=False
    ) as dataset:
        check(loader_of, lambda: dataset, (3, 1, 4, 2), weights=WEIGHTS)


def test_an_index_that_comes_again_draws_anew_in_workers(loader_of: Any) -> None:
    check(
        loader_of,
        lambda: Foreign(Augment("random", "attribute")),
        (2, 1, 3, 1),
        workers=2,
        weights=WEIGHTS,
    )


def test_an_index_that_comes_again_as_padding_draws_anew(loader_of: Any) -> None:
    """42 samples on 4 ranks: two come again; they are others' augmentations, or the same, but
    the same at every try.
    """
    last = [
        list(loader_of(Foreign(Augment("torch", "attribute")), 4, rank))[-1] for rank in range(4)
    ]
    again = [
        list(loader_of(Foreign(Augment("torch", "attribute")), 4, rank, num_workers=0))[-1]
        for rank in range(4)
    ]
    assert same(last, again)
