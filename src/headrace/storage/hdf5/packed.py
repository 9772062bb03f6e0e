"""The attributes of HDF5 files that `headrace.pack` wrote."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.storage.arrays.packed import PackedInfo, info_in
from headrace.storage.hdf5.files import HDF5Files


def packed_info(path: str | os.PathLike[Any], hdf5: HDF5Files | None = None) -> PackedInfo | None:
    """What a packed file says about itself; None for any other HDF5 file.

    Raises:
        FormatError: the file is of a later version of headrace, or damaged.
    """
    with (hdf5 or HDF5Files()).reading(os.fspath(path)) as file:
        return info_in(file.attrs, path)


def are_offsets(offsets: npt.NDArray[Any], count: int, end: int) -> bool:
    """True if `count + 1` offsets lead from 0 to `end`, never backwards."""
    is_whole = offsets.shape == (count + 1,) and offsets[0] == 0 and offsets[-1] == end
    return bool(is_whole and np.all(offsets[1:] >= offsets[:-1]))
