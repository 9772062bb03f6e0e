"""The index of a remote HDF5 file, and how it is made for a whole file."""

from __future__ import annotations

import functools

import h5py
import numpy as np

from headrace.errors import FileChangedError, HeadraceError, RemoteError, warn
from headrace.io.array_file import Arrays
from headrace.io.handles import WorkerFiles
from headrace.io.index import IndexKind
from headrace.io.paths import redact
from headrace.io.remote_files import RemoteFiles
from headrace.storage.hdf5.chunks import chunks_of
from headrace.storage.hdf5.files import reading_hdf5
from headrace.storage.hdf5.links import other_files
from headrace.storage.hdf5.objects import holds_objects
from headrace.storage.hdf5.packed import CRC, NAME_OFFSETS, NAMES, OFFSETS, TARGETS, packed_info
from headrace.storage.hdf5.remote import FarHDF5
from headrace.storage.hdf5.versions import Versions

_COLUMN_BYTES = 64 << 20


def _make(files: RemoteFiles, url: str) -> Arrays:
    """Of all datasets of a file, whichever will be asked for."""
    files.learn([url])
    far = FarHDF5(files, INDEX)
    return far.arrays_of(url, functools.partial(_read_all, far))


INDEX = IndexKind("hdf5", 1, ("<i8", "<i8", "u1", "u1"), _make)
"""Offsets and lengths of what h5py reads of a file to open datasets; these bytes; and as JSON, by dataset, what speaks against decoding it
here."""


def _read_all(far: FarHDF5, url: str) -> None:
    info = packed_info(url, far)
    columns = [OFFSETS, CRC, NAMES, NAME_OFFSETS, TARGETS] if info is not None else []
    names: list[str] = []
    with reading_hdf5(url, far) as file:
        file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
        for name in names:
            try:
                _read(file[name], url, name, far, is_column=name in columns)
            except (RemoteError, FileChangedError):
                raise
            except HeadraceError as error:
                warn(f"{redact(url)}: {name!r} is left out of the index: {error}")


def _read(dataset: h5py.Dataset, url: str, name: str, far: FarHDF5, is_column: bool) -> None:
    """Reads what opening a dataset takes; and the values of one that is small enough to hold targets, or is a column of a packed file."""
    if dataset.shape and not holds_objects(dataset.dtype, f"{redact(url)}: {name!r}"):
        other_files(dataset, url, far)
        versions = Versions(dataset, url, name, far.files)
        library: WorkerFiles[h5py.File] = WorkerFiles(far.open, h5py.File.close)  # nothing is read through it here
        chunks_of(dataset, url, name, far.files, library, versions, far=far)
    if is_column or (dataset.shape is not None and len(dataset.shape) == 1 and dataset.nbytes <= _COLUMN_BYTES):
        np.asarray(dataset)
