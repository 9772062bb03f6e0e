"""Types that all rooms share."""

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
