"""MultiDataLoader: one epoch of several loaders, by exact quotas, that goes on from any batch."""

import itertools
import json
import os
import pickle
import random
import warnings
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset

from headrace import (
    ConfigError,
    HeadraceWarning,
    ImageDataset,
    Loader,
    MultiDataLoader,
    SampleError,
    StateError,
    WorkerError,
    split_workers,
)
from headrace.loader.multi.schedule import Schedule, whole_weights
from headrace.order.epoch import pass_epoch
from tests.testing.test_contract import SquareDataset

pytestmark = pytest.mark.quick_every(2)

STRATEGIES = ("round_robin", "sequential", "weighted", "alternating")


class Numbers(Dataset[int]):
    """`n` integers from `first` on."""

    def __init__(self, n: int, first: int = 0) -> None:
        self.n, self.first = n, first

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return self.first + index


class Deadly(Numbers):
    """Its sample 4 ends the worker that asks for it."""

    def __getitem__(self, index: int) -> int:
        if index == 4:
            os._exit(1)
        return index


class Stream(IterableDataset[int]):
    """Integers whose number nobody knows beforehand."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


@pytest.fixture
def multi_of() -> Iterator[Any]:
    made: list[MultiDataLoader] = []

    def make(loaders: Any = None, *args: Any, **options: Any) -> MultiDataLoader:
        if loaders is None:
            loaders = {"a": Numbers(10), "b": Numbers(3, 100), "c": Numbers(7, 200)}
        if any(not isinstance(loader, DataLoader) for loader in loaders.values()):
            options = {"batch_size": 2, "num_workers": 0, "seed": 5, **options}
        made.append(MultiDataLoader(loaders, *args, **options))
        return made[-1]

    yield make
    for multi in made:
        multi.close()


def seen(batches: Any) -> list[tuple[str, list[int]]]:
    return [(name, batch.tolist()) for name, batch in batches]


def names(batches: Any) -> str:
    return "".join(name for name, _ in batches)


def alone(dataset: Any, epoch: int) -> list[list[int]]:
    """The batches of a dataset's own loader."""
    loader = Loader(dataset, batch_size=2, num_workers=0, seed=5)
    loader.set_epoch(epoch)
    return [batch.tolist() for batch in loader]


# -- the schedule


def drawn(schedule: Schedule, steps: int) -> list[int]:
    """The loaders of the next steps, none of which is ever through."""
    found = []
    for _ in range(steps):
        number = schedule.pick()
        assert number is not None
        schedule.took(number)
        found.append(number)
    return found


weights_lists = st.lists(st.integers(0, 60), min_size=1, max_size=9).filter(any)


@settings(deadline=None)
@given(weights_lists, st.integers(1, 250))
def test_quotas_are_kept_at_every_prefix(weights: list[int], steps: int) -> None:
    schedule, total = Schedule("weighted", weights, range(len(weights)), True), sum(weights)
    counts = [0] * len(weights)
    for step, number in enumerate(drawn(schedule, steps), 1):
        counts[number] += 1
        assert all(
            abs(count - Fraction(weight * step, total)) < 1
            for count, weight in zip(counts, weights, strict=True)
        )
    assert schedule.counts == counts and sum(counts) == steps


@settings(deadline=None)
@given(weights_lists)
def test_a_whole_period_gives_the_weights_themselves(weights: list[int]) -> None:
    schedule = Schedule("weighted", weights, range(len(weights)), True)
    drawn(schedule, sum(weights))
    assert schedule.counts == weights


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=5).filter(any), st.integers(1, 60))
def test_quotas_of_fractions_are_kept_too(weights: list[float], steps: int) -> None:
    whole = whole_weights([str(i) for i in range(len(weights))], weights)
    assert all(
        a * Fraction(repr(y)) == b * Fraction(repr(x))
        for (a, x), (b, y) in itertools.pairwise(zip(whole, weights, strict=True))
    )
    schedule = Schedule("weighted", whole, range(len(whole)), True)
    drawn(schedule, steps)
    assert all(
        abs(c - Fraction(w * steps, sum(whole))) < 1
        for c, w in zip(schedule.counts, whole, strict=True)
    )


