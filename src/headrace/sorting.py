"""Sorting of whole numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def distinct(values: ArrayLike) -> NDArray[Any]:
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
