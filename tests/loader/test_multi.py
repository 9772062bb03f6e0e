"""MultiDataLoader: one epoch of several loaders, by exact quotas, that goes on from any batch."""

import itertools
import json
import pickle
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import DataLoader

from headrace import (
    ConfigError,
    HeadraceWarning,
    Loader,
    MultiDataLoader,
    SampleError,
    StateError,
    split_workers,
)
from headrace.loader.multi import exact_weights, next_by_quota
from headrace.order.epoch import pass_epoch
from tests.loader.datasets import Numbers, Stream
from tests.testing.test_contract import SquareDataset

STRATEGIES = ("round_robin", "sequential", "weighted", "alternating")


@pytest.fixture
def multi_of() -> Iterator[Any]:
    made: list[MultiDataLoader] = []

    def make(loaders: Any = None, *args: Any, **options: Any) -> MultiDataLoader:
        if loaders is None:
            loaders = {"a": Numbers(10), "b": Numbers(3, 100), "c": Numbers(7, 200)}
        if any(not isinstance(loader, DataLoader) for loader in loaders.values()):
            # a look at memory costs more than such an epoch
            quick = {"num_workers": 0, "enable_monitoring": False}
            options = {"batch_size": 2, "seed": 5, **quick, **options}
        made.append(MultiDataLoader(loaders, *args, **options))
        return made[-1]

    yield make
    for multi in made:
        multi.close()


def seen(batches: Any) -> list[tuple[str, list[int]]]:
    return [(name, batch.tolist()) for name, batch in batches]


def first(multi: Any, steps: int) -> list[tuple[str, list[int]]]:
    """The first batches of an iterator that is left then."""
    return seen(itertools.islice(iter(multi), steps))


def names(batches: Any) -> str:
    return "".join(name for name, _ in batches)


def alone(dataset: Any, epoch: int) -> list[list[int]]:
    """The batches of a dataset's own loader."""
    loader = Loader(dataset, batch_size=2, num_workers=0, seed=5)
    loader.set_epoch(epoch)
    return [batch.tolist() for batch in loader]


def as_saved(multi: Any) -> Any:
    return json.loads(json.dumps(multi.state_dict()))


# -- the schedule


def is_quota(counts: list[int], weights: Any, steps: int) -> bool:
    """True if each count is its share of the steps, rounded up or down."""
    shares = [Fraction(weight * steps, sum(weights)) for weight in weights]
    return sum(counts) == steps and all(
        abs(count - share) < 1 for count, share in zip(counts, shares, strict=True)
    )


weights_lists = st.lists(st.integers(0, 60), min_size=1, max_size=9).filter(any)


@given(weights_lists, st.integers(99, 250))
def test_quotas_are_kept_at_every_prefix(weights: list[int], steps: int) -> None:
    names = [str(i) for i in range(len(weights))]
    exact = exact_weights(names, weights)
    counts = dict.fromkeys(names, 0)
    for step in range(1, steps + 1):
        name = next_by_quota(exact, counts)
        assert name is not None
        counts[name] += 1
        assert is_quota(list(counts.values()), weights, step)
        assert step != sum(weights) or list(counts.values()) == weights


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=5).filter(any))
def test_weights_of_fractions_are_exact(weights: list[float]) -> None:
    exact = exact_weights([str(i) for i in range(len(weights))], weights)
    assert list(exact.values()) == [Fraction(repr(weight)) for weight in weights]
    assert exact_weights("a", [0.1]) == {"a": Fraction(1, 10)}, "a tenth is a tenth"


