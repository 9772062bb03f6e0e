"""Plans the batches of one rank's epoch, and yields their requests.

Batches follow headrace's own order, computed at any step; or a sampler of the user, which is
replayed; or an iterable dataset, whose length is not known in advance.
"""

from __future__ import annotations

import copy
import itertools
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset

from headrace.datasets.core.base import BaseDataset
from headrace.errors import ConfigError, StateError, warn
from headrace.loader.config import DataLoaderConfig, Shuffle
from headrace.loader.data import length_of
from headrace.loader.stateful import is_stateful
from headrace.order import (
    BalancedOrder,
    BatchRequest,
    BucketedOrder,
    EpochOrder,
    Order,
    OrderSampler,
    RankBatches,
    ResizedOrder,
    WeightedOrder,
)
from headrace.order.drawn import padding_fraction
from headrace.order.seeding import OF_SAMPLER, Draws, SampleSeeder

_LOOKED_AT = 1_000  # batches of an epoch, to say how much of them is padding


class Plan(ABC):
    """The batches of one rank, epoch by epoch. Picklable where workers use it (`OrderPlan`)."""

    seed: int
    padding = 0
    origin = "the order"
    """What an error calls the origin of the indices."""

    @abstractmethod
    def steps(self) -> int | None:
        """The number of batches of an epoch; None where it is not known."""

    def ends_at(self, position: int) -> bool:
        """True if an epoch is known to end at a position."""
        steps = self.steps()
        return steps is not None and position >= steps

    @abstractmethod
    def requests(self, epoch: int, start: int) -> Iterator[BatchRequest]:
        """The requests of an epoch from a step on, without ring slots."""

    def samples_before(self, step: int) -> int | None:
        """Samples of the epoch that all ranks together have received when a step begins; None
        where it is not known.
        """
        return None

    @abstractmethod
    def parameters(self) -> dict[str, Any]:
        """What the order of the batches depends on, for the state."""

    def stats(self) -> dict[str, float]:
        """What can be said of the batches, for `get_stats()`."""
        return {}

    def note(self, batch: Any) -> None:
        """Looks at a batch that the user is about to get."""
        return

    def received(self, epoch: int, position: int) -> None:
        """The user has received so many batches of an epoch."""
        return

    def state_at(self, epoch: int, position: int) -> Any:
        """What else is to be saved to go on at a position; None: nothing."""
        return None

    def load_state(self, epoch: int, position: int, state: Any) -> None:
        """Takes over what was saved for a position."""
        return


