"""Reads samples that are rows of HDF5 files.

Rows of one dataset or of several, and the flat bytes with offsets that `headrace.pack` writes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import h5py
import numpy as np
import numpy.typing as npt

from headrace.dtypes import ArraySpec
from headrace.errors import FormatError
from headrace.io.files import Files
from headrace.io.handles import WorkerFiles
from headrace.io.local.files import LocalFiles
from headrace.io.packed_strings import PackedNames
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import RemoteFiles
from headrace.io.resolve.expressions import DataPath
from headrace.io.resolve.file_set import FileSet
from headrace.io.resolve.resolver import resolve
from headrace.memory.anonymous import SharedArray
from headrace.storage.arrays.chunks import LibraryChunks
from headrace.storage.arrays.reader import ArrayReader, ChunkCache
from headrace.storage.arrays.rows import BLOCK_BYTES, ArraysSource
from headrace.storage.hdf5.chunks import chunks_of
from headrace.storage.hdf5.files import HDF5, dataset_named, is_hdf5, open_hdf5, reading_hdf5
from headrace.storage.hdf5.filters import check_filters
from headrace.storage.hdf5.index import INDEX
from headrace.storage.hdf5.links import check_way, other_files
from headrace.storage.hdf5.objects import ObjectRows, holds_objects
from headrace.storage.hdf5.packed import CRC, DATA, NAME_OFFSETS, NAMES, OFFSETS, PackedInfo, are_offsets, crc_of, packed_info
from headrace.storage.hdf5.remote import FarHDF5
from headrace.storage.hdf5.versions import Versions
from headrace.storage.source import Rows

T = TypeVar("T")


class OpenHDF5:
    """What each process has open of HDF5 files, and the chunks that it has decoded.

    Args:
        files: of the server that they lie on; None: they lie on this machine.
    """

    def __init__(self, files: RemoteFiles | None = None) -> None:
        self.far: FarHDF5 | None = None if files is None else FarHDF5(files, INDEX)
        self.files: Files = files or LocalFiles()
        opener = open_hdf5 if self.far is None else self.far.open
        self.library: WorkerFiles[h5py.File] = WorkerFiles(opener, h5py.File.close, 16, survives_fork=False)
        self.chunks: ChunkCache = ChunkCache(0)

    def read_each(self, paths: Sequence[str], function: Callable[[str], T]) -> list[T]:
        """What a function makes of each file. Of files that are far away, what it reads through h5py is kept as their index."""
        if self.far is None:
            return [function(path) for path in paths]
        return self.far.read_each(paths, function)

    def close(self) -> None:
        """Closes and forgets it all; it is opened again when it is needed."""
        for part in (self.library, self.files, self.chunks):
            part.close()


def open_files(data_path: DataPath | FileSet, options: RemoteOptions) -> tuple[list[str], OpenHDF5]:
    """The paths or URLs of the HDF5 files that a path means, and what is open of them.

    Raises:
        ConfigError, DataNotFoundError, AccessError, RemoteError: see `headrace.io.resolve.resolver.resolve`.
        FormatError: one of them is no HDF5 file.
    """
    files = resolve(data_path, HDF5, options)
    paths = files.urls()
    for path in [] if files.is_remote else paths:
        if not is_hdf5(path):
            if os.access(path, os.R_OK):
                raise FormatError(
                    f"{redact(path)} is no HDF5 file, whatever its name says: it is damaged, or a server's page: fetch it again"
                )
            open_hdf5(path)  # says what is wrong
    return paths, OpenHDF5(files.server)


def packed_kind(data_path: DataPath | FileSet, options: RemoteOptions) -> str:
    """What `headrace.pack` made the first of some HDF5 files of ("image", "text", "array"); "": it did not make it.

    Raises:
        ConfigError, DataNotFoundError, AccessError, RemoteError, FormatError: see `open_files`.
    """
    paths, opened = open_files(data_path, options)
    try:
        info = opened.read_each(paths[:1], lambda path: packed_info(path, opened.far))[0]
    finally:
        if not isinstance(data_path, FileSet):
            opened.close()
    return info.kind if info is not None else ""


class HDF5Source(ArraysSource):
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

    def __init__(
        self,
        path: str | os.PathLike[str],
        name: str | Sequence[str] = DATA,
        *,
        direct: bool = True,
        cache_dir: str | os.PathLike[str] | None = None,
        opened: OpenHDF5 | None = None,
    ) -> None:
        self._opened = opened or OpenHDF5()
        self._far = self._opened.far
        self.files = self._opened.files
        self._file = os.path.abspath(os.path.expanduser(os.fspath(path))) if self._far is None else os.fspath(path)
        self.path: str = self._file if self._far is None else redact(path)
        self.name: str | tuple[str, ...] = name if isinstance(name, str) else tuple(name)
        self.info: PackedInfo | None = packed_info(self._file, self._far)
        packed = self.info if name == DATA else None
        self._offsets: SharedArray | None = None
        self._crc: SharedArray | None = None
        self.names: PackedNames | None = None
        self._chunks = self._opened.chunks
        with reading_hdf5(self._file, self._far) as file:
            options: dict[str, Any] = {"far": self._far, "direct": direct, "cache_dir": cache_dir}
            self._fields = {one: self._field(file, one, options) for one in self._names}
            self.grids: list[list[Any]] = [[one, f.shape, f.dtype.str, file[one].chunks] for one, f in self._fields.items()]
            if packed is not None:
                self._read_index(file, packed)
        self._check_lengths()

    def _field(self, file: h5py.File, name: str, options: dict[str, Any]) -> ArrayReader | ObjectRows:
        dataset, where = self._named(file, name), f"{redact(self.path)}: {name!r}"
        if not dataset.shape:
            raise FormatError(f"{where} is a single value, it has no axis of samples")
        versions = Versions(dataset, self._file, name, self._opened.files)
        versions.add(other_files(dataset, versions.path, self._far))
        if holds_objects(dataset.dtype, where):
            check_filters(dataset, where)
            return ObjectRows(self._opened.library, self._file, name, dataset, versions if self._far is None else None)
        chunks = chunks_of(dataset, self._file, name, self._opened.files, self._opened.library, versions, **options)
        if isinstance(chunks, LibraryChunks):
            check_filters(dataset, where)
        return ArrayReader(chunks, self._opened.chunks, f"{self._file}\0{name}")

    def _named(self, file: h5py.File, name: str) -> h5py.Dataset:
        if self._far is not None:
            check_way(file, name, self._file)
        return dataset_named(file, name, self._file)

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
        dataset = self._named(file, name)
        other_files(dataset, Versions(dataset, self._file, name, self._opened.files).path, self._far)
        column = np.asarray(dataset)
        expected = self.info.checksums.get(name) if self.info is not None else None
        if expected is not None and crc_of(column) != expected:
            raise FormatError(f"{redact(self.path)}: {name!r} has a wrong checksum, the file is damaged: pack it again")
        return column

    # -- what it is

    @property
    def has_checksums(self) -> bool:
        """Is each sample checked when it is read?"""
        return self._crc is not None

    @property
    def has_samples_of_any_size(self) -> bool:
        """Are the samples encoded, tokens, or objects, so that each has a size of its own?"""
        return self._offsets is not None or self.holds_objects

    def __len__(self) -> int:
        return super().__len__() if self._offsets is None else len(self._offsets) - 1

    def sizes(self) -> npt.NDArray[np.int64]:
        """The size of each sample in bytes ([n] int64); of objects nobody knows it: 0."""
        return super().sizes() if self._offsets is None else np.diff(self._offsets.array) * self._row_bytes

    @property
    def total_bytes(self) -> int:
        return super().total_bytes if self._offsets is None else int(self._offsets.array[-1]) * self._row_bytes

    # -- reading

    @property
    def array_spec(self) -> ArraySpec | None:
        return super().array_spec if self._offsets is None else None

    def read_into(self, indices: Sequence[int], rows: Rows) -> None:
        super().read_into(indices, rows)
        self.check(indices, rows)

    def read(self, indices: Sequence[int]) -> list[Any]:
        records = super().read(indices) if self._offsets is None else self._read_spans(np.asarray(indices, np.int64))
        self.check(indices, records)
        return records

    def _read_spans(self, indices: npt.NDArray[np.int64]) -> list[Any]:
        assert self._offsets is not None and isinstance(self._first, ArrayReader)
        starts, stops = self._offsets.array[indices], self._offsets.array[indices + 1]
        samples = [np.empty((count, *self.shape[1:]), self.dtype) for count in (stops - starts).tolist()]
        self._first.read_spans(starts.tolist(), samples, self.run)
        return samples

    def byte_ranges(self, indices: npt.NDArray[np.int64]) -> ByteRanges:
        if self._offsets is None:
            return super().byte_ranges(indices)
        assert isinstance(self._first, ArrayReader)
        return self._first.stretch_ranges(self._offsets.array[indices], self._offsets.array[indices + 1])

    def check(self, indices: Sequence[int], records: Rows | Sequence[Any]) -> None:
        if self._crc is None:
            return
        for index, array in zip(indices, records, strict=True):
            if crc_of(array) != int(self._crc.array[index]):
                raise FormatError(f"{self.location(index)}: wrong checksum, the file is damaged: pack it again")

    def close(self) -> None:
        """Closes what this process has open of this source and those that share it; decoded chunks are forgotten."""
        self._opened.close()

    def blocks(self) -> npt.NDArray[np.int64]:
        if self._offsets is None:
            return super().blocks()
        ids = self._offsets.array[:-1] * self._row_bytes // BLOCK_BYTES
        return np.unique(ids, return_counts=True)[1].astype(np.int64)

    def fingerprint(self) -> str:
        """The one of the packed dataset; else a hash of names, shapes, dtypes and chunk grids."""
        if self.info is not None and self.name == DATA:
            return self.info.fingerprint
        return super().fingerprint()

    def location(self, index: int) -> str:
        name = f" ({redact(self.names[index])})" if self.names is not None else ""
        return f"{redact(self.path)}, {' and '.join(self._names)}, row {index}{name}"

    def column(self, name: str) -> npt.NDArray[Any]:
        """A whole dataset with one row a sample, such as the targets.

        Raises:
            MissingNameError, FormatError: no such dataset; another number of rows.
        """
        with reading_hdf5(self._file, self._far) as file:
            column = self._column(file, name)
        if column.ndim == 0 or len(column) != len(self):
            raise FormatError(f"{redact(self.path)}: {name!r} has shape {column.shape}, not one row for each of {len(self)} samples")
        return column

    def has_column(self, name: str) -> bool:
        """Is there a dataset of that name?"""
        with reading_hdf5(self._file, self._far) as file:
            return name in file
