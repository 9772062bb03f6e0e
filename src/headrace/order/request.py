"""The request for a batch, as it travels to a worker.

A `BatchRequest` is the list of a batch's indices (torch's samplers yield lists, torch's fetcher
hands them to ``dataset.__getitems__``), and carries along what makes the batch reproducible: seed,
epoch, step, and the number of the ring slot that the parent chose for it. It is pickled to the
worker with the indices, so workers need no other channel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager


class BatchRequest(list[int]):
    """The indices of one batch, and where the batch stands in the epoch.

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
