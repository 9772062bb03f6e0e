"""Distributes the global batches of an epoch over the ranks, as batches or as a torch sampler.

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
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import torch.utils.data
from numpy.typing import ArrayLike

from headrace.arguments import check_integer, checks_keywords
from headrace.dtypes import IntArray
from headrace.errors import ConfigError, StateError
from headrace.order.epoch import DEFAULT_TURNS, EpochOrder, Order, Shuffle
from headrace.order.world import detect_world

STATE_VERSION = 1
# indices that an iteration computes at a time: many cost hardly more than one batch
_PART = 4_096
# it begins with one batch, so that the first comes at once, and grows by this factor
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


_current: BatchRequest | None = None


def current_request() -> BatchRequest | None:
    """The request that this process works on. Datasets inside others, such as
    `torch.utils.data.Subset`, take seed and epoch from it.
    """
    return _current


@contextmanager
def working_on(request: BatchRequest) -> Iterator[None]:
    """Context in which `current_request` returns this request."""
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


class OrderSampler(torch.utils.data.DistributedSampler[int]):
    """Yields one rank's indices of an epoch, for the `sampler` argument of a DataLoader.

    ```python
    sampler = OrderSampler(dataset, batch_size=64, seed=7)
    loader = DataLoader(dataset, batch_size=64, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch in loader: ...
    ```

    Without `set_epoch` the same epoch repeats, as with torch's sampler. torch.distributed need not
    be initialised.

    The state counts the global batches whose last index was yielded. A DataLoader with workers
    requests indices in advance, so the state may be some batches ahead of the training loop. The
    loader of `headrace.create_dataloader` counts received batches instead.

    With ``pad=False`` the ranks' last batches are changed so that all ranks have equally many (see
    `order.ranks`), but a DataLoader with `batch_size` forms batches itself. Pass a `RankBatches` as
    `batch_sampler` in this case.

    Args:
        dataset: the dataset, of which only the length is used, or the length itself.
        batch_size: number of samples per batch and rank, as passed to the DataLoader. It only
            defines the global batch.
        shuffle, seed, blocks, interleave, turns: see `EpochOrder`.
        rank, world_size: number of this rank, and number of ranks. None: see `detect_world`.
        drop_last: drop the incomplete global batch (torch's sampler drops only what is not
            divisible by the world size).
        pad: see `RankBatches`.
        order: an order of another kind, such as a `WeightedOrder`, made for the global batch;
            `shuffle`, `seed`, `blocks`, `interleave` and `turns` are then ignored.

    Attributes:
        dataset: the dataset, or a range of the length.
        num_replicas: the world size.
        rank, epoch, shuffle, seed, drop_last: the arguments, or the detected values.
        num_samples: number of indices of this rank in an epoch.
        total_size: number of indices of all ranks in an epoch, padding included.
        batches: the `RankBatches` of the current epoch.

    Raises:
        ConfigError: an argument is invalid.
    """

    @checks_keywords
    def __init__(
        self,
        dataset: Sized | int,
        *,
        batch_size: int = 1,
        shuffle: Shuffle = True,
        seed: int = 42,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
        pad: bool = True,
        blocks: ArrayLike | None = None,
        interleave: int | None = None,
        turns: int = DEFAULT_TURNS,
        order: Order | None = None,
    ) -> None:
        world = detect_world(rank, world_size)
        if not isinstance(dataset, Sized):
            dataset = range(check_integer("dataset", dataset, 0))
        if order is None:
            order = EpochOrder(
                len(dataset),
                shuffle=shuffle,
                seed=seed,
                blocks=blocks,
                global_batch=batch_size * world.world_size,
                interleave=interleave,
                turns=turns,
            )
        super().__init__(
            dataset,  # type: ignore[arg-type]  # only its length counts
            num_replicas=world.world_size,
            rank=world.rank,
            shuffle=bool(order.shuffle),
            seed=order.seed,
            drop_last=drop_last,
        )
        self.batches: RankBatches = RankBatches(
            order, world.rank, world.world_size, batch_size, drop_last=drop_last, pad=pad
        )
        self.num_samples: int = self.batches.num_samples
        self.total_size: int = self.batches.total_size
        # "block" and its like count as true
        self.shuffle: bool | str = order.shuffle  # type: ignore[assignment]
        self._handed_out = 0  # global batches of the running iteration
        self._resume_at = 0  # global batch that the next iteration begins with

    def __len__(self) -> int:
        """Number of indices of a whole epoch on this rank, also if an iteration resumes within
        one.
        """
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        check_shared_once(self, self.batches.world_size)
        step = self._resume_at
        self._resume_at = 0
        self._handed_out = step
        return self._iterate(self.batches, step)

    def _iterate(self, batches: RankBatches, step: int) -> Iterator[int]:
        for number, indices in enumerate(batches.iter_from(step), step + 1):
            *others, last = indices.tolist()
            yield from others
            self._handed_out = number  # before the yield: who holds the last index has the batch
            yield last

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration. If it differs from the current one, a loaded
        position is dropped.
        """
        epoch = check_integer("epoch", epoch)
        if epoch != self.epoch:
            self.epoch = epoch
            self.batches = self.batches.with_epoch(epoch)
            self._handed_out = self._resume_at = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the state: plain values, the same on every rank.

        Returns:
            ``version``, ``epoch``, ``step`` (number of global batches yielded), ``samples`` (number
            of samples in them, over all ranks),
                and the parameters of the order.
        """
        return {
            "version": STATE_VERSION,
            "epoch": int(self.epoch),
            "step": self._handed_out,
            "samples": self.batches.samples_before(self._handed_out),
            "order": self._parameters(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a saved state: the next iteration starts with the first batch that was not
        yielded.

        The world size may differ from that of the saved state if it divides the global batch. After
        a state that was saved at the end of an epoch the next iteration is empty, unless
        `set_epoch` sets another epoch first.

        Args:
            state: the result of `state_dict`.

        Raises:
            StateError: the state has another version, or belongs to an order with other parameters;
                nothing is changed then.
        """
        if state.get("version") != STATE_VERSION:
            raise StateError(
                f"the state has version {state.get('version')!r}, this sampler reads "
                f"{STATE_VERSION}"
            )
        counts: list[Any] = [state.get(name) for name in ("epoch", "step", "samples")]
        saved = state.get("order")
        if not are_counts(counts) or not isinstance(saved, Mapping):
            raise StateError(f"the state is damaged: {dict(state)!r}")
        epoch, step, samples = counts
        if differing := differences(saved, self._parameters()):
            raise StateError(f"the state is of another order: {differing}")
        batches = self.batches.with_epoch(epoch)
        if samples == batches.samples_before(batches.steps):
            step = batches.steps  # the last batch may have another number here
        if batches.samples_before(step) != samples:
            raise StateError(
                f"the state was saved after {samples} samples, but with {self.num_replicas} ranks "
                "no batch ends there (with pad=False the last two depend on the world size): load "
                "it with the world size that saved it"
            )
        self.epoch = epoch
        self.batches = batches
        self._handed_out = self._resume_at = step

    def _parameters(self) -> dict[str, Any]:
        parameters = self.batches.order.parameters()
        return {**parameters, "drop_last": self.drop_last, "pad": self.batches.pad}


