"""Splits datasets into views: at random, by labels, and by groups."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self, overload

import numpy as np

from headrace.arguments import checks_keywords
from headrace.core.decoder import Decoder
from headrace.core.views import TargetSequence, parts_of, targets_of_view
from headrace.dtypes import AnyArray, IntArray
from headrace.errors import ConfigError, MissingNameError, warn
from headrace.io.nearest_names import listed_names
from headrace.order.seeding import random_names
from headrace.order.splits import fold_parts, split_parts

Transform = Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None
"""A callable, or several that are applied one after the other. None: no transform."""
JointTransform = (
    Callable[[Any, Any], tuple[Any, Any]] | Sequence[Callable[[Any, Any], tuple[Any, Any]]] | None
)
"""The same for callables that take input and target."""


class Splittable:
    """Splitting, which needs only a dataset's views and labels."""

    targets: Any
    """One target per sample, or None."""
    label_columns: Mapping[str, Any] = MappingProxyType({})
    """The columns of the table of labels, for all samples of the whole dataset. Empty if the
    labels are not a table.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def subset(self, indices: Sequence[int] | AnyArray) -> Self:
        """Returns a view of some samples."""

    @abstractmethod
    def with_transform(self, transform: Transform) -> Self:
        """Returns a view of all samples with another transform."""

    @abstractmethod
    def whole_indices(self, indices: Any) -> IntArray:
        """Indices of the samples in the whole dataset."""

    @overload
    def split(
        self,
        fraction: float,
        seed: int = 42,
        *,
        stratify: Any = None,
        groups: Any = None,
        val_transform: Transform = None,
    ) -> tuple[Self, Self]: ...
    @overload
    def split(
        self,
        fraction: Sequence[float],
        seed: int = 42,
        *,
        stratify: Any = None,
        groups: Any = None,
        val_transform: Transform = None,
    ) -> tuple[Self, ...]: ...
    @checks_keywords
    def split(
        self,
        fraction: float | Sequence[float],
        seed: int = 42,
        *,
        stratify: Any = None,
        groups: Any = None,
        val_transform: Transform = None,
    ) -> tuple[Self, ...]:
        """Splits the dataset into disjoint views that together contain all samples.

        Samples are drawn at random. Without `stratify` and `groups`, the split depends on `seed`
        and the number of samples alone. Each view is in index order.

        Args:
            fraction: fraction of the samples in the first of two views (rounded), or a list with
                the fraction of each view (``[.7, .15, .15]``).
            seed: any integer.
            stratify: one label per sample, the name of a column of the table of labels, or True for
                `targets`. Each view gets its fraction of the samples of each label.
            groups: one group per sample, such as a patient, or the name of a column of these.
                Samples of a group stay together, so fractions are approximate.
            val_transform: transform of all views but the first; [] for none. None: the views keep
                the dataset's transform, with a warning if it is random.

        Raises:
            ConfigError: an argument is invalid, or a view would have no samples.
        """
        fractions = (
            list(fraction)
            if isinstance(fraction, (Sequence, np.ndarray))
            else [fraction, 1 - fraction]
        )
        labels = _labels_of(self, stratify)
        members = _column_of(self, groups, "groups")
        if val_transform is None:
            self._warn_if_random("split: all views")
        parts = split_parts(len(self), fractions, seed, stratify=labels, groups=members)
        views = [self.subset(part) for part in parts]
        if val_transform is not None:
            views[1:] = [view.with_transform(val_transform) for view in views[1:]]
        return tuple(views)

    @checks_keywords
    def folds(
        self,
        k: int,
        seed: int = 42,
        *,
        stratify: Any = None,
        groups: Any = None,
        val_transform: Transform = None,
    ) -> list[tuple[Self, Self]]:
        """Returns pairs of training and validation views for k-fold cross-validation.

        Each sample is in exactly one validation view. The other arguments are those of `split`.
        """
        if val_transform is None:
            self._warn_if_random("folds: the validation views too")
        labels = _labels_of(self, stratify)
        members = _column_of(self, groups, "groups")
        everything = np.arange(len(self))
        pairs = []
        for part in fold_parts(len(self), k, seed, stratify=labels, groups=members):
            train, val = self.subset(np.delete(everything, part)), self.subset(part)
            if val_transform is not None:
                val = val.with_transform(val_transform)
            pairs.append((train, val))
        return pairs

    def _warn_if_random(self, views: str) -> None:
        names = random_steps_in(self)
        if names:
            warn(
                f"{views} are transformed at random ({', '.join(names[:3])}): pass "
                "val_transform=, the transform of validation data "
                "([] for none), or the same transform again if that is meant"
            )


def _labels_of(dataset: Splittable, stratify: Any) -> Any:
    """The labels that a split keeps the shares of: those that were given, a column of them, or
    for True the targets, if there are any.
    """
    if stratify is True and dataset.targets is None:
        raise ConfigError(
            f"stratify=True: this {type(dataset).__name__} has no targets: pass a label for each "
            "sample"
        )
    if stratify is True and isinstance(dataset.targets, TargetSequence):
        columns = ""
        if dataset.label_columns:
            columns = f", or the name of one of its columns ({', '.join(dataset.label_columns)})"
        raise ConfigError(
            f"stratify=True: a target of this {type(dataset).__name__} is no single label: pass a "
            f"label for each sample{columns}"
        )
    return dataset.targets if stratify is True else _column_of(dataset, stratify, "stratify")


def _column_of(dataset: Splittable, given: Any, name: str) -> Any:
    """One value a sample: as they were given, or of the column that was named."""
    if not isinstance(given, str):
        return given
    columns = dataset.label_columns
    if not columns:
        raise ConfigError(
            f"{name}={given!r}: this {type(dataset).__name__} has no table of labels: pass a "
            "label for each sample"
        )
    if given not in columns:
        raise MissingNameError(
            f"{name}: the table of labels has no column {given!r}; it has "
            f"{listed_names(columns, given, repr)}"
        )
    return targets_of_view(columns[given], dataset.whole_indices(np.arange(len(dataset))))


def random_steps_in(dataset: Any) -> list[str]:
    """The names of what transforms samples at random in a dataset, headrace's or another, and in
    those inside of it.
    """
    holders = list[Any]()
    for part in parts_of(dataset):
        sample_decoder = getattr(part, "sample_decoder", None)
        if isinstance(sample_decoder, Decoder):
            holders += sample_decoder.random_steps()
        holders += [
            getattr(part, name, None) for name in ("transforms", "transform", "target_transform")
        ]
    return random_names(*holders)
