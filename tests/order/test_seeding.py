"""The same seeds give the same draws, and everything is put back."""

from __future__ import annotations

import functools
import os
import pickle
import random
from collections import namedtuple
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import DataLoader

from headrace.order import seed_everything
from headrace.order.seeding import SampleSeeder, preserved_rng, sample_seeds

Draw = Callable[[Any], Any]
GENERATORS: list[tuple[Callable[[], Any], Draw]] = [
    (
        lambda: np.random.default_rng(),
        lambda g: [g.random(), g.standard_normal(), g.integers(1 << 30, dtype=np.int32)],
    ),
    (lambda: np.random.Generator(np.random.Philox()), lambda g: g.random()),
    (lambda: np.random.Generator(np.random.MT19937()), lambda g: g.random()),
    (lambda: np.random.RandomState(), lambda g: [g.random(), g.randn()]),
    (lambda: np.random.RandomState(np.random.PCG64()), lambda g: [g.random(), g.randn()]),
    (lambda: random.Random(), lambda g: [g.random(), g.gauss(0, 1)]),
    (lambda: torch.Generator(), lambda g: torch.rand(3, generator=g).tolist()),
]


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    with preserved_rng():
        yield


def draw_globals() -> list[float]:
    numbers = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]
    return [*numbers, *torch.randn(3).tolist()]


@given(
    seed=st.integers(),
    epoch=st.integers(0, 2**40),
    index=st.integers(-3, 2**62),
    k=st.integers(0, 2**40),
)
def test_seeds_follow_from_all_four_numbers(seed: int, epoch: int, index: int, k: int) -> None:
    first, second, third = sample_seeds(seed, epoch, index, k)
    assert 0 <= first < 2**64 and 0 <= second < 2**32 and 0 <= third < 2**63
    assert sample_seeds(seed, epoch, index, k) == (first, second, third)
    for number in range(4):
        other = [seed, epoch, index, k]
        other[number] += 1
        assert sample_seeds(*other)[0] != first


def test_seeds_are_the_same_for_ever() -> None:
    golden = (14516770460890819784, 42239987, 9190110895759020844)
    assert sample_seeds(42, 0, 7) == golden
    assert sample_seeds(np.int64(42), np.uint8(0), np.int32(7), 0) == golden
    assert sample_seeds(2**64, 0, 7) == (5697169914378284071, 1647323671, 5016106567369765955)
    wide = (-(2**63), 2**63, -(2**64), 2**64, -1, 0, 1)
    assert len({sample_seeds(seed, 0, 0) for seed in wide}) == 7


class Compose:
    """A chain of transforms, as torchvision has it."""

    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)


