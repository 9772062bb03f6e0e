"""Ids that say of themselves whether they are supervised: one signed integer each.

An id that is supervised stands for itself, another one is stored as -1 - id. So ids and labels of
chats are cut, cached, mapped and packed as ids alone are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

IGNORED = -100
"""The label of what is not supervised."""


def mark(ids: npt.NDArray[Any], is_supervised: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """Ids with their marks, int32 of the same shape."""
    narrow = ids.astype(np.int32)
    return np.where(is_supervised, narrow, ~narrow)


def unmark(ids: npt.NDArray[np.int64], labels: npt.NDArray[np.int64]) -> None:
    """Makes marked ids the ids, in their place, and writes their labels into another array of
    the same shape.
    """
    np.copyto(labels, ids)
    is_marked = ids < 0
    labels[is_marked] = IGNORED
    np.invert(ids, out=ids, where=is_marked)


def ids_of(marked: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The ids, int64 of the same shape."""
    wide = marked.astype(np.int64)
    return np.maximum(wide, ~wide)


def labels_of(marked: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The ids that are supervised, elsewhere -100; int64 of the same shape."""
    wide = marked.astype(np.int64)
    wide[wide < 0] = IGNORED
    return wide
