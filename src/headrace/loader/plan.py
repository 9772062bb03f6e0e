"""Plans the batches of one rank's epochs, and yields their requests.

headrace's own orders are `RankBatches`; a sampler of the user's is replayed; and an iterable
dataset is asked until it has nothing left.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from torch.utils.data import ConcatDataset, IterableDataset, Subset

from headrace.core.dataset import BaseDataset
from headrace.errors import ConfigError, StateError
from headrace.loader.config import DataLoaderConfig, length_of
from headrace.loader.state import is_stateful
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
from headrace.order.seeding import OF_SAMPLER, Draws, SampleSeeder


class SamplerPlan:
    """A sampler, or batch sampler, of the user.

    The random generators that it uses, global ones or its own, are seeded by (seed, epoch), so that
    it draws the same numbers again. To resume, it is replayed from its start. If it or its iterator
    has a `state_dict` and a `load_state_dict`, it is asked for its state after each batch, and
    resumes from the state of the last batch that the user received; a sampler is asked at its end
    too, since it may count epochs, and begins the next epoch from that state.
    """

    padding = 0

    def __init__(self, config: DataLoaderConfig) -> None:
        self._seed = config.seed
        self._drop_last = config.drop_last
        self._makes_batches = config.batch_sampler is not None
        self._kind = "batch_sampler" if self._makes_batches else "sampler"
        self._source: Any = getattr(config, self._kind)
        self._size = 1 if self._makes_batches else config.batch_size or 1  # of what it counts
        self._seeder = SampleSeeder(self._source)
        # by epoch and position; where the epoch began, and of batches that are on their way
        self._states: dict[tuple[int, int], dict[str, Any] | None] = {}
        # with what the next epoch begins: the sampler's state at the end of one; and whether it was
        # loaded, so that the sampler does not have it yet
        self._end: dict[str, Any] | None = None
        self._is_end_loaded = False

    @property
    def steps(self) -> int | None:
        """Batches of an epoch; None: not known."""
        return _steps(length_of(self._source), self._size, self._drop_last)

    def requests(self, epoch: int, start: int) -> Iterator[BatchRequest]:
        """The requests of an epoch from a step on."""
        source = self._source
        saved = self._states.get((epoch, start))
        loads = saved is not None or self._is_end_loaded
        if saved is None and not start:
            saved = self._end
        self._states = {(epoch, start): saved}
        if saved is not None and not start and loads:  # of an epoch before: `set_epoch` comes later
            source.load_state_dict(copy.deepcopy(saved["state"]))
        for part in (source, getattr(source, "sampler", None)):
            set_epoch = getattr(part, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
        if saved is not None and (saved.get("ended") or ends_at(self, start)):
            return  # a sampler at its end may begin anew when it is asked again
        self._end = None
        self._is_end_loaded = False
        step = position = 0
        draws = Draws(self._seeder, self._seed, epoch, OF_SAMPLER)
        with draws():
            if saved is not None and start and not saved["of_iterator"]:
                source.load_state_dict(copy.deepcopy(saved["state"]))
            rest: Any = iter(source)
            if saved is not None:
                step = start
                position = saved["samples"]
                if saved["of_iterator"]:
                    self._check_loads(rest)
                    rest.load_state_dict(copy.deepcopy(saved["state"]))
        holder = None
        for part in (source, rest):
            # ours counts whole batches of its own: between two of them only a replay is exact
            is_ours = isinstance(part, OrderSampler) and self._size % part.batches.batch_size
            if is_stateful(part) and not is_ours:
                holder = part
        while True:
            with draws():
                indices = self._next(rest)
                # the state held the position too
                if indices is None and saved is not None and not step:
                    rest = iter(source)
                    indices = self._next(rest)
            if indices is None:
                break
            first = position
            position += len(indices)
            if holder is not None:
                self._states[epoch, step + 1] = {
                    "of_iterator": holder is rest,
                    "samples": position,
                    "state": copy.deepcopy(holder.state_dict()),
                }
            if step >= start:
                yield BatchRequest(indices, self._seed, epoch, step, draws=range(first, position))
            step += 1
        last = self._states.get((epoch, step))
        if last is not None:
            last["ended"] = True
            if not last["of_iterator"]:  # asked once more, since it may count epochs
                last["state"] = copy.deepcopy(source.state_dict())
                self._end = {"of_iterator": False, "samples": 0, "state": last["state"]}

    def _next(self, rest: Iterator[Any]) -> list[int] | None:
        """The indices of the next batch; None at the end."""
        if self._makes_batches:
            batch = next(rest, None)
            return None if batch is None else [_index(i) for i in batch]
        indices = [_index(i) for i in take(rest, self._size)]
        if not indices or (self._drop_last and len(indices) < self._size):
            return None
        return indices

    def parameters(self) -> dict[str, Any]:
        """What the order of the batches depends on, for the state."""
        return {"shuffle": self._kind, "seed": self._seed, "global_batch": self._size}

    def received(self, epoch: int, position: int) -> None:
        """Drops the states before a position that the user has reached."""
        for key in [key for key in self._states if key[0] == epoch and key[1] < position]:
            del self._states[key]

    def state_at(self, epoch: int, position: int) -> Any:
        """Returns the sampler's state at a position, to be saved. None: it has none."""
        begins = None if position else self._end
        return copy.deepcopy(self._states.get((epoch, position), begins))

    def load_state(self, epoch: int, position: int, state: Any) -> None:
        """Loads a state that was saved at a position."""
        if state is None:
            self._states = {}
            self._is_end_loaded = False
            self._end = None
            return
        if not (isinstance(state, dict) and {"of_iterator", "samples", "state"} <= state.keys()):
            raise StateError(
                f"load_state_dict: the state is damaged: its sampler_state is {state!r:.80}"
            )
        is_at_end = not position or bool(state.get("ended")) or ends_at(self, position)
        if not state["of_iterator"]:
            self._check_loads(self._source)
        self._states = {(epoch, position): copy.deepcopy(state)}
        self._is_end_loaded = is_at_end and not state["of_iterator"]
        self._end = None
        if self._is_end_loaded:
            begin = {"of_iterator": False, "samples": 0, "state": state["state"]}
            self._end = copy.deepcopy(begin)

    def _check_loads(self, part: Any) -> None:
        if not is_stateful(part):
            raise StateError(
                f"load_state_dict: the state includes that of a {self._kind}, but "
                f"{type(part).__name__} has no load_state_dict: build the loader as it was"
            )


