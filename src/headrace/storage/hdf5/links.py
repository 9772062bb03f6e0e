"""Finds the files that a dataset's values lie in, and checks that h5py reads those that were there
when it was opened.

HDF5 gives the fill value for a part of a virtual dataset whose source is missing, and follows
sources that lead back to where they came from until its stack ends. Both are errors here. Of remote
files nothing may lead to another file: HDF5 would look for it in the very same bytes, or on this
machine's disk.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import cast

import h5py
import numpy as np

from headrace.errors import DataNotFoundError, FormatError
from headrace.io.files import Version
from headrace.io.local.files import LocalFiles, changed
from headrace.io.paths import redact
from headrace.storage.hdf5.files import HDF5Files, found_from
from headrace.storage.hdf5.filters import check_filters
from headrace.storage.hdf5.remote import other_file

ALL_ROWS = (0, (1 << 63) - 1)

_DEPTH = 32
_Rows = tuple[int, int]


class Versions:
    """The versions of the files that hold a dataset's bytes.

    Args:
        dataset: open.
        path: of the file in which it was looked for; or its URL.
        name: by which it was found; a link to another file may have led there.
        hdf5: opens that file, and others.

    Attributes:
        path: of the file that holds it.
        is_linked: True if that is another file.
        known: its version; None: another process is writing to it, as HDF5's SWMR mode allows, so
            that it may change.

    Raises:
        DataNotFoundError: a file that a virtual or external dataset is made of is missing; the
            message names it.
        FormatError: a source is missing in its file, h5py lacks a filter of it, or a virtual
            dataset leads back to itself; or, of a remote file, to another.
        FileChangedError: the file has been changed since it was opened.
    """

    def __init__(self, dataset: h5py.Dataset, path: str, name: str, hdf5: HDF5Files) -> None:
        file = dataset.file
        self._name, self.path, self.is_linked = name, path, False
        if not hdf5.files.is_remote:  # what is remote leads nowhere else
            self.path = os.path.abspath(file.filename)
            self.is_linked = self.path != path
        self.known: Version | None = None if file.swmr_mode else hdf5.files.version(self.path)
        self._files = cast(LocalFiles, hdf5.files)
        self._check(file)
        others = _Found(hdf5)
        others.add_external(dataset, self.path)
        if dataset.is_virtual:
            others.follow(dataset, self.path, None, [])
        self._others = list(others.files)
        for other in self._others:
            self._files.version(other)
        self._rows = np.array([*others.files.values()], np.int64).reshape(-1, 2)

    def _check(self, file: h5py.File) -> None:
        """Compares the file as h5py has it open with its version."""
        if (
            self.known is not None
            and file.driver == "sec2"
            and not self._files.is_same(self.path, file.id.get_vfd_handle())
        ):
            raise changed(self.path)

    def check(self, file: h5py.File, rows: Sequence[int]) -> None:
        """Compares the file that holds the dataset, as h5py has it open, and the others that hold
        some rows.

        Args:
            file: in which it was looked for.
            rows: that are to be read.

        Raises:
            FileChangedError, DataNotFoundError: one has been changed; or is gone, for which HDF5
                would give the fill value.
        """
        if self.known is not None:
            dataset = file.get(self._name) if self.is_linked else None
            if self.is_linked and dataset is None:
                raise changed(file.filename)
            self._check(file if dataset is None else dataset.file)
        if not self._others:
            return
        asked = np.sort(np.asarray(rows, np.int64))
        needed = np.searchsorted(asked, self._rows[:, 0], "left") < np.searchsorted(
            asked, self._rows[:, 1], "right"
        )
        for number in np.flatnonzero(needed).tolist():
            path = self._others[number]
            if not os.path.exists(path):
                raise DataNotFoundError(
                    f"{redact(path)} is gone, which holds rows of {redact(file.filename)}"
                )
            if not self._files.is_same(path):
                raise changed(path)


class _Found:
    """The files beside its own that a virtual or external dataset is made of.

    Attributes:
        files: where HDF5 finds each, and the first and last row that may lie there.
    """

    def __init__(self, hdf5: HDF5Files) -> None:
        self._hdf5, self._seen = hdf5, set[tuple[str, str]]()
        self.files: dict[str, _Rows] = {}

    def _add(self, path: str, rows: _Rows) -> None:
        first, last = self.files.get(path, rows)
        self.files[path] = min(first, rows[0]), max(last, rows[1])

    def add_external(self, dataset: h5py.Dataset, path: str) -> None:
        """Notes the files of external storage."""
        for name, _, _ in dataset.external or ():
            where = f"{redact(path)}: {dataset.name!r} lies in the external file {redact(name)!r}"
            if self._hdf5.files.is_remote:
                raise other_file(where)
            place = _external_place(name, path)
            if not os.path.exists(place):
                raise DataNotFoundError(
                    f"{where}, which does not exist (working folder: {os.getcwd()})"
                )
            self._add(place, ALL_ROWS)

    def follow(
        self, dataset: h5py.Dataset, path: str, rows: _Rows | None, way: list[tuple[str, str]]
    ) -> None:
        """Notes the files of all sources.

        Args:
            dataset, path: where this step of the way is.
            rows: of the dataset where the way began which may lie here; None: it begins here.
            way: the steps before.
        """
        is_remote = self._hdf5.files.is_remote
        here = path if is_remote else os.path.realpath(path), str(dataset.name)
        what = f"{redact(path)}: the virtual dataset {dataset.name!r}"
        if here in way or len(way) > _DEPTH:
            raise FormatError(f"{what} leads back to itself, or through more than {_DEPTH} others")
        if here in self._seen:
            return
        self._seen.add(here)
        if not dataset.is_virtual:
            check_filters(dataset, f"{redact(path)}: {dataset.name!r}")
            self.add_external(dataset, path)
            return
        for source in dataset.virtual_sources():
            if is_remote and source.file_name != ".":
                raise other_file(f"{what} needs {redact(source.file_name)!r}")
            lies_in = _rows_of(source.vspace) if rows is None else ALL_ROWS
            for file_name in _files_of(source.file_name, path, what):
                if file_name != path:
                    self._add(file_name, lies_in)
                if _is_pattern(source.file_name) or _is_pattern(source.dset_name):
                    continue  # there are as many sources as there are: none is missing
                with self._hdf5.reading(file_name) as file:
                    target = file.get(_plain(source.dset_name))
                    if not isinstance(target, h5py.Dataset):
                        raise FormatError(
                            f"{what} needs {source.dset_name!r} of {redact(file_name)}, which is "
                            "missing"
                        )
                    self.follow(target, file_name, lies_in, [*way, here])


def _rows_of(space: h5py.h5s.SpaceID) -> _Rows:
    """The first and the last row of a selection, where it has an end."""
    try:
        starts, ends = space.get_select_bounds()
    except (ValueError, RuntimeError):  # nothing is selected, or it grows
        return ALL_ROWS
    return (int(starts[0]), int(ends[0])) if starts else ALL_ROWS


def _is_pattern(name: str) -> bool:
    return "%b" in name.replace("%%", "")


def _plain(name: str, number: int = 0) -> str:
    """A source's name as HDF5 reads it: "%b" is a number, and "%%" a percent sign."""
    return "%".join(part.replace("%b", str(number)) for part in name.split("%%"))


def _files_of(name: str, path: str, what: str) -> list[str]:
    """The files that the name of a source means."""
    if name == ".":
        return [path]
    found, numbers = list[str](), itertools.count() if _is_pattern(name) else [0]
    for number in numbers:
        if (place := found_from(_plain(name, number), path, "HDF5_VDS_PREFIX")) is None:
            break
        found.append(place)
    if not found and not _is_pattern(name):
        raise DataNotFoundError(f"{what} needs {redact(_plain(name))!r}, which is missing")
    return found


def _external_place(name: str, path: str) -> str:
    """Where HDF5 looks for a file of external storage: below the prefix that is set, or else in
    the working folder.
    """
    prefix = os.environ.get("HDF5_EXTFILE_PREFIX", "")
    if prefix.startswith("${ORIGIN}"):
        prefix = os.path.dirname(path) + prefix.removeprefix("${ORIGIN}")
    return os.path.join("" if prefix == "." else prefix, name)
