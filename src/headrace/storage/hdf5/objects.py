"""Reads rows that are no plain numbers: strings, arrays of any length, and compounds with such."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import h5py
import numpy as np

from headrace.errors import FormatError
from headrace.io.handles import WorkerFiles
from headrace.io.library_errors import asking
from headrace.io.paths import redact
from headrace.storage.arrays.rows import LibraryRows
from headrace.storage.hdf5.remote import patiently
from headrace.storage.hdf5.versions import Versions


def holds_objects(dtype: np.dtype[Any], where: str) -> bool:
    """Do elements of that dtype lie elsewhere in the file, each of its own size?

    Raises:
        FormatError: they are references, which mean nothing outside of their file.
    """
    if h5py.check_ref_dtype(dtype) is not None:
        raise FormatError(f"{where} holds references to other objects of its file, and no values: name the dataset that they lead to")
    if dtype.names is not None:
        return any([holds_objects(dtype[name], f"{where}, field {name!r},") for name in dtype.names])
    return bool(dtype.hasobject) or (dtype.subdtype is not None and holds_objects(dtype.subdtype[0], where))


class ObjectRows(LibraryRows):
    """Rows through h5py, one by one.

    Args:
        opened: what each process has open.
        path, name: of the file, and of the dataset in it.
        dataset: open.
        versions: of its files; None: each read from a server is checked there.
    """

    def __init__(self, opened: WorkerFiles[h5py.File], path: str, name: str, dataset: h5py.Dataset, versions: Versions | None) -> None:
        self._opened, self._path, self._name, self._versions = opened, path, name, versions
        self.shape, self.dtype = tuple(dataset.shape), dataset.dtype
        self.how = "h5py: elements of any size"

    def read(self, rows: Sequence[int]) -> list[Any]:
        """The rows as h5py gives them.

        Raises:
            FormatError, BudgetError: they are damaged.
            FileChangedError: the file has been changed.
        """
        return patiently(functools.partial(self._read, rows))

    def _read(self, rows: Sequence[int]) -> list[Any]:
        with self._opened.reading(self._path) as file, asking("h5py", f"{redact(self._path)}: {self._name!r}"):
            if self._versions is not None:
                self._versions.check(file, rows)
            dataset = file[self._name]
            return [dataset[row] for row in rows]
