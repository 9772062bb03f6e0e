"""How is an HDF5 file opened, and what is in it?"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import h5py

from headrace.errors import AccessError, ConfigError, DataNotFoundError, FormatError, HeadraceError, MissingNameError
from headrace.storage.paths import is_url, redact

SIGNATURE = b"\x89HDF\r\n\x1a\n"


def is_hdf5(path: str | os.PathLike[Any]) -> bool:
    """Does the file begin as HDF5 files do?"""
    try:
        with open(path, "rb") as file:
            return file.read(len(SIGNATURE)) == SIGNATURE
    except OSError:
        return False


def refuse_remote_hdf5(path: Any) -> None:
    """Raises a ConfigError for a URL of an HDF5 file: they are read from local disks by now."""
    if is_url(path) and str(path).partition("?")[0].lower().endswith((".h5", ".hdf5", ".he5")):
        raise ConfigError(f"{redact(path)}: HDF5 files are read from local disks only by now: copy it, or mount the bucket")


def open_hdf5(path: str) -> h5py.File:
    """The file, opened for reading without HDF5's file locks.

    Raises:
        DataNotFoundError, AccessError, FormatError: not there; not readable for this user; no (whole) HDF5 file.
    """
    try:
        return h5py.File(path, "r", locking=False)
    except FileNotFoundError as error:
        raise DataNotFoundError(f"{redact(path)} does not exist (working folder: {os.getcwd()})") from error
    except PermissionError as error:
        raise AccessError(f"{redact(path)}: this user may not read the file") from error
    except OSError as error:
        if "flag values don't match" in str(error):
            raise AccessError(f"{redact(path)} is open for writing in this process: close it first") from error
        if "already open for" in str(error):
            return _open_beside_its_writer(path)
        cause = " ".join(str(error).split())
        raise FormatError(f"{redact(path)} is no HDF5 file, or not a whole one: {cause}") from error


def _open_beside_its_writer(path: str) -> h5py.File:
    try:
        return h5py.File(path, "r", locking=False, swmr=True)
    except OSError as error:
        raise AccessError(
            f"{redact(path)} is being written by another process, which allows no readers (file.swmr_mode = True): wait for its end; if it "
            f"has died, `h5clear -s {redact(path)}` says so to the file"
        ) from error


@contextlib.contextmanager
def reading_hdf5(path: str) -> Iterator[h5py.File]:
    """The file, open for reading: whatever h5py raises becomes an error that names the file.

    Raises:
        DataNotFoundError, AccessError, FormatError: as `open_hdf5`; also a FormatError for what is damaged inside.
    """
    with open_hdf5(path) as file:
        try:
            yield file
        except HeadraceError:
            raise
        except (OSError, KeyError, RuntimeError, TypeError, ValueError) as error:  # whatever h5py makes of it
            raise FormatError(f"{redact(path)} is damaged, or holds what h5py can't read: {error}") from error


def dataset_named(file: h5py.File, name: str, path: str) -> h5py.Dataset:
    """A dataset of the file.

    Raises:
        MissingNameError: there is none; the message lists those there are.
    """
    found = file.get(name)
    if isinstance(found, h5py.Dataset):
        return found
    names: list[str] = []
    file.visititems(lambda key, item: names.append(key) if isinstance(item, h5py.Dataset) else None)
    raise MissingNameError(f"{redact(path)} has no dataset {name!r}; it has: {', '.join(sorted(names)) or 'none'}")
