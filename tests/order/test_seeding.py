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
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from headrace.order import seed_everything
from headrace.order.seeding import SampleSeeder, preserved_rng, sample_seeds

Draw = Callable[[Any], Any]
GENERATORS: list[tuple[Callable[[], Any], Draw]] = [
    (lambda: np.random.default_rng(), lambda g: [g.random(), g.standard_normal(), g.integers(1 << 30, dtype=np.int32)]),
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
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), *torch.randn(3).tolist()]


@given(seed=st.integers(), epoch=st.integers(0, 2**40), index=st.integers(-3, 2**62), k=st.integers(0, 2**40))
def test_seeds_follow_from_all_four_numbers(seed: int, epoch: int, index: int, k: int) -> None:
    first, second, third = sample_seeds(seed, epoch, index, k)
    assert 0 <= first < 2**64 and 0 <= second < 2**32 and 0 <= third < 2**63
    assert sample_seeds(seed, epoch, index, k) == (first, second, third)
    others = [(seed + 1, epoch, index, k), (seed, epoch + 1, index, k), (seed, epoch, index + 1, k), (seed, epoch, index, k + 1)]
    assert all(sample_seeds(*other)[0] != first for other in others)


def test_seeds_are_the_same_for_ever() -> None:
    assert (
        sample_seeds(42, 0, 7)
        == sample_seeds(np.int64(42), np.uint8(0), np.int32(7), 0)
        == (14516770460890819784, 42239987, 9190110895759020844)
    )
    assert sample_seeds(2**64, 0, 7) == (5697169914378284071, 1647323671, 5016106567369765955)
    assert len({sample_seeds(seed, 0, 0) for seed in (-(2**63), 2**63, -(2**64), 2**64, -1, 0, 1)}) == 7


def test_seeds_of_a_grid_do_not_repeat() -> None:
    seeds = [sample_seeds(s, e, i, k) for s in range(8) for e in range(8) for i in range(64) for k in range(2)]
    for part in range(3):
        assert len({seed[part] for seed in seeds}) == len(seeds)


def test_global_generators_draw_the_same_whatever_came_before() -> None:
    seeder = SampleSeeder()
    seeder(42, 3, 7)
    first = draw_globals()
    draw_globals()
    seeder(42, 3, 7)
    assert draw_globals() == first
    for other in ((43, 3, 7), (42, 4, 7), (42, 3, 8), (42, 3, 7, 1)):
        seeder(*other)
        assert not set(draw_globals()) & set(first)


@pytest.mark.parametrize(("make", "draw"), GENERATORS)
def test_held_generators_draw_the_same_whatever_came_before(make: Callable[[], Any], draw: Draw) -> None:
    holder = SimpleNamespace(rng=make(), other=make())
    seeder = SampleSeeder(holder)
    assert seeder.generators == [holder.rng, holder.other]
    seeder(42, 3, 7)
    first = draw(holder.rng), draw(holder.other)
    assert first[0] != first[1]  # each has a stream of its own
    draw(holder.rng)
    seeder(42, 3, 7)
    assert (draw(holder.rng), draw(holder.other)) == first
    seeder(42, 3, 8)
    assert draw(holder.rng) != first[0]


@pytest.mark.parametrize(("make", "draw"), GENERATORS)
def test_everything_is_put_back(make: Callable[[], Any], draw: Draw) -> None:
    holder = SimpleNamespace(rng=make())
    seeder = SampleSeeder(holder)
    seeder(1, 2, 3)
    random.gauss(0, 1), np.random.randn(), draw(holder.rng)  # leave half-used pairs of normal numbers behind
    with preserved_rng(seeder):
        expected = draw_globals(), draw(holder.rng)
    with pytest.raises(RuntimeError, match="in between"), preserved_rng(seeder):
        seeder(4, 5, 6)
        draw_globals()
        raise RuntimeError("in between")
    assert (draw_globals(), draw(holder.rng)) == expected


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


