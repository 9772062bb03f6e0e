"""OrderSampler: a plain DataLoader gets the order, and resumes."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

from headrace.errors import ConfigError, StateError
from headrace.order import EpochOrder, OrderSampler, RankBatches


class Numbers(Dataset[int]):
    """A map-style dataset whose samples are their indices."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        assert type(index) is int
        return index


def make(n: int = 50, world_size: int = 1, rank: int = 0, **options: Any) -> OrderSampler:
    return OrderSampler(n, **{"batch_size": 4, "rank": rank, "world_size": world_size, **options})


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_plain_dataloader_cuts_the_batches_of_the_order(num_workers: int, drop_last: bool) -> None:
    dataset = Numbers(50)
    for rank in range(3):
        sampler = OrderSampler(dataset, batch_size=4, rank=rank, world_size=3, seed=5, drop_last=drop_last)
        loader = DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=num_workers)
        sampler.set_epoch(2)
        order = EpochOrder(50, seed=5, epoch=2, global_batch=12)
        expected = [batch.tolist() for batch in RankBatches(order, rank, 3, 4, drop_last)]
        assert [batch.tolist() for batch in loader] == expected
        assert len(loader) == len(expected)
        assert len(sampler) == sum(map(len, expected))


@pytest.mark.parametrize("pad", [True, False])
def test_the_ranks_share_each_epoch_exactly(pad: bool) -> None:
    blocks = [10, 0, 25, 15]
    ranks = [make(world_size=4, rank=r, shuffle="block", blocks=blocks, interleave=3, turns=2, pad=pad) for r in range(4)]
    for epoch in (0, 1):
        for sampler in ranks:
            sampler.set_epoch(epoch)
        got = [list(sampler) for sampler in ranks]
        assert [len(indices) for indices in got] == [len(sampler) for sampler in ranks]
        assert {index for indices in got for index in indices} == set(range(50))
        assert sum(map(len, got)) == ranks[0].total_size == (52 if pad else 50)


def test_it_has_what_trainers_read_from_a_distributed_sampler() -> None:
    dataset = Numbers(50)
    sampler = OrderSampler(dataset, batch_size=4, rank=1, world_size=3, shuffle="block", seed=7)
    assert isinstance(sampler, DistributedSampler)
    names = ("dataset", "num_replicas", "rank", "epoch", "num_samples", "total_size", "shuffle", "seed", "drop_last")
    expected = (dataset, 3, 1, 0, 17, 51, "block", 7, False)
    assert tuple(getattr(sampler, name) for name in names) == expected
    sampler.set_epoch(4)
    assert sampler.epoch == 4
    assert len(make(50).dataset) == 50  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="n must be an integer of at least 0"):
        make(-1)


def test_rank_and_world_size_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "5")
    sampler = OrderSampler(50)
    assert (sampler.rank, sampler.num_replicas, len(sampler)) == (2, 5, 10)


def test_without_set_epoch_the_same_epoch_comes_again() -> None:
    sampler = make()
    first = list(sampler)
    assert list(sampler) == first
    next(iter(sampler))
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first


