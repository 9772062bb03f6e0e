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
from headrace.formats.hdf5.files import HDF5Files, found_from
from headrace.formats.hdf5.filters import check_filters
from headrace.formats.hdf5.remote import other_file
from headrace.io.files import Version
from headrace.io.local.files import LocalFiles, changed
from headrace.io.paths import redact

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
        self._name = name
        self.path = path
        self.is_linked = False
        if not hdf5.files.is_remote:  # what is remote leads nowhere else
            self.path = os.path.abspath(file.filename)
            self.is_linked = self.path != path
        self.known: Version | None = None if file.swmr_mode else hdf5.files.version(self.path)
        self._files = cast(LocalFiles, hdf5.files)
        self._check(file)
        # other files, and the first and last row that may lie there
        self._others: dict[str, _Rows] = {}
        self._follow(dataset, self.path, None, [], hdf5, set())
        for other in self._others:
            self._files.version(other)
        self._rows = np.array([*self._others.values()], np.int64).reshape(-1, 2)

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
        firsts = np.searchsorted(asked, self._rows[:, 0])
        lasts = np.searchsorted(asked, self._rows[:, 1], side="right")
        paths = list(self._others)
        for number in np.flatnonzero(firsts < lasts).tolist():
            path = paths[number]
            if not os.path.exists(path):
                raise DataNotFoundError(
                    f"{redact(path)} is gone, which holds rows of {redact(file.filename)}"
                )
            if not self._files.is_same(path):
                raise changed(path)

    def _add(self, path: str, rows: _Rows) -> None:
        first, last = self._others.get(path, rows)
        self._others[path] = (min(first, rows[0]), max(last, rows[1]))

    def _follow(
        self,
        dataset: h5py.Dataset,
        path: str,
        rows: _Rows | None,
        way: list[tuple[str, str]],
        hdf5: HDF5Files,
        seen: set[tuple[str, str]],
    ) -> None:
        """Notes the files of external storage, and of all sources of a virtual dataset.

        Args:
            dataset, path: where this step of the way is.
            rows: of the dataset where the way began which may lie here; None: it begins here.
            way: the steps before.
            hdf5: opens files.
            seen: steps that need not be gone again.
        """
        is_remote = hdf5.files.is_remote
        here = (path if is_remote else os.path.realpath(path), str(dataset.name))
        where = f"{redact(path)}: {dataset.name!r}"
        if here in way or len(way) > _DEPTH:
            raise FormatError(
                f"{where}, a virtual dataset, leads back to itself, or through more than {_DEPTH} "
                "others"
            )
        if here in seen:
            return
        seen.add(here)
        if way and not dataset.is_virtual:
            check_filters(dataset, where)
        for name, _, _ in dataset.external or ():
            external = f"{where} lies in the external file {redact(name)!r}"
            if is_remote:
                raise other_file(external)
            place = _external_place(name, path)
            if not os.path.exists(place):
                raise DataNotFoundError(
                    f"{external}, which does not exist (working folder: {os.getcwd()})"
                )
            self._add(place, ALL_ROWS)
        for source in dataset.virtual_sources() if dataset.is_virtual else ():
            if is_remote and source.file_name != ".":
                raise other_file(f"{where}, a virtual dataset, needs {redact(source.file_name)!r}")
            lies_in = ALL_ROWS
            if rows is None:
                lies_in = _rows_of(source.vspace)
            for file_name in _files_of(source.file_name, path, where):
                if file_name != path:
                    self._add(file_name, lies_in)
                if _is_pattern(source.file_name) or _is_pattern(source.dset_name):
                    continue  # there are as many sources as there are: none is missing
                with hdf5.reading(file_name) as file:
                    target = file.get(_plain(source.dset_name))
                    if not isinstance(target, h5py.Dataset):
                        raise FormatError(
                            f"{where}, a virtual dataset, needs {source.dset_name!r} of "
                            f"{redact(file_name)}, which is missing"
                        )
                    self._follow(target, file_name, lies_in, [*way, here], hdf5, seen)


def _rows_of(space: h5py.h5s.SpaceID) -> _Rows:
    """The first and the last row of a selection, where it has an end."""
    try:
        starts, ends = space.get_select_bounds()
    except (ValueError, RuntimeError):  # nothing is selected, or it grows
        return ALL_ROWS
    if starts:
        return (int(starts[0]), int(ends[0]))
    return ALL_ROWS


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
