"""Which batches has an epoch, for this rank?

A plan answers it, and hands out tickets: headrace's own order, computed at any step; a sampler of the user's, replayed; or the
ends of an iterable dataset, which nobody knows beforehand.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

from headrace.order import RankBatches, Ticket
from headrace.order.seeding import SampleSeeder, preserved_rng


class Plan(ABC):
    """The batches of one rank, epoch by epoch. Picklable where workers use it (`OrderPlan`)."""

    seed: int
    padding = 0

    @abstractmethod
    def steps(self) -> int | None:
        """The number of batches of an epoch; None where it is not known."""

    @abstractmethod
    def tickets(self, epoch: int, start: int) -> Iterator[Ticket]:
        """The tickets of an epoch from a step on, without ring slots."""

    def samples_before(self, step: int) -> int | None:
        """Samples of the epoch that all ranks together have received when a step begins; None where it is not known."""
        return None

    @abstractmethod
    def parameters(self) -> dict[str, Any]:
        """What the order of the batches depends on, for the state."""


class OrderPlan(Plan):
    """headrace's own order (laws 2 to 4)."""

    def __init__(self, batches: RankBatches) -> None:
        self._batches = batches
        self.seed = batches.order.seed
        self.padding = batches.padding

    def steps(self) -> int:
        return len(self._batches)

    def _of_epoch(self, epoch: int) -> RankBatches:
        if self._batches.order.epoch != epoch:
            self._batches = self._batches.with_epoch(epoch)
        return self._batches

    def batch(self, epoch: int, step: int) -> list[int]:
        """The indices of one batch."""
        indices: list[int] = self._of_epoch(epoch).batch(step).tolist()
        return indices

    def tickets(self, epoch: int, start: int) -> Iterator[Ticket]:
        for step, indices in enumerate(self._of_epoch(epoch).iter_from(min(start, self.steps())), start):
            yield Ticket(indices.tolist(), self.seed, epoch, step)

    def samples_before(self, step: int) -> int:
        return self._batches.samples_before(step)

    def parameters(self) -> dict[str, Any]:
        said: dict[str, Any] = self._batches.order.parameters()
        said.pop("n")  # the state has the dataset's length
        return said


class SamplerPlan(Plan):
    """A sampler, or batch sampler, of the user's: replayed from its start to resume.

    A sampler that draws from torch's global generator when it starts does so under (seed, epoch), and so draws the same again.
    """

    def __init__(
        self,
        seed: int,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[list[int]] | None = None,
        batch_size: int | None = 1,
        drop_last: bool = False,
    ) -> None:
        self.seed, self._drop_last = seed, drop_last
        self._sampler, self._batch_sampler, self._size = sampler, batch_sampler, batch_size or 1
        self._position = 0

    def steps(self) -> int | None:
        try:
            if self._batch_sampler is not None:
                return len(self._batch_sampler)  # type: ignore[arg-type]
            n = len(self._sampler)  # type: ignore[arg-type]
        except TypeError:
            return None
        return n // self._size if self._drop_last else -(-n // self._size)

    def tickets(self, epoch: int, start: int) -> Iterator[Ticket]:
        source: Any = self._batch_sampler if self._batch_sampler is not None else self._sampler
        for part in (source, getattr(source, "sampler", None)):
            set_epoch = getattr(part, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
        position = 0
        for step, indices in enumerate(self._lists(self._started(source, epoch))):
            if step >= start:
                yield Ticket(indices, self.seed, epoch, step, draws=range(position, position + len(indices)))
            position += len(indices)

    def _started(self, source: Iterable[Any], epoch: int) -> Iterator[Any]:
        with preserved_rng():
            SampleSeeder()(self.seed, epoch, -1)  # -1: no sample has this index
            rest = iter(source)
            first = list(itertools.islice(rest, 1))
        return itertools.chain(first, rest)

    def _lists(self, items: Iterator[Any]) -> Iterator[list[int]]:
        if self._batch_sampler is not None:
            yield from (list(map(int, indices)) for indices in items)
            return
        while chunk := [int(i) for i in itertools.islice(items, self._size)]:
            if len(chunk) < self._size and self._drop_last:
                return
            yield chunk

    def parameters(self) -> dict[str, Any]:
        return {"shuffle": "sampler", "seed": self.seed, "global_batch": self._size}


class IterablePlan(Plan):
    """Tickets without an end for a foreign `IterableDataset`: its workers say when they have nothing left."""

    def __init__(self, seed: int, batch_size: int | None, length: int | None, drop_last: bool) -> None:
        self.seed, self._size, self._length, self._drop_last = seed, batch_size or 1, length, drop_last
        self._runs = itertools.count()

    def steps(self) -> int | None:
        if self._length is None:
            return None
        return self._length // self._size if self._drop_last else -(-self._length // self._size)

    def tickets(self, epoch: int, start: int) -> Iterator[Ticket]:
        run = next(self._runs)
        return (Ticket([run], self.seed, epoch, step) for step in itertools.count())

    def parameters(self) -> dict[str, Any]:
        return {"shuffle": "iterable", "seed": self.seed, "global_batch": self._size}


def length_of(dataset: Any) -> int | None:
    """The length of a dataset, if it has one."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None
