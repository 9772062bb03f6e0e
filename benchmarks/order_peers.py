"""How each peer of `order.py` gives the indices of an epoch.

Each is a class that is made for N samples and makes everything else in `first`, which is timed:
nothing is there beforehand but the integers that the order follows from. Seeds are fixed, since an
order that can't be repeated can't be resumed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler, RandomSampler

from headrace.order import EpochOrder, OrderSampler, RankBatches

BLOCK, BATCH, SEED, RANKS = 4096, 64, 7, 8
"""Indices a block, samples a batch, the seed, and the ranks of those that are one rank's share."""
SAMPLES_A_BLOCK = 1000
"""Of storage, in a block shuffle: N / 1,000 blocks."""


class Indices(ABC):
    """The indices of an epoch of `n` samples, of which this rank gets `share`."""

    ranks = 1

    def __init__(self, n: int) -> None:
        self.n, self.share = n, -(-n // self.ranks)
        # of this rank's indices; where a batch ends, since states count batches
        self.middle = self.share // 2 // BLOCK * BLOCK

    @abstractmethod
    def first(self) -> int:
        """From nothing to the first index; what follows goes on from there."""

    @abstractmethod
    def block(self, number: int) -> Sequence[int] | np.ndarray[Any, Any]:
        """4,096 indices more: the `number`-th block of the epoch where the peer knows positions,
        else the next.
        """

    @abstractmethod
    def batch(self, number: int) -> list[int]:
        """64 indices more, as a list, as torch's BatchSampler takes them."""

    def saved(self) -> Any:
        """What a run has saved at `middle`, written down instead of run up to; not timed. None:
        there is no such state.
        """
        return None

    @abstractmethod
    def resumed(self, state: Any) -> int:
        """From nothing but what was saved to the index at `middle`, by the peer's own means."""

    @abstractmethod
    def all(self) -> list[int]:
        """All indices of this rank; to look whether they are what they should be."""


class Sampled(Indices):
    """A sampler of torch's kind: one index after the other. It has no state: what was given is
    given again, and left out.
    """

    def sampler(self) -> Iterable[int]:
        raise NotImplementedError

    def first(self) -> int:
        self.iterator: Iterator[int] = iter(self.sampler())
        return next(self.iterator)

    def block(self, number: int) -> list[int]:
        return [*islice(self.iterator, BLOCK)]

    def batch(self, number: int) -> list[int]:
        return [*islice(self.iterator, BATCH)]

    def resumed(self, state: Any) -> int:
        return next(islice(iter(self.sampler()), self.middle, None))

    def all(self) -> list[int]:
        return list(self.sampler())


class Positioned(Indices):
    """An order that can be asked for any position."""

    order: Any

    def make(self) -> None:
        raise NotImplementedError

    def at(self, start: int, stop: int) -> Sequence[int] | np.ndarray[Any, Any]:
        return [self.one(position) for position in range(start, stop)]

    def one(self, position: int) -> int:
        return int(self.order[position])

    def first(self) -> int:
        self.make()
        return self.one(0)

    def block(self, number: int) -> Sequence[int] | np.ndarray[Any, Any]:
        return self.at(number * BLOCK, (number + 1) * BLOCK)

    def batch(self, number: int) -> list[int]:
        found = self.at(number * BATCH, (number + 1) * BATCH)
        return found.tolist() if isinstance(found, np.ndarray) else list(found)

    def resumed(self, state: Any) -> int:
        self.make()
        return self.one(self.middle)

    def all(self) -> list[int]:
        self.make()
        return list(self.at(0, self.n))


# -- headrace


def storage_blocks(n: int, shuffle: Any) -> np.ndarray[Any, Any] | None:
    """The sizes of the blocks that a storage would have; only a block shuffle asks."""
    if shuffle != "block":
        return None
    return np.diff(np.append(np.arange(0, n, SAMPLES_A_BLOCK), n))


class OurOrder(Positioned):
    shuffle: Any = True

    def make(self) -> None:
        blocks = storage_blocks(self.n, self.shuffle)
        self.order = EpochOrder(self.n, shuffle=self.shuffle, seed=SEED, blocks=blocks)

    def at(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        return self.order[start:stop]

    def first(self) -> int:
        self.make()
        self.iterator = iter(self.order)
        return next(self.iterator)

    def batch(self, number: int) -> list[int]:
        return [*islice(self.iterator, BATCH)]


class OurBlockOrder(OurOrder):
    shuffle = "block"


class OurBatches(Indices):
    """A batch sampler: its batches are the blocks."""

    def batches(self, size: int) -> RankBatches:
        return RankBatches(EpochOrder(self.n, seed=SEED, global_batch=size), batch_size=size)

    def first(self) -> int:
        self.iterator = iter(self.batches(BATCH))
        self.blocks = iter(self.batches(BLOCK))
        return int(next(self.iterator)[0])

    def block(self, number: int) -> np.ndarray[Any, Any]:
        return next(self.blocks)

    def batch(self, number: int) -> list[int]:
        found: list[int] = next(self.iterator).tolist()
        return found

    def resumed(self, state: Any) -> int:
        return int(next(self.batches(BATCH).iter_from(self.middle // BATCH))[0])

    def all(self) -> list[int]:
        return [int(index) for batch in self.batches(BATCH) for index in batch]


class OurSampler(Sampled):
    shuffle: Any = True

    def sampler(self) -> OrderSampler:
        blocks = storage_blocks(self.n, self.shuffle)
        world = {"rank": 0, "world_size": self.ranks}
        return OrderSampler(
            self.n, batch_size=BATCH, shuffle=self.shuffle, seed=SEED, blocks=blocks, **world
        )

    def saved(self) -> Any:
        steps = self.middle // BATCH
        return {**self.sampler().state_dict(), "step": steps, "samples": steps * BATCH * self.ranks}

    def resumed(self, state: Any) -> int:
        sampler = self.sampler()
        sampler.load_state_dict(state)
        return next(iter(sampler))


class OurRank(OurSampler):
    ranks = RANKS


class OurBlockSampler(OurSampler):
    shuffle = "block"


# -- torch and torchdata


class TorchRandom(Sampled):
    def sampler(self) -> Iterable[int]:
        return RandomSampler(range(self.n), generator=torch.Generator().manual_seed(SEED))


class TorchDistributed(Sampled):
    ranks = RANKS

    def sampler(self) -> Iterable[int]:
        return DistributedSampler(range(self.n), num_replicas=self.ranks, rank=0, seed=SEED)  # type: ignore[arg-type]


class TorchdataRandom(Sampled):
    """Of StatefulDataLoader."""

    def sampler(self) -> Iterable[int]:
        from torchdata.stateful_dataloader.sampler import RandomSampler as Stateful

        return Stateful(range(self.n), generator=torch.Generator().manual_seed(SEED))

    def saved(self) -> Any:
        return {
            "yielded": self.middle,
            "generator": torch.Generator().manual_seed(SEED).get_state(),
        }

    def resumed(self, state: Any) -> int:
        iterator: Any = iter(self.sampler())
        iterator.load_state_dict(state)
        return int(next(iterator))


class TorchdataDistributed(Sampled):
    ranks = RANKS

    def sampler(self) -> Any:
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

        return StatefulDistributedSampler(range(self.n), num_replicas=self.ranks, rank=0, seed=SEED)

    def saved(self) -> Any:
        return {"yielded": self.middle}

    def resumed(self, state: Any) -> int:
        sampler = self.sampler()
        sampler.load_state_dict(state)
        return int(next(iter(sampler)))


# -- Grain and numpy


class GrainShuffle(Positioned):
    """The bare function under Grain's shuffles: C++, one index a call."""

    def make(self) -> None:
        from grain.experimental import index_shuffle

        self.function = index_shuffle

    def one(self, position: int) -> int:
        return int(self.function(position, max_index=self.n - 1, seed=SEED, rounds=4))


class GrainDataset(Positioned):
    """`MapDataset.shuffle`, Grain's way of today."""

    def make(self) -> None:
        import grain

        self.order = grain.MapDataset.range(self.n).shuffle(seed=SEED)


class GrainSampler(Positioned):
    """What Grain's DataLoader takes; it also makes a random generator for each record."""

    def make(self) -> None:
        from grain.samplers import IndexSampler

        self.order = IndexSampler(self.n, shuffle=True, seed=SEED, num_epochs=1)

    def one(self, position: int) -> int:
        return int(self.order[position].record_key)


class NumpyPermutation(Positioned):
    """The limit in speed: all indices lie ready, and a block of them is a copy."""

    def make(self) -> None:
        self.order = np.random.default_rng(SEED).permutation(self.n)

    def at(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        return self.order[start:stop].copy()
