"""Does a dataset that lies in other files or datasets have all of them?

HDF5 gives the fill value for a part of a virtual dataset whose source is missing, and follows sources that lead back to where they came
from until its stack ends. Both are errors here. Far away nothing may lead to another file: HDF5 would look for it in the very same bytes,
or on this machine's disk.
"""

from __future__ import annotations

import os

import h5py

from headrace.errors import DataNotFoundError, FormatError
from headrace.storage.hdf5_far import FarHDF5
from headrace.storage.hdf5_files import reading_hdf5
from headrace.storage.paths import redact

_DEPTH, _LINKS = 32, 1000


def check_links(dataset: h5py.Dataset, path: str, far: FarHDF5 | None = None) -> None:
    """Looks for all that a virtual or external dataset is made of.

    Args:
        dataset: open.
        path: of its file; or its URL.
        far: of the URL's server.

    Raises:
        DataNotFoundError: a file is missing; the message names it.
        FormatError: a source is missing in its file, or a virtual dataset leads back to itself; or, far away, to another file.
    """
    if dataset.external:
        for name, _, _ in dataset.external:
            where = f"{redact(path)}: {dataset.name!r} lies in the external file {redact(name)!r}"
            if far is not None:
                raise _other_file(where)
            # HDF5 looks in the working folder unless a prefix is set
            if not os.path.exists(name) and not os.environ.get("HDF5_EXTFILE_PREFIX"):
                raise DataNotFoundError(f"{where}, which does not exist (working folder: {os.getcwd()})")
    if dataset.is_virtual:
        _follow(dataset, path, far, [], {})


def check_way(file: h5py.File, name: str, path: str) -> None:
    """Looks whether a name leads out of a file that is far away.

    Raises:
        FormatError: it does.
    """
    parts, group, steps = [part for part in name.split("/") if part], file["/"], 0
    while parts:
        part, steps = parts.pop(0), steps + 1
        link = group.get(part, getlink=True) if isinstance(group, h5py.Group) and steps <= _LINKS else None
        if isinstance(link, h5py.ExternalLink):
            raise _other_file(f"{redact(path)}: the link {part!r} on the way to {name!r} leads into {redact(link.filename)!r}")
        if isinstance(link, h5py.SoftLink):
            parts = [one for one in link.path.split("/") if one] + parts
            group = file["/"] if link.path.startswith("/") else group
        elif link is not None:
            group = group[part]
        else:
            return  # there is no such thing: whoever opens it will say so


def _other_file(what: str) -> FormatError:
    return FormatError(f"{what}: far away other files are not followed: open that file itself, or a copy of all of them on this machine")


def _follow(dataset: h5py.Dataset, path: str, far: FarHDF5 | None, way: list[tuple[str, str]], found: dict[tuple[str, str], bool]) -> None:
    here = os.path.realpath(path) if far is None else path, str(dataset.name)
    what = f"{redact(path)}: the virtual dataset {dataset.name!r}"
    if here in way or len(way) > _DEPTH:
        raise FormatError(f"{what} leads back to itself, or through more than {_DEPTH} others")
    if here in found:
        return
    found[here] = True
    if not dataset.is_virtual:
        return
    for source in dataset.virtual_sources():
        if far is not None and source.file_name != ".":
            raise _other_file(f"{what} needs {redact(source.file_name)!r}")
        if "%" in source.file_name or "%" in source.dset_name:
            continue  # a pattern: as many sources as there are
        file_name = path if source.file_name == "." else _file_of(source.file_name, path)
        if file_name is None:
            raise DataNotFoundError(f"{what} needs {redact(source.file_name)!r}, which is missing")
        with reading_hdf5(file_name, far) as file:
            target = file.get(source.dset_name)
            if not isinstance(target, h5py.Dataset):
                raise FormatError(f"{what} needs {source.dset_name!r} of {redact(file_name)}, which is missing")
            _follow(target, file_name, far, [*way, here], found)


def _file_of(name: str, path: str) -> str | None:
    """Where HDF5 finds a source file: beside the file that names it, or as the name says."""
    beside = os.path.join(os.path.dirname(path), name)
    return next((place for place in (beside, name) if os.path.exists(place)), None)