def are_counts(numbers: list[Any]) -> bool:
    """True if all are integers of at least 0."""
    return all(type(number) is int and number >= 0 for number in numbers)


def differences(state: Mapping[str, Any], own: dict[str, Any]) -> str:
    """The differences between a saved state and what loads it, for messages; "" if none."""
    return ", ".join(
        f"{name} was {state.get(name)!r}, is {value!r}"
        for name, value in own.items()
        if state.get(name) != value
    )


# -- shards that are sharded again

_KINDS = (torch.utils.data.Sampler, torch.utils.data.DataLoader, torch.utils.data.IterableDataset)
# whose loaders, and iterators over them, are of other classes besides
_LIBRARIES = ("accelerate.", "torch.utils.data.")
_COUNTS = ("num_processes", "num_replicas", "world_size")
REMEDY = (
    "Accelerate: prepare model and optimizer alone, and let "
    "create_dataloader(device=accelerator.device) move the batches"
)


def check_shared_once(own: object, world_size: int) -> None:
    """Checks that nothing shards an iteration over one rank's share again.

    Call it in a method of the object that is iterated over, or below, before the first index.

    Args:
        own: that object: a sampler, a batch sampler or an iterable dataset.
        world_size: number of ranks that share the samples.

    Raises:
        ConfigError: the samples are sharded again.
    """
    if world_size < 2:
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_locals.get("self") is not own:
        frame = frame.f_back
    for asker in askers(own, frame):
        # Accelerate's dispatcher knows the number by its state
        for holder in (asker, getattr(asker, "state", None)):
            for name in _COUNTS:
                ranks = getattr(holder, name, None)
                if type(ranks) is int and ranks > 1:
                    raise ConfigError(
                        f"samples would be lost: {type(own).__name__} is one rank's share, of "
                        f"{world_size}, and {type(asker).__name__} shares it out to {ranks} "
                        f"processes again. {REMEDY}; or make it with rank=0 and world_size=1 "
                        "(docs/trainers.md)"
                    )


def askers(own: object, frame: FrameType | None) -> Iterator[Any]:
    """Samplers, datasets and loaders that iterate over an object of headrace, innermost first, up
    to the next frame of headrace.

    Args:
        own: that object.
        frame: the frame of its method.
    """
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("headrace."):
            if frame.f_locals.get("self") is not own:
                return
        # reading `f_locals` of others, such as a training loop, would keep batches alive
        elif frame.f_code.co_name in ("__iter__", "__next__") or module.startswith(_LIBRARIES):
            asker = frame.f_locals.get("self")
            is_of_library = type(asker).__module__.startswith(_LIBRARIES)
            if asker is not own and (is_of_library or isinstance(asker, _KINDS)):
                yield asker
        frame = frame.f_back
