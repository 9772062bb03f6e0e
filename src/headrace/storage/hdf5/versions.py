"""Checks that h5py reads a dataset from the files that were there when it was opened, and not from others of their names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import h5py
import numpy as np

from headrace.errors import DataNotFoundError
from headrace.io.files import Files, Version
from headrace.io.local.files import changed, version_of
from headrace.io.paths import redact

ALL_ROWS = (0, (1 << 63) - 1)


class OtherFile(NamedTuple):
    """A file beside a dataset's own that holds some of its bytes.

    Attributes:
        path: where HDF5 finds it.
        first, last: no other rows lie there.
    """

    path: str
    first: int
    last: int


class Versions:
    """The versions of the files that hold a dataset's bytes.

    Args:
        dataset: open.
        path: of the file in which it was looked for; or its URL.
        name: by which it was found; a link to another file may have led there.
        files: by which the file that holds it is read.

    Attributes:
        path: of the file that holds it.
        is_linked: True if that is another file.
        known: its version; None: another process is writing to it, as HDF5's SWMR mode allows, so that it may change.
    """

    def __init__(self, dataset: h5py.Dataset, path: str, name: str, files: Files) -> None:
        file = dataset.file
        self._name, self.path, self.is_linked = name, path, False
        if not files.is_remote:  # what is remote leads nowhere else
            self.path = os.path.abspath(file.filename)
            self.is_linked = self.path != path
        self.known: Version | None = None if file.swmr_mode else files.version(self.path)
        self._check(file)
        self.add([])

    def _check(self, file: h5py.File) -> None:
        """Compares the file as h5py has it open with its version."""
        if self.known is not None and file.driver == "sec2" and version_of(os.fstat(file.id.get_vfd_handle())) != self.known:
            raise changed(self.path)

    def add(self, others: Sequence[OtherFile]) -> None:
        """Notes the files that a virtual dataset or external storage needs besides."""
        self._others = [(other.path, version_of(os.stat(other.path))) for other in others]
        self._rows = np.array([(other.first, other.last) for other in others], np.int64).reshape(-1, 2)

    def check(self, file: h5py.File, rows: Sequence[int]) -> None:
        """Looks at the file that holds the dataset as h5py has it open, and at the others that hold some rows.

        Args:
            file: in which it was looked for.
            rows: that are to be read.

        Raises:
            FileChangedError, DataNotFoundError: one has been changed; or is gone, for which HDF5 would give the fill value.
        """
        if self.known is not None:
            dataset = file.get(self._name) if self.is_linked else None
            if self.is_linked and dataset is None:
                raise changed(file.filename)
            self._check(file if dataset is None else dataset.file)
        if not self._others:
            return
        asked = np.sort(np.asarray(rows, np.int64))
        needed = np.searchsorted(asked, self._rows[:, 0], "left") < np.searchsorted(asked, self._rows[:, 1], "right")
        for number in np.flatnonzero(needed).tolist():
            path, version = self._others[number]
            try:
                now = version_of(os.stat(path))
            except FileNotFoundError as error:
                raise DataNotFoundError(f"{redact(path)} is gone, which holds rows of {redact(file.filename)}") from error
            if now != version:
                raise changed(path)
