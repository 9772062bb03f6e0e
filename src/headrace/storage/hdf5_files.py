"""How is an HDF5 file opened, and what is in it?"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import h5py

from headrace.errors import AccessError, DataNotFoundError, FormatError, MissingNameError
from headrace.storage.foreign import OF_THE_MACHINE, asking
from headrace.storage.hdf5_far import FarHDF5
from headrace.storage.nearest import listed_names
from headrace.storage.paths import is_url, redact

SIGNATURE = b"\x89HDF\r\n\x1a\n"
ENDINGS = (".h5", ".hdf5", ".he5")
"""Of URLs of HDF5 files: what lies far away is not looked into to find out its format."""


def is_hdf5(path: str | os.PathLike[Any]) -> bool:
    """Does the file begin as HDF5 files do?"""
    try:
        with open(path, "rb") as file:
            return file.read(len(SIGNATURE)) == SIGNATURE
    except OSError:
        return False


def is_far_hdf5(path: object) -> bool:
    """Is it a URL that says that HDF5 files lie there?"""
    return isinstance(path, str) and is_url(path) and path.partition("::")[0].partition("?")[0].lower().endswith(ENDINGS)


def open_hdf5(path: str, far: FarHDF5 | None = None) -> h5py.File:
    """The file, opened for reading.

    Args:
        path: of the file; or its URL.
        far: of the URL's server.

    Raises:
        DataNotFoundError, AccessError, FormatError: not there; not readable for this user, or being written; no (whole) HDF5 file.
        RemoteError, ReplacedError: of files that are far away, see `RemoteFiles.read`.
    """
    if far is not None:
        return far.open(path)
    try:
        file = _open(path)
    except FileNotFoundError as error:
        raise DataNotFoundError(f"{redact(path)} does not exist (working folder: {os.getcwd()})") from error
    except PermissionError as error:
        raise AccessError(f"{redact(path)}: this user may not read the file") from error
    except OSError as error:
        if "already open for" in str(error):
            return _open_beside_its_writer(path)
        if error.errno in OF_THE_MACHINE:
            raise
        cause = " ".join(str(error).split())
        raise FormatError(f"{redact(path)} is no HDF5 file, or not a whole one: {cause}") from error
    if file.mode != "r":  # HDF5 gives the very file that is open already
        file.close()
        raise AccessError(f"{redact(path)} is open for writing in this process: close it first")
    return file


def _open(path: str, **options: Any) -> h5py.File:
    """With HDF5's lock on files if it is to be had, which is the default; or in the way in which this process has it open already."""
    for locking in (None, False):
        try:
            return h5py.File(path, "r", locking=locking, **options)
        except OSError as error:
            if "lock" not in str(error):
                raise
    return h5py.File(path, "r", locking=True, **options)


def _open_beside_its_writer(path: str) -> h5py.File:
    try:
        return _open(path, swmr=True)
    except OSError as error:
        raise AccessError(
            f"{redact(path)} is being written by another process, which allows no readers (file.swmr_mode = True): wait for its end; if it "
            f"has died, `h5clear -s {redact(path)}` says so to the file"
        ) from error


@contextlib.contextmanager
def reading_hdf5(path: str, far: FarHDF5 | None = None) -> Iterator[h5py.File]:
    """The file, open for reading: whatever h5py raises becomes an error that names the file. See `open_hdf5`.

    Raises:
        DataNotFoundError, AccessError, FormatError: as `open_hdf5`.
        FormatError, BudgetError: something inside is damaged.
    """
    with contextlib.ExitStack() as opened:
        file = opened.enter_context(open_hdf5(path) if far is None else far.reading(path))
        with asking("h5py", redact(path)):
            yield file


def dataset_named(file: h5py.File, name: str, path: str) -> h5py.Dataset:
    """A dataset of the file.

    Raises:
        MissingNameError: there is none; the message lists those there are, of many the nearest.
    """
    found = file.get(name)
    if isinstance(found, h5py.Dataset):
        return found
    names: list[str] = []
    file.visititems(lambda key, item: names.append(key) if isinstance(item, h5py.Dataset) else None)
    raise MissingNameError(f"{redact(path)} has no dataset {name!r}; it has: {listed_names(names, name)}")