class OrderPlan(Plan):
    """headrace's own order (laws 2 to 4).

    Attributes:
        batches: those of the epoch that was asked for last.
    """

    def __init__(self, batches: RankBatches) -> None:
        self.batches: RankBatches = batches
        self.seed: int = batches.order.seed
        self.padding: int = batches.padding
        self._stats: dict[str, float] | None = None
        # elements of the batches so far, and those that are no padding
        self._padded: npt.NDArray[np.int64] = np.zeros(2, np.int64)

    def steps(self) -> int:
        return len(self.batches)

    def batches_of(self, epoch: int) -> RankBatches:
        """Those of an epoch."""
        if self.batches.order.epoch != epoch:
            self.batches = self.batches.with_epoch(epoch)
        return self.batches

    def requests(self, epoch: int, start: int) -> Iterator[BatchRequest]:
        repeats = self.batches.order.repeats
        for step, (indices, positions) in enumerate(
            self.batches_of(epoch).with_positions(min(start, self.steps())), start
        ):
            yield BatchRequest(
                indices.tolist(),
                self.seed,
                epoch,
                step,
                draws=positions.tolist() if repeats else None,
            )

    def note(self, batch: Any) -> None:
        mask = (
            batch.get("attention_mask")
            if isinstance(self.batches.order, BucketedOrder) and isinstance(batch, Mapping)
            else None
        )
        if isinstance(mask, torch.Tensor) and mask.device.type == "cpu":
            self._padded += mask.numel(), int(mask.count_nonzero())

    def stats(self) -> dict[str, float]:
        order, batches = self.batches.order, self.batches
        if not isinstance(order, BucketedOrder):
            return {}
        if self._stats is None:
            whole = range(
                0,
                min(len(order) // order.global_batch, _LOOKED_AT) * order.global_batch,
                order.global_batch,
            )
            mine = np.arange(batches.rank, order.global_batch, batches.world_size)
            positions = (np.array(whole, np.int64)[:, np.newaxis] + mine).reshape(-1)
            lengths = [
                order.lengths[indices].reshape(-1, len(mine))
                for indices in (order[positions], order.shuffled(positions))
            ]
            self._stats = dict(
                zip(
                    ("padding_fraction", "padding_fraction_unbucketed"),
                    map(padding_fraction, lengths),
                    strict=True,
                )
            )
        every, real = self._padded.tolist()
        return {**self._stats, "padding_fraction": 1 - real / every} if every else self._stats

    def samples_before(self, step: int) -> int:
        return self.batches.samples_before(step)

    def parameters(self) -> dict[str, Any]:
        parameters: dict[str, Any] = self.batches.order.parameters()
        parameters.pop("n")  # the state has the dataset's length
        return parameters


class SamplerPlan(Plan):
    """A sampler, or batch sampler, of the user.

    The random generators that it uses, global ones or its own, are seeded by (seed, epoch), so that
    it draws the same numbers again. To resume, it is replayed from its start. If it or its iterator
    has a `state_dict` and a `load_state_dict`, it is asked for its state after each batch, and
    resumes from the state of the last batch that the user received; a sampler is asked at its end
    too, since it may count epochs, and begins the next epoch from that state.
    """

    def __init__(
        self,
        seed: int,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[list[int]] | None = None,
        batch_size: int | None = 1,
        drop_last: bool = False,
    ) -> None:
        self.seed: int = seed
        self._drop_last = drop_last
        self._kind = "sampler" if batch_sampler is None else "batch_sampler"
        self._source: Any = sampler if batch_sampler is None else batch_sampler
        self._size = batch_size or 1 if batch_sampler is None else 1  # of what the source counts
        self._seeder = SampleSeeder(self._source)
        self.origin: str = f"{self._kind} {type(self._source).__name__}"
        # by epoch and position; where the epoch began, and of batches that are on their way
        self._states: dict[tuple[int, int], dict[str, Any] | None] = {}
        # the sampler's state at the end of an epoch, with which the next one begins; and whether it
        # was loaded, so that the sampler does not have it yet
        self._end: Any = None
        self._is_end_loaded = False

    def steps(self) -> int | None:
        return _steps(length_of(self._source), self._size, self._drop_last)

    def requests(self, epoch: int, start: int) -> Iterator[BatchRequest]:
        source: Any = self._source
        saved = self._states.get((epoch, start))
        loads = saved is not None or self._is_end_loaded
        saved = saved or self._begin_state(start)
        self._states = {(epoch, start): saved}
        if saved is not None and not start and loads:  # of an epoch before: `set_epoch` comes later
            source.load_state_dict(copy.deepcopy(saved["state"]))
        for part in (source, getattr(source, "sampler", None)):
            set_epoch = getattr(part, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
        if saved is not None and (saved.get("ended") or self.ends_at(start)):
            return  # a sampler at its end may begin anew when it is asked again
        self._end, self._is_end_loaded = None, False
        first_step, position, draws = 0, 0, Draws(self._seeder, self.seed, epoch, OF_SAMPLER)
        with draws():
            if saved is not None and start and not saved["of_iterator"]:
                source.load_state_dict(copy.deepcopy(saved["state"]))
            rest: Any = iter(source)
            if saved is not None:
                first_step, position = start, saved["samples"]
                if saved["of_iterator"]:
                    self._check_loads(rest)
                    rest.load_state_dict(copy.deepcopy(saved["state"]))
        holder = next((part for part in (rest, source) if self._tells_state(part)), None)
        for step in itertools.count(first_step):
            with draws():
                indices = self._next(rest)
                # the state held the position too
                if indices is None and saved is not None and not step:
                    rest = iter(source)
                    indices = self._next(rest)
            if indices is None:
                if (last := self._states.get((epoch, step))) is not None:
                    last["ended"] = True
                    if not last["of_iterator"]:  # asked once more, since it may count epochs
                        self._end = last["state"] = copy.deepcopy(source.state_dict())
                return
            first, position = position, position + len(indices)
            if holder is not None:
                state = copy.deepcopy(holder.state_dict())
                self._states[epoch, step + 1] = {
                    "of_iterator": holder is rest,
                    "samples": position,
                    "state": state,
                }
            if step >= start:
                yield BatchRequest(indices, self.seed, epoch, step, draws=range(first, position))

    def _begin_state(self, position: int) -> dict[str, Any] | None:
        """The state of the sampler at the beginning of an epoch, if one has ended before."""
        if position or self._end is None:
            return None
        return {"of_iterator": False, "samples": 0, "state": self._end}

    def _tells_state(self, part: Any) -> bool:
        # ours counts whole batches of its own: between two of them only a replay is exact
        return is_stateful(part) and not (
            isinstance(part, OrderSampler) and self._size % part.batches.batch_size
        )

    def _next(self, rest: Iterator[Any]) -> list[int] | None:
        """The indices of the next batch; None at the end."""
        if self._kind == "batch_sampler":
            batch = next(rest, None)
            return None if batch is None else [_index(i) for i in batch]
        indices = []
        # `islice` would call `iter` again, where a sampler that is its own iterator may begin anew
        for _ in range(self._size):
            try:
                indices.append(_index(next(rest)))
            except StopIteration:
                break
        return None if len(indices) < (self._size if self._drop_last else 1) else indices

    def parameters(self) -> dict[str, Any]:
        return {"shuffle": self._kind, "seed": self.seed, "global_batch": self._size}

    def received(self, epoch: int, position: int) -> None:
        for key in [key for key in self._states if key[0] == epoch and key[1] < position]:
            del self._states[key]

    def state_at(self, epoch: int, position: int) -> Any:
        begins = None if (epoch, position) in self._states else self._begin_state(position)
        return copy.deepcopy(self._states.get((epoch, position), begins))

    def load_state(self, epoch: int, position: int, state: Any) -> None:
        if state is not None and not (
            isinstance(state, dict) and {"of_iterator", "samples", "state"} <= state.keys()
        ):
            raise StateError(
                f"load_state_dict: the state is damaged: its sampler_state is {state!r:.80}"
            )
        if state is not None and not state["of_iterator"]:
            self._check_loads(self._source)
        self._states = {} if state is None else {(epoch, position): copy.deepcopy(state)}
        self._is_end_loaded = (
            state is not None
            and not state["of_iterator"]
            and bool(not position or state.get("ended") or self.ends_at(position))
        )
        self._end = copy.deepcopy(state["state"]) if self._is_end_loaded else None

    def _check_loads(self, part: Any) -> None:
        if not is_stateful(part):
            raise StateError(
                f"load_state_dict: the state holds one of a {self._kind}, and "
                f"{type(part).__name__} has no load_state_dict: build the loader as it was"
            )


def _steps(samples: int | None, batch_size: int, drop_last: bool) -> int | None:
    return (
        None
        if samples is None
        else samples // batch_size
        if drop_last
        else -(-samples // batch_size)
    )


def _index(given: Any) -> Any:
    """An index of any integer type as an int; anything else (a key, a tuple) as it is: the
    dataset may know what it means.
    """
    try:
        return operator.index(given)
    except TypeError:
        return given


class IterablePlan(Plan):
    """Endless requests for an `IterableDataset` of another library. Its workers report when they
    have nothing left.

    Its order depends on the number of workers, and its length does not determine the number of
    batches: each worker ends with its own incomplete batch.
    """

    def __init__(
        self,
        seed: int,
        batch_size: int | None,
        length: int | None,
        drop_last: bool,
        workers: int = 0,
    ) -> None:
        self.seed: int = seed
        self._size, self._length, self._drop_last = batch_size or 1, length, drop_last
        self._workers = max(1, workers)
        self._runs = itertools.count()
        self._is_warned = False

    def steps(self) -> int | None:
        return _steps(self._length, self._size, self._drop_last)

    def ends_at(self, position: int) -> bool:
        return False

    def check_count(self, samples: int) -> None:
        """Warns, once, of more samples in an epoch than the dataset's length."""
        if self._length is None or samples <= self._length or self._is_warned:
            return
        self._is_warned = True
        warn(
            f"the IterableDataset says by __len__ that it has {self._length:,} samples, and gives "
            "more: len(loader) is too small. Correct "
            "__len__; with workers, divide the samples by torch.utils.data.get_worker_info(), or "
            "each worker gives them all"
        )

    def requests(self, epoch: int, start: int) -> Iterator[BatchRequest]:
        run = next(self._runs)
        return (BatchRequest([run], self.seed, epoch, step) for step in itertools.count(start))

    def parameters(self) -> dict[str, Any]:
        return {
            "shuffle": "iterable",
            "seed": self.seed,
            "global_batch": self._size,
            "workers": self._workers,
        }


def make_plan(config: DataLoaderConfig, dataset: Any, adopted: dict[str, Any]) -> Plan:
    """The plan of a loader with a resolved config; parameters of the order that are `adopted` of a
    loaded state replace those of it.

    Raises:
        ConfigError: a dataset without a length, or weights or targets that don't fit it.
    """
    seed = adopted.get("seed", config.seed)
    if config.sampler is not None or config.batch_sampler is not None:
        return SamplerPlan(
            seed, config.sampler, config.batch_sampler, config.batch_size, config.drop_last
        )
    if isinstance(dataset, IterableDataset) and not isinstance(dataset, BaseDataset):
        return IterablePlan(
            seed, config.batch_size, length_of(dataset), config.drop_last, config.num_workers or 0
        )
    rank, world_size, batch_size = config.rank or 0, config.world_size or 1, config.batch_size or 1
    order = _make_order(config, dataset, seed, batch_size * world_size, adopted)
    return OrderPlan(RankBatches(order, rank, world_size, batch_size, config.drop_last, config.pad))


def _make_order(
    config: DataLoaderConfig, dataset: Any, seed: int, global_batch: int, adopted: dict[str, Any]
) -> Order:
    n = length_of(dataset)
    if n is None:
        raise ConfigError(
            f"{type(dataset).__name__} has no length: give it __len__, make it an "
            "IterableDataset, or pass a sampler"
        )
    drawn: dict[str, Any] = {
        "n": config.num_samples,
        "replacement": config.replacement,
        "seed": seed,
        "global_batch": global_batch,
    }
    if config.weights is not None:
        weights = WeightedOrder(config.weights, **drawn)
        if (count := weights.parameters()["n"]) != n:
            raise ConfigError(
                f"weights holds {count:,} weights, and there are {n:,} samples: pass one for each"
            )
        return weights
    if config.balanced:
        return BalancedOrder(classes_of(dataset, n), **drawn)
    if config.is_bucketed:
        return BucketedOrder(
            _lengths_of(config.bucket_by_length, dataset, n), seed=seed, global_batch=global_batch
        )
    shuffle: Shuffle = adopted.get("shuffle", config.shuffle or False)
    if isinstance(dataset, BaseDataset):
        interleave = adopted.get("interleave", config.interleave)
        turns = adopted.get("turns", config.turns)
        order = dataset.epoch_order(shuffle, seed, 0, global_batch, interleave, turns)
    else:
        order = EpochOrder(n, shuffle=shuffle, seed=seed, global_batch=global_batch)
    return (
        order if config.num_samples in (None, n) else ResizedOrder(order, config.num_samples or 0)
    )


def _lengths_of(given: Any, dataset: Any, n: int) -> Any:
    lengths = given
    if given is True:
        lengths = dataset.lengths() if isinstance(dataset, BaseDataset) else None
    if lengths is None:
        raise ConfigError(
            f"bucket_by_length=True: {type(dataset).__name__} does not know how long its samples "
            "are: pass one integer a sample"
        )
    if not hasattr(lengths, "__len__"):
        raise ConfigError(
            f"bucket_by_length must be True, False or one integer a sample, not {lengths!r}"
        )
    if len(lengths) != n:
        raise ConfigError(
            f"bucket_by_length holds {len(lengths):,} lengths, and there are {n:,} samples: pass "
            "one for each"
        )
    return lengths


def classes_of(dataset: Any, n: int) -> Any:
    """The class of each sample: the dataset's `targets`, as headrace's and torchvision's have them,
    through torch's `Subset` and `ConcatDataset` too.
    """
    targets = _targets_of(dataset)
    if targets is None or len(targets) != n:
        had = (
            "has no targets"
            if targets is None
            else f"has {len(targets):,} targets for {n:,} samples"
        )
        raise ConfigError(
            f"balanced=True: {type(dataset).__name__} {had}: give it `targets`, one class a "
            "sample, or pass weights="
        )
    return np.asarray(targets)


def _targets_of(dataset: Any) -> Any:
    if isinstance(dataset, Subset):
        inner = _targets_of(dataset.dataset)
        return None if inner is None else np.asarray(inner)[np.asarray(dataset.indices, np.int64)]
    if isinstance(dataset, ConcatDataset):
        parts = [_targets_of(part) for part in dataset.datasets]
        return (
            None
            if any(part is None for part in parts)
            else np.concatenate([np.asarray(part) for part in parts])
        )
    return getattr(dataset, "targets", None)
