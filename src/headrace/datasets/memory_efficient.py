"""Loading modes and a memory budget for any dataset."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import IterableDataset

from headrace.arguments import check_names, described
from headrace.core.dataset import BaseDataset
from headrace.core.decoder import Decoder, chained
from headrace.core.options import (
    COMMON,
    OF_LOADERS,
    JointTransform,
    LoadingMode,
    ModeName,
    check_common,
)
from headrace.core.views import answers_batches, parts_of
from headrace.datasets.open import KNOWN_KEYWORDS, open_dataset
from headrace.datasets.streaming import StreamingDataset
from headrace.errors import ConfigError
from headrace.formats.resolve.resolver import DataPath
from headrace.formats.source import Source
from headrace.memory.processes import PerProcess
from headrace.memory.tree import copied
from headrace.monitor.memory import MemoryMonitor
from headrace.order.ranks import BatchRequest, working_on
from headrace.order.seeding import SampleSeeder, preserved_rng, rng_states

ALONE: Final[Any] = type("Alone", (), {"__repr__": lambda self: "ALONE"})()
"""The target of a finished sample that is no pair of input and target."""


class ForeignDecoder(Decoder):
    """Samples that another dataset has finished: pairs of input and target where they are tuples of
    two, else inputs as a whole.

    Args:
        needs_pairs: True if transforms are called that get a target.
    """

    stores_values = False
    splits_targets = True
    always_pairs = True
    makes_plain_samples = False

    def __init__(self, needs_pairs: bool) -> None:
        self._needs_pairs = needs_pairs

    def split_target(self, value: Any, index: int, dataset: BaseDataset) -> tuple[Any, Any]:
        if type(value) is tuple and len(value) == 2:
            return value
        if self._needs_pairs:
            raise ConfigError(
                f"target_transform and transforms have no meaning here: sample {index} is no "
                "tuple of two, and so has no target; "
                "transform= gets it as a whole"
            )
        return value, ALONE

    def make_sample(self, value: Any, target: Any, has_target: bool) -> Any:
        if target is ALONE:
            return value
        return (value, target)


class Foreign(Source):
    """A foreign dataset's samples as records.

    What a sample draws at random depends on (seed, its index) alone: not on the epoch, the process,
    nor the samples around it. So does what headrace's own datasets inside of it draw.

    Args:
        dataset: has ``__getitem__`` and ``__len__``; ``__getitems__`` is used where there is one.
        seed: of the random numbers.

    Raises:
        ConfigError: it is no map-style dataset.
    """

    # the random generators of a process are common to its threads, and who knows about the dataset
    thread_safe = False

    def __init__(self, dataset: Any, seed: int) -> None:
        self._length = _length_of(dataset)
        self._dataset, self._seed = dataset, seed
        self._answers_batches = answers_batches(dataset)
        self._reset()

    def _reset(self) -> None:
        self._draws = False
        self._seeder: SampleSeeder | None = None
        # a thread of the parent may hold the parent's while it forks
        self._lock = PerProcess(threading.Lock)

    def __len__(self) -> int:
        return self._length

    def read(self, indices: Sequence[int]) -> list[Any]:
        with self._lock.get(), working_on(BatchRequest((), self._seed, 0)):
            wanted = [int(index) for index in indices]
            seeder = self._seeder or SampleSeeder(self._dataset)
            with preserved_rng(seeder):
                samples = self._read(wanted, seeder)
            if self._seeder is None:
                self._seeder = SampleSeeder(self._dataset)
                # some datasets make their generators when they are first read
                if len(self._seeder.generators) != len(seeder.generators):
                    with preserved_rng(self._seeder):
                        samples = self._read(wanted, self._seeder)
            return samples

    def _read(self, indices: list[int], seeder: SampleSeeder) -> list[Any]:
        if self._answers_batches and len(indices) > 1 and not self._draws:
            before = rng_states(seeder)
            samples = self._batch(indices)
            if rng_states(seeder) == before:
                return list(map(copy_of, samples))
            # random numbers that depend on the whole batch: each sample has to be read by itself
            self._draws = True
        copies = []
        for index in indices:
            seeder(self._seed, 0, index)
            if self._answers_batches:
                copies.append(copy_of(self._batch([index])[0]))
            else:
                copies.append(copy_of(self._dataset[index]))
        return copies

    def _batch(self, indices: list[int]) -> Sequence[Any]:
        samples: Sequence[Any] = self._dataset.__getitems__(indices)
        if len(samples) != len(indices):
            raise ValueError(f"__getitems__ gave {len(samples)} samples for {len(indices)} indices")
        return samples

    def location(self, index: int) -> str:
        return f"{type(self._dataset).__name__}[{index}]"

    def fingerprint(self) -> str:
        own = getattr(self._dataset, "fingerprint", None)
        if isinstance(own, str):
            return own
        name = f"{type(self._dataset).__module__}.{type(self._dataset).__qualname__} {self._length}"
        return hashlib.blake2b(name.encode(), digest_size=16).hexdigest()

    def held_as(self) -> str:
        """What `BaseDataset.held_as` says of these samples.

        Raises:
            ConfigError: nobody can tell them from others.
        """
        name = type(self._dataset).__name__
        if not isinstance(getattr(self._dataset, "fingerprint", None), str):
            raise ConfigError(
                "shared='machine': nobody can tell whether another process holds the samples of "
                f"the same {name}: give it an attribute `fingerprint`, a text that says what its "
                "samples are"
            )
        return f"finished samples of {name}, seed {self._seed}"

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in vars(self).items()
            if name not in ("_draws", "_seeder", "_lock")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()


def copy_of(sample: Any) -> Any:
    """A copy of a sample, which shares no memory with the dataset.

    Raises:
        TypeError: it can't be pickled; the message names the types in it.
    """
    try:
        return copied(sample)
    except MemoryError:
        raise
    except Exception as error:
        items: Any = ()
        if isinstance(sample, dict):
            items = sample.values()
        elif isinstance(sample, (tuple, list)):
            items = sample
        types = ", ".join(dict.fromkeys(type(item).__name__ for item in items))
        raise TypeError(
            "a sample must be picklable, so that it can be held, and "
            f"{type(sample).__name__}{types and f' of {types}'} is not: {error}"
        ) from error


def _length_of(dataset: Any) -> int:
    if isinstance(dataset, (IterableDataset, Mapping, type)) or not (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    ):
        raise ConfigError(
            f"data_path: {described(dataset)} is no path and no map-style dataset: pass a path, or "
            "a dataset with __getitem__ and __len__ (one sample for each index)"
        )
    try:
        return len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise ConfigError(
            f"data_path: {described(dataset)} has no length ({error}): pass a dataset with one"
        ) from error


def foreign_targets(dataset: Any, length: int) -> Any:
    """The `targets` of a foreign dataset, if they are one for each sample."""
    targets: Any = getattr(dataset, "targets", None)
    if isinstance(targets, torch.Tensor):
        targets = targets.numpy(force=True)
    is_column = isinstance(targets, (list, tuple)) or (
        isinstance(targets, np.ndarray) and targets.ndim
    )
    return targets if is_column and len(targets) == length else None


class MemoryEfficientDataset(BaseDataset):
    """Wraps any dataset in one of the four loading modes, within the memory budget.

    For a path or a headrace dataset, the cached values and the samples are the same as those of
    `open_dataset` or of that dataset in this mode, bit for bit, and this is a dataset of that class
    too. For any other dataset the finished samples are cached. Their random numbers are keyed by
    (`seed`, index) and are the same in every epoch, so pass random transforms as `transform=` here.
    Its samples must be picklable. Samples are copies, so a transform may modify them.

    Args:
        data_path: a path, URL, glob or list of these, whose format is detected; a headrace dataset
            in mode "lazy", or a view of one; or any map-style dataset (with ``__getitem__`` and
            ``__len__``).
        max_memory_usage: memory budget, as a fraction of the memory that is free at first use, or
            bytes ("500MB").
        loading_mode: see `LoadingMode`.
        transform: a callable that is applied to the input. A sample of another library's dataset is
            ``(input, target)`` if it is a tuple of two; otherwise the whole sample is the input.
        target_transform: a callable that is applied to the target.
        transforms: a callable that takes input and target and returns both, or a list of such
            callables. Not allowed together with `transform` or `target_transform`.
        **options: see `BaseDataset`; for a path also the options of its format, such as
            ``image_size=``. A headrace dataset keeps its own transforms, seed, hold, on_error,
            return_index and progress, unless they are given here.

    Attributes:
        targets: targets of the wrapped dataset, if it has one for each sample.
        classes, class_to_idx: likewise.
        memory_monitor: monitors used and available memory.

    Raises:
        ConfigError: `data_path` is none of these, or an argument is invalid; the message names it.
        DataNotFoundError, FormatError: see `open_dataset`.
        BudgetError: the samples don't fit the memory budget in mode "eager".
    """

    def __init__(
        self,
        data_path: DataPath | Any,
        *,
        max_memory_usage: float | int | str = 0.8,
        loading_mode: LoadingMode | ModeName = LoadingMode.CACHED,
        transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        transforms: JointTransform = None,
        **options: Any,
    ) -> None:
        given: dict[str, Any] = {
            "transform": transform,
            "target_transform": target_transform,
            "transforms": transforms,
        }
        of_format = {name: options.pop(name) for name in [*options] if name not in COMMON}
        check_names(type(self).__name__, of_format, KNOWN_KEYWORDS, OF_LOADERS)
        options = {**options, "max_memory_usage": max_memory_usage, "loading_mode": loading_mode}
        check_common({**given, **options})
        self._adds_transforms = False
        is_path = _is_path(data_path)
        if of_format and not is_path:
            raise ConfigError(
                f"{', '.join(of_format)}: an option for paths, and data_path is a dataset here: "
                "give it to that dataset"
            )
        if isinstance(data_path, BaseDataset):
            if data_path.loading_mode is not LoadingMode.LAZY:
                raise ConfigError(
                    f"data_path: a {type(data_path).__name__} with loading_mode="
                    f"{data_path.loading_mode.value!r} would hold its samples a second time: make "
                    "it with loading_mode='lazy'"
                )
            self._wrap(data_path, given, options)
            self._inside = repr(data_path).rpartition("  # ")[0]  # without the number of samples
        elif is_path:
            if options.get("hold") is not None:
                of_format["hold"] = options["hold"]
            cls = type(self)
            inner = open_dataset(data_path, **given, **of_format)
            self._wrap(inner, dict.fromkeys(given), options)
            if isinstance(inner, StreamingDataset):  # whose order is for shards that are streamed
                self.__class__ = cls
            self.data_path: Any = data_path
        else:
            self._hold_samples(data_path, given, options)
        self._owns_source = is_path
        self.memory_monitor: MemoryMonitor = MemoryMonitor()

    def _wrap(self, inner: BaseDataset, given: dict[str, Any], options: dict[str, Any]) -> None:
        """Holds what a dataset of headrace's would hold."""
        names = [name for name, transform in given.items() if transform is not None]
        if names and inner.is_random:
            raise ConfigError(
                f"{', '.join(names)}: the {type(inner).__name__} has transforms already: give them "
                "to one of the two"
            )
        if not names:
            given = {name: getattr(inner, name) for name in given}
        brought = {name: getattr(inner, name) for name in ("seed", "on_error", "return_index")}
        brought |= {"hold": inner._hold, "progress": inner._progress}
        self._become(inner, **{**brought, **given, **options})
        self._adds_transforms = bool(names)

    def _hold_samples(self, dataset: Any, given: dict[str, Any], options: dict[str, Any]) -> None:
        """Holds the finished samples of another library's dataset."""
        source = Foreign(dataset, options.get("seed", 42))
        has_pairs = given["transforms"] is not None or given["target_transform"] is not None
        targets = foreign_targets(dataset, len(source))
        decoder = ForeignDecoder(has_pairs)
        super().__init__(source, sample_decoder=decoder, targets=targets, **given, **options)
        self.fork_safe: bool = all(getattr(part, "fork_safe", True) for part in parts_of(dataset))
        for name in ("classes", "class_to_idx"):
            if hasattr(dataset, name):
                setattr(self, name, getattr(dataset, name))
        self._inside = f"<{type(dataset).__name__} of {len(source):,} samples>"

    def _with_transform(self, transform: Any) -> tuple[Decoder, Callable[[Any], Any] | None]:
        if self._adds_transforms:
            return self._decoder, chained(transform)
        return super()._with_transform(transform)

    def held_as(self) -> str:
        if isinstance(self.sample_source, Foreign):
            return self.sample_source.held_as()
        return super().held_as()

    def _settle(self) -> None:
        if not self._owns_source and "data_path" in self._arguments:
            self._arguments["data_path"] = _Shown(self._inside)
        super()._settle()


class _Shown:
    """Stands for the dataset inside in this one's repr."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _is_path(data_path: Any) -> bool:
    """True for a path, or a list of paths."""
    one = (str, bytes, os.PathLike)
    return isinstance(data_path, one) or (
        isinstance(data_path, (list, tuple)) and all(isinstance(path, one) for path in data_path)
    )