def test_a_batch_is_handed_out_with_its_last_index() -> None:
    sampler = make(10)
    iterator = iter(sampler)
    steps = []
    for _ in range(10):
        next(iterator)
        steps.append(sampler.state_dict()["step"])
    assert steps == [0, 0, 0, 1, 1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("shuffle", [True, "block"])
@pytest.mark.parametrize("step", [0, 1, 5, 12, 13])
def test_it_goes_on_where_it_was_saved(shuffle: Any, step: int) -> None:
    options = {"shuffle": shuffle, "blocks": [5] * 10, "interleave": 2, "turns": 3}
    sampler = make(**options)
    sampler.set_epoch(3)
    everything = list(sampler)
    list(islice(sampler, 4 * step))
    if step == 13:
        assert len(list(sampler)) == 50
    state = json.loads(json.dumps(sampler.state_dict()))

    other = make(**options)
    other.load_state_dict(state)
    assert (other.epoch, other.state_dict()) == (3, state)
    other.set_epoch(3)  # as loops do at the beginning of each epoch
    assert list(other) == everything[4 * step :]
    assert list(other) == everything  # the epoch after the resumed one is whole


def test_it_resumes_in_a_plain_dataloader() -> None:
    dataset, sampler = Numbers(50), make()
    loader = DataLoader(dataset, sampler=sampler, batch_size=4)
    batches = [batch.tolist() for batch in loader]
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = sampler.state_dict()
    assert (state["epoch"], state["step"], state["samples"]) == (0, 3, 12)
    sampler.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == batches[3:]


def test_another_epoch_drops_the_position() -> None:
    sampler, other = make(), make()
    next(islice(iter(sampler), 8, None))
    assert sampler.state_dict()["step"] == 2
    other.load_state_dict(sampler.state_dict())
    other.set_epoch(1)
    assert other.state_dict()["step"] == 0
    assert len(list(other)) == 50
    other.set_epoch(0)
    assert len(list(other)) == 50


def test_another_world_size_resumes_without_losing_a_sample() -> None:
    ranks = [make(100, 4, rank, batch_size=3) for rank in range(4)]
    seen = [index for sampler in ranks for index in islice(sampler, 5 * 3)]
    states = [sampler.state_dict() for sampler in ranks]
    assert all(state == states[0] for state in states)
    others = [make(100, 2, rank, batch_size=6) for rank in range(2)]
    for sampler in others:
        sampler.load_state_dict(states[0])
        seen += sampler
    assert sorted(seen) == list(range(100))


def test_position_unknown_to_the_world_size_is_refused() -> None:
    sampler = make(9, 2, batch_size=2, pad=False)
    list(islice(sampler, 3))  # the second to last step has a single sample a rank
    state = sampler.state_dict()
    assert (state["step"], state["samples"]) == (2, 6)
    other = make(9, 1, batch_size=4, pad=False)
    with pytest.raises(StateError, match="after 6 samples, where with 1 ranks no batch ends"):
        other.load_state_dict(state)
    list(sampler)
    other.load_state_dict(sampler.state_dict())
    assert list(other) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 51}, "n: 50 saved, 51 here"),
        ({"seed": 1}, "seed: 42 saved, 1 here"),
        ({"shuffle": False}, "shuffle: True saved, False here"),
        ({"batch_size": 5}, "global_batch: 4 saved, 5 here"),
        ({"drop_last": True}, "drop_last: False saved, True here"),
        ({"pad": False}, "pad: True saved, False here"),
        ({"shuffle": "block", "blocks": [25, 25]}, "interleave: None saved, 64 here; turns: None saved, 12 here; blocks"),
    ],
)
def test_the_state_of_another_order_is_refused(options: dict[str, Any], message: str) -> None:
    sampler = make()
    list(islice(sampler, 20))
    other = make(**options)
    with pytest.raises(StateError, match=message):
        other.load_state_dict({**sampler.state_dict(), "epoch": 5})
    assert other.epoch == 0 and len(list(other)) == len(other)


def test_the_state_of_another_version_is_refused() -> None:
    with pytest.raises(StateError, match="version 99"):
        make().load_state_dict({**make().state_dict(), "version": 99})


@pytest.mark.parametrize("change", [{"epoch": -1}, {"step": "x"}, {"samples": None}, {"order": 5}])
def test_damaged_state_is_refused(change: dict[str, Any]) -> None:
    sampler = make()
    with pytest.raises(StateError, match="damaged"):
        sampler.load_state_dict({**sampler.state_dict(), **change})


def test_torch_cuts_the_same_batches() -> None:
    sampler = make(50, 3, 1)
    assert list(BatchSampler(sampler, 4, drop_last=False)) == [batch.tolist() for batch in sampler.batches]