NAMES: list[tuple[str, dict[str, Any], str]] = [
    ("round_robin", {}, "abcabcabcab"),
    ("round_robin", {"epoch_length": "max"}, "abcab"),
    ("round_robin", {"epoch_length": "min"}, "ab"),
    ("round_robin", {"cycle_short_loaders": False, "steps": 99}, "abcabcacaca"),
    ("sequential", {"steps": 14}, "aaaaabbccccaaa"),
    ("sequential", {"steps": 14, "cycle_short_loaders": False}, "aaaaabbcccc"),
    ("alternating", {"pattern": ["a", "a", "b"], "epoch_length": "max"}, "aabaa"),
    ("alternating", {"pattern": ["a", "a", "b"]}, "aabaaba"),
    (
        "alternating",
        {"pattern": ["a", "a", "c"], "steps": 10, "cycle_short_loaders": False},
        "aacaacacc",
    ),
    ("alternating", {"steps": 4}, "abca"),
    ("weighted", {"weights": {"a": 0.5, "b": 0.25, "c": 0.25}, "steps": 8}, "abacabac"),
    ("weighted", {"weights": [1, 0, 3], "steps": 8}, "ccac" * 2),
    ("WEIGHTED", {}, "acabcacaabc"),
]


def test_names_come_as_the_strategy_says(multi_of: Any) -> None:
    for strategy, options, expected in NAMES:
        multi = multi_of(None, strategy, **options)
        for _ in range(2):
            iterator = iter(multi)
            assert len(iterator) == len(multi) == len(expected), (strategy, options)
            assert names(iterator) == expected, (strategy, options)
            assert len(iterator) == 0


# -- what comes


def test_without_cycles_each_sample_comes_once(multi_of: Any) -> None:
    samples = [*range(10), *range(100, 103), *range(200, 207)]
    for strategy in STRATEGIES:
        batches = seen(multi_of(None, strategy, cycle_short_loaders=False))
        assert sorted(i for _, batch in batches for i in batch) == samples, strategy


def test_passes_have_orders_of_their_own(multi_of: Any) -> None:
    a, b = Numbers(40), Numbers(8, 100)
    multi = multi_of({"a": a, "b": b})
    multi.set_epoch(3)
    batches = seen(multi)
    assert [batch for name, batch in batches if name == "a"] == alone(a, 3)[:12]
    of_b = [batch for name, batch in batches if name == "b"]
    assert of_b == [*alone(b, 3), *alone(b, pass_epoch(3, 1)), *alone(b, pass_epoch(3, 2))]
    assert seen(multi)[:2] == [("a", alone(a, 4)[0]), ("b", alone(b, 4)[0])]
    assert multi.epoch == 4


def test_no_pass_is_another_epoch() -> None:
    found = [pass_epoch(epoch, number) for epoch in range(-20, 60) for number in range(99)]
    assert len(set(found)) == len(found)
    assert pass_epoch(7, 0) == 7
    assert pass_epoch(3, 1) == 3562855653138988437  # golden: an order that is resumed depends on it


def test_ranks_draw_alike_and_share_samples(multi_of: Any) -> None:
    datasets = {"a": Numbers(12), "b": Numbers(8, 100)}
    parts = [seen(multi_of(datasets, "weighted", rank=r, world_size=2)) for r in range(2)]
    assert names(parts[0]) == names(parts[1])
    samples = sorted(i for part in parts for _, batch in part for i in batch)
    assert samples == [*range(12), *range(100, 108)]
    assert names(parts[0]) == names(multi_of(datasets, "weighted", batch_size=4))


def test_an_empty_loader_is_left_out_and_said(multi_of: Any) -> None:
    datasets = {"a": Numbers(4), "b": Numbers(0), "c": Numbers(2)}
    for strategy in STRATEGIES:
        with pytest.warns(HeadraceWarning, match=": b"):
            multi = multi_of(datasets, strategy, epoch_length="min")
        assert len(multi) == 1 and set(names(multi)) <= {"a", "c"}, strategy
    with pytest.warns(HeadraceWarning, match="a, b"):
        multi = multi_of({"a": Numbers(0), "b": Numbers(0)}, "weighted")
    assert len(multi) == 0 and list(multi) == [] and multi.state_dict()["ended"]
    with pytest.raises(ConfigError, match="steps=3"):
        multi_of({"a": Numbers(0)}, steps=3)


