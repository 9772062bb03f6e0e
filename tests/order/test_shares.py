"""A rank's share that is shared out to the ranks once more is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import pytest
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from headrace import ConfigError, HDF5Dataset
from headrace.order import EpochOrder, OrderSampler, RankBatches


class Shard(BatchSampler):
    """Every other batch of a batch sampler, for one process of two."""

    num_processes = 2

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        yield from (
            batch for number, batch in enumerate(self.batches) if number % self.num_processes == 0
        )

    def __len__(self) -> int:
        return len(self.batches) // 2


class Wrapper(DistributedSampler[int]):
    """Shares out another sampler's indices, as Lightning does where it is not distributed."""

    def __init__(self, sampler: Any) -> None:
        super().__init__(sampler, num_replicas=2, rank=0, shuffle=False)

    def __iter__(self) -> Iterator[int]:
        indices = list(self.dataset)  # type: ignore[call-overload]
        return (indices[i] for i in super().__iter__())


class StreamShard(IterableDataset[Any]):
    """Every other sample of an iterable dataset."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.state = dataset, SimpleNamespace(num_processes=2)

    def __iter__(self) -> Iterator[Any]:
        yield from (sample for number, sample in enumerate(self.dataset) if number % 2 == 0)


def sampler(world_size: int) -> OrderSampler:
    return OrderSampler(40, batch_size=5, rank=0, world_size=world_size)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_shared_stream(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, workers: int) -> None:
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file.create_dataset("data", data=range(40))
    with HDF5Dataset(tmp_path / "rows.h5", loading_mode="streaming") as dataset:
        assert len(list(DataLoader(StreamShard(dataset), 5))) == 4
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert len(list(DataLoader(dataset, 5))) == 4
        with pytest.raises(ConfigError, match=r"HDF5Dataset .* StreamShard"):
            start = "fork" if workers else None
            shard: Any = StreamShard(dataset)
            list(DataLoader(shard, 5, num_workers=workers, multiprocessing_context=start))


def test_a_sampler_s_subclass_and_other_loops_share_nothing_out() -> None:
    class Mine(OrderSampler):
        def __iter__(self) -> Iterator[int]:
            yield from super().__iter__()

    class Trainer:
        world_size = 2

        def run(self, loader: Any) -> int:
            return sum(len(batch) for batch in loader)

    sampler = Mine(40, batch_size=5, rank=1, world_size=2)
    assert Trainer().run(DataLoader(range(40), 5, sampler=sampler)) == 20  # type: ignore[arg-type]


def test_a_share_is_shared_out_again() -> None:
    order = EpochOrder(40, global_batch=10)
    with pytest.raises(ConfigError, match=r"OrderSampler .* Shard"):
        list(DataLoader(range(40), batch_sampler=Shard(BatchSampler(sampler(2), 5, False))))
    with pytest.raises(ConfigError, match=r"OrderSampler .* Wrapper"):
        list(DataLoader(range(40), 5, sampler=Wrapper(sampler(2))))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"RankBatches .* Shard"):
        list(Shard(RankBatches(order, 0, 2, 5)))
    whole = [
        Shard(BatchSampler(sampler(1), 5, False)),
        Wrapper(sampler(1)),
        Shard(RankBatches(order, 0, 1, 10)),
    ]
    assert [len(list(one)) for one in whole] == [4, 20, 2]
