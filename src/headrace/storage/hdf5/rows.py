"""Reads samples that are rows of HDF5 files.

Rows of one dataset or of several, and the flat bytes with offsets that `headrace.pack` writes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.errors import FileChangedError, FormatError, HeadraceError, RemoteError, warn
from headrace.io.array_file import Arrays
from headrace.io.index import IndexKind
from headrace.io.packed_strings import PackedNames
from headrace.io.paths import redact
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import RemoteFiles
from headrace.io.resolve.expressions import DataPath
from headrace.io.resolve.file_set import FileSet
from headrace.io.resolve.resolver import resolve
from headrace.memory.anonymous import SharedArray
from headrace.storage.arrays.packed import CRC, DATA, NAME_OFFSETS, NAMES, OFFSETS, TARGETS, PackedInfo, PackedSource, crc_of
from headrace.storage.arrays.reader import ArrayReader, OpenArrays
from headrace.storage.arrays.rows import LibraryRows
from headrace.storage.hdf5.chunks import ObjectRows, holds_objects, rows_of
from headrace.storage.hdf5.files import HDF5, HDF5Files, dataset_names, is_hdf5
from headrace.storage.hdf5.links import Versions
from headrace.storage.hdf5.packed import are_offsets, packed_info
from headrace.storage.hdf5.remote import RemoteHDF5
from headrace.storage.source import PackPart

_COLUMN_BYTES = 64 << 20


def _make_index(files: RemoteFiles, url: str) -> Arrays:
    """Of all datasets of a file, whichever will be asked for."""
    files.learn([url])
    opened = OpenHDF5(files)
    assert isinstance(opened.hdf5, RemoteHDF5)
    return opened.hdf5.arrays_of(url, functools.partial(_read_all, opened))


def _read_all(opened: OpenHDF5, url: str) -> None:
    """Reads what opening each dataset takes, and the values of those that may be targets, or columns of a packed file."""
    info = packed_info(url, opened.hdf5)
    columns = [OFFSETS, CRC, NAMES, NAME_OFFSETS, TARGETS] if info is not None else []
    with opened.hdf5.reading(url) as file:
        for name in dataset_names(file):
            dataset = file[name]
            try:
                if dataset.shape and not holds_objects(dataset.dtype, f"{redact(url)}: {name!r}"):
                    rows_of(dataset, url, name, opened.hdf5, opened.library)
                if name in columns or (dataset.shape is not None and len(dataset.shape) == 1 and dataset.nbytes <= _COLUMN_BYTES):
                    np.asarray(dataset)
            except (RemoteError, FileChangedError):
                raise
            except HeadraceError as error:
                warn(f"{redact(url)}: {name!r} is left out of the index: {error}")


INDEX = IndexKind("hdf5", 1, ("<i8", "<i8", "u1", "u1"), _make_index)
"""Offsets and lengths of what h5py reads of a file to open datasets; these bytes; and as JSON, by dataset, what speaks against decoding it
here."""


class OpenHDF5(OpenArrays[h5py.File]):
    """What each process has open of HDF5 files of a server, or of this machine, and the chunks that it has decoded."""

    def __init__(self, server: RemoteFiles | None = None) -> None:
        self.hdf5: HDF5Files = HDF5Files() if server is None else RemoteHDF5(server, INDEX)
        super().__init__(self.hdf5.files, self.hdf5.open, h5py.File.close)


def open_files(data_path: DataPath | FileSet, options: RemoteOptions) -> tuple[list[str], OpenHDF5]:
    """The paths or URLs of the HDF5 files that a path means, and what is open of them.

    Raises:
        ConfigError, DataNotFoundError, AccessError, RemoteError: see `headrace.io.resolve.resolver.resolve`.
        FormatError: one of them is no HDF5 file.
    """
    files = resolve(data_path, HDF5, options)
    paths, opened = files.urls(), OpenHDF5(files.server)
    for path in [] if files.is_remote else paths:
        if not is_hdf5(path):
            if os.access(path, os.R_OK):
                raise FormatError(
                    f"{redact(path)} is no HDF5 file, whatever its name says: it is damaged, or a server's page: fetch it again"
                )
            opened.hdf5.open(path)  # says what is wrong
    return paths, opened


def packed_kind(data_path: DataPath | FileSet, options: RemoteOptions) -> str:
    """What `headrace.pack` made the first of some HDF5 files of ("image", "text", "array"); "": it did not make it."""
    paths, opened = open_files(data_path, options)
    try:
        info = opened.hdf5.read_each(paths[:1], lambda path: packed_info(path, opened.hdf5))[0]
    finally:
        if not isinstance(data_path, FileSet):
            opened.close()
    return info.kind if info is not None else ""


class HDF5Source(PackedSource):
    """Rows of datasets of an HDF5 file, or the samples of a packed file.

    Records are arrays of one row (its shape and dtype, in the file's byte order); strings, vlen and compounds with them as h5py gives
    them; for several names dicts of these; 1-D arrays where a packed file holds encoded samples or tokens. Samples of packed files are
    checked against their CRC.

    Args:
        path: a local file; or, where `opened` has the files of its server, a URL.
        name: dataset inside the file; or several of equal length.
        direct: read the file itself where its layout is known; False: through h5py alone.
        cache_dir: where the table of a dataset of many chunks is kept; None: the user's cache folder.
        opened: what is open and decoded, to be shared with other sources.

    Raises:
        MissingNameError: no dataset of that name; the message lists those there are.
        FormatError: no rows, references instead of values, a filter that nobody here knows, or a file that is shorter than it says.
    """

    _opened: OpenHDF5

    def __init__(
        self,
        path: str | os.PathLike[str],
        name: str | Sequence[str] = DATA,
        *,
        direct: bool = True,
        cache_dir: str | os.PathLike[str] | None = None,
        opened: OpenHDF5 | None = None,
    ) -> None:
        opened = opened or OpenHDF5()
        hdf5, is_remote = opened.hdf5, opened.files.is_remote
        self._file = os.fspath(path) if is_remote else os.path.abspath(os.path.expanduser(os.fspath(path)))
        self.info = packed_info(self._file, hdf5)
        self._offsets: SharedArray | None = None
        fields, chunks = dict[str, ArrayReader | LibraryRows](), list[tuple[int, ...] | None]()
        with hdf5.reading(self._file) as file:
            for one in (name,) if isinstance(name, str) else name:
                dataset = hdf5.dataset(file, one, self._file)
                rows = rows_of(dataset, self._file, one, hdf5, opened.library, direct=direct, cache_dir=cache_dir)
                fields[one] = rows if isinstance(rows, ObjectRows) else ArrayReader(rows, opened.chunks, f"{self._file}\0{one}")
                chunks.append(dataset.chunks)
            shown = redact(path) if is_remote else self._file
            super().__init__(shown, opened, name if isinstance(name, str) else tuple(name), fields, chunks)
            if self.info is not None and name == DATA:
                self.part = None if self.info.part is None else PackPart(*self.info.part)
                self._read_index(file, self.info)

    def _read_index(self, file: h5py.File, packed: PackedInfo) -> None:
        """Offsets, checksums and names of a packed file, which must fit each other."""
        if packed.is_flat:
            self._offsets = SharedArray(self._column(file, OFFSETS).astype(np.int64, copy=False))
        self._crc = SharedArray(self._column(file, CRC)) if CRC in file else None
        ends: list[tuple[str, npt.NDArray[Any], int]] = []
        if self._offsets is not None:
            ends.append((OFFSETS, self._offsets.array, self.shape[0]))
        if NAMES in file:
            self.names = PackedNames.from_arrays(self._column(file, NAMES), self._column(file, NAME_OFFSETS))
            ends.append((NAME_OFFSETS, self.names.arrays[1], len(self.names.arrays[0])))
        wrong = [name for name, offsets, end in ends if not are_offsets(offsets, packed.count, end)]
        if self._offsets is None and self.shape[0] != packed.count:
            wrong.append(DATA)
        if self._crc is not None and self._crc.array.shape != (packed.count,):
            wrong.append(CRC)
        if wrong:
            raise FormatError(
                f"{redact(self.path)} is damaged: {', '.join(wrong)} don't fit the {packed.count:,} samples it should hold: pack it again"
            )

    def _column(self, file: h5py.File, name: str) -> npt.NDArray[Any]:
        dataset = self._opened.hdf5.dataset(file, name, self._file)
        Versions(dataset, self._file, name, self._opened.hdf5)
        column = np.asarray(dataset)
        expected = self.info.checksums.get(name) if self.info is not None else None
        if expected is not None and crc_of(column) != expected:
            raise FormatError(f"{redact(self.path)}: {name!r} has a wrong checksum, the file is damaged: pack it again")
        return column

    def _spans(self, indices: IntArray | slice) -> tuple[IntArray, IntArray] | None:
        if self._offsets is None:
            return None
        offsets = self._offsets.array
        return offsets[:-1][indices], offsets[1:][indices]

    def column(self, name: str) -> npt.NDArray[Any]:
        with self._opened.hdf5.reading(self._file) as file:
            column = self._column(file, name)
        if column.ndim == 0 or len(column) != len(self):
            raise FormatError(f"{redact(self.path)}: {name!r} has shape {column.shape}, not one row for each of {len(self)} samples")
        return column

    def has_column(self, name: str) -> bool:
        with self._opened.hdf5.reading(self._file) as file:
            return name in file