def test_streams_of_unknown_length(multi_of: Any) -> None:
    loaders = {"a": Stream(5), "b": Numbers(4, 100)}
    for strategy, options in (("round_robin", {}), ("weighted", {"steps": 8})):
        with pytest.raises(ConfigError):
            multi_of(loaders, strategy, **options)
    multi = multi_of(loaders, steps=8)
    assert seen(multi)[::2] == [("a", batch) for batch in ([0, 1], [2, 3], [4], [0, 1])]
    whole = seen(multi)
    for step in range(9):
        multi.set_epoch(1)
        received = first(multi, step)
        other = multi_of(loaders, steps=8)
        other.load_state_dict(as_saved(multi))
        other.set_epoch(1)
        assert received + seen(other) == whole, step
    ends = multi_of(loaders, steps=8, cycle_short_loaders=False)
    assert names(ends) == "ababa" and names(ends) == "ababa"
    assert ends.state_dict()["ended"] and ends.state_dict()["batches"] == 5


def test_a_stream_without_batches_is_left_out(multi_of: Any) -> None:
    for others, expected in (({"b": Numbers(4)}, "bbb"), ({}, "")):
        with pytest.warns(HeadraceWarning, match="'a'"):
            assert names(multi_of({"a": Stream(0), **others}, steps=3)) == expected


def test_unreadable_sample_is_an_error_and_the_rest_comes(multi_of: Any) -> None:
    datasets = {"a": SquareDataset([0]), "b": SquareDataset()}
    multi = multi_of(datasets, shuffle=False, batch_size=21, cycle_short_loaders=False)
    iterator = iter(multi)
    with pytest.raises(SampleError):
        next(iterator)
    assert multi.state_dict()["batches"] == 0
    assert names(iterator) == "abb"


# -- epochs and positions


