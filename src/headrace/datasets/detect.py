"""Which format has a path?"""

from __future__ import annotations

import os
from typing import Any

from headrace.datasets.base import BaseDataset
from headrace.datasets.hdf5 import HDF5Dataset
from headrace.datasets.image import ImageDataset
from headrace.datasets.pixels import EXTENSIONS
from headrace.errors import FormatError
from headrace.storage.hdf5 import is_hdf5, packed_info
from headrace.storage.scan import DataPath, redact


def open_dataset(data_path: DataPath, **options: Any) -> BaseDataset:
    """The dataset for a path, its format found by content: a folder, glob or list of images, or an HDF5 file.

    Args:
        data_path: what `ImageDataset` or `HDF5Dataset` take.
        **options: passed to the dataset's class.

    Raises:
        DataNotFoundError: nothing there, or no file of a known format.
        FormatError: a file of another format.
    """
    if isinstance(data_path, (str, os.PathLike)) and os.path.isfile(data_path):
        if is_hdf5(data_path):
            info = packed_info(data_path)
            return (ImageDataset if info is not None and info.kind == "image" else HDF5Dataset)(data_path, **options)
        if not os.fspath(data_path).lower().endswith(EXTENSIONS):
            raise FormatError(f"{redact(data_path)}: the format is not known; headrace reads images and HDF5 by now")
    return ImageDataset(data_path, **options)
