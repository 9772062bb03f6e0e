"""Indices, targets, fingerprints and blocks of views; and datasets inside of torch's wrappers."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
from torch.utils.data import Subset

from headrace.core.decoder import plain_target
from headrace.dtypes import AnyArray, IntArray
from headrace.errors import warn
from headrace.order.seeding import random_names


class TargetSequence(Sequence[Any]):
    """One target per sample, made from flat arrays when it is requested."""

    @abstractmethod
    def take(self, indices: IntArray) -> Self:
        """The targets of some samples."""


class ColumnTargets(TargetSequence):
    """Targets that are dicts of a value of each column.

    Args:
        columns: values by name, one a sample.

    Attributes:
        columns: the same.
    """

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self.columns: dict[str, Any] = dict(columns)

    @classmethod
    def of_rows(cls, rows: AnyArray) -> Self:
        """Of an array of compounds."""
        return cls({name: np.ascontiguousarray(rows[name]) for name in rows.dtype.names or ()})

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        return {name: plain_target(column[index]) for name, column in self.columns.items()}

    def take(self, indices: IntArray) -> Self:
        return type(self)(
            {name: targets_of_view(column, indices) for name, column in self.columns.items()}
        )


def chosen_indices(indices: Sequence[int] | AnyArray, length: int) -> IntArray:
    """Resolves the argument of `subset`: indices, or a mask of that length.

    Raises:
        IndexError: an index that is no integer; a mask that is not as long as the dataset.
    """
    chosen = np.asarray(indices).reshape(-1)
    if chosen.dtype == bool and len(chosen) not in (0, length):
        raise IndexError(
            f"subset: the mask has {len(chosen):,} entries, the dataset {length:,} samples"
        )
    if chosen.dtype.kind not in "biu" and len(chosen):
        raise IndexError(
            f"subset takes indices or a mask, not {chosen.dtype} such as {chosen[0]!r}"
        )
    if chosen.dtype == bool:
        return np.flatnonzero(chosen)
    return chosen.astype(np.int64)


def targets_of_view(targets: Any, chosen: IntArray) -> Any:
    """The targets of the chosen samples."""
    if targets is None or isinstance(targets, np.ndarray):
        return targets if targets is None else targets[chosen]
    if isinstance(targets, TargetSequence):
        return targets.take(chosen)
    return [targets[index] for index in chosen.tolist()]


def fingerprint_of_view(whole: str, chosen: IntArray) -> str:
    """A fingerprint of the chosen samples of a dataset."""
    return hashlib.blake2b(
        whole.encode() + chosen.astype("<i8").tobytes(), digest_size=16
    ).hexdigest()


def parts_of(dataset: Any, opaque: type | tuple[type, ...] = ()) -> Iterator[Any]:
    """A dataset and, each once, those that it holds as `dataset` or `datasets`, and so on; not
    those inside of an `opaque` one.
    """
    waiting, seen = [dataset], set[int]()
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        if not isinstance(part, opaque):
            for name in ("dataset", "datasets"):
                inner = getattr(part, "__dict__", {}).get(name)
                if inner is not None:
                    waiting.extend(inner if isinstance(inner, (list, tuple)) else [inner])


def answers_batches(dataset: Any) -> bool:
    """True if a dataset reads batches by ``__getitems__``. A torch Subset always has one, but only
    passes batches on.
    """
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return hasattr(dataset, "__getitems__")


def warn_if_random(dataset: Any, which: str) -> None:
    """Warns if validation data, or the data that they are taken from, have random transforms."""
    holders = list[Any]()
    for part in parts_of(dataset):
        for name in ("transforms", "transform", "target_transform"):
            holders.append(getattr(part, name, None))
        decoder = getattr(part, "sample_decoder", None)
        if getattr(decoder, "draws", False):
            holders.append(decoder)
    names = random_names(*holders)
    if names:
        warn(
            f"{which} are transformed at random ({', '.join(names[:3])}): pass val_transform=, the "
            "transform of validation data ([] for none), or the same transform again if that is "
            "meant"
        )
