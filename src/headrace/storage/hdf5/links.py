"""Finds the other files and datasets that a dataset's values lie in.

HDF5 gives the fill value for a part of a virtual dataset whose source is missing, and follows sources that lead back to where they came
from until its stack ends. Both are errors here. Of remote files nothing may lead to another file: HDF5 would look for it in the very same
bytes, or on this machine's disk.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import h5py

from headrace.errors import DataNotFoundError, FormatError
from headrace.io.paths import redact
from headrace.storage.hdf5.files import found_from, leads_out, reading_hdf5
from headrace.storage.hdf5.filters import check_filters
from headrace.storage.hdf5.remote import FarHDF5
from headrace.storage.hdf5.versions import ALL_ROWS, OtherFile

_DEPTH = 32
_Rows = tuple[int, int]


def other_files(dataset: h5py.Dataset, path: str, far: FarHDF5 | None = None) -> list[OtherFile]:
    """The files beside its own that a virtual or external dataset is made of.

    Args:
        dataset: open.
        path: of the file that holds it; or its URL.
        far: of the URL's server.

    Raises:
        DataNotFoundError: a file is missing; the message names it.
        FormatError: a source is missing in its file, h5py lacks a filter of it, or a virtual dataset leads back to itself; or, of a remote
            file, to another.
    """
    found = _Found(far)
    found.add_external(dataset, path, ALL_ROWS)
    if dataset.is_virtual:
        found.follow(dataset, path, None, [])
    return [OtherFile(name, first, last) for name, (first, last) in found.files.items()]


def check_way(file: h5py.File, name: str, path: str) -> None:
    """Looks whether a name leads out of a remote file.

    Raises:
        FormatError: it does.
    """
    out = leads_out(file, name)
    if out is not None:
        part, link, _ = out
        raise _other_file(f"{redact(path)}: the link {part!r} on the way to {name!r} leads into {redact(link.filename)!r}")


def _other_file(what: str) -> FormatError:
    return FormatError(f"{what}: far away other files are not followed: open that file itself, or a copy of all of them on this machine")


class _Found:
    """What is found on the way through the sources of a virtual dataset."""

    def __init__(self, far: FarHDF5 | None) -> None:
        self._far, self._seen = far, set[tuple[str, str]]()
        self.files: dict[str, _Rows] = {}

    def _add(self, path: str, rows: _Rows) -> None:
        first, last = self.files.get(path, rows)
        self.files[path] = min(first, rows[0]), max(last, rows[1])

    def add_external(self, dataset: h5py.Dataset, path: str, rows: _Rows) -> None:
        """Notes the files of external storage."""
        for name, _, _ in dataset.external or ():
            where = f"{redact(path)}: {dataset.name!r} lies in the external file {redact(name)!r}"
            if self._far is not None:
                raise _other_file(where)
            place = _external_place(name, path)
            if not os.path.exists(place):
                raise DataNotFoundError(f"{where}, which does not exist (working folder: {os.getcwd()})")
            self._add(place, rows)

    def follow(self, dataset: h5py.Dataset, path: str, rows: _Rows | None, way: list[tuple[str, str]]) -> None:
        """Notes the files of all sources.

        Args:
            dataset, path: where this step of the way is.
            rows: of the dataset where the way began which may lie here; None: it begins here.
            way: the steps before.
        """
        far = self._far
        here = os.path.realpath(path) if far is None else path, str(dataset.name)
        what = f"{redact(path)}: the virtual dataset {dataset.name!r}"
        if here in way or len(way) > _DEPTH:
            raise FormatError(f"{what} leads back to itself, or through more than {_DEPTH} others")
        if here in self._seen:
            return
        self._seen.add(here)
        if not dataset.is_virtual:
            check_filters(dataset, f"{redact(path)}: {dataset.name!r}")
            self.add_external(dataset, path, ALL_ROWS)
            return
        for source in dataset.virtual_sources():
            if far is not None and source.file_name != ".":
                raise _other_file(f"{what} needs {redact(source.file_name)!r}")
            lies_in = _rows_of(source.vspace) if rows is None else ALL_ROWS
            for file_name in _files_of(source.file_name, path, what):
                if file_name != path:
                    self._add(file_name, lies_in)
                if _is_pattern(source.file_name) or _is_pattern(source.dset_name):
                    continue  # there are as many sources as there are: none is missing
                with reading_hdf5(file_name, far) as file:
                    target = file.get(_plain(source.dset_name))
                    if not isinstance(target, h5py.Dataset):
                        raise FormatError(f"{what} needs {source.dset_name!r} of {redact(file_name)}, which is missing")
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


def _files_of(name: str, path: str, what: str) -> Iterator[str]:
    """The files that the name of a source means."""
    if name == ".":
        yield path
        return
    if not _is_pattern(name):
        found = found_from(_plain(name), path, "HDF5_VDS_PREFIX")
        if found is None:
            raise DataNotFoundError(f"{what} needs {redact(_plain(name))!r}, which is missing")
        yield found
        return
    for number in itertools.count():
        found = found_from(_plain(name, number), path, "HDF5_VDS_PREFIX")
        if found is None:
            return
        yield found


def _external_place(name: str, path: str) -> str:
    """Where HDF5 looks for a file of external storage: below the prefix that is set, or else in the working folder."""
    prefix = os.environ.get("HDF5_EXTFILE_PREFIX", "")
    if prefix.startswith("${ORIGIN}"):
        prefix = os.path.dirname(path) + prefix.removeprefix("${ORIGIN}")
    return os.path.join("" if prefix == "." else prefix, name)
