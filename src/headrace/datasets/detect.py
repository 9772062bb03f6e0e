"""Which format has a path?"""

from __future__ import annotations

import os
from typing import Any

from headrace.datasets.base import BaseDataset
from headrace.datasets.hdf5 import HDF5Dataset
from headrace.datasets.image import ImageDataset
from headrace.datasets.pixels import EXTENSIONS
from headrace.datasets.text import TEXT_EXTENSIONS, TextDataset
from headrace.datasets.zarr import ZarrDataset
from headrace.errors import FormatError
from headrace.storage.hdf5_files import is_hdf5
from headrace.storage.packed import packed_info
from headrace.storage.scan import DataPath, redact
from headrace.storage.zarr_files import is_zarr


def open_dataset(data_path: DataPath, **options: Any) -> BaseDataset:
    """The dataset for a path, its format found by content: a folder, glob or list of images, an HDF5 file, or a Zarr store.

    Args:
        data_path: what `ImageDataset`, `HDF5Dataset` or `ZarrDataset` take.
        **options: passed to the dataset's class.

    Raises:
        DataNotFoundError: nothing there, or no file of a known format.
        FormatError: a file of another format.
    """
    if isinstance(data_path, (str, os.PathLike)) and is_zarr(data_path):
        return ZarrDataset(data_path, **options)
    if isinstance(data_path, (str, os.PathLike)) and os.path.isfile(data_path):
        if is_hdf5(data_path):
            info = packed_info(data_path)
            return (ImageDataset if info is not None and info.kind == "image" else HDF5Dataset)(data_path, **options)
        if os.fspath(data_path).lower().endswith(TEXT_EXTENSIONS):
            return TextDataset(data_path, **options)
        if not os.fspath(data_path).lower().endswith(EXTENSIONS):
            raise FormatError(f"{redact(data_path)}: the format is not known; headrace reads images, texts, HDF5 and Zarr by now")
    return ImageDataset(data_path, **options)