@pytest.mark.parametrize(
    "wrap",
    [
        Jitter,
        lambda rng: Compose(str, Jitter(rng)),
        lambda rng: Compose(Compose([{"a": (1, Jitter(rng))}])),
        lambda rng: [rng],
        lambda rng: {"rng": rng},
        lambda rng: namedtuple("Pair", "left right")(None, rng),
        lambda rng: functools.partial(max, rng),
        lambda rng: functools.partial(max, key=Jitter(rng)),
        lambda rng: functools.partial(Jitter(rng).apply, 3),
        lambda rng: Jitter(rng).apply,
        lambda rng: rng.random,  # a method of a builtin type
        closure,
        lambda rng: functools.wraps(closure)(Jitter(rng)),
        lambda rng: torch.nn.Sequential(torch.nn.Identity(), module(rng)),
        lambda rng: type("Items", (list,), {})([rng]),
    ],
)
def test_a_generator_is_found_wherever_it_is_held(wrap: Callable[[Any], Any]) -> None:
    rng = random.Random(0)
    assert SampleSeeder(SimpleNamespace(size=3, transform=wrap(rng))).generators == [rng]
    assert SampleSeeder(wrap(rng)).generators == [rng]


def module(rng: Any) -> torch.nn.Module:
    inner = torch.nn.Dropout()
    inner.rng = rng
    return inner


def test_generators_are_found_once_in_holder_order() -> None:
    first, second, third = (random.Random(number) for number in range(3))
    deep, shallow = Compose(Compose(Jitter(first))), SimpleNamespace(rng=second, again=first)
    circle = SimpleNamespace(deep=deep, rng=third)
    circle.itself = [circle]
    assert SampleSeeder(deep, shallow, circle, deep).generators == [first, second, third]


def test_it_does_not_walk_into_what_is_not_a_holders_own() -> None:
    foreign = SimpleNamespace(module=random, kind=random.Random, tensor=torch.zeros(2), array=np.zeros(2), text="rng")
    foreign.system = random.SystemRandom()  # has no state to seed
    foreign.missing = (lambda: unset) if (unset := None) else (lambda: None)
    assert SampleSeeder(foreign).generators == []
    late = [0] * 1_000 + [random.Random()]
    assert SampleSeeder(late).generators == []
    nested: Any = random.Random()
    for _ in range(20):
        nested = [nested]
    assert SampleSeeder(nested).generators == []


@pytest.mark.slow
def test_a_wide_holder_is_looked_at_only_in_part() -> None:
    rng = random.Random()
    wide = [[[number, [other]] for other in range(300)] for number in range(200)]
    assert SampleSeeder(SimpleNamespace(records=wide, transform=Jitter(rng))).generators == [rng]


def test_pickled_with_its_holder_it_seeds_the_copies() -> None:
    holder = SimpleNamespace(transform=Jitter(np.random.default_rng()))
    holder.seeder = SampleSeeder(holder)
    copy = pickle.loads(pickle.dumps(holder))
    for each in (holder, copy):
        each.seeder(1, 2, 3)
    assert copy.transform(1.0) == holder.transform(1.0)
    assert copy.seeder.generators == [copy.transform.rng] != holder.seeder.generators


@pytest.mark.parametrize("seed", [0, 42, 2**32 - 1])
def test_seed_everything_seeds_each_library(seed: int) -> None:
    seed_everything(seed)
    got = draw_globals()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    assert draw_globals() == got


@pytest.mark.parametrize("seed", [-1, -(2**70), 2**32, 2**70, np.int64(3)])
def test_seed_everything_takes_any_integer(seed: int) -> None:
    seed_everything(seed)
    first = draw_globals()
    seed_everything(seed)
    assert draw_globals() == first
    seed_everything(seed + 1)
    assert not set(draw_globals()) & set(first)


def test_seed_everything_returns_what_a_plain_dataloader_takes() -> None:
    def order() -> list[int]:
        seed_worker, generator = seed_everything(42)
        loader = DataLoader(range(20), shuffle=True, worker_init_fn=seed_worker, generator=generator)  # type: ignore[arg-type]
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
def test_seed_everything_makes_torch_deterministic_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
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
