"""Types of arrays that all rooms share, and the distinct numbers of one."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int64]
AnyArray: TypeAlias = npt.NDArray[Any]


class ArraySpec(NamedTuple):
    """Shape and dtype of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of such an array."""
        return math.prod(self.shape) * self.dtype.itemsize


BFLOAT16: np.dtype[Any] = np.dtype([("bfloat16", np.uint16)])
"""Stands for torch.bfloat16, which NumPy does not have: an array of this dtype holds the bits of
the numbers.
"""


def distinct(values: npt.ArrayLike) -> AnyArray:
    """Gives each value once, ascending, in one dimension: what `numpy.unique` gives of whole
    numbers.

    numpy 2.3 and later look for them by a hash: 0.85 s for 10^6 of int64. Sorting them takes 17 ms,
    and to see that they are sorted 1 ms.
    """
    array = np.ravel(values)
    if (array[1:] < array[:-1]).any():
        array = np.sort(array)
    is_new = np.empty(array.size, bool)
    is_new[:1] = True
    np.not_equal(array[1:], array[:-1], out=is_new[1:])
    return array[is_new]
