"""Splits of datasets into views: at random, by labels, and by groups."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self, overload

import numpy as np
import numpy.typing as npt

from headrace.datasets.core.views import TargetSequence, targets_of_view
from headrace.errors import ConfigError, MissingNameError
from headrace.io.nearest_names import listed_names
from headrace.order.splits import fold_parts, split_parts

Transform = Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None
"""A callable, or several that are called one after the other; None: none."""
JointTransform = Callable[[Any, Any], tuple[Any, Any]] | Sequence[Callable[[Any, Any], tuple[Any, Any]]] | None
"""The same of callables that get input and target."""


class Splittable:
    """What a dataset does with its views and its labels alone."""

    targets: Any
    """One target a sample, or None."""
    label_columns: Mapping[str, Any] = MappingProxyType({})
    """The columns of the table of its labels, for all samples of the whole dataset; none where its labels are no table."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def subset(self, indices: Sequence[int] | npt.NDArray[Any]) -> Self:
        """A view of some samples."""

    @abstractmethod
    def with_transform(self, transform: Transform) -> Self:
        """A view of all samples with another transform."""

    @abstractmethod
    def whole_indices(self, indices: Any) -> npt.NDArray[np.int64]:
        """The numbers of samples in the whole dataset."""

    @overload
    def split(
        self, fraction: float, seed: int = 42, *, stratify: Any = None, groups: Any = None, val_transform: Transform = None
    ) -> tuple[Self, Self]: ...
    @overload
    def split(
        self, fraction: Sequence[float], seed: int = 42, *, stratify: Any = None, groups: Any = None, val_transform: Transform = None
    ) -> tuple[Self, ...]: ...
    def split(
        self,
        fraction: float | Sequence[float],
        seed: int = 42,
        *,
        stratify: Any = None,
        groups: Any = None,
        val_transform: Transform = None,
    ) -> tuple[Self, ...]:
        """Views that share no sample and together have all, drawn at random by seed and length alone; each in index order.

        Args:
            fraction: of the samples that the first of two views gets (rounded); or the fractions of all views (``[.7, .15, .15]``).
            seed: any integer.
            stratify: a label a sample, a column of the table of labels, or True for `targets`: each view gets its fraction of each label's
                samples.
            groups: a group a sample, such as its patient, or a column of these: its samples stay together, and fractions are approached.
            val_transform: of all views but the first, in place of their transform; [] for none.

        Raises:
            ConfigError: an argument makes no sense, or a view would have no sample.
        """
        fractions = list(fraction) if isinstance(fraction, (Sequence, np.ndarray)) else [fraction, 1 - fraction]
        labels, members = _labels_of(self, stratify), _column_of(self, groups, "groups")
        first, *others = map(self.subset, split_parts(len(self), fractions, seed, stratify=labels, groups=members))
        return (first, *(others if val_transform is None else [view.with_transform(val_transform) for view in others]))

    def folds(
        self, k: int, seed: int = 42, *, stratify: Any = None, groups: Any = None, val_transform: Transform = None
    ) -> list[tuple[Self, Self]]:
        """Training and validation views of a k-fold cross-validation: each sample is in one validation view. See `split`."""
        labels, members = _labels_of(self, stratify), _column_of(self, groups, "groups")
        parts, everything = fold_parts(len(self), k, seed, stratify=labels, groups=members), np.arange(len(self))
        pairs = [(self.subset(np.delete(everything, part)), self.subset(part)) for part in parts]
        return pairs if val_transform is None else [(train, val.with_transform(val_transform)) for train, val in pairs]


def _labels_of(dataset: Splittable, stratify: Any) -> Any:
    """The labels that a split keeps the shares of: those that were given, a column of them, or for True the targets, if there are any."""
    if stratify is True and dataset.targets is None:
        raise ConfigError(f"stratify=True: this {type(dataset).__name__} has no targets: pass a label for each sample")
    if stratify is True and isinstance(dataset.targets, TargetSequence):
        columns = f", or the name of one of its columns ({', '.join(dataset.label_columns)})" if dataset.label_columns else ""
        raise ConfigError(
            f"stratify=True: a target of this {type(dataset).__name__} is no single label: pass a label for each sample{columns}"
        )
    return dataset.targets if stratify is True else _column_of(dataset, stratify, "stratify")


def _column_of(dataset: Splittable, given: Any, name: str) -> Any:
    """One value a sample: as they were given, or of the column that was named."""
    if not isinstance(given, str):
        return given
    columns = dataset.label_columns
    if not columns:
        raise ConfigError(f"{name}={given!r}: this {type(dataset).__name__} has no table of labels: pass a label for each sample")
    if given not in columns:
        raise MissingNameError(f"{name}: the table of labels has no column {given!r}; it has {listed_names(columns, given, repr)}")
    return targets_of_view(columns[given], dataset.whole_indices(np.arange(len(dataset))))
