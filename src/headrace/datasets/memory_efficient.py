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
"""The target of a finished sample that is not a pair of input and target."""


class ForeignDecoder(Decoder):
    """Passes on the finished samples of another dataset: a tuple of two is a pair of input and
    target, anything else an input.

    Args:
        needs_pairs: True if a transform needs targets.
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
                f"target_transform and transforms need targets, and sample {index} is not a tuple "
                "of two: use transform=, which receives the whole sample"
            )
        return value, ALONE

    def make_sample(self, value: Any, target: Any, has_target: bool) -> Any:
        if target is ALONE:
            return value
        return (value, target)


class Foreign(Source):
    """The samples of another library's dataset as records.

    The random numbers of a sample depend on (seed, index) only, also inside headrace's own datasets
    that it wraps.

    Args:
        dataset: a dataset with ``__getitem__``, ``__len__`` and perhaps ``__getitems__``.
        seed: seed of the random numbers.

    Raises:
        ConfigError: it is not a map-style dataset.
    """

    # threads share the random generators of their process, and the dataset may not be thread-safe
    thread_safe = False

    def __init__(self, dataset: Any, seed: int) -> None:
        if isinstance(dataset, (IterableDataset, Mapping, type)) or not (
            hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        ):
            raise ConfigError(
                "data_path must be a path, or a dataset with __getitem__ and __len__, not "
                f"{described(dataset)}"
            )
        try:
            self._length = len(dataset)
        except (TypeError, NotImplementedError) as error:
            raise ConfigError(f"data_path: {described(dataset)} has no length: {error}") from error
        self._dataset = dataset
        self._seed = seed
        self._answers_batches = answers_batches(dataset)
        self._draws = False  # True: its batches draw random numbers
        self._seeder: SampleSeeder | None = None
        # a thread may hold the parent's lock while it forks
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
                # some datasets make their generators at the first read
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
            # the random numbers depend on the whole batch: read one sample at a time
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
            raise ValueError(
                f"__getitems__ returned {len(samples)} samples for {len(indices)} indices"
            )
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
        """See `BaseDataset.held_as`.

        Raises:
            ConfigError: the dataset has no fingerprint.
        """
        name = type(self._dataset).__name__
        if not isinstance(getattr(self._dataset, "fingerprint", None), str):
            raise ConfigError(
                f"shared='machine': the {name} can't be compared with that of another process: "
                "give it an attribute `fingerprint`, a string that identifies its samples"
            )
        return f"finished samples of {name}, seed {self._seed}"

    def __getstate__(self) -> dict[str, Any]:
        # another process finds its own generators, also those of functions that it imports
        return {**vars(self), "_seeder": None}


def copy_of(sample: Any) -> Any:
    """A copy of a sample that shares no memory with the dataset.

    Raises:
        TypeError: it can't be pickled; the message shows it.
    """
    try:
        return copied(sample)
    except MemoryError:
        raise
    except Exception as error:
        what = f"{type(sample).__name__} {sample!r:.60}"
        raise TypeError(f"samples must be picklable, and the {what} is not: {error}") from error


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
        entries = data_path if isinstance(data_path, (list, tuple)) else [data_path]
        is_path = all(isinstance(entry, (str, bytes, os.PathLike)) for entry in entries)
        if of_format and not is_path:
            names = ", ".join(of_format)
            raise ConfigError(f"{names}: data_path is a dataset, so pass this option to it instead")
        if isinstance(data_path, BaseDataset):
            if data_path.loading_mode is not LoadingMode.LAZY:
                raise ConfigError(
                    f"data_path: a {type(data_path).__name__} with loading_mode="
                    f"{data_path.loading_mode.value!r} would cache its samples twice: use 'lazy'"
                )
            self._wrap(data_path, given, options)
            self._inside = repr(data_path).rpartition("  # ")[0]  # without the number of samples
        elif is_path:
            if options.get("hold") is not None:
                of_format["hold"] = options["hold"]
            cls = type(self)
            inner = open_dataset(data_path, **given, **of_format)
            self._wrap(inner, dict.fromkeys(given), options)
            if isinstance(inner, StreamingDataset):  # its order is for streamed shards
                self.__class__ = cls
            self.data_path: Any = data_path
        else:
            self._hold_samples(data_path, given, options)
        self._owns_source = is_path
        self.memory_monitor: MemoryMonitor = MemoryMonitor()

    def _wrap(self, inner: BaseDataset, given: dict[str, Any], options: dict[str, Any]) -> None:
        """Caches the same values as a headrace dataset would."""
        names = [name for name, transform in given.items() if transform is not None]
        if names and inner.is_random:
            shown = ", ".join(names)
            raise ConfigError(f"{shown}: the {type(inner).__name__} has transforms: pass all to it")
        if not names:
            given = {name: getattr(inner, name) for name in given}
        brought = {name: getattr(inner, name) for name in ("seed", "on_error", "return_index")}
        brought |= {"hold": inner._hold, "progress": inner._progress}
        self._become(inner, **{**brought, **given, **options})
        self._adds_transforms = bool(names)

    def _hold_samples(self, dataset: Any, given: dict[str, Any], options: dict[str, Any]) -> None:
        """Caches the finished samples of another library's dataset."""
        source = Foreign(dataset, options.get("seed", 42))
        has_pairs = given["transforms"] is not None or given["target_transform"] is not None
        targets: Any = getattr(dataset, "targets", None)
        if isinstance(targets, torch.Tensor):
            targets = targets.numpy(force=True)
        is_column = (
            isinstance(targets, (list, tuple, np.ndarray)) and getattr(targets, "ndim", 1) > 0
        )
        if not is_column or len(targets) != len(source):
            targets = None
        decoder = ForeignDecoder(has_pairs)
        super().__init__(source, sample_decoder=decoder, targets=targets, **given, **options)
        self._held_as = (type(self), {})  # `data_path` is no path
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
    """Stands for the wrapped dataset in a repr."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text