MORE: dict[str, dict[str, Any]] = {
    "round_robin": {},
    "sequential": {},
    "weighted": {"weights": {"a": 2, "b": 0.5, "c": 1}},
    "alternating": {"pattern": ["b", "a", "c", "b"]},
}


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("cycles", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_state_of_any_moment_gives_the_rest(multi_of: Any, strategy: Any, cycles: bool) -> None:
    options = {"strategy": strategy, "steps": 10, "cycle_short_loaders": cycles, **MORE[strategy]}
    multi = multi_of(**options)
    multi.set_epoch(2)
    whole, following = seen(multi), seen(multi)
    for step in range(len(whole) + 1):
        multi.set_epoch(2)
        received = first(multi, step)
        state = as_saved(multi)
        assert (state["epoch"], state["batches"], sum(state["counts"].values())) == (2, step, step)
        other = multi_of(**options)
        other.load_state_dict(state)
        assert other.state_dict() == state
        if not state["ended"]:
            assert received + seen(other) == whole
            assert seen(other) == following
    multi.set_epoch(2)
    assert seen(multi) == whole
    other.load_state_dict(as_saved(multi))
    assert seen(other) == following, "an epoch that has ended is not begun again"
    other.load_state_dict(as_saved(multi))
    other.set_epoch(2)
    assert seen(other) == []


def test_another_epoch_drops_a_loaded_position(multi_of: Any) -> None:
    multi = multi_of()
    whole = seen(multi)
    multi.set_epoch(0)
    first(multi, 4)
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
    assert names(first(multi, 6)) == "aaaaab"  # b has got one of epoch 3
    multi.set_epoch(3)
    assert first(multi, 2) == whole[:2]
    state = multi.state_dict()
    multi.set_epoch(3)
    first(multi, 6)
    multi.load_state_dict(state)
    assert seen(multi) == whole[2:]


def test_an_iterator_that_was_left_says_so(multi_of: Any) -> None:
    multi = multi_of()
    for leave in (multi.__iter__, multi.close, lambda: multi.load_state_dict(multi.state_dict())):
        old = iter(multi)
        next(old)
        leave()
        with pytest.raises(StateError):
            next(old)
        assert len(old) == 0


def test_prefetched_batches_don_t_count_and_workers_live_on(multi_of: Any) -> None:
    alone_here = multi_of()
    whole, following = seen(alone_here), seen(alone_here)
    multi = multi_of(num_workers=3, prefetch_factor=4, enable_monitoring=True)
    received, pids = [], []
    for step in range(3):
        received += first(multi, 1)
        state = multi.state_dict()
        assert state["batches"] == step + 1
        multi.load_state_dict(state)
        pids.append({pid for loader in multi.loaders.values() for pid in loader._pids})
    assert received + seen(multi) == whole and seen(multi) == following
    assert pids[0] < pids[1] < pids[2] and len(pids[2]) == 3
    workers = {name: stats["num_workers"] for name, stats in multi.get_stats().items()}
    assert workers == {"a": 1, "b": 1, "c": 1}


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


def test_a_state_of_other_loaders_is_refused_and_changes_nothing(multi_of: Any) -> None:
    multi = multi_of()
    first(multi, 5)
    before = multi.state_dict()
    for options, named in [
        ({"strategy": "sequential"}, "'sequential'.*'round_robin'"),
        ({"epoch_length": "max"}, "'max'.*'sum'"),
        ({"steps": 4}, "4.*None"),
        ({"cycle_short_loaders": False}, "False.*True"),
        ({"loaders": {"a": Numbers(10)}}, "'b'"),
        ({"loaders": {"a": Numbers(10), "b": Numbers(4), "c": Numbers(7)}}, "'b'.*4.*3"),
    ]:
        other = multi_of(**options)
        first(other, 1)
        with pytest.raises(StateError, match=named):
            multi.load_state_dict(other.state_dict())
        assert multi.state_dict() == before
    assert seen(multi)[:3] == [(n, alone(multi.loaders[n].dataset, 1)[0]) for n in "abc"]


def test_garbage_is_refused(multi_of: Any) -> None:
    multi = multi_of()
    first(multi, 3)
    good = multi.state_dict()
    fields = ("epoch", "batches", "counts", "passes", "out", "loaders", "ended")
    without = [{k: v for k, v in good.items() if k != field} for field in fields]
    damaged = [
        {"version": 2},
        {"version": -1},
        {"version": True},
        {"epoch": 1},
        {"epoch": -1},
        {"epoch": 0.5},
        {"batches": 4},
        {"batches": 3.0},
        {"counts": {}},
        {"counts": {**good["counts"], "a": -1}},
        {"counts": {**good["counts"], "a": True}},
        {"passes": {**good["passes"], "a": 1}},
        {"out": ["d"]},
        {"ended": 0},
        {"loaders": 3},
        {"loaders": {**good["loaders"], "a": None}},
        {"loaders": {**good["loaders"], "d": {}}},
        {"loaders": {**good["loaders"], "a": {**good["loaders"]["a"], "length": 99}}},
    ]
    for state in (None, [], {}, *without, *({**good, **change} for change in damaged)):
        with pytest.raises(StateError):
            multi.load_state_dict(state)
    multi.load_state_dict(good)
    assert names(multi) == "abcabcab"


# -- arguments


BAD_ARGUMENTS = [
    {"loaders": {}},
    {"loaders": [Numbers(3)]},
    {"loaders": {1: Numbers(3)}},
    {"loaders": {"a": 3}},
    {"loaders": {"a": DataLoader(range(4))}},
    {"loaders": {"a": (Loader(range(4), num_workers=0), 2)}},
    {"loaders": {"a": (Numbers(4), 0)}},
    {"loaders": {"a": [Numbers(4), Numbers(4)]}},
    {"strategy": "random"},
    {"strategy": "weighted", "weights": [1, -1, 1]},
    {"strategy": "weighted", "weights": [1, float("inf"), 1]},
    {"strategy": "weighted", "weights": [1, True, 1]},
    {"strategy": "weighted", "weights": [1, [], 1]},
    {"strategy": "weighted", "weights": [0, 0, 0]},
    {"strategy": "weighted", "weights": [1, 2]},
    {"strategy": "weighted", "weights": 3},
    {"strategy": "weighted", "weights": {"a": 1, "b": 1, "d": 1}},
    {"weights": [1, 1, 1]},
    {"pattern": ["a"]},
    {"strategy": "alternating", "pattern": ["a", "d"]},
    {"strategy": "alternating", "pattern": []},
    {"strategy": "alternating", "pattern": "aab"},
    {"epoch_length": "mean"},
    {"steps": 0},
    {"cycle_short_loaders": 1},
    {"batch_sise": 3},
]


def test_what_makes_no_sense_is_refused() -> None:
    datasets = {"a": Numbers(10), "b": Numbers(3), "c": Numbers(7)}
    for options in BAD_ARGUMENTS:
        with pytest.raises(ConfigError):
            MultiDataLoader(**{"loaders": datasets, "num_workers": 0, **options})
            pytest.fail(f"accepted: {options}")


def test_loaders_are_taken_as_they_are(multi_of: Any) -> None:
    loader = Loader(Numbers(6), batch_size=3, num_workers=0)
    multi = multi_of({"a": loader, "b": Loader(Numbers(4), batch_size=1, num_workers=0)})
    assert multi.loaders["a"] is loader and names(multi) == "ababab"
    for options in ({"batch_size": 2}, {"seed": 2}, {"loaders": {"a": loader, "b": loader}}):
        with pytest.raises(ConfigError):
            MultiDataLoader(**{"loaders": {"a": loader}, **options})


def test_datasets_and_paths(multi_of: Any, photos: Path) -> None:
    multi = multi_of({"a": Numbers(10), "b": [7, 8, 9]}, shuffle=False, steps=np.int64(5))
    assert [type(value) for value in multi.state_dict().values()].count(np.int64) == 0
    assert first(multi, 2) == [("a", [0, 1]), ("b", [7, 8])]
    paths = multi_of({"a": photos, "b": str(photos)}, image_size=8, batch_size=4)
    assert [images.shape for _, (images, _) in itertools.islice(iter(paths), 2)] == [
        (4, 3, 8, 8),
        (4, 3, 8, 8),
    ]


def test_workers_of_datasets_are_split(multi_of: Any) -> None:
    def split(loaders: Any = None, **options: Any) -> list[int]:
        multi = multi_of(loaders, **options)
        return [loader.config.num_workers for loader in multi.loaders.values()]

    assert split(num_workers=5) == [2, 2, 1]
    # 10, 3 and 7 samples: 2.5, 0.75 and 1.75
    assert split(num_workers=5, strategy="sequential") == [2, 1, 2]
    assert split(num_workers=4, strategy="weighted", weights=[0, 1, 3]) == [0, 1, 3]
    assert split(num_workers=3, strategy="alternating", pattern=["c", "c", "a"]) == [1, 0, 2]
    options = {"prefetch_factor": 3, "persistent_workers": True, "timeout": 9}
    assert split(num_workers=1, **options) == [1, 0, 0]
    in_memory = torch.utils.data.TensorDataset(torch.arange(8))
    most = Loader(Numbers(8)).config.num_workers
    assert split({"a": in_memory, "b": Numbers(8)}, num_workers=None) == [0, most]
    assert split({"a": in_memory}, num_workers=None) == [0]


@given(st.integers(0, 200), weights_lists)
def test_split_workers_keeps_sum_and_quotas(number: int, weights: list[int]) -> None:
    found = split_workers(number, {str(i): weight for i, weight in enumerate(weights)})
    assert is_quota(list(found.values()), weights, number)


def test_split_workers_by_largest_remainder() -> None:
    assert split_workers(3, {"a": 1, "b": 1}) == {"a": 2, "b": 1}
    assert split_workers(10, {"a": 0.415, "b": 0.385, "c": 0.2}) == {"a": 4, "b": 4, "c": 2}
    bad: list[Any] = [(-1, {"a": 1}), (True, {"a": 1}), (1, {}), (1, {"a": 0}), (1, [1])]
    for number, shares in bad:
        with pytest.raises(ConfigError):
            split_workers(number, shares)
