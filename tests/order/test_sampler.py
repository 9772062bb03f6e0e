"""OrderSampler: a plain DataLoader gets the order, and resumes."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from headrace.errors import ConfigError, StateError
from headrace.order import EpochOrder, OrderSampler, RankBatches


class Numbers(Dataset[int]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        assert type(index) is int
        return index


def make(n: int = 50, world_size: int = 1, rank: int = 0, **options: Any) -> OrderSampler:
    return OrderSampler(n, **{"batch_size": 4, "rank": rank, "world_size": world_size, **options})


def test_a_plain_dataloader_cuts_the_batches_of_the_order() -> None:
    for num_workers, drop_last in [(0, False), (2, True)]:
        dataset = Numbers(50)
        for rank in range(3):
            sampler = OrderSampler(
                dataset, batch_size=4, rank=rank, world_size=3, seed=5, drop_last=drop_last
            )
            loader = DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=num_workers)
            sampler.set_epoch(2)
            order = EpochOrder(50, seed=5, epoch=2, global_batch=12)
            expected = [batch.tolist() for batch in RankBatches(order, rank, 3, 4, drop_last)]
            assert [batch.tolist() for batch in loader] == expected
            assert len(loader) == len(expected)
            assert len(sampler) == sum(map(len, expected))


def test_it_has_what_trainers_read(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Numbers(50)
    sampler = OrderSampler(dataset, batch_size=4, rank=1, world_size=3, shuffle="block", seed=7)
    assert isinstance(sampler, DistributedSampler)
    assert (sampler.dataset, sampler.num_replicas, sampler.rank) == (dataset, 3, 1)
    assert (sampler.epoch, sampler.num_samples, sampler.total_size) == (0, 17, 51)
    assert (sampler.shuffle, sampler.seed, sampler.drop_last) == ("block", 7, False)
    sampler.set_epoch(4)
    assert sampler.epoch == 4
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "5")
    assert (OrderSampler(50).rank, len(OrderSampler(50))) == (2, 10)
    assert len(make(50).dataset) == 50  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        make(-1)


def test_a_batch_is_handed_out_with_its_last_index() -> None:
    sampler = make(10)
    iterator = iter(sampler)
    steps = []
    for _ in range(10):
        next(iterator)
        steps.append(sampler.state_dict()["step"])
    assert steps == [0, 0, 0, 1, 1, 1, 1, 2, 2, 3]


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


def test_the_state_of_another_order_is_refused() -> None:
    for options, named in (
        ({"n": 51}, "n was 50, is 51"),
        ({"seed": 1}, "seed was 42, is 1"),
        ({"shuffle": False}, "shuffle was True, is False"),
        ({"shuffle": "block", "blocks": [25, 25]}, "interleave.* turns.* blocks"),
    ):
        sampler = make()
        list(islice(sampler, 20))
        other = make(**options)
        with pytest.raises(StateError, match=named):
            other.load_state_dict({**sampler.state_dict(), "epoch": 5})
        assert other.epoch == 0 and len(list(other)) == len(other)


def test_a_damaged_state_is_refused() -> None:
    sampler = make()
    for change in ({"version": 99}, {"epoch": -1}, {"step": "x"}, {"samples": None}, {"order": 5}):
        with pytest.raises(StateError):
            sampler.load_state_dict({**sampler.state_dict(), **change})