def test_weights_are_spread_and_not_drawn_in_a_row() -> None:
    schedule = Schedule("weighted", [4, 2, 1], range(3), True)
    assert drawn(schedule, 14) == [0, 0, 1, 0, 1, 0, 2] * 2
    assert drawn(Schedule("weighted", [1, 1], range(2), True), 6) == [0, 1] * 3


def test_a_tenth_is_a_tenth() -> None:
    assert whole_weights("abc", [0.1, 0.2, 0.7]) == [1, 2, 7]
    assert whole_weights("ab", {"b": 1e-9, "a": 1}) == [10**9, 1]
    assert whole_weights("ab", [torch.tensor(2.5), 5]) == [1, 2]


@settings(deadline=None)
@given(
    st.sampled_from(STRATEGIES),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.booleans(),
    st.data(),
)
def test_the_schedule_goes_on_from_every_step(
    strategy: str, lengths: list[int], cycles: bool, data: Any
) -> None:
    pattern = list(range(len(lengths)))
    if strategy == "alternating":
        pattern = data.draw(st.lists(st.sampled_from(pattern), min_size=1, max_size=6))

    def run(
        saved: tuple[list[int], int, set[int]], steps: int
    ) -> tuple[list[int], list[tuple[list[int], int, set[int]]]]:
        """The names from a state on, and the state after each; a loader's pass is at its end
        where its count says so.
        """
        schedule = Schedule(strategy, lengths, pattern, cycles)
        schedule.counts, schedule.cursor, schedule.out = list(saved[0]), saved[1], set(saved[2])
        found, states, ended = [], [saved], set()
        while len(found) < steps and (number := schedule.pick()) is not None:
            count = schedule.counts[number]
            if count and count % lengths[number] == 0 and (number, count) not in ended:
                ended.add((number, count))
                schedule.ended(number)
                continue
            schedule.took(number)
            found.append(number)
            states.append((list(schedule.counts), schedule.cursor, set(schedule.out)))
        return found, states

    whole, states = run(([0] * len(lengths), 0, set()), 40)
    for step, state in enumerate(states):
        if strategy == "sequential" and cycles:
            continue  # there a state holds which passes have ended, in the loaders' own states
        assert run(state, 40 - step)[0] == whole[step:]
    if not cycles:
        reached = range(len(lengths)) if strategy == "weighted" else set(pattern)
        assert Counter(whole) == {i: lengths[i] for i in reached}


@pytest.mark.parametrize(
    ("strategy", "options", "expected"),
    [
        ("round_robin", {}, "abcabcabcab"),
        ("round_robin", {"epoch_length": "max"}, "abcab"),
        ("round_robin", {"epoch_length": "min"}, "ab"),
        ("round_robin", {"steps": 7}, "abcabca"),
        ("round_robin", {"cycle_short_loaders": False}, "abcabcacaca"),
        ("round_robin", {"cycle_short_loaders": False, "steps": 99}, "abcabcacaca"),
        ("sequential", {}, "aaaaabbcccc"),
        ("sequential", {"steps": 14}, "aaaaabbccccaaa"),
        ("sequential", {"steps": 14, "cycle_short_loaders": False}, "aaaaabbcccc"),
        ("alternating", {"pattern": ["a", "a", "b"], "epoch_length": "max"}, "aabaa"),
        ("alternating", {"pattern": ["a", "a", "b"]}, "aabaaba"),
        (
            "alternating",
            {"pattern": ["a", "a", "c"], "steps": 12, "cycle_short_loaders": False},
            "aacaacacc",
        ),
        ("alternating", {"steps": 4}, "abca"),
        ("weighted", {"weights": {"a": 0.5, "b": 0.25, "c": 0.25}, "steps": 8}, "abacabac"),
        ("weighted", {"weights": [1, 0, 3], "steps": 8}, "ccac" * 2),
        ("weighted", {}, "acabcacaabc"),
        ("WEIGHTED", {}, "acabcacaabc"),
    ],
)
def test_names_come_as_the_strategy_says(
    multi_of: Any, strategy: str, options: dict[str, Any], expected: str
) -> None:
    multi = multi_of(None, strategy, **options)
    for _ in range(2):
        iterator = iter(multi)
        assert len(iterator) == len(multi) == len(expected)
        assert names(iterator) == expected
        assert len(iterator) == 0


