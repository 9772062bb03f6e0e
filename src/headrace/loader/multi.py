"""Combines the batches of several loaders in one epoch.

NOTE [ passes ]

* The number of batches of an epoch is computed in advance from the lengths of the loaders. A loader
  that ends earlier starts another pass: pass c of epoch e uses the order of epoch `pass_epoch(e,
  c)`, a hash, so that no pass repeats the order of another pass or epoch.
* Each loader keeps its position in its own state. This module only keeps the integers of the
  schedule and the number of each loader's pass.
* Epochs and positions are set, counted, saved and loaded like those of a `Loader` (NOTE [ epochs
  and positions ] in `state.py`). At the start of an epoch, the epoch of every loader is set, so
  that their states belong together at any moment.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, cast

import numpy as np
from torch.utils.data import IterableDataset

from headrace.arguments import check_flag, check_integer, checks_keywords, parameters_of
from headrace.core.dataset import BaseDataset
from headrace.errors import ConfigError, StateError, WorkerError, warn
from headrace.loader.build import resolve
from headrace.loader.config import NO_WORKERS, DataLoaderConfig, check_options
from headrace.loader.data import check_dataset, is_path, length_of
from headrace.loader.explain import count_batches
from headrace.loader.loader import Loader, open_path
from headrace.loader.state import LoaderState, check_version
from headrace.monitor.stats import Stats
from headrace.order import detect_world
from headrace.order.epoch import pass_epoch

STRATEGIES = ("round_robin", "sequential", "weighted", "alternating")


class Schedule:
    """The sequence of loader numbers, one per batch, and the position in an epoch.

    "weighted" follows the quota method of M. L. Balinski and H. P. Young ("The Quota Method of
    Apportionment", Amer. Math. Monthly 82, 1975): of the loaders whose quota ``weight /
    sum(weights) * (step + 1)`` exceeds the number of their batches so far, the one with the largest
    ``weight / (batches + 1)`` is next. After every step each loader has yielded its quota, rounded
    up or down. The share of a loader that has dropped out is divided among the others.

    Args:
        strategy: one of `STRATEGIES`.
        weights: one integer per loader, 0 or more; only "weighted" uses them.
        pattern: numbers of loaders; "round_robin" and "alternating" take them in turn, "sequential"
            one after the other.
        cycles: True if a loader starts again at its end; otherwise it drops out.

    Attributes:
        epoch: number of the epoch.
        counts: number of batches that each loader has yielded.
        passes: number of the pass of each loader.
        cursor: position in the pattern.
        out: loaders that have dropped out.
        has_ended: True if all loaders ended before the number of batches was reached.
    """

    def __init__(
        self,
        strategy: str,
        weights: Sequence[int],
        pattern: Sequence[int],
        cycles: bool,
        epoch: int = 0,
    ) -> None:
        self._strategy = strategy
        self._weights = list(weights)
        self._pattern = list(pattern)
        self._cycles = cycles
        self.epoch: int = epoch
        self.counts: list[int] = [0] * len(weights)
        self.passes: list[int] = [0] * len(weights)
        self.cursor: int = 0
        self.out: set[int] = set()
        self.has_ended: bool = False

    @property
    def step(self) -> int:
        """Batches that all loaders together have given."""
        return sum(self.counts)

    @property
    def drawn(self) -> list[int]:
        """The loaders that batches are ever drawn from."""
        if self._strategy == "weighted":
            return [number for number, weight in enumerate(self._weights) if weight]
        return sorted(set(self._pattern))

    def pick(self) -> int | None:
        """The loader of the next batch; None where all have dropped out."""
        if self._strategy == "weighted":
            return self._by_quota()
        slot = self._next_slot()
        return None if slot is None else self._pattern[slot]

    def took(self, loader: int) -> None:
        """A batch of the loader that `pick` named was received."""
        if self._strategy in ("round_robin", "alternating"):
            slot = self._next_slot()
            assert slot is not None
            self.cursor = (slot + 1) % len(self._pattern)
        self.counts[loader] += 1

    def ended(self, loader: int) -> None:
        """The loader that `pick` named is through, once more."""
        if not self._cycles:
            self.out.add(loader)
        if self._strategy == "sequential":
            self.cursor = (self._pattern.index(loader) + 1) % len(self._pattern)

    def _next_slot(self) -> int | None:
        """The first place of the pattern, from the cursor on, whose loader has not dropped out."""
        size = len(self._pattern)
        for slot in range(self.cursor, self.cursor + size):
            if self._pattern[slot % size] not in self.out:
                return slot % size
        return None

    def _by_quota(self) -> int | None:
        active = [number for number in self.drawn if number not in self.out]
        total = sum(self._weights[number] for number in active)
        coming = sum(self.counts[number] for number in active) + 1
        # those that would not be ahead of their quota
        behind = [n for n in active if self.counts[n] * total < self._weights[n] * coming]
        # the largest weight / (batches + 1), of equal ones the first
        return max(
            behind, key=lambda n: Fraction(self._weights[n], self.counts[n] + 1), default=None
        )


def whole_weights(
    names: Sequence[str], weights: Mapping[str, float] | Sequence[float]
) -> list[int]:
    """Weights as the smallest integers in the same proportions, in the order of the names; 0.1
    means a tenth.

    Raises:
        ConfigError: one is missing, of another name, negative or no finite number, or all are 0.
    """
    named = weights
    if isinstance(weights, Sequence) and not isinstance(weights, str):
        named = dict(zip(names, weights, strict=False))
    if not isinstance(named, Mapping) or set(named) != set(names) or len(weights) != len(names):
        raise ConfigError(
            f"weights must be a dict or a list of one number for each of {list(names)}, not "
            f"{weights!r}"
        )
    fractions = []
    for name in names:
        weight: Any = named[name]
        value = -1.0
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            value = float(weight)
        if not 0 <= value < math.inf or isinstance(weight, (bool, str)):
            raise ConfigError(
                f"weights: that of {name!r} must be a number of 0 or more, not {weight!r}"
            )
        fractions.append(Fraction(repr(value)))
    if not any(fractions):
        raise ConfigError("weights: at least one must be above 0")
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    whole = [int(fraction * scale) for fraction in fractions]
    divisor = math.gcd(*whole)
    return [weight // divisor for weight in whole]


def pattern_of(names: Sequence[str], pattern: Sequence[str] | None) -> list[int]:
    """The numbers of the loaders that a pattern names; without one, all in turn.

    Raises:
        ConfigError: it is empty, no list, or names a loader that is not there.
    """
    numbers = {name: number for number, name in enumerate(names)}
    if pattern is None:
        return list(numbers.values())
    is_list = isinstance(pattern, Sequence) and not isinstance(pattern, str) and len(pattern) > 0
    if not is_list or not numbers.keys() >= set(pattern):
        raise ConfigError(f"pattern must be a list of names of {list(names)}, not {pattern!r}")
    return [numbers[name] for name in pattern]


@checks_keywords
def split_workers(num_workers: int, shares: Mapping[str, float]) -> dict[str, int]:
    """Splits a number of workers in proportion to shares, by largest remainder (the method of A.
    Hamilton, 1792).

    Args:
        num_workers: total number of workers.
        shares: a non-negative number for each name; only their proportions matter.

    Returns:
        A dict from name to number of workers, which may be 0; their sum is `num_workers`. Of equal
        remainders the first wins.

    Raises:
        ConfigError: `num_workers` is below 0, a share is negative or not finite, or no share is
            above 0.
    """
    num_workers = check_integer("num_workers", num_workers, 0)
    if not isinstance(shares, Mapping) or not shares:
        raise ConfigError(f"shares must be a dict of a number for each name, not {shares!r}")
    weights = dict(zip(shares, whole_weights(list(shares), shares), strict=True))
    total = sum(weights.values())
    split = {name: num_workers * weight // total for name, weight in weights.items()}
    remainders = {name: num_workers * weight % total for name, weight in weights.items()}
    by_remainder = sorted(shares, key=remainders.__getitem__, reverse=True)
    for name in by_remainder[: num_workers - sum(split.values())]:
        split[name] += 1
    return split


Strategy = Literal["round_robin", "sequential", "weighted", "alternating"]

_VERSION = 1
_DAMAGED = "load_state_dict: the state is damaged"
_LENGTHS: dict[str, Callable[[list[int]], int]] = {"sum": sum, "max": max, "min": min}


class MultiDataLoader:
    """Batches of several loaders in one epoch, as pairs ``(name, batch)``.

    Args:
        loaders: a dict from name to a `Loader`, a dataset, or a path. For datasets and paths,
            loaders are created with the options below; a tuple ``(dataset, batch_size)`` sets the
            batch size of one.
        strategy: a name, in any case. "round_robin": one batch of each loader in turn.
            "sequential": one loader after the other. "weighted": exact quotas, spread evenly (see
            `Schedule`). "alternating": as given by `pattern`.
        weights: for "weighted": ``{name: number}``, or a list of numbers in the order of the
            loaders; 0: never. None: the lengths of the loaders.
        pattern: for "alternating": list of names, which is repeated. A loader that is not in it is
            not used. None: all in turn.
        epoch_length: number of batches per epoch: "sum", "max" or "min" of the lengths of the
            loaders that are used and not empty.
        steps: number of batches per epoch, instead of `epoch_length`.
        cycle_short_loaders: restart a loader that has ended, in another order. False: continue
            without it; the epoch ends at the latest when all loaders have ended.
        config, **overrides: options of the loaders that are created here, and of the datasets of
            paths, as in `create_dataloader`. `num_workers` is the total number; `split_workers`
            splits it in proportion to the number of batches that each dataset contributes. A
            dataset without workers is loaded in this process.

    Attributes:
        loaders: the loaders in use, by name.

    Raises:
        ConfigError: an argument is invalid; or a loader has no length and `steps` is not given.
    """

    @checks_keywords
    def __init__(
        self,
        loaders: Mapping[str, Any],
        strategy: Strategy = "round_robin",
        weights: Mapping[str, float] | Sequence[float] | None = None,
        pattern: Sequence[str] | None = None,
        epoch_length: Literal["sum", "max", "min"] = "sum",
        steps: int | None = None,
        cycle_short_loaders: bool = True,
        *,
        config: DataLoaderConfig | None = None,
        **overrides: Any,
    ) -> None:
        if not isinstance(loaders, Mapping) or not loaders:
            raise ConfigError(
                "loaders must be a dict of at least one loader, dataset or path by name, not "
                f"{loaders!r:.80}"
            )
        if isinstance(strategy, str):
            strategy = cast(Strategy, strategy.lower())
        if strategy not in STRATEGIES:
            raise ConfigError(f"strategy must be one of {', '.join(STRATEGIES)}, not {strategy!r}")
        for name, value, reader in (
            ("weights", weights, "weighted"),
            ("pattern", pattern, "alternating"),
        ):
            if value is not None and strategy != reader:
                raise ConfigError(f"{name} is for strategy={reader!r}, not for {strategy!r}")
        if epoch_length not in _LENGTHS:
            raise ConfigError(f"epoch_length must be 'sum', 'max' or 'min', not {epoch_length!r}")
        check_flag("cycle_short_loaders", cycle_short_loaders)
        self._strategy = strategy
        self._epoch_length = epoch_length
        self._cycles = cycle_short_loaders
        self._given_steps = check_integer("steps", steps, 1, optional=True)
        self._names = list(loaders)
        self._pattern = pattern_of(self._names, pattern)
        self._weights: list[int] = []  # none: by length
        if weights is not None:
            self._weights = whole_weights(self._names, weights)
        self._opened: list[BaseDataset] = []
        self.loaders: dict[str, Loader] = self._made(loaders, config, overrides)
        if strategy == "weighted" and weights is None:
            lengths = self._known_lengths(range(len(self._names)), "pass weights=")
            if any(lengths):
                self._weights = whole_weights(self._names, lengths)
        self._weights = self._weights or [1] * len(self._names)
        empty = {name: None for name, loader in self.loaders.items() if length_of(loader) == 0}
        drawn = {self._names[number] for number in self._new_schedule().drawn}
        if steps is not None and drawn <= empty.keys():
            raise ConfigError(f"steps={steps}, but the loaders have no batches: {', '.join(empty)}")
        if empty:
            warn(f"these loaders have no batches, and are left out: {', '.join(empty)}")
        self._length = self._steps()
        self._state: LoaderState[Schedule] = LoaderState(self._new_schedule)

    # -- set-up

    def _made(
        self,
        given: Mapping[str, Any],
        config: DataLoaderConfig | None,
        options: dict[str, Any],
    ) -> dict[str, Loader]:
        """The loaders, made where a dataset or a path was given."""
        arguments = parameters_of(MultiDataLoader.__init__)
        found: dict[str, Any] = {}
        datasets: dict[str, Any] = {}
        sizes: dict[str, int | None] = {}
        rest = options
        for name, value in given.items():
            if not isinstance(name, str) or not name:
                raise ConfigError(f"loaders: a name must be a text, not {name!r}")
            if _is_sized(value):
                value, size = value
                sizes[name] = check_integer("batch_size", size, 1, optional=True)
            if is_path(value):
                value, rest = open_path("MultiDataLoader", value, config, options, arguments)
                self._opened.append(value)
            found[name] = value
            if not isinstance(value, Loader):
                check_dataset("MultiDataLoader", f"loaders[{name!r}]", value)
                datasets[name] = value
            elif sum(other is value for other in found.values()) > 1:
                raise ConfigError(
                    f"loaders: {name!r} is a second name of a loader, which has only one position: "
                    "make two loaders"
                )
        check_options("MultiDataLoader", config, rest, arguments)
        if (config is not None or options) and not datasets:
            raise ConfigError(
                f"{', '.join(options) or 'config'}: options are for datasets, and only loaders "
                "were passed: pass them where the loaders are made"
            )
        config = (config or DataLoaderConfig()).with_(**rest)
        sizes = {name: sizes.get(name, config.batch_size) for name in datasets}
        workers = self._workers(datasets, sizes, config.num_workers)
        for name, dataset in datasets.items():
            own = config.with_(batch_size=sizes[name], num_workers=workers[name])
            if not workers[name]:
                own = own.with_(**NO_WORKERS)
            found[name] = Loader(dataset, own)
        return found

    def _workers(
        self, datasets: dict[str, Any], sizes: dict[str, int | None], total: int | None
    ) -> dict[str, int]:
        """How many workers each dataset gets: in proportion to its batches in an epoch."""
        shares: dict[str, float] = {}
        for name, dataset in datasets.items():
            number = self._names.index(name)
            if self._weights:
                shares[name] = self._weights[number]
            elif self._strategy in ("weighted", "sequential"):
                shares[name] = (length_of(dataset) or 1) / (sizes[name] or 1)
            else:
                shares[name] = self._pattern.count(number)
        if total is None:
            total = 0
            for name, dataset in datasets.items():
                config, *_ = resolve(DataLoaderConfig(), dataset, detect_world())
                total = max(total, config.num_workers or 0)
                if not config.num_workers:  # what is in memory needs none
                    shares[name] = 0
        if not any(shares.values()):
            shares = dict.fromkeys(shares, 1)
        return split_workers(total, shares) if shares else {}

    def _new_schedule(self, epoch: int = 0) -> Schedule:
        schedule = Schedule(self._strategy, self._weights, self._pattern, self._cycles, epoch)
        schedule.out = {i for i in schedule.drawn if length_of(self.loaders[self._names[i]]) == 0}
        return schedule

    def _known_lengths(self, numbers: Sequence[int], remedy: str) -> list[int]:
        """The lengths of these loaders."""
        lengths = []
        for name in (self._names[number] for number in numbers):
            length = length_of(self.loaders[name])
            if length is None:
                raise ConfigError(f"the length of the loader {name!r} is not known; {remedy}")
            lengths.append(length)
        return lengths

    def _steps(self) -> int:
        """The batches of an epoch."""
        drawn = self._new_schedule().drawn
        steps = self._given_steps
        if steps is not None:
            lengths = [length_of(self.loaders[self._names[number]]) for number in drawn]
            if self._cycles or None in lengths:
                return steps
            return min(steps, sum(length or 0 for length in lengths))
        known = self._known_lengths(drawn, "pass steps=, the batches of an epoch")
        return _LENGTHS[self._epoch_length]([length for length in known if length] or [0])

    # -- epochs

    def __len__(self) -> int:
        """Number of batches per epoch; an upper bound if loaders of unknown length don't cycle."""
        return self._length

    def __repr__(self) -> str:
        parts = []
        for name, loader in self.loaders.items():
            length = length_of(loader)
            batches = "? batches" if length is None else count_batches(length)
            parts.append(f"{name!r}: {batches} of {loader.config.batch_size}")
        return (
            f"MultiDataLoader({{{', '.join(parts)}}}, strategy={self._strategy!r})  # "
            f"{count_batches(self._length)} an epoch"
        )

    @property
    def epoch(self) -> int:
        """The epoch of the current or last iterator."""
        return int(self._state.at.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iterator. Without it, each iterator uses the epoch after
        the last one.
        """
        self._state.set_epoch(epoch)

    def __iter__(self) -> MultiIterator:
        """Starts an epoch. A running iterator becomes invalid, since both would draw from the
        same loaders.
        """
        self._leave()
        position = self._state.start()
        for number, loader in enumerate(self.loaders.values()):
            named = pass_epoch(position.epoch, position.passes[number])
            if not position.counts[number]:
                loader.set_epoch(named + 1)  # another epoch drops a position that was loaded
            loader.set_epoch(named)
        iterator = MultiIterator(self.loaders, position, self._length)
        self._state.running = iterator
        return iterator

    def _leave(self) -> None:
        """Frees the loaders from the iterator that is under way."""
        running = self._state.running
        if running is not None:
            running.leave()

    def close(self) -> None:
        """Stops the workers of all loaders and the running iterator, and closes what was opened
        from paths. All can be used again afterwards.
        """
        self._leave()
        for loader in self.loaders.values():
            loader.close()
        for dataset in self._opened:
            dataset.close()

    def get_stats(self) -> dict[str, dict[str, Any]]:
        """Returns the statistics of each loader by name, which print as tables."""
        return Stats({name: loader.get_stats() for name, loader in self.loaders.items()})

    # -- state

    def _parameters(self) -> dict[str, Any]:
        """What the order of the names depends on, beside the loaders' lengths."""
        return {
            "names": list(self._names),
            "strategy": self._strategy,
            "weights": list(self._weights),
            "pattern": list(self._pattern),
            "epoch_length": self._epoch_length,
            "steps": self._given_steps,
            "cycle_short_loaders": self._cycles,
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns the state: which batches the user has received, and the state of each loader."""
        position = self._state.position
        return {
            "version": _VERSION,
            **self._parameters(),
            "epoch": position.epoch,
            "batches": position.step,
            "counts": dict(zip(self._names, position.counts, strict=True)),
            "passes": dict(zip(self._names, position.passes, strict=True)),
            "cursor": position.cursor,
            "out": [self._names[i] for i in sorted(position.out)],
            "ended": position.has_ended,
            "loaders": {name: loader.state_dict() for name, loader in self.loaders.items()},
        }

    def __getstate__(self) -> dict[str, Any]:
        """A copy starts at the position of this loader."""
        return {**self.__dict__, "_state": copy.deepcopy(self._state.position)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        position: Any = state["_state"]
        self._state = LoaderState(self._new_schedule)
        self._state.load(position, position.has_ended)

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """Resumes from a saved state with the next iterator. A running iterator ends.

        Args:
            state: the result of `state_dict()`.
            strict: passed to the loaders. The strategy must be that of the state in either case.

        Raises:
            StateError: the state does not fit; the message has both values, and nothing is changed.
        """
        position = self._position_of(state)
        self._leave()
        before = {name: loader.state_dict() for name, loader in self.loaders.items()}
        try:
            for name, loader in self.loaders.items():
                try:
                    loader.load_state_dict(state["loaders"][name], strict=strict)
                except StateError as error:
                    raise StateError(f"loader {name!r}: {error}") from error
        except StateError:
            for name, loader in self.loaders.items():
                loader.load_state_dict(before[name], strict=False)
            raise
        self._state.load(position, position.has_ended)

    def _position_of(self, state: Any) -> Schedule:
        """The position of a saved state."""
        check_version(state, _VERSION, "loaders", "a MultiDataLoader")
        differing = [
            f"{name} was {state.get(name)!r}, is {own!r}"
            for name, own in self._parameters().items()
            if state.get(name) != own
        ]
        if differing:
            raise StateError(
                f"load_state_dict: the state is of another schedule: {', '.join(differing)}. Build "
                "the MultiDataLoader as it was"
            )
        position = self._new_schedule()
        try:
            position.epoch = state["epoch"]
            position.has_ended = state["ended"]
            position.passes = [state["passes"][name] for name in self._names]
            position.counts = [state["counts"][name] for name in self._names]
            position.cursor = state["cursor"]
            position.out = {self._names.index(name) for name in state["out"]}
            numbers = [position.epoch, position.cursor, state["batches"]]
            numbers += [*position.passes, *position.counts]
            is_sound = all(type(number) is int and number >= 0 for number in numbers)
            is_sound &= position.cursor < len(self._pattern) and type(position.has_ended) is bool
            is_sound &= position.step == state["batches"]
            is_sound &= set(state["loaders"]) == set(self._names)
            for number, name in enumerate(self._names):
                epoch = pass_epoch(position.epoch, position.passes[number])
                if position.counts[number] and state["loaders"][name]["epoch"] != epoch:
                    is_sound = False
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"{_DAMAGED}: {error!r}") from error
        if not is_sound:
            raise StateError(f"{_DAMAGED}: its numbers and loaders don't belong together")
        return position


def _is_sized(value: Any) -> bool:
    """True for a dataset and its batch size."""
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    dataset, size = value
    is_size = isinstance(size, (int, np.integer)) and not isinstance(size, bool)
    is_dataset = hasattr(dataset, "__getitem__") or isinstance(dataset, IterableDataset)
    return (size is None or is_size) and (is_dataset or is_path(dataset))


class MultiIterator:
    """One epoch of a `MultiDataLoader`, from a position on, which it moves."""

    def __init__(self, loaders: dict[str, Any], position: Schedule, steps: int) -> None:
        self._loaders = loaders
        self._names = list(loaders)
        self._position = position
        self._steps = steps
        # begun at the first batch: a loader that waits for its turn holds nothing
        self._batches: dict[int, Iterator[Any]] = {}
        self._fruitless = [0] * len(loaders)  # passes in a row that gave nothing
        self.is_done: bool = False
        self._is_left = False

    def __iter__(self) -> MultiIterator:
        return self

    def __len__(self) -> int:
        """Batches that are left."""
        return 0 if self.is_done else max(0, self._steps - self._position.step)

    def __next__(self) -> tuple[str, Any]:
        if self._is_left:
            raise StateError(
                "this iterator can't go on: its MultiDataLoader has begun another one, loaded a "
                "state, or was closed"
            )
        position = self._position
        while not self.is_done:
            number = position.pick() if position.step < self._steps else None
            if number is None:
                position.has_ended = True
                self._end()
                break
            name = self._names[number]
            if number not in self._batches:
                self._batches[number] = iter(self._loaders[name])
            try:
                batch = next(self._batches[number])
            except StopIteration:
                self._through(number)
                continue
            except WorkerError:
                self._end()
                raise
            position.took(number)
            self._fruitless[number] = 0
            return name, batch
        raise StopIteration

    def _through(self, number: int) -> None:
        """A loader's pass is at its end."""
        position = self._position
        name = self._names[number]
        del self._batches[number]
        self._fruitless[number] += 1
        if self._fruitless[number] > 1:
            warn(f"loader {name!r} has no batches, and is left out")
            position.out.add(number)
        position.ended(number)
        if number not in position.out:
            position.passes[number] += 1
            self._loaders[name].set_epoch(pass_epoch(position.epoch, position.passes[number]))

    def _end(self) -> None:
        self.is_done = True
        self._batches.clear()

    def leave(self) -> None:
        """Frees the loaders; what comes after it is an error."""
        self._end()
        self._is_left = True
