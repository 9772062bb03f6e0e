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

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np
from torch.utils.data import DataLoader, Dataset, IterableDataset

from headrace.arguments import check_integer, checks_keywords, parameters_of
from headrace.datasets.core.base import BaseDataset
from headrace.errors import ConfigError, StateError, warn
from headrace.loader.build import resolve
from headrace.loader.config import NO_WORKERS, DataLoaderConfig, check_options
from headrace.loader.create import open_path
from headrace.loader.data import check_dataset, is_path, length_of
from headrace.loader.explain import count_batches
from headrace.loader.loader import Loader
from headrace.loader.multi.foreign import ReplayedLoader
from headrace.loader.multi.schedule import (
    MultiIterator,
    Schedule,
    check_schedule,
    pattern_of,
    split_workers,
    whole_weights,
)
from headrace.loader.state import LoaderState
from headrace.monitor.stats import Stats
from headrace.order import detect_world
from headrace.order.epoch import pass_epoch

Strategy = Literal["round_robin", "sequential", "weighted", "alternating"]

_VERSION = 1


class MultiDataLoader:
    """Batches of several loaders in one epoch, as pairs ``(name, batch)``.

    Args:
        loaders: a dict from name to a `Loader`, a torch `DataLoader`, a dataset, or a path. For
            datasets and paths, loaders are created with the options below; a tuple ``(dataset,
            batch_size)`` sets the batch size of one. A torch `DataLoader` is seeded by (seed,
            epoch) and replayed on resume.
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
        loaders, self._sizes = _split_sizes(loaders)
        _check_loaders(loaders)
        if isinstance(strategy, str):
            strategy = cast(Strategy, strategy.lower())
        check_schedule(strategy, weights, pattern, epoch_length, cycle_short_loaders)
        steps = check_integer("steps", steps, 1, optional=True)
        self._strategy, self._epoch_length, self._given_steps = strategy, epoch_length, steps
        self._cycles = cycle_short_loaders
        self._names = list(loaders)
        self._pattern = pattern_of(self._names, pattern)
        given = None if weights is None else whole_weights(self._names, weights)
        self._opened: list[BaseDataset] = []
        self.loaders: dict[str, Any] = self._made(loaders, given, config, overrides)
        if (
            strategy == "weighted"
            and given is None
            and any(lengths := self._known_lengths(range(len(loaders)), "pass weights="))
        ):
            given = whole_weights(self._names, lengths)
        self._weights = given if given is not None else [1] * len(self._names)
        empty = [name for name, loader in self.loaders.items() if length_of(loader) == 0]
        if steps is not None and set(empty) >= {self._names[i] for i in self._new_schedule().drawn}:
            raise ConfigError(f"steps={steps}, but the loaders have no batches: {', '.join(empty)}")
        if empty:
            warn(f"these loaders have no batches, and are left out: {', '.join(empty)}")
        self._steps()  # raises where the length is not known
        self._cursor: LoaderState[Schedule] = LoaderState(self._new_schedule)

    # -- set-up

    def _made(
        self,
        given: Mapping[str, Any],
        weights: list[int] | None,
        config: DataLoaderConfig | None,
        options: dict[str, Any],
    ) -> dict[str, Any]:
        """The loaders, made where a dataset or a path was given."""
        found, rest, was_given = dict(given), options, config is not None
        arguments = parameters_of(MultiDataLoader.__init__)
        for name, value in given.items():
            if is_path(value):
                found[name], rest = open_path("MultiDataLoader", value, config, options, arguments)
                self._opened.append(found[name])
        check_options("MultiDataLoader", config, rest, arguments)
        for name, value in found.items():
            if not isinstance(value, DataLoader):
                check_dataset("MultiDataLoader", f"loaders[{name!r}]", value)
        config = (config or DataLoaderConfig()).with_(**rest)
        datasets = {
            name: value for name, value in found.items() if not isinstance(value, DataLoader)
        }
        are_read = bool(datasets) or (
            set(options) == {"seed"} and not all(isinstance(v, Loader) for v in found.values())
        )
        if (was_given or options) and not are_read:
            said = ", ".join(options) or "config"
            raise ConfigError(
                f"{said}: options are for datasets, and only loaders were passed: pass them where "
                "the loaders are made"
            )
        workers = self._workers(datasets, weights, config)
        for name, value in found.items():
            if name in datasets:
                own: dict[str, Any] = (
                    {"batch_size": self._sizes[name]} if name in self._sizes else {}
                )
                found[name] = Loader(
                    value,
                    config,
                    num_workers=workers[name],
                    **own,
                    **({} if workers[name] else NO_WORKERS),
                )
            elif not isinstance(value, Loader):
                found[name] = ReplayedLoader(value, config.seed)
        return found

    def _workers(
        self, datasets: dict[str, Any], weights: list[int] | None, config: DataLoaderConfig
    ) -> dict[str, int]:
        """How many workers each dataset gets."""
        if not datasets:
            return {}
        shares = {
            name: self._share(name, dataset, weights, config) for name, dataset in datasets.items()
        }
        total = config.num_workers
        if total is None:
            wanted = {
                name: resolve(DataLoaderConfig(), dataset, detect_world())[0].num_workers or 0
                for name, dataset in datasets.items()
            }
            total = max(wanted.values())
            # what is in memory needs none
            shares = {name: share if wanted[name] else 0.0 for name, share in shares.items()}
        if not any(shares.values()):
            shares = dict.fromkeys(shares, 1.0)
        return split_workers(total, shares)

    def _share(
        self, name: str, dataset: Any, weights: list[int] | None, config: DataLoaderConfig
    ) -> float:
        """Of the batches of an epoch, in proportion to others."""
        number = self._names.index(name)
        if self._strategy == "weighted" and weights is not None:
            return weights[number]
        if self._strategy in ("weighted", "sequential"):
            return (length_of(dataset) or 1) / (self._sizes.get(name, config.batch_size) or 1)
        return self._pattern.count(number)

    def _new_schedule(self, epoch: int = 0) -> Schedule:
        schedule = Schedule(self._strategy, self._weights, self._pattern, self._cycles, epoch)
        schedule.out = {i for i in schedule.drawn if length_of(self.loaders[self._names[i]]) == 0}
        return schedule

    def _known_lengths(self, numbers: Iterable[int], remedy: str) -> list[int]:
        """The lengths of these loaders."""
        lengths = {
            name: length_of(self.loaders[name]) for name in (self._names[i] for i in numbers)
        }
        unknown = [name for name, length in lengths.items() if length is None]
        if unknown:
            raise ConfigError(
                f"the length of these loaders is not known: {', '.join(unknown)}; {remedy}"
            )
        return [length or 0 for length in lengths.values()]

    def _steps(self) -> int:
        """The batches of an epoch."""
        drawn = self._new_schedule().drawn
        if self._given_steps is not None:
            lengths = [length_of(self.loaders[self._names[i]]) for i in drawn]
            if self._cycles or None in lengths:
                return self._given_steps
            return min(self._given_steps, sum(length or 0 for length in lengths))
        known = [
            length
            for length in self._known_lengths(drawn, "pass steps=, the batches of an epoch")
            if length
        ]
        if self._epoch_length == "sum":
            return sum(known)
        return (max if self._epoch_length == "max" else min)(known, default=0)

    # -- epochs

    def __len__(self) -> int:
        """Number of batches per epoch; an upper bound if loaders of unknown length don't cycle."""
        return self._steps()

    def __repr__(self) -> str:
        parts = []
        for name, loader in self.loaders.items():
            batches, size = (
                length_of(loader),
                getattr(getattr(loader, "loader", loader), "batch_size", None),
            )
            of = "" if size is None else f" of {size}"
            parts.append(
                f"{name!r}: {'? batches' if batches is None else count_batches(batches)}{of}"
            )
        return (
            f"MultiDataLoader({{{', '.join(parts)}}}, strategy={self._strategy!r})  # "
            f"{count_batches(self._steps())} an epoch"
        )

    @property
    def epoch(self) -> int:
        """The epoch of the current or last iterator."""
        return self._cursor.at.epoch

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iterator. Without it, each iterator uses the epoch after
        the last one.
        """
        self._cursor.set_epoch(epoch)

    def __iter__(self) -> MultiIterator:
        """Starts an epoch. A running iterator becomes invalid, since both would draw from the
        same loaders.
        """
        self._leave()
        self._cursor.start()
        position = self._cursor.at
        for number, name in enumerate(self._names):
            loader, named = self.loaders[name], pass_epoch(position.epoch, position.passes[number])
            if not position.counts[number]:
                loader.set_epoch(named + 1)  # another epoch drops a position that was loaded
            loader.set_epoch(named)
        iterator = MultiIterator(self.loaders, position, self._steps())
        self._cursor.running = iterator
        return iterator

    def _leave(self) -> None:
        """Frees the loaders from the iterator that is under way."""
        if (running := self._cursor.running) is not None:
            running.leave()
        self._cursor.running = None

    def close(self) -> None:
        """Stops the workers of all loaders and the running iterator, and closes what was opened
        from paths. All can be used again afterwards.
        """
        self._leave()
        for closable in (*self.loaders.values(), *self._opened):
            closable.close()

    def get_stats(self) -> dict[str, dict[str, Any]]:
        """Returns the statistics of each loader by name, which print as tables.

        For a torch `DataLoader` these are only dataset size, number of batches, batch size and
        number of workers.
        """
        return Stats({name: loader.get_stats() for name, loader in self.loaders.items()})

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """Returns the state: which batches the user has received, and the state of each loader."""
        position = self._cursor.position
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
        return {**self.__dict__, "_cursor": copy.deepcopy(self._cursor.position)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        position: Any = state["_cursor"]
        self._cursor = LoaderState(self._new_schedule)
        self._cursor.load(position, position.has_ended)

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
        self._cursor.load(position, position.has_ended)

    def _position_of(self, state: Any) -> Schedule:
        """The position of a saved state."""
        if not isinstance(state, dict) or "version" not in state or "loaders" not in state:
            raise StateError(
                "load_state_dict: this is no state of a MultiDataLoader: pass what its "
                "state_dict() returned"
            )
        version = state["version"]
        if type(version) is int and version > _VERSION:
            raise StateError(
                f"load_state_dict: the state has version {version}, this headrace knows "
                f"{_VERSION}: upgrade it"
            )
        if type(version) is not int or version < _VERSION:
            raise StateError(f"load_state_dict: the state is damaged: its version is {version!r}")
        own = self._parameters()
        differing = ", ".join(
            f"{k} was {state.get(k)!r}, is {v!r}" for k, v in own.items() if state.get(k) != v
        )
        if differing:
            raise StateError(
                f"load_state_dict: the state is of another schedule: {differing}. Build the "
                "MultiDataLoader as it was"
            )
        position = self._new_schedule()
        try:
            position.epoch = state["epoch"]
            position.has_ended = state["ended"]
            position.passes = [state["passes"][name] for name in self._names]
            position.counts = [state["counts"][name] for name in self._names]
            position.cursor = state["cursor"]
            position.out = {self._names.index(name) for name in state["out"]}
            begun = [i for i, count in enumerate(position.counts) if count]
            epochs = {i: state["loaders"][self._names[i]]["epoch"] for i in begun}
            numbers = [position.epoch, position.cursor, state["batches"]]
            numbers += [*position.passes, *position.counts]
            is_sound = all(type(number) is int and number >= 0 for number in numbers)
            is_sound &= position.cursor < len(self._pattern) and type(position.has_ended) is bool
            is_sound &= position.step == state["batches"]
            is_sound &= set(state["loaders"]) == set(self._names)
            is_sound &= epochs == {i: pass_epoch(position.epoch, position.passes[i]) for i in begun}
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"load_state_dict: the state is damaged: {error!r}") from error
        if not is_sound:
            raise StateError(
                "load_state_dict: the state is damaged: its numbers and loaders don't belong "
                "together"
            )
        return position


def _split_sizes(loaders: Any) -> tuple[dict[str, Any], dict[str, int | None]]:
    """The loaders, and the batch sizes of those that were given as ``(dataset, batch_size)``."""
    if not isinstance(loaders, Mapping) or not loaders:
        raise ConfigError(
            "loaders must be a dict of at least one loader, dataset or path by name, not "
            f"{loaders!r:.80}"
        )
    given, sizes = dict(loaders), {}
    for name, value in loaders.items():
        if not isinstance(value, (tuple, list)) or not value:
            continue
        first, *rest = value
        is_dataset = isinstance(first, (Dataset, DataLoader))
        is_size = len(rest) == 1 and (
            rest[0] is None
            or (isinstance(rest[0], (int, np.integer)) and not isinstance(rest[0], bool))
        )
        is_pair = (
            isinstance(value, tuple)
            and is_size
            and (is_path(first) or hasattr(first, "__getitem__") or is_dataset)
        )
        if is_pair and isinstance(first, DataLoader):
            raise ConfigError(
                f"loaders: {name!r} is a loader and a batch_size, and a loader has its own: pass "
                "the loader alone"
            )
        if is_pair:
            given[name] = first
            sizes[name] = check_integer("batch_size", rest[0], 1, optional=True)
        elif is_dataset:
            raise ConfigError(
                f"loaders: {name!r} is a {type(value).__name__}: pass one dataset, or a tuple "
                "(dataset, batch_size)"
            )
    return given, sizes


def _check_loaders(loaders: dict[str, Any]) -> None:
    for name, value in loaders.items():
        if not isinstance(name, str) or not name:
            raise ConfigError(f"loaders: a name must be a text, not {name!r}")
        has_items = isinstance(value, (DataLoader, IterableDataset)) or (
            hasattr(value, "__getitem__") and not isinstance(value, Mapping)
        )
        if not has_items and not is_path(value):
            raise ConfigError(
                f"loaders: {name!r} must be a loader, a dataset or a path, not "
                f"{type(value).__name__}"
            )
    given = [id(value) for value in loaders.values() if isinstance(value, DataLoader)]
    if len(set(given)) < len(given):
        raise ConfigError(
            "loaders: the same loader has two names, and only one position: make two loaders"
        )