class StreamPlan:
    """Endless requests for an `IterableDataset` of another library. Its workers report when they
    have nothing left.

    Its order depends on the number of workers, and its length does not determine the number of
    batches: each worker ends with its own incomplete batch.
    """

    padding = 0

    def __init__(self, config: DataLoaderConfig, length: int | None) -> None:
        self._seed = config.seed
        self._size = config.batch_size or 1
        self._workers = max(1, config.num_workers or 0)
        self._runs = itertools.count()
        self.steps: int | None = _steps(length, self._size, config.drop_last)

    def requests(self, epoch: int, start: int) -> Iterator[BatchRequest]:
        """The requests of an epoch from a step on."""
        run = next(self._runs)
        return (BatchRequest([run], self._seed, epoch, step) for step in itertools.count(start))

    def parameters(self) -> dict[str, Any]:
        """What the order of the batches depends on, for the state."""
        return {
            "shuffle": "iterable",
            "seed": self._seed,
            "global_batch": self._size,
            "workers": self._workers,
        }


Plan: TypeAlias = RankBatches | SamplerPlan | StreamPlan


def ends_at(plan: Plan, position: int) -> bool:
    """True if an epoch is known to end at a position."""
    if isinstance(plan, StreamPlan) or plan.steps is None:
        return False
    return position >= plan.steps


