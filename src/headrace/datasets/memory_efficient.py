"""Loading modes and a memory budget for any dataset."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from headrace.arguments import check_names
from headrace.core.checks import OF_LOADERS, check_common
from headrace.core.dataset import BaseDataset
from headrace.core.decoder import Decoder, chained
from headrace.core.modes import LoadingMode, ModeName
from headrace.core.options import COMMON
from headrace.core.splitting import JointTransform
from headrace.core.wrapped import parts_of
from headrace.datasets.foreign import Foreign, ForeignDecoder, foreign_targets
from headrace.datasets.open import known_keywords, open_dataset
from headrace.datasets.shards.streaming import StreamingDataset
from headrace.display import Lines
from headrace.errors import ConfigError
from headrace.io.resolve.expressions import DataPath
from headrace.monitor.memory import MemoryMonitor


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
        check_names(type(self).__name__, of_format, known_keywords(), OF_LOADERS)
        options = {**options, "max_memory_usage": max_memory_usage, "loading_mode": loading_mode}
        check_common({**given, **options})
        self._adds_transforms = False
        self._owns_source = False
        if of_format and not _is_path(data_path):
            raise ConfigError(
                f"{', '.join(of_format)}: an option for paths, and data_path is a dataset here: "
                "give it to that dataset"
            )
        if isinstance(data_path, BaseDataset):
            self._wrap(data_path, given, options)
        elif _is_path(data_path):
            hold = {"hold": options["hold"]} if options.get("hold") is not None else {}
            inner = open_dataset(data_path, **hold, **given, **of_format)
            given = {name: getattr(inner, name) for name in given}  # without what it does itself
            cls = type(self)
            self._become(inner, **given, **options)
            if isinstance(inner, StreamingDataset):  # whose order is for shards that are streamed
                self.__class__ = cls
            self._owns_source = True
            self.data_path: Any = data_path
            self._wraps = f"{type(inner).__name__}, opened from its path: what it would hold"
        else:
            self._hold_samples(data_path, given, options)
        self.memory_monitor: MemoryMonitor = MemoryMonitor()

    def _wrap(self, inner: BaseDataset, given: dict[str, Any], options: dict[str, Any]) -> None:
        """Holds what a dataset of headrace's would hold."""
        name = type(inner).__name__
        if inner.loading_mode is not LoadingMode.LAZY:
            raise ConfigError(
                f"data_path: a {name} with loading_mode={inner.loading_mode.value!r} would hold "
                "its samples a second time: make it with loading_mode='lazy'"
            )
        names = [name for name, transform in given.items() if transform is not None]
        if names and inner.is_random:
            raise ConfigError(
                f"{', '.join(names)}: the {name} has transforms already: give them to one of the "
                "two"
            )
        if not names:
            given = {name: getattr(inner, name) for name in given}
        brought = {name: getattr(inner, name) for name in ("seed", "on_error", "return_index")}
        brought |= {"hold": inner._hold, "progress": inner._progress}
        self._become(inner, **{**brought, **given, **options})
        self._adds_transforms = bool(names)
        view = "" if inner._chosen is None else "a view of "
        self._wraps = f"{view}{name}: what it would hold"
        self._shown = repr(inner).rpartition("  # ")[0]  # without the number of samples

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
        name = type(dataset).__name__
        self._wraps = f"{name}: its finished samples; random transforms belong in transform= here"
        self._shown = f"<{name} of {len(source):,} samples>"

    def _with_transform(self, transform: Any) -> tuple[Decoder, Callable[[Any], Any] | None]:
        if self._adds_transforms:
            return self._decoder, chained(transform)
        return super()._with_transform(transform)

    def held_as(self) -> str:
        if isinstance(self.sample_source, Foreign):
            return self.sample_source.held_as()
        return super().held_as()

    # -- what users see

    def explain(self) -> str:
        """Describes what is wrapped, how samples are read, what is cached, and the state of the
        memory budget.
        """
        first, *rest = super().explain().split("\n")
        return Lines("\n".join([first, f"it wraps {self._wraps} is held", *rest]))

    def _settle(self) -> None:
        if not self._owns_source and "data_path" in self._arguments:
            self._arguments["data_path"] = _Shown(self._shown)
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
