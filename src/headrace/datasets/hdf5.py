"""Rows of an HDF5 file as samples."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import numpy as np

from headrace.datasets.base import BaseDataset, CommonOptions, as_tensor
from headrace.datasets.filling import Like
from headrace.errors import ConfigError, FormatError
from headrace.modes import LoadingMode
from headrace.storage.hdf5 import DATA, HDF5Source, is_hdf5, open_hdf5, refuse_remote_hdf5


class HDF5Dataset(BaseDataset):
    """Samples are the rows of one dataset of an HDF5 file, as tensors of its dtype; with `target_name` ``(row, target)``.

    A file that `headrace.pack` wrote is recognised: its samples are counted, and encoded ones come as 1-D uint8 tensors.

    Args:
        data_path: a local HDF5 file.
        dataset_name: path of the dataset inside the file; its first axis counts the samples.
        target_name: path of a dataset with one row a sample.
        transform: called with the row as a tensor.
        loading_mode: see `LoadingMode`.
        **options: see `BaseDataset`.

    Raises:
        ConfigError: several files or datasets, or a folder.
        DataNotFoundError, FormatError: no such file; no HDF5 file, or a dtype without a fixed size (numbers are read by now).
        MissingNameError: no such dataset; the message lists those there are.
    """

    def __init__(
        self,
        data_path: str | os.PathLike[Any],
        dataset_name: str = DATA,
        target_name: str | None = None,
        transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
        loading_mode: LoadingMode | str = LoadingMode.LAZY,
        **options: Unpack[CommonOptions],
    ) -> None:
        if not isinstance(data_path, (str, os.PathLike)) or not isinstance(dataset_name, str):
            raise ConfigError("HDF5Dataset reads one dataset of one file by now: give data_path and dataset_name as text, not as a list")
        refuse_remote_hdf5(data_path)
        path = os.path.expanduser(os.fspath(data_path))
        if os.path.isdir(path):
            raise ConfigError(f"{path} is a folder: name an HDF5 file in it")
        if os.path.exists(path) and not is_hdf5(path):
            raise FormatError(f"{path} is no HDF5 file, whatever its name says")
        if not os.path.exists(path):
            open_hdf5(path)  # says what is wrong
        source = HDF5Source(path, dataset_name)
        targets = None if target_name is None else source.column(target_name)
        super().__init__(source, targets=targets, transform=transform, loading_mode=loading_mode, **options)

    def present(self, value: Any) -> Any:
        return as_tensor(value)

    def input_like(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Like | None:
        return shape, dtype

    def held_nbytes(self) -> int | None:
        source = self._source
        return int(source.sizes().sum()) if isinstance(source, HDF5Source) else None

    def sample_nbytes(self) -> int | None:
        source = self._source
        assert isinstance(source, HDF5Source)
        is_fixed = not source.has_samples_of_any_size and not self._is_random
        return int(source.sizes()[0]) if is_fixed and len(source) else None
