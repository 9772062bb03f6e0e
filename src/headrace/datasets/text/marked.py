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


def label_rows(
    ids: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    documents: npt.NDArray[np.int32],
    labels: npt.NDArray[np.int64],
    is_marked: bool,
) -> None:
    """Writes the labels of rows of whole documents into another array of their shape: -100 at
    padding, where ids are marked as not supervised, and at the first token of each document, which
    follows from no other of it. Marked ids become the ids, in their place.
    """
    if is_marked:
        unmark(ids, labels)
    else:
        np.copyto(labels, ids)
    labels[(documents < 0) | (positions == 0)] = IGNORED


def ids_of(marked: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The ids, int64 of the same shape."""
    wide = marked.astype(np.int64)
    return np.maximum(wide, ~wide)


def labels_of(marked: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The ids that are supervised, elsewhere -100; int64 of the same shape."""
    wide = marked.astype(np.int64)
    wide[wide < 0] = IGNORED
    return wide
