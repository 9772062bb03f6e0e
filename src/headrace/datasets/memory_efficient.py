"""Loading modes and a memory budget for any dataset."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.arguments import check_names
from headrace.core.checks import OF_LOADERS, check_common
from headrace.core.dataset import BaseDataset
from headrace.core.modes import LoadingMode, ModeName
from headrace.core.options import COMMON
from headrace.core.splitting import JointTransform
from headrace.datasets.delegating import DelegatingDataset
from headrace.datasets.finished import Finished
from headrace.datasets.open import known_keywords, open_dataset
from headrace.display import Lines
from headrace.errors import ConfigError
from headrace.io.resolve.expressions import DataPath
from headrace.monitor.memory import MemoryMonitor
from headrace.storage.source import Source


class MemoryEfficientDataset(DelegatingDataset):
    """Wraps any dataset in one of the four loading modes, within the memory budget.

    For a path or a headrace dataset, the cached values and the samples are the same as those of
    `open_dataset` or of that dataset in this mode, bit for bit. For any other dataset the finished
    samples are cached. Their random numbers are keyed by (`seed`, index) and are the same in every
    epoch, so pass random transforms as `transform=` here. Its samples must be picklable. Samples
    are copies, so a transform may modify them.

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
        check_common(
            {**given, **options, "max_memory_usage": max_memory_usage, "loading_mode": loading_mode}
        )
        self._opened_here = _is_path(data_path)
        self.data_path: Any = (
            data_path if self._opened_here else getattr(data_path, "data_path", None)
        )
        inner: BaseDataset
        self._adds_transforms = False
        if self._opened_here:
            held = {"hold": options["hold"]} if options.get("hold") is not None else {}
            inner = open_dataset(data_path, **held, **given, **of_format)
            given = {name: getattr(inner, name) for name in given}  # without what it does itself
        elif of_format:
            raise ConfigError(
                f"{', '.join(of_format)}: an option for paths, and data_path is a dataset here: "
                "give it to that dataset"
            )
        elif isinstance(data_path, BaseDataset):
            inner, given = self._adopt(data_path, given, options)
        else:
            inner = Finished(
                data_path,
                options.get("seed", 42),
                needs_pairs=transforms is not None or target_transform is not None,
            )
        source = inner.sample_source if inner._chosen is None else ViewSource(inner)
        adds = self._adds_transforms
        super().__init__(
            inner,
            source,
            adds,
            loading_mode=loading_mode,
            max_memory_usage=max_memory_usage,
            **given,
            **options,
        )
        self._memory_monitor: MemoryMonitor | None = None

    def _adopt(
        self, dataset: BaseDataset, given: dict[str, Any], options: dict[str, Any]
    ) -> tuple[BaseDataset, dict[str, Any]]:
        """A dataset of headrace's as it is wrapped, and the transforms that hold; `options` get
        what it brings along.
        """
        if dataset.loading_mode is not LoadingMode.LAZY:
            raise ConfigError(
                f"data_path: a {type(dataset).__name__} with "
                f"loading_mode={dataset.loading_mode.value!r} would hold its samples a second "
                "time: make it with loading_mode='lazy'"
            )
        names = [name for name, transform in given.items() if transform is not None]
        self._adds_transforms = bool(names)
        if names and dataset.is_random:
            raise ConfigError(
                f"{', '.join(names)}: the {type(dataset).__name__} has transforms already: give "
                "them to one of the two"
            )
        brought = {name: getattr(dataset, name) for name in ("seed", "on_error", "return_index")}
        for name, value in {
            **brought,
            "hold": dataset._hold,
            "progress": dataset._progress,
        }.items():
            options.setdefault(name, value)
        if options["hold"] != dataset._hold:
            dataset = copy.copy(dataset)
            dataset._hold = options["hold"]
        return dataset, given if names else {name: getattr(dataset, name) for name in given}

    @property
    def memory_monitor(self) -> MemoryMonitor:
        """Monitor of used and available memory, created at first use."""
        if self._memory_monitor is None:
            self._memory_monitor = MemoryMonitor()
        return self._memory_monitor

    # -- what users see

    def explain(self) -> str:
        """Describes what is wrapped, how samples are read, what is cached, and the state of the
        memory budget.
        """
        first, *rest = super().explain().split("\n")
        if isinstance(self._inner, Finished):
            what = (
                f"{self._inner.name}: its finished samples are held; random transforms belong in "
                "transform= here"
            )
        else:
            view = "" if self._inner._chosen is None else "a view of "
            how = ", opened from its path" if self._opened_here else ""
            what = f"{view}{type(self._inner).__name__}{how}: what it would hold is held"
        return Lines("\n".join([first, f"it wraps {what}", *rest]))

    def close(self) -> None:
        """Frees what is cached, and closes what was opened from a path. The dataset can be used
        again afterwards.
        """
        if self._chosen is not None:
            return
        if self._value_source is not None:
            self._value_source.close()
            self._value_source = None
        if self._opened_here:
            self._inner.close()

    def _settle(self) -> None:
        if not self._opened_here and "data_path" in self._arguments:
            self._arguments["data_path"] = _Shown(self._inner)
        super()._settle()


class ViewSource(Source):
    """The records of a view of a headrace dataset, numbered as in the view."""

    def __init__(self, view: BaseDataset) -> None:
        assert view._chosen is not None
        self._view, self._chosen = view, view._chosen
        self.thread_safe: bool = view.sample_source.thread_safe

    def __len__(self) -> int:
        return len(self._chosen)

    def read(self, indices: Sequence[int]) -> list[Any]:
        return self._view.sample_source.read(self._chosen[np.asarray(indices, np.int64)].tolist())

    def blocks(self) -> npt.NDArray[np.int64] | None:
        return self._view.blocks()

    def location(self, index: int) -> str:
        return self._view.source_of(index)

    def fingerprint(self) -> str:
        return self._view.fingerprint


class _Shown:
    """Stands for the dataset inside in this one's repr."""

    def __init__(self, inner: BaseDataset) -> None:
        if isinstance(inner, Finished):
            self._text = f"<{inner.name} of {len(inner):,} samples>"
        else:
            self._text = repr(inner).rpartition("  # ")[0]  # without the number of samples

    def __repr__(self) -> str:
        return self._text


def _is_path(data_path: Any) -> bool:
    """True for a path, or a list of paths."""
    one = (str, bytes, os.PathLike)
    return isinstance(data_path, one) or (
        isinstance(data_path, (list, tuple)) and all(isinstance(path, one) for path in data_path)
    )