class Jitter:
    """A transform that holds a generator, and can be a callable or lend its method."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __call__(self, value: Any) -> Any:
        return value * self.rng.random()

    apply = __call__


def closure(rng: Any) -> Callable[[float], float]:
    return lambda value: value * rng.random()


def module(rng: Any) -> torch.nn.Module:
    inner = torch.nn.Dropout()
    inner.rng = rng
    return inner


def test_it_does_not_walk_into_what_is_not_a_holders_own() -> None:
    foreign = SimpleNamespace(
        module=random, kind=random.Random, tensor=torch.zeros(2), array=np.zeros(2), text="rng"
    )
    foreign.system = random.SystemRandom()  # has no state to seed
    foreign.missing = (lambda: unset) if (unset := None) else (lambda: None)
    assert SampleSeeder(foreign).generators == []
    late = [0] * 1_000 + [random.Random()]
    assert SampleSeeder(late).generators == []
    nested: Any = random.Random()
    for _ in range(20):
        nested = [nested]
    assert SampleSeeder(nested).generators == []


def test_pickled_with_its_holder_it_seeds_the_copies() -> None:
    holder = SimpleNamespace(transform=Jitter(np.random.default_rng()))
    holder.seeder = SampleSeeder(holder)
    copy = pickle.loads(pickle.dumps(holder))
    for each in (holder, copy):
        each.seeder(1, 2, 3)
    assert copy.transform(1.0) == holder.transform(1.0)
    assert copy.seeder.generators == [copy.transform.rng] != holder.seeder.generators


def test_seed_everything_returns_what_a_plain_dataloader_takes() -> None:
    def order() -> list[int]:
        seed_worker, generator = seed_everything(42)
        loader = DataLoader(
            range(20), shuffle=True, worker_init_fn=seed_worker, generator=generator
        )  # type: ignore[arg-type]
        return [int(batch) for batch in loader]

    assert order() == order() != sorted(order())
    seed_worker, generator = seed_everything(3)
    assert generator.initial_seed() == 3 and pickle.loads(pickle.dumps(seed_worker)) is seed_worker
    seed_worker(0)
    first = draw_globals()
    torch.manual_seed(3)
    seed_worker(1)
    assert draw_globals() == first


@pytest.mark.slow
def test_seed_everything_makes_torch_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert not torch.are_deterministic_algorithms_enabled()
    seed_everything(1)
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        seed_everything(1, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)


def test_held_generators_are_seeded_and_put_back() -> None:
    for make, draw in GENERATORS:
        holder = SimpleNamespace(rng=make(), other=make())
        seeder = SampleSeeder(holder)
        assert seeder.generators == [holder.rng, holder.other]
        drawn = []
        for sample in ((42, 3, 7), (42, 3, 7), (43, 3, 7), (42, 4, 7), (42, 3, 8), (42, 3, 7, 1)):
            seeder(*sample)
            drawn.append([*draw_globals(), draw(holder.rng), draw(holder.other)])
            draw(holder.rng)
        assert drawn[0] == drawn[1]
        assert drawn[0][-1] != drawn[0][-2]  # each has a stream of its own
        for other in drawn[2:]:
            assert all(one != another for one, another in zip(drawn[0], other, strict=True))
        # leave half-used pairs of normal numbers behind
        random.gauss(0, 1), np.random.randn(), draw(holder.rng)
        with preserved_rng(seeder):
            expected = draw_globals(), draw(holder.rng)
        with pytest.raises(RuntimeError), preserved_rng(seeder):
            seeder(4, 5, 6)
            draw_globals()
            raise RuntimeError
        assert (draw_globals(), draw(holder.rng)) == expected


def test_a_generator_is_found_wherever_it_is_held() -> None:
    first, second = random.Random(0), random.Random(1)
    layer = torch.nn.Dropout()
    layer.rng = first
    for holder in (
        Compose(Compose([{"a": (1, Jitter(first))}])),
        namedtuple("Pair", "left right")(None, first),
        functools.partial(max, first),
        functools.partial(max, key=Jitter(first)),
        functools.partial(Jitter(first).apply, 3),
        first.random,  # a method of a builtin type
        closure(first),
        functools.wraps(closure)(Jitter(first)),
        torch.nn.Sequential(torch.nn.Identity(), layer),
        type("Items", (list,), {})([first]),
        SimpleNamespace(
            records=[[[number, [other]] for other in range(300)] for number in range(20)],
            transform=Jitter(first),
        ),
    ):
        assert SampleSeeder(holder).generators == [first]
        circle = SimpleNamespace(size=3, rng=second, transform=holder)
        circle.itself = [circle]
        assert set(SampleSeeder(circle, holder, circle).generators) == {first, second}


def test_seed_everything_takes_any_integer() -> None:
    for seed in (-1, -(2**70), 0, 1, 2**32 - 1, 2**32, 2**70, np.int64(3)):
        seed_everything(seed)
        first = draw_globals()
        seed_everything(seed + 1)
        assert not set(draw_globals()) & set(first)
        seed_everything(seed)
        assert draw_globals() == first
        if 0 <= seed < 2**32:
            random.seed(int(seed))
            np.random.seed(seed)
            torch.manual_seed(int(seed))
            assert draw_globals() == first