# -- what comes


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_cycles_each_sample_comes_once(multi_of: Any, strategy: Any) -> None:
    multi = multi_of(None, strategy, cycle_short_loaders=False)
    batches = seen(multi)
    assert len(batches) == len(multi) == 5 + 2 + 4
    assert sorted(i for _, batch in batches for i in batch) == [
        *range(10),
        *range(100, 103),
        *range(200, 207),
    ]


def test_passes_have_orders_of_their_own(multi_of: Any) -> None:
    a, b = Numbers(40), Numbers(8, 100)
    multi = multi_of({"a": a, "b": b})
    multi.set_epoch(3)
    batches = seen(multi)
    assert [batch for name, batch in batches if name == "a"] == alone(a, 3)[:12]
    of_b = [batch for name, batch in batches if name == "b"]
    assert of_b == [*alone(b, 3), *alone(b, pass_epoch(3, 1)), *alone(b, pass_epoch(3, 2))]
    assert len({str(of_b[i : i + 4]) for i in (0, 4, 8)}) == 3
    assert seen(multi)[:2] == [("a", alone(a, 4)[0]), ("b", alone(b, 4)[0])]


def test_no_pass_is_another_epoch() -> None:
    found = [pass_epoch(epoch, number) for epoch in range(-20, 60) for number in range(99)]
    assert len(set(found)) == len(found)
    assert all(pass_epoch(epoch, 0) == epoch for epoch in range(-20, 60))
    assert all(
        2**61 <= pass_epoch(epoch, number) < 2**62 for epoch in range(9) for number in range(1, 9)
    )
    assert pass_epoch(3, 1) == 3562855653138988437  # golden: an order that is resumed depends on it


def test_ranks_draw_alike_and_share_samples(multi_of: Any) -> None:
    datasets = {"a": Numbers(12), "b": Numbers(8, 100)}
    parts = [seen(multi_of(datasets, "weighted", rank=r, world_size=2)) for r in range(2)]
    assert names(parts[0]) == names(parts[1])
    assert sorted(i for part in parts for _, batch in part for i in batch) == [
        *range(12),
        *range(100, 108),
    ]
    assert names(parts[0]) == names(multi_of(datasets, "weighted", batch_size=4))


def test_an_empty_loader_is_left_out_and_said(multi_of: Any) -> None:
    for strategy in STRATEGIES:
        with pytest.warns(HeadraceWarning, match=r"no batches.*: b"):
            multi = multi_of(
                {"a": Numbers(4), "b": Numbers(0), "c": Numbers(2)}, strategy, epoch_length="min"
            )
        assert len(multi) == 1 and set(names(multi)) <= {"a", "c"}
    with pytest.warns(HeadraceWarning, match="a, b"):
        multi = multi_of({"a": Numbers(0), "b": Numbers(0)}, "weighted")
    assert len(multi) == 0 and list(multi) == [] and multi.state_dict()["ended"]
    with pytest.raises(ConfigError, match=r"steps=3.*no batches"):
        multi_of({"a": Numbers(0)}, steps=3)


def test_streams_of_unknown_length(multi_of: Any) -> None:
    loaders = {"a": Stream(5), "b": Numbers(4, 100)}
    with pytest.raises(ConfigError, match="a; pass steps="):
        multi_of(loaders)
    with pytest.raises(ConfigError, match="weights="):
        multi_of(loaders, "weighted", steps=8)
    multi = multi_of(loaders, steps=8)
    assert len(multi) == 8 and seen(multi)[::2] == [("a", b) for b in ([0, 1], [2, 3], [4], [0, 1])]
    whole = seen(multi)
    for step in range(9):
        multi.set_epoch(1)
        iterator = iter(multi)
        first = seen(itertools.islice(iterator, step))
        other = multi_of(loaders, steps=8)
        other.load_state_dict(json.loads(json.dumps(multi.state_dict())))
        other.set_epoch(1)
        assert first + seen(other) == whole
    ends = multi_of(loaders, steps=8, cycle_short_loaders=False)
    assert names(ends) == "ababa" and names(ends) == "ababa"
    assert ends.state_dict()["ended"] and ends.state_dict()["batches"] == 5


