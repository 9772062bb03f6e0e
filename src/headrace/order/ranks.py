"""Distributes the global batches of an epoch over the ranks.

Global batch s covers the positions from ``s * global_batch`` on, and rank r takes those with
position mod world size = r. With 10 samples, 2 ranks and a batch size of 2 (so that a global batch
has 4 positions):

    ====  =============  ======  ======
    step  global batch   rank 0  rank 1
    ====  =============  ======  ======
    0     0, 1, 2, 3     0, 2    1, 3
    1     4, 5, 6, 7     4, 6    5, 7
    2     8, 9           8       9       (with ``drop_last`` there is no step 2)
    ====  =============  ======  ======

So the union of the ranks, and the order in it, depends on the global batch and not on the number
of ranks. Only an incomplete last batch is changed, so that no rank is left without a batch. With 9
samples, the last two steps are

    =============  ====  ======  ======
    ``pad=True``   1     4, 6    5, 7
    ..             2     8       0       (padded with the epoch's first samples)
    ``pad=False``  1     4       5       (step 1 passes its last positions on)
    ..             2     6, 8    7
    =============  ====  ======  ======
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from headrace.arguments import check_integer, checks_keywords
from headrace.dtypes import IntArray
from headrace.errors import ConfigError
from headrace.order.base import Order
from headrace.order.shares import check_shared_once

# indices that an iteration computes at a time: many at once cost an order hardly more than one
# batch
_PART = 4_096
# but it begins with a single batch, so that the first one comes at once, and takes so many times
# more each time
_GROWTH = 4


class BatchRequest(list[int]):
    """The request for a batch, as it is pickled to a worker: the batch's indices, and what makes it
    reproducible.

    A list, since torch's samplers yield lists, which its fetcher hands to ``dataset.__getitems__``.

    Attributes:
        seed: seed of the order, from which the seeds of the samples are derived.
        epoch: epoch number.
        step: number of the global batch in the epoch.
        slot: ring slot to collate into, or None for a fresh buffer.
        draws: for each index its `k` (see `order.seeding`), or None where every k is 0: a
            permutation.
        given: pickled states that the dataset goes on from, or None.
        is_idle: no batch is to be made, only what is given is to be taken.
    """

    __slots__ = ("draws", "epoch", "given", "is_idle", "seed", "slot", "step")

    def __init__(
        self,
        indices: Iterable[int] = (),
        seed: int = 42,
        epoch: int = 0,
        step: int = 0,
        slot: int | None = None,
        draws: Sequence[int] | None = None,
        given: bytes | None = None,
        is_idle: bool = False,
    ) -> None:
        super().__init__(indices)
        self.seed: int = seed
        self.epoch: int = epoch
        self.step: int = step
        self.slot: int | None = slot
        self.draws: Sequence[int] | None = draws
        self.given: bytes | None = given
        self.is_idle: bool = is_idle

    def __reduce__(self) -> tuple[object, ...]:
        numbers = (self.seed, self.epoch, self.step, self.slot)
        return BatchRequest, (list(self), *numbers, self.draws, self.given, self.is_idle)


_current: BatchRequest | None = None


def current_request() -> BatchRequest | None:
    """The batch that this process works on: it names seed and epoch for datasets inside others,
    such as `torch.utils.data.Subset`.
    """
    return _current


@contextmanager
def working_on(request: BatchRequest) -> Iterator[None]:
    """While a batch of this process is made."""
    global _current
    before = _current
    _current = request
    try:
        yield
    finally:
        _current = before


class RankBatches:
    """One rank's batches of indices, by the number of the global batch.

    All ranks have the same number of batches, none of them empty. Over all ranks each sample comes
    exactly once, except for `padding` and what `drop_last` drops. An instance can be the
    ``batch_sampler`` of a plain DataLoader.

    Args:
        order: the order of the epoch; its ``global_batch`` must be ``batch_size * world_size``.
        rank: number of this rank, in [0, world_size).
        world_size: number of ranks.
        batch_size: number of samples per batch and rank.
        drop_last: drop the incomplete global batch.
        pad: True: repeat the epoch's first samples until all ranks have equally many. False: repeat
            nothing, for exact evaluation. If fewer samples than ranks remain for the last step, the
            full batch before it passes on its last `world_size` positions or, with a batch size of
            1, takes the remaining ones in as a batch of up to two.

    Attributes:
        order, rank, world_size, batch_size, drop_last, pad: the arguments.
        steps: number of global batches, the same on every rank.
        padding: number of samples that are repeated, over all ranks.
        num_samples: number of indices of this rank in an epoch.
        total_size: number of indices of all ranks in an epoch, padding included.

    Raises:
        ConfigError: an argument is invalid, or ``pad=False`` with fewer samples than ranks.
    """

    @checks_keywords
    def __init__(
        self,
        order: Order,
        rank: int = 0,
        world_size: int = 1,
        batch_size: int = 32,
        drop_last: bool = False,
        pad: bool = True,
    ) -> None:
        self.order: Order = order
        self.rank: int = check_integer("rank", rank, 0)
        self.world_size: int = check_integer("world_size", world_size, 1)
        self.batch_size: int = check_integer("batch_size", batch_size, 1)
        self.drop_last: bool = drop_last
        self.pad: bool = pad
        self.global_batch: int = self.batch_size * self.world_size
        """Number of samples of a full batch, over all ranks."""
        if rank >= world_size:
            raise ConfigError(
                f"rank must be in [0, world_size), got rank={rank} with world_size={world_size}"
            )
        if order.global_batch != self.global_batch:
            raise ConfigError(
                f"the order was made for global_batch={order.global_batch}, but "
                f"batch_size={batch_size} times world_size={world_size} is {self.global_batch}"
            )
        n = order.n
        full, tail = divmod(n, self.global_batch)
        self.steps: int = full
        self.total_size: int = full * self.global_batch
        self._handed = 0  # positions that the last step takes over from the one before
        if tail and not self.drop_last:
            self.steps += 1
            self.total_size = n
            if self.pad:
                self.total_size = -(-n // world_size) * world_size
            elif n < world_size:
                raise ConfigError(
                    f"pad=False needs a sample for every rank, but there are {n} for "
                    f"world_size={world_size}: use pad=True"
                )
            elif tail < world_size and batch_size == 1:
                self.steps -= 1
            elif tail < world_size:
                self._handed = world_size
        self.padding: int = max(0, self.total_size - n)
        self.num_samples: int = len(range(rank, self.total_size, world_size))

    def __len__(self) -> int:
        return self.steps

    def batch(self, step: int) -> IntArray:
        """Returns this rank's indices of a global batch.

        Args:
            step: number of the global batch in the epoch, in [0, steps).

        Returns:
            int64 array of shape [batch_size]; at the end of an epoch shorter, or longer by one (see
            `pad`), but never empty.

        Raises:
            IndexError: there is no such step.
        """
        return self.some([step])[0]

    def some(self, steps: Sequence[int]) -> list[IntArray]:
        """Returns this rank's indices of several global batches, at little more cost than
        `batch` for one.
        """
        if not steps:
            return []
        if min(steps) < 0 or max(steps) >= self.steps:
            raise IndexError(f"steps {steps!r:.80} are not all in an epoch of {self.steps}")
        parts = [self._positions(step, step + 1) for step in steps]
        ends = np.cumsum([len(part) for part in parts])
        return np.split(self.order[np.concatenate(parts)], ends[:-1])

    def iter_from(self, step: int) -> Iterator[IntArray]:
        """Iterates over the batches from a step on. Starting costs the same for every step.

        Args:
            step: first global batch, in [0, steps]; `steps` gives no batches.

        Raises:
            IndexError: there is no such step.
        """
        if not 0 <= step <= self.steps:
            raise IndexError(f"step {step} is outside an epoch of {self.steps} steps")
        return (indices for indices, _ in self._iterate(step))

    def __iter__(self) -> Iterator[IntArray]:
        check_shared_once(self, self.world_size)
        return self.iter_from(0)

    def requests(self, epoch: int, start: int) -> Iterator[BatchRequest]:
        """Iterates over the requests of an epoch's batches, from a step on."""
        repeats = self.order.repeats
        batches = self.with_epoch(epoch)._iterate(start)
        for step, (indices, positions) in enumerate(batches, start):
            draws = positions.tolist() if repeats else None
            yield BatchRequest(indices.tolist(), self.order.seed, epoch, step, draws=draws)

    def samples_before(self, step: int) -> int:
        """Returns the number of different samples that all ranks together received before
        `step`.
        """
        return min(self._start(step), self.order.n)

    def parameters(self) -> dict[str, Any]:
        """Returns the parameters of the order that a loader's state holds."""
        parameters: dict[str, Any] = self.order.parameters()
        del parameters["n"]  # the state has the dataset's length
        return parameters

    def with_epoch(self, epoch: int) -> RankBatches:
        """Returns the batches of another epoch. Cheap, like `EpochOrder.with_epoch`."""
        if epoch == self.order.epoch:
            return self
        other = copy.copy(self)
        other.order = self.order.with_epoch(epoch)
        return other

    def _start(self, step: int) -> int:
        """First position of a step, a multiple of the world size; of the step after the last,
        the epoch's end.
        """
        if step >= self.steps:
            return self.total_size
        first = step * self.global_batch
        if step == self.steps - 1:
            return first - self._handed
        return first

    def _positions(self, first: int, last: int) -> IntArray:
        """This rank's positions of the steps from `first` to before `last`."""
        positions = np.arange(
            self._start(first) + self.rank, self._start(last), self.world_size, dtype=np.int64
        )
        if last == self.steps and self.padding:
            # padding is the epoch from its beginning, over and over if it has fewer samples
            positions %= self.order.n
        return positions

    def _iterate(self, step: int) -> Iterator[tuple[IntArray, IntArray]]:
        """Indices of each batch, and their positions in the order."""
        stride = 1
        while step < self.steps:
            # the last two batches may have other sizes, and come one by one
            count = max(1, min(stride, self.steps - 2 - step))
            positions = self._positions(step, step + count)
            indices = self.order[positions]
            size = len(positions) // count
            for begin in range(0, len(positions), size):
                yield indices[begin : begin + size], positions[begin : begin + size]
            step += count
            stride = min(_GROWTH * stride, max(1, _PART // self.batch_size))