def _steps(samples: int | None, batch_size: int, drop_last: bool) -> int | None:
    if samples is None:
        return None
    return samples // batch_size if drop_last else -(-samples // batch_size)


def take(iterator: Iterator[Any], count: int) -> list[Any]:
    """The next items, one by one: `islice` would call `iter` again, where one that is its own
    iterator may begin anew.
    """
    items = []
    for _ in range(count):
        try:
            items.append(next(iterator))
        except StopIteration:
            break
    return items


def _index(given: Any) -> Any:
    """An index of any integer type as an int; anything else (a key, a tuple) as it is: the
    dataset may know what it means.
    """
    try:
        return operator.index(given)
    except TypeError:
        return given


def make_plan(config: DataLoaderConfig, dataset: Any) -> Plan:
    """The plan of a loader with a resolved config.

    Raises:
        ConfigError: a dataset without a length, or weights or targets that don't fit it.
    """
    if config.has_sampler:
        return SamplerPlan(config)
    n = length_of(dataset)
    if isinstance(dataset, IterableDataset) and not isinstance(dataset, BaseDataset):
        return StreamPlan(config, n)
    if n is None:
        raise ConfigError(
            f"{type(dataset).__name__} has no length: give it __len__, make it an "
            "IterableDataset, or pass a sampler"
        )
    batch_size = config.batch_size or 1
    world_size = config.world_size or 1
    order = _order(config, dataset, n, batch_size * world_size)
    rank = config.rank or 0
    return RankBatches(order, rank, world_size, batch_size, config.drop_last, config.pad)


def _order(config: DataLoaderConfig, dataset: Any, n: int, global_batch: int) -> Order:
    common: dict[str, Any] = {"seed": config.seed, "global_batch": global_batch}
    drawn = {"n": config.num_samples, "replacement": config.replacement, **common}
    if config.weights is not None:
        weighted = WeightedOrder(config.weights, **drawn)
        _check_count("weights", weighted.parameters()["n"], n)
        return weighted
    if config.balanced:
        targets = _targets_of(dataset)
        if targets is None:
            raise ConfigError(
                f"balanced=True: {type(dataset).__name__} has no targets: give it `targets`, one "
                "class per sample, or pass weights="
            )
        _check_count("balanced=True: targets", len(targets), n)
        return BalancedOrder(np.asarray(targets), **drawn)
    if config.is_bucketed:
        lengths = config.bucket_by_length
        if lengths is True:
            lengths = dataset.lengths() if isinstance(dataset, BaseDataset) else None
        if not hasattr(lengths, "__len__"):
            raise ConfigError(
                f"bucket_by_length={config.bucket_by_length!r}: {type(dataset).__name__} does not "
                "know how long its samples are: pass one integer per sample"
            )
        _check_count("bucket_by_length", len(lengths), n)
        return BucketedOrder(lengths, **common)
    shuffle = config.shuffle or False
    if isinstance(dataset, BaseDataset):
        layout = (config.interleave, config.turns)
        order = dataset.epoch_order(shuffle, config.seed, 0, global_batch, *layout)
    else:
        order = EpochOrder(n, shuffle=shuffle, **common)
    if config.num_samples in (None, n):
        return order
    return ResizedOrder(order, config.num_samples or 0)


def _check_count(what: str, count: int, n: int) -> None:
    if count != n:
        raise ConfigError(f"{what} holds {count:,} entries for {n:,} samples: pass one per sample")


def _targets_of(dataset: Any) -> Any:
    """The class of each sample: the dataset's `targets`, as headrace's and torchvision's have them,
    through torch's `Subset` and `ConcatDataset` too.
    """
    if isinstance(dataset, Subset):
        inner = _targets_of(dataset.dataset)
        return None if inner is None else np.asarray(inner)[np.asarray(dataset.indices, np.int64)]
    if isinstance(dataset, ConcatDataset):
        parts = [_targets_of(part) for part in dataset.datasets]
        return None if any(part is None for part in parts) else np.concatenate(parts)
    return getattr(dataset, "targets", None)