def test_a_stream_without_batches_is_left_out(multi_of: Any) -> None:
    multi = multi_of({"a": Stream(0), "b": Numbers(4)}, steps=3)
    with pytest.warns(HeadraceWarning, match="'a' has no batches"):
        assert names(multi) == "bbb"
    with pytest.warns(HeadraceWarning, match="'a' has no batches"):
        assert list(multi_of({"a": Stream(0)}, steps=3)) == []


def test_unreadable_sample_is_an_error_and_the_rest_comes(multi_of: Any) -> None:
    multi = multi_of(
        {"a": SquareDataset([0]), "b": SquareDataset()},
        shuffle=False,
        batch_size=21,
        cycle_short_loaders=False,
    )
    iterator = iter(multi)
    with pytest.raises(SampleError):
        next(iterator)
    assert multi.state_dict()["batches"] == 0
    assert names(iterator) == "abb"


def test_a_dead_worker_ends_the_epoch(multi_of: Any) -> None:
    multi = multi_of({"a": Deadly(8)}, shuffle=False, num_workers=1)
    iterator = iter(multi)
    with pytest.raises(WorkerError):
        list(iterator)
    assert list(iterator) == [] and multi.state_dict()["passes"] == {"a": 0}


# -- epochs and positions


def test_epochs_are_counted_on_or_named(multi_of: Any) -> None:
    multi = multi_of()
    first, second = seen(multi), seen(multi)
    assert multi.epoch == 1 and first != second
    multi.set_epoch(0)
    assert seen(multi) == first and seen(multi) == second
    iterator = iter(multi)
    next(iterator)
    multi.set_epoch(0)
    assert multi.state_dict()["epoch"] == 0 and multi.state_dict()["batches"] == 0
    next(iterator)
    assert seen(multi) == first


