"""Combines the batches of several loaders in one epoch.

NOTE [ passes ]

* The number of batches of an epoch is computed in advance from the lengths of the loaders. A loader
  that ends earlier starts another pass: pass c of epoch e uses the order of epoch `pass_epoch(e,
  c)`, a hash, so that no pass repeats the order of another pass or epoch.
* Each loader keeps its position in its own state. This module only counts batches and passes of
  each loader: which one is next follows from these numbers.
* Epochs and positions are set, counted, saved and loaded like those of a `Loader` (NOTE [ epochs
  and positions ] in `epoch.py`). At the start of an epoch, the epoch of every loader is set, so
  that their states belong together at any moment.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from typing import Any, Literal, cast, get_args

from headrace.arguments import (
    check_choice,
    check_flag,
    check_integer,
    checks_keywords,
    parameters_of,
)
from headrace.errors import ConfigError, StateError, WorkerError, warn
from headrace.loader.config import NO_WORKERS, DataLoaderConfig, check_dataset, length_of, resolve
from headrace.loader.epoch import LoaderState
from headrace.loader.loader import Loader, open_paths
from headrace.loader.state import VERSION, check_version
from headrace.monitor.stats import Stats
from headrace.order import detect_world
from headrace.order.epoch import pass_epoch
from headrace.order.ranks import are_counts, differences

Strategy = Literal["round_robin", "sequential", "weighted", "alternating"]
_DAMAGED = "load_state_dict: the state is damaged"
_LENGTHS: dict[str, Callable[[list[int]], int]] = {"sum": sum, "max": max, "min": min}


@dataclass
class MultiPosition:
    """A position in an epoch of several loaders.

    Attributes:
        epoch: number of the epoch.
        counts: number of batches that each loader has yielded.
        passes: number of the pass of each loader.
        out: loaders that have dropped out.
        ended: True if the epoch has ended.
    """

    epoch: int
    counts: dict[str, int]
    passes: dict[str, int]
    out: list[str]
    ended: bool = False

    @property
    def step(self) -> int:
        """Number of batches that all loaders have yielded."""
        return sum(self.counts.values())


def next_by_quota(weights: Mapping[str, Fraction], counts: Mapping[str, int]) -> str | None:
    """The loader of the next batch in proportion to weights. None: no loader is left.

    It follows the quota method of M. L. Balinski and H. P. Young ("The Quota Method of
    Apportionment", Amer. Math. Monthly 82, 1975): of the loaders whose quota ``weight /
    sum(weights) * (step + 1)`` exceeds the number of their batches so far, the one with the largest
    ``weight / (batches + 1)`` is next. After every step each loader has yielded its quota, rounded
    up or down. The share of a loader that has dropped out is divided among the others.
    """
    total = sum(weights.values())
    coming = sum(counts[name] for name in weights) + 1
    # those that would not be ahead of their quota
    behind = [name for name in weights if counts[name] * total < weights[name] * coming]
    # of equal ones the first
    return max(behind, key=lambda name: weights[name] / (counts[name] + 1), default=None)


def exact_weights(
    names: Sequence[str], weights: Mapping[str, float] | Sequence[float]
) -> dict[str, Fraction]:
    """Weights by name as exact fractions: 0.1 means a tenth.

    Raises:
        ConfigError: a weight is missing, has an unknown name, is negative or not finite, or all are
            0.
    """
    named = weights
    if isinstance(weights, Sequence) and len(weights) == len(names):
        named = dict(zip(names, weights, strict=True))
    if not isinstance(named, Mapping) or set(named) != set(names):
        raise ConfigError(
            f"weights must be a dict or a list of one number for each of {list(names)}, not "
            f"{weights!r}"
        )
    exact = {}
    for name in names:
        weight: Any = named[name]
        try:
            exact[name] = Fraction(repr(float(weight)))
        except (TypeError, ValueError, OverflowError):  # infinity too
            exact[name] = Fraction(-1)
        if exact[name] < 0 or isinstance(weight, (bool, str)):
            raise ConfigError(
                f"weights: that of {name!r} must be a number of 0 or more, not {weight!r}"
            )
    if not any(exact.values()):
        raise ConfigError("weights: at least one must be above 0")
    return exact


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
    weights = exact_weights(list(shares), shares)
    total = sum(weights.values())
    split = {name: int(num_workers * weight // total) for name, weight in weights.items()}
    remainders = {name: num_workers * weight % total for name, weight in weights.items()}
    by_remainder = sorted(shares, key=remainders.__getitem__, reverse=True)
    for name in by_remainder[: num_workers - sum(split.values())]:
        split[name] += 1
    return split


class MultiDataLoader:
    """Batches of several loaders in one epoch, as pairs ``(name, batch)``.

    Args:
        loaders: a dict from name to a `Loader`, a dataset, or a path. For datasets and paths,
            loaders are created with the options below.
        strategy: a name, in any case. "round_robin": one batch of each loader in turn.
            "sequential": one loader after the other. "weighted": exact quotas, spread evenly.
            "alternating": as given by `pattern`.
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
        cycles: True if a loader starts again at its end; otherwise it drops out.

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
        names = list(loaders)
        if isinstance(strategy, str):
            strategy = cast(Strategy, strategy.lower())
        check_choice("strategy", strategy, get_args(Strategy))
        if weights is not None and strategy != "weighted":
            raise ConfigError(f"weights is for strategy='weighted', not for {strategy!r}")
        if pattern is not None:
            if strategy != "alternating":
                raise ConfigError(f"pattern is for strategy='alternating', not for {strategy!r}")
            is_list = isinstance(pattern, Sequence) and not isinstance(pattern, str)
            if not is_list or not pattern or not set(pattern) <= set(names):
                raise ConfigError(f"pattern must be a list of names of {names}, not {pattern!r}")
        check_choice("epoch_length", epoch_length, _LENGTHS)
        check_flag("cycle_short_loaders", cycle_short_loaders)
        steps = check_integer("steps", steps, 1, optional=True)
        self._strategy = strategy
        self.cycles: bool = cycle_short_loaders
        self._pattern = list(pattern or names)
        self._weights: dict[str, Fraction] = {}  # none: by length
        if weights is not None:
            self._weights = exact_weights(names, weights)
        self.loaders: dict[str, Loader] = self._made(loaders, config, overrides)
        lengths = {name: length_of(loader) for name, loader in self.loaders.items()}
        if strategy == "weighted" and weights is None:
            counts = _known(lengths, names, "pass weights=")
            self._weights = dict(zip(names, map(Fraction, counts), strict=True))
        drawn = list(dict.fromkeys(self._pattern))
        if strategy == "weighted":
            drawn = [name for name, weight in self._weights.items() if weight]
        self._drawn = drawn
        self._empty = [name for name in names if lengths[name] == 0]
        if steps is not None and set(drawn) <= set(self._empty):
            raise ConfigError(
                f"steps={steps}, but the loaders have no batches: {', '.join(self._empty)}"
            )
        if self._empty:
            warn(f"these loaders have no batches, and are left out: {', '.join(self._empty)}")
        known = [lengths[name] or 0 for name in drawn]
        self._length: int
        if steps is None:
            known = _known(lengths, drawn, "pass steps=, the batches of an epoch")
            self._length = _LENGTHS[epoch_length]([length for length in known if length] or [0])
        elif self.cycles or any(lengths[name] is None for name in drawn):
            self._length = steps
        else:
            self._length = min(steps, sum(known))
        # what the order of the names depends on, beside the loaders' lengths
        self._parameters: dict[str, Any] = {
            "names": names,
            "strategy": strategy,
            "weights": {name: float(weight) for name, weight in self._weights.items()},
            "pattern": self._pattern,
            "epoch_length": epoch_length,
            "steps": steps,
            "cycle_short_loaders": cycle_short_loaders,
        }
        self._state: LoaderState[MultiPosition] = LoaderState(self._begin)

    # -- set-up

    def _made(
        self, given: Mapping[str, Any], config: DataLoaderConfig | None, options: dict[str, Any]
    ) -> dict[str, Loader]:
        """The loaders, with new ones for datasets and paths."""
        arguments = parameters_of(MultiDataLoader.__init__)
        loaders: dict[str, Any] = dict(given)
        names: dict[int, str] = {}  # of loaders
        for name, value in given.items():
            if not isinstance(name, str) or not name:
                raise ConfigError(f"loaders: a name must be a text, not {name!r}")
            if not isinstance(value, Loader):
                check_dataset(f"loaders[{name!r}]", value)
            elif names.setdefault(id(value), name) != name:
                raise ConfigError(
                    f"loaders: {name!r} is a second name of a loader, which has only one position: "
                    "make two loaders"
                )
        if (config is not None or options) and len(names) == len(given):
            raise ConfigError(
                f"{', '.join(options) or 'config'}: options are for datasets, and only loaders "
                "were passed: pass them where the loaders are made"
            )
        self._opened, shared = open_paths("MultiDataLoader", given, config, options, arguments)
        loaders |= self._opened
        datasets = {name: loaders[name] for name in given if name not in names.values()}
        for name, workers in self._workers(datasets, shared.num_workers).items():
            own = shared.with_(num_workers=workers)
            if not workers:
                own = own.with_(**NO_WORKERS)
            loaders[name] = Loader(datasets[name], own)
        return loaders

    def _workers(self, datasets: dict[str, Any], total: int | None) -> dict[str, int]:
        """Number of workers of each dataset, in proportion to its batches in an epoch."""
        shares: dict[str, float] = {}
        for name, dataset in datasets.items():
            if self._weights:
                shares[name] = float(self._weights[name])
            elif self._strategy in ("weighted", "sequential"):
                shares[name] = length_of(dataset) or 1
            else:
                shares[name] = self._pattern.count(name)
        if total is None:
            total = 0
            for name, dataset in datasets.items():
                config, *_ = resolve(DataLoaderConfig(), dataset, detect_world())
                total = max(total, config.num_workers or 0)
                if not config.num_workers:  # what is in memory needs none
                    shares[name] = 0
        if not any(shares.values()):
            return dict.fromkeys(shares, 0)
        return split_workers(total, shares)

    def _begin(self, epoch: int) -> MultiPosition:
        """The position at the beginning of an epoch."""
        nothing = dict.fromkeys(self.loaders, 0)
        return MultiPosition(epoch, nothing, dict(nothing), list(self._empty))

    def next_name(self, position: MultiPosition) -> str | None:
        """The loader of the next batch; None at the end of the epoch."""
        if position.step >= self._length:
            return None
        counts = position.counts
        active = [name for name in self._drawn if name not in position.out]
        if self._strategy == "weighted":
            return next_by_quota({name: self._weights[name] for name in active}, counts)
        if self._strategy == "sequential":
            return min(active, key=position.passes.__getitem__, default=None)

        def turn(name: str) -> tuple[int, int]:
            """Round and place in the pattern of its next batch."""
            places = [n for n, other in enumerate(self._pattern) if other == name]
            number, place = divmod(counts[name], len(places))
            return number, places[place]

        return min(active, key=turn, default=None)

    # -- epochs

    def __len__(self) -> int:
        """Number of batches per epoch; an upper bound if loaders of unknown length don't cycle."""
        return self._length

    def __repr__(self) -> str:
        parts = ", ".join(f"{name!r}: {loader!r}" for name, loader in self.loaders.items())
        return (
            f"MultiDataLoader({{{parts}}}, strategy={self._strategy!r})  # {self._length} batches "
            "an epoch"
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
        for name, loader in self.loaders.items():
            epoch = pass_epoch(position.epoch, position.passes[name])
            if not position.counts[name]:
                loader.set_epoch(epoch + 1)  # another epoch drops a position that was loaded
            loader.set_epoch(epoch)
        iterator = MultiIterator(self, position)
        self._state.running = iterator
        return iterator

    def _leave(self) -> None:
        """Frees the loaders from the running iterator."""
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
        for dataset in self._opened.values():
            dataset.close()

    def get_stats(self) -> dict[str, dict[str, Any]]:
        """Returns the statistics of each loader by name, which print as tables."""
        return Stats({name: loader.get_stats() for name, loader in self.loaders.items()})

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """Returns the state: which batches the user has received, and the state of each loader."""
        position = self._state.position
        return {
            "version": VERSION,
            **copy.deepcopy(self._parameters),
            "batches": position.step,
            **asdict(position),
            "loaders": {name: loader.state_dict() for name, loader in self.loaders.items()},
        }

    def __getstate__(self) -> dict[str, Any]:
        """A copy starts at the position of this loader."""
        return {**self.__dict__, "_state": copy.deepcopy(self._state.position)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        position: Any = state["_state"]
        self._state = LoaderState(self._begin)
        self._state.load(position, position.ended)

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
        for name, loader in self.loaders.items():
            try:
                loader.load_state_dict(state["loaders"][name], strict=strict)
            except StateError as error:
                for each, former in before.items():
                    self.loaders[each].load_state_dict(former, strict=False)
                raise StateError(f"loader {name!r}: {error}") from error
        self._state.load(position, position.ended)

    def _position_of(self, state: Any) -> MultiPosition:
        """The position of a saved state."""
        check_version(state, "loaders", "a MultiDataLoader")
        differing = differences(state, self._parameters)
        if differing:
            raise StateError(
                f"load_state_dict: the state is of another schedule: {differing}. Build the "
                "MultiDataLoader as it was"
            )
        names = self.loaders.keys()
        try:
            parts = {
                field.name: copy.deepcopy(state[field.name]) for field in fields(MultiPosition)
            }
            position = MultiPosition(**parts)
            numbers = [position.epoch, state["batches"]]
            numbers += [*position.counts.values(), *position.passes.values()]
            is_sound = (
                are_counts(numbers)
                and type(position.ended) is bool
                and position.step == state["batches"]
                and position.counts.keys() == names == state["loaders"].keys()
                and set(position.out) <= names
            )
            for name in names:
                epoch = pass_epoch(position.epoch, position.passes[name])
                if position.counts[name] and state["loaders"][name]["epoch"] != epoch:
                    is_sound = False
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateError(f"{_DAMAGED}: {error!r}") from error
        if not is_sound:
            raise StateError(f"{_DAMAGED}: its numbers and loaders don't belong together")
        return position


def _known(lengths: Mapping[str, int | None], names: Sequence[str], remedy: str) -> list[int]:
    """The known lengths of these loaders."""
    known = []
    for name in names:
        length = lengths[name]
        if length is None:
            raise ConfigError(f"the length of the loader {name!r} is not known; {remedy}")
        known.append(length)
    return known


class MultiIterator:
    """Iterates over one epoch of a `MultiDataLoader`, from a position that it advances."""

    def __init__(self, multi: MultiDataLoader, position: MultiPosition) -> None:
        self._multi = multi
        self._position = position
        # begun at the first batch: a loader that waits for its turn holds nothing
        self._batches: dict[str, Iterator[Any]] = {}
        self._fruitless: set[str] = set()  # loaders without a batch since their pass ended
        self.is_done: bool = False
        self._is_left = False

    def __iter__(self) -> MultiIterator:
        return self

    def __len__(self) -> int:
        """Number of remaining batches."""
        return 0 if self.is_done else max(0, len(self._multi) - self._position.step)

    def __next__(self) -> tuple[str, Any]:
        if self._is_left:
            raise StateError(
                "this iterator can't go on: its MultiDataLoader has begun another one, loaded a "
                "state, or was closed"
            )
        position = self._position
        while not self.is_done:
            name = self._multi.next_name(position)
            if name is None:
                position.ended = True
                self._end()
                break
            loader = self._multi.loaders[name]
            if name not in self._batches:
                self._batches[name] = iter(loader)
            try:
                batch = next(self._batches[name])
            except StopIteration:
                del self._batches[name]
                self._end_pass(name)
                continue
            except WorkerError:
                self._end()
                raise
            position.counts[name] += 1
            self._fruitless.discard(name)
            return name, batch
        raise StopIteration

    def _end_pass(self, name: str) -> None:
        """Restarts a loader that has ended, or drops it."""
        position = self._position
        is_empty = name in self._fruitless
        if is_empty:
            warn(f"loader {name!r} has no batches, and is left out")
        if is_empty or not self._multi.cycles:
            position.out.append(name)
            return
        self._fruitless.add(name)
        position.passes[name] += 1
        epoch = pass_epoch(position.epoch, position.passes[name])
        self._multi.loaders[name].set_epoch(epoch)

    def _end(self) -> None:
        self.is_done = True
        self._batches.clear()

    def leave(self) -> None:
        """Frees the loaders; further use is an error."""
        self._end()
        self._is_left = True