@pytest.mark.slow
@pytest.mark.parametrize("cycles", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_state_of_any_moment_gives_the_rest(multi_of: Any, strategy: Any, cycles: bool) -> None:
    options: dict[str, Any] = {"strategy": strategy, "steps": 25, "cycle_short_loaders": cycles}
    if strategy == "weighted":
        options["weights"] = {"a": 2, "b": 0.5, "c": 1}
    multi = multi_of(**options)
    multi.set_epoch(2)
    whole, following = seen(multi), seen(multi)
    assert len(whole) == (25 if cycles else 11)
    for step in range(len(whole) + 1):
        multi.set_epoch(2)
        first = seen(itertools.islice(iter(multi), step))
        state = multi.state_dict()
        assert (state["epoch"], state["batches"], sum(state["counts"].values())) == (2, step, step)
        other = multi_of(**options)
        other.load_state_dict(json.loads(json.dumps(state)))
        assert other.state_dict() == state
        if state["ended"]:
            assert step >= len(whole) and seen(other) == following
            other.load_state_dict(state)
            other.set_epoch(2)
            assert seen(other) == []
        else:
            iterator = iter(other)
            assert other.state_dict() == state
            assert first + seen(iterator) == whole
            assert seen(other) == following


def test_another_epoch_drops_a_loaded_position(multi_of: Any) -> None:
    multi = multi_of()
    whole = seen(multi)
    multi.set_epoch(0)
    list(itertools.islice(iter(multi), 4))
    state = multi.state_dict()
    for epoch in (1, 0):
        multi.load_state_dict(state)
        multi.set_epoch(1)
        multi.set_epoch(epoch)
        assert (multi.state_dict()["epoch"], multi.state_dict()["batches"]) == (epoch, 0)
        assert (seen(multi) == whole) is (epoch == 0)


def test_what_an_earlier_try_received_does_not_count(multi_of: Any) -> None:
    multi = multi_of(None, "sequential")
    multi.set_epoch(3)
    whole = seen(multi)
    multi.set_epoch(3)
    assert names(itertools.islice(iter(multi), 6)) == "aaaaab"  # b has got one of epoch 3
    multi.set_epoch(3)
    assert seen(itertools.islice(iter(multi), 2)) == whole[:2]
    state = multi.state_dict()
    multi.set_epoch(3)
    assert names(itertools.islice(iter(multi), 6)) == "aaaaab"
    multi.load_state_dict(state)
    assert seen(multi) == whole[2:]


def test_an_iterator_that_was_left_says_so(multi_of: Any) -> None:
    multi = multi_of()
    old = iter(multi)
    next(old)
    new = iter(multi)
    with pytest.raises(StateError, match="begun another"):
        next(old)
    assert len(list(new)) == 11 and len(old) == 0
    for leave in (multi.close, lambda: multi.load_state_dict(multi.state_dict())):
        old = iter(multi)
        next(old)
        leave()
        with pytest.raises(StateError):
            next(old)


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_workers_change_nothing(multi_of: Any, number: int) -> None:
    expected = multi_of()
    whole, following = seen(expected), seen(expected)
    multi = multi_of(num_workers=number, **({"prefetch_factor": 4} if number else {}))
    assert sum(loader.config.num_workers for loader in multi.loaders.values()) == number
    assert seen(multi) == whole and seen(multi) == following


def test_prefetched_batches_don_t_count_and_workers_live_on(multi_of: Any) -> None:
    whole = seen(multi_of())
    multi = multi_of(num_workers=3, prefetch_factor=4)
    received, pids = [], []
    for step in range(3):
        for name, batch in multi:
            received.append((name, batch.tolist()))
            break
        state = multi.state_dict()
        assert state["batches"] == step + 1
        multi.load_state_dict(state)
        pids.append({pid for loader in multi.loaders.values() for pid in loader._pids})
    assert received + seen(multi) == whole
    assert pids[0] < pids[1] < pids[2] and len(pids[2]) == 3
    assert {name: stats["num_workers"] for name, stats in multi.get_stats().items()} == {
        "a": 1,
        "b": 1,
        "c": 1,
    }


def test_a_state_goes_on_with_other_workers(multi_of: Any) -> None:
    whole = seen(multi_of(None, "weighted", weights=[1, 3, 1]))
    state, received = multi_of(None, "weighted", weights=[1, 3, 1]).state_dict(), []
    for number in (2, 0, 1, 3):
        multi = multi_of(None, "weighted", weights=[1, 3, 1], num_workers=number)
        multi.load_state_dict(state)
        received += seen(itertools.islice(iter(multi), 2))
        state = multi.state_dict()
    assert received == whole[:8]


def test_a_copy_begins_where_it_stands(multi_of: Any) -> None:
    multi = multi_of()
    whole = seen(multi)
    multi.set_epoch(0)
    iterator = iter(multi)
    next(iterator)
    copied = pickle.loads(pickle.dumps(multi))
    assert copied.state_dict() == multi.state_dict()
    assert seen(copied) == whole[1:] == seen(iterator)


# -- states that don't fit


def test_a_state_of_another_schedule_is_refused(multi_of: Any) -> None:
    state = multi_of().state_dict()
    for options, said in [
        ({"strategy": "sequential"}, "strategy was 'round_robin', is 'sequential'"),
        ({"epoch_length": "max"}, "epoch_length was 'sum', is 'max'"),
        ({"steps": 4}, "steps was None, is 4"),
        ({"cycle_short_loaders": False}, "cycle_short_loaders was True, is False"),
        ({"loaders": {"a": Numbers(10)}}, "names was"),
    ]:
        with pytest.raises(StateError, match=said):
            multi_of(**options).load_state_dict(state)


def test_a_state_of_other_data_is_refused_and_nothing_changes(multi_of: Any) -> None:
    other = multi_of({"a": Numbers(10), "b": Numbers(4), "c": Numbers(7)})
    next(iter(other))
    multi = multi_of()
    list(itertools.islice(iter(multi), 5))
    before = multi.state_dict()
    with pytest.raises(StateError, match=r"loader 'b': .*Numbers:4.*Numbers:3"):
        multi.load_state_dict(other.state_dict())
    assert multi.state_dict() == before
    assert seen(multi)[:3] == [(n, alone(multi.loaders[n].dataset, 1)[0]) for n in "abc"]


def test_garbage_is_refused(multi_of: Any) -> None:
    multi = multi_of()
    list(itertools.islice(iter(multi), 3))
    good = multi.state_dict()
    fields = ("epoch", "batches", "counts", "passes", "cursor", "out", "loaders", "ended")
    without = [{k: v for k, v in good.items() if k != field} for field in fields]
    damaged = [
        {"version": 2},
        {"batches": 4},
        {"counts": {**good["counts"], "a": -1}},
        {"counts": {}},
        {"passes": {**good["passes"], "a": 1}},
        {"cursor": "x"},
        {"out": ["d"]},
        {"epoch": 1},
        {"loaders": {}},
        {"loaders": 3},
        {"loaders": {**good["loaders"], "a": None}},
        {"loaders": {**good["loaders"], "d": {}}},
        {"version": -1},
        {"version": True},
        {"epoch": -1},
        {"epoch": "0"},
        {"epoch": 0.5},
        {"cursor": -3},
        {"cursor": 3},
        {"cursor": True},
        {"ended": 0},
        {"batches": 3.0},
        {"counts": {**good["counts"], "a": True}},
        {"loaders": {**good["loaders"], "a": {**good["loaders"]["a"], "length": 99}}},
    ]
    for state in (None, 3, [], {}, *without, *({**good, **change} for change in damaged)):
        with pytest.raises(StateError):
            multi.load_state_dict(state)
    multi.load_state_dict(good)
    assert names(multi) == "abcabcab"


# -- arguments


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loaders": {}}, "at least one"),
        ({"loaders": [Numbers(3)]}, "dict"),
        ({"loaders": {1: Numbers(3)}}, "name must be a text"),
        ({"loaders": {"a": 3}}, "'a' must be"),
        ({"loaders": {"a": {"b": Numbers(3)}}}, "'a' must be"),
        ({"strategy": "random"}, "strategy must be one of round_robin.*'random'"),
        ({"strategy": "weighted", "weights": [1, -1, 1]}, "'b'.*-1"),
        ({"strategy": "weighted", "weights": [1, float("nan"), 1]}, "'b'.*nan"),
        ({"strategy": "weighted", "weights": [1, float("inf"), 1]}, "'b'.*inf"),
        ({"strategy": "weighted", "weights": [1, True, 1]}, "'b'.*True"),
        ({"strategy": "weighted", "weights": [1, "2", 1]}, "'b'.*'2'"),
        ({"strategy": "weighted", "weights": [0, 0, 0]}, "above 0"),
        ({"strategy": "weighted", "weights": [1, 2]}, "one number for each"),
        ({"strategy": "weighted", "weights": 3}, "one number for each"),
        ({"strategy": "weighted", "weights": {"a": 1, "b": 1, "d": 1}}, "'d'.*'c'"),
        ({"strategy": "weighted", "weights": {"a": 1}}, "each loader once"),
        ({"weights": [1, 1, 1]}, "weights are for strategy='weighted'"),
        ({"pattern": ["a"]}, "pattern is for strategy='alternating'"),
        ({"strategy": "alternating", "pattern": ["a", "d"]}, "pattern names 'd'.*'a', 'b', 'c'"),
        ({"strategy": "alternating", "pattern": []}, "list of loaders' names"),
        ({"strategy": "alternating", "pattern": "aab"}, "list of loaders' names"),
        ({"epoch_length": "mean"}, "epoch_length"),
        ({"steps": 0}, "steps"),
        ({"steps": True}, "steps"),
        ({"cycle_short_loaders": 1}, "cycle_short_loaders"),
        ({"batch_sise": 3}, "batch_sise"),
    ],
)
def test_what_makes_no_sense_is_refused(multi_of: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        MultiDataLoader(
            **{
                "loaders": {"a": Numbers(10), "b": Numbers(3), "c": Numbers(7)},
                "num_workers": 0,
                **options,
            }
        )


def test_loaders_are_taken_as_they_are(multi_of: Any) -> None:
    loader = Loader(Numbers(6), batch_size=3, num_workers=0)
    multi = multi_of({"a": loader, "b": Loader(Numbers(4), batch_size=1, num_workers=0)})
    assert multi.loaders["a"] is loader and names(multi) == "ababab"
    with pytest.raises(ConfigError, match="batch_size: options are for datasets"):
        MultiDataLoader({"a": loader}, batch_size=2)
    with pytest.raises(ConfigError, match="seed: options are for datasets"):
        MultiDataLoader({"a": loader}, seed=2)
    with pytest.raises(ConfigError, match="two names"):
        MultiDataLoader({"a": loader, "b": loader})


def test_a_tuple_gives_a_dataset_its_batch_size(multi_of: Any, photos: Path) -> None:
    multi = multi_of(
        {
            "a": (Numbers(10), 4),
            "b": Numbers(4, 100),
            "c": ([7, 8, 9], 3),
            "d": ([torch.zeros(2)] * 3, None),
        },
        shuffle=False,
    )
    assert [loader.config.batch_size for loader in multi.loaders.values()] == [4, 2, 3, None]
    assert [(name, batch.tolist()) for name, batch in multi if name in "abc"][:3] == [
        ("a", [0, 1, 2, 3]),
        ("b", [100, 101]),
        ("c", [7, 8, 9]),
    ]
    of_paths = multi_of({"a": (photos, 3), "b": (str(photos), 2)}, image_size=8)
    assert [loader.config.batch_size for loader in of_paths.loaders.values()] == [3, 2]
    split = multi_of({"a": (Numbers(16), 4), "b": (Numbers(16), 1)}, "sequential", num_workers=5)
    assert [loader.config.num_workers for loader in split.loaders.values()] == [1, 4], (
        "in proportion to batches, not to samples"
    )


def test_its_repr_is_one_line(multi_of: Any) -> None:
    multi = multi_of(
        {"a": (Numbers(10), 4), "b": Numbers(2), "c": DataLoader(Numbers(4), batch_size=3)}, steps=8
    )
    said = (
        "MultiDataLoader({'a': 3 batches of 4, 'b': 1 batch of 2, 'c': 2 batches of 3}, "
        "strategy='round_robin')  # 8 batches an epoch"
    )
    assert repr(multi) == said
    assert "'a': ? batches of 2" in repr(multi_of({"a": Stream(4)}, steps=1))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            (Loader(range(4), num_workers=0), 2),
            "'a' is a loader and a batch_size, and a loader has its own",
        ),
        ((Numbers(4), 0), "batch_size must be"),
        (
            (Numbers(4), True),
            r"'a' is a tuple: pass one dataset, or a tuple \(dataset, batch_size\)",
        ),
        ((Numbers(4), 2, 3), "'a' is a tuple"),
        ([Numbers(4), Numbers(4)], "'a' is a list"),
    ],
)
def test_what_is_no_dataset_and_batch_size(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        MultiDataLoader({"a": given, "b": Numbers(4)}, num_workers=0)


def test_workers_of_datasets_are_split(multi_of: Any) -> None:
    def split(**options: Any) -> list[int]:
        return [loader.config.num_workers for loader in multi_of(**options).loaders.values()]

    assert split(num_workers=5) == [2, 2, 1]
    # 10, 3 and 7 samples: 2.5, 0.75 and 1.75
    assert split(num_workers=5, strategy="sequential") == [2, 1, 2]
    assert split(num_workers=4, strategy="weighted", weights=[0, 1, 3]) == [0, 1, 3]
    assert split(num_workers=3, strategy="alternating", pattern=["c", "c", "a"]) == [1, 0, 2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert split(num_workers=1, prefetch_factor=3, persistent_workers=True, timeout=9) == [
            1,
            0,
            0,
        ]


def test_by_default_data_in_memory_gets_no_workers(multi_of: Any) -> None:
    tensors = torch.utils.data.TensorDataset(torch.arange(8))
    multi = MultiDataLoader({"a": tensors, "b": Numbers(8), "c": tensors})
    try:
        assert [loader.config.num_workers for loader in multi.loaders.values()] == [
            0,
            Loader(Numbers(8)).config.num_workers,
            0,
        ]
    finally:
        multi.close()
    assert [
        loader.config.num_workers
        for loader in multi_of({"a": tensors}, num_workers=None).loaders.values()
    ] == [0]


def test_paths_are_opened(multi_of: Any, photos: Path, tiny_photos: Path) -> None:
    multi = multi_of(
        {"big": photos, "tiny": str(tiny_photos)}, image_size=8, batch_size=4, drop_last=True
    )
    assert {name: type(loader.dataset) for name, loader in multi.loaders.items()} == {
        "big": ImageDataset,
        "tiny": ImageDataset,
    }
    assert Counter(name for name, (images, _) in multi if images.shape == (4, 3, 8, 8)) == {
        "big": 4,
        "tiny": 3,
    }


@pytest.mark.parametrize(
    ("number", "shares", "expected"),
    [
        (0, {"a": 1, "b": 1}, [0, 0]),
        (3, {"a": 1, "b": 1}, [2, 1]),
        (4, {"a": 70, "b": 20, "c": 10}, [3, 1, 0]),
        (10, {"a": 0.415, "b": 0.385, "c": 0.2}, [4, 4, 2]),
        (7, {"a": 0, "b": 5}, [0, 7]),
    ],
)
def test_split_workers_by_largest_remainder(
    number: int, shares: dict[str, float], expected: list[int]
) -> None:
    assert split_workers(number, shares) == dict(zip(shares, expected, strict=True))


@settings(deadline=None)
@given(st.integers(0, 200), weights_lists)
def test_split_workers_keeps_sum_and_quotas(number: int, weights: list[int]) -> None:
    found = split_workers(number, {str(i): weight for i, weight in enumerate(weights)})
    assert sum(found.values()) == number
    assert all(
        abs(found[str(i)] - Fraction(number * weight, sum(weights))) < 1
        for i, weight in enumerate(weights)
    )


@pytest.mark.parametrize(
    ("number", "shares"),
    [
        (-1, {"a": 1}),
        (True, {"a": 1}),
        (2.0, {"a": 1}),
        (1, {}),
        (1, {"a": 0}),
        (1, {"a": -1}),
        (1, [1]),
    ],
)
def test_split_workers_refuses_what_makes_no_sense(number: Any, shares: Any) -> None:
    with pytest.raises(ConfigError):
        split_workers(number, shares)


# -- torch's own loaders


def foreign(n: int, **options: Any) -> DataLoader[int]:
    return DataLoader(Numbers(n), batch_size=2, **{"shuffle": True, **options})


def test_a_torch_dataloader_is_repeated_and_resumed(multi_of: Any) -> None:
    def make(seed: int = 5) -> MultiDataLoader:
        return multi_of({"a": foreign(9), "b": foreign(4, generator=torch.Generator())}, seed=seed)

    multi = make()
    torch.manual_seed(1)
    random.seed(1)
    before = torch.get_rng_state(), random.getstate()
    whole, following = seen(multi), seen(multi)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert names(whole) == "abababa" and whole != following and seen(make(6)) != whole
    assert {i for _, batch in whole[1::2][:2] for i in batch} == {0, 1, 2, 3}
    for step in range(len(whole)):
        torch.manual_seed(step)
        multi = make()
        first = seen(itertools.islice(iter(multi), step))
        other = make()
        other.load_state_dict(json.loads(json.dumps(multi.state_dict())))
        other.set_epoch(0)
        assert first + seen(other) == whole
        assert seen(other) == following
    with pytest.raises(StateError, match=r"seed=5.*seed=6"):
        make(6).load_state_dict(multi.state_dict())


def test_a_torch_dataloader_with_workers(multi_of: Any) -> None:
    whole = seen(multi_of({"a": foreign(12)}, seed=5))
    multi = multi_of({"a": foreign(12, num_workers=1)}, seed=5)
    assert seen(itertools.islice(iter(multi), 2)) == whole[:2]
    multi.load_state_dict(multi.state_dict())
    assert seen(multi) == whole[2:]


def test_its_samplers_are_told_the_epoch(multi_of: Any) -> None:
    def ranked() -> DataLoader[int]:
        sampler = torch.utils.data.DistributedSampler(range(8), 1, 0, seed=9)  # type: ignore[arg-type]
        return foreign(8, sampler=sampler, shuffle=None)

    loader = ranked()
    loader.sampler.set_epoch(4)  # type: ignore[attr-defined]
    expected = [batch.tolist() for batch in loader]
    multi = multi_of({"a": ranked()}, steps=8)
    multi.set_epoch(4)
    found = [batch for _, batch in seen(multi)]
    assert (
        found[:4] == expected
        and sorted(i for batch in found[4:] for i in batch) == list(range(8))
        and found[4:] != expected
    )


def test_a_torch_dataloader_that_fails_does_not_begin_again(multi_of: Any) -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 4:
                raise ValueError("four")
            return index

    multi = multi_of({"a": DataLoader(Broken(8), batch_size=2)})
    iterator = iter(multi)
    assert seen(itertools.islice(iterator, 2)) == [("a", [0, 1]), ("a", [2, 3])]
    for _ in range(2):
        with pytest.raises(ValueError, match="four"):
            next(iterator)
    assert multi.state_dict()["batches"] == 2
