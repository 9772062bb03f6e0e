"""Reads samples that are rows of HDF5 files.

Rows of one dataset or of several, and the flat bytes with offsets that `headrace.pack` writes.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import h5py
import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.errors import (
    ConfigError,
    FileChangedError,
    FormatError,
    HeadraceError,
    RemoteError,
    warn,
)
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
from headrace.storage.arrays.axes import AxisReader
from headrace.storage.arrays.chunks import Chunks
from headrace.storage.arrays.decoded import DecodedObjects, DecodedReader
from headrace.storage.arrays.packed import (
    BESIDE,
    CRC,
    DATA,
    NAME_OFFSETS,
    NAMES,
    OFFSETS,
    PackedInfo,
    are_targets,
    crc_of,
    offsets_named,
)
from headrace.storage.arrays.packed_rows import PackedSource
from headrace.storage.arrays.reader import ArrayReader, OpenArrays
from headrace.storage.arrays.rows import LibraryRows
from headrace.storage.hdf5.chunks import ObjectRows, holds_objects, rows_of
from headrace.storage.hdf5.conventions import (
    axis_named,
    check_matlab,
    packing_of,
)
from headrace.storage.hdf5.files import HDF5Files, dataset_names
from headrace.storage.hdf5.kind import HDF5, is_hdf5
from headrace.storage.hdf5.layouts import ArrayLayout, layout_of
from headrace.storage.hdf5.links import Versions
from headrace.storage.hdf5.packed import are_offsets, packed_info
from headrace.storage.hdf5.remote import RemoteHDF5
from headrace.storage.hdf5.times import check_has_values, decoding_of, readable
from headrace.storage.source import PackPart

_COLUMN_BYTES = 64 << 20


def _make_index(files: RemoteFiles, url: str) -> Arrays:
    """Of all datasets of a file, whichever will be asked for."""
    files.learn([url])
    opened = OpenHDF5(files)
    assert isinstance(opened.hdf5, RemoteHDF5)
    return opened.hdf5.arrays_of(url, functools.partial(_read_all, opened))


def _read_all(opened: OpenHDF5, url: str) -> None:
    """Reads what opening each dataset takes, and the values of those that may be targets, or
    columns of a packed file.
    """
    info = packed_info(url, opened.hdf5)
    columns = BESIDE if info is not None else set()
    with opened.hdf5.reading(url) as file:
        file.visititems(_read_attributes)
        for name in dataset_names(file):
            try:
                dataset = readable(file[name], f"{redact(url)}: {name!r}")
                is_column = (
                    dataset.shape is not None
                    and len(dataset.shape) == 1
                    and dataset.nbytes <= _COLUMN_BYTES
                )
                if (
                    name in columns
                    or (info is not None and are_targets(name))
                    or (is_column and not _holds_samples(file, name))
                ):
                    # first: chunks that are compared with h5py's are not recorded, and h5py reads
                    # them once
                    np.asarray(dataset)
                if dataset.shape and not holds_objects(dataset.dtype, f"{redact(url)}: {name!r}"):
                    rows_of(dataset, url, name, opened.hdf5, opened.library)
            except (RemoteError, FileChangedError):
                raise
            except HeadraceError as error:
                warn(f"{redact(url)}: {name!r} is left out of the index: {error}")


def _read_attributes(_: str, item: h5py.Group | h5py.Dataset) -> None:
    for key in item.attrs:
        # of a type that h5py lacks
        with contextlib.suppress(OSError, TypeError, ValueError, KeyError):
            item.attrs.get(key)


def _holds_samples(file: h5py.File, name: str) -> bool:
    """True for the values of a sparse matrix and their columns, which are no part of what
    opening it takes.
    """
    group, _, last = name.rpartition("/")
    return last in ("data", "indices") and f"{group}/indptr" in file


INDEX = IndexKind("hdf5", 1, ("<i8", "<i8", "u1", "u1"), _make_index)
"""Offsets and lengths of what h5py reads of a file to open datasets; these bytes; and as JSON, by
dataset, what speaks against decoding it here.
"""


_CLASSIC = (b"CDF\x01", b"CDF\x02", b"CDF\x05")
"""What netCDF files begin with that are no HDF5 files."""


class OpenHDF5(OpenArrays[h5py.File]):
    """What each process has open of HDF5 files of a server, or of this machine, and the chunks
    that it has decoded.
    """

    def __init__(self, server: RemoteFiles | None = None) -> None:
        self.hdf5: HDF5Files = HDF5Files() if server is None else RemoteHDF5(server, INDEX)
        super().__init__(self.hdf5.files, self.hdf5.open, h5py.File.close)


def open_files(data_path: DataPath | FileSet, options: RemoteOptions) -> tuple[list[str], OpenHDF5]:
    """The paths or URLs of the HDF5 files that a path means, and what is open of them.

    Raises:
        ConfigError, DataNotFoundError, AccessError, RemoteError: see
            `headrace.io.resolve.resolver.resolve`.
        FormatError: one of them is no HDF5 file.
    """
    files = resolve(data_path, HDF5, options)
    paths, opened = files.urls(), OpenHDF5(files.server)
    for path in [] if files.is_remote else paths:
        if not is_hdf5(path):
            if os.access(path, os.R_OK):
                with open(path, "rb", buffering=0) as file:
                    if file.read(4) in _CLASSIC:
                        raise FormatError(
                            f"{redact(path)} is a netCDF-3 file, and no HDF5 file: convert it to "
                            "netCDF-4, by nccopy -k nc4 or xarray"
                        )
                raise FormatError(
                    f"{redact(path)} is no HDF5 file, whatever its name says: it is damaged, or a "
                    "server's page: fetch it again"
                )
            opened.hdf5.open(path)  # says what is wrong
    return paths, opened


class Interpretation(NamedTuple):
    """What is made of the arrays of a file.

    Attributes:
        axis: along which samples lie: its number, from the end too, or its name.
        reverse_axes: axes are in reverse, as MATLAB shows them; `axis` counts so too.
        decode_cf: packed numbers of netCDF are unpacked, see `headrace.storage.hdf5.conventions`.
    """

    axis: int | str = 0
    reverse_axes: bool = False
    decode_cf: bool = False

    def axis_of(self, dataset: h5py.Dataset, where: str) -> int:
        """The axis that samples lie along, as the dataset is stored."""
        axis = axis_named(dataset, self.axis, where)
        return (
            dataset.ndim - 1 - axis
            if self.reverse_axes and not isinstance(self.axis, str)
            else axis
        )

    def reader(
        self,
        dataset: h5py.Dataset,
        rows: Chunks | ObjectRows,
        opened: OpenHDF5,
        path: str,
        name: str,
    ) -> ArrayReader | LibraryRows:
        """What reads the samples of a dataset.

        Raises:
            ConfigError: there is no such axis; or elements are of any size, so that samples lie
                along the first axis only.
        """
        where, key = f"{redact(path)}: {name!r}", f"{path}\0{name}"
        axis = self.axis_of(dataset, where)
        is_plain = axis == 0 and not (self.reverse_axes and dataset.ndim > 2)
        if isinstance(rows, ObjectRows):
            if not is_plain:
                raise ConfigError(
                    f"axis={self.axis!r}: {where} has elements of any size, so its samples lie "
                    "along the first axis only"
                )
            return rows
        reader = (
            ArrayReader(rows, opened.chunks, key)
            if is_plain
            else AxisReader(rows, opened.chunks, key, axis, self.reverse_axes)
        )
        if (decoding := decoding_of(dataset)) is not None:
            return DecodedReader(reader, *decoding)
        packing = packing_of(dataset) if self.decode_cf else None
        if packing is None:
            return reader
        if packing.joins:
            return DecodedObjects(reader, packing.decode, len(reader.shape) - 1)
        return DecodedReader(reader, packing.decode, packing.dtype)


class HDF5Source(PackedSource):
    """Rows of datasets of an HDF5 file, or the samples of a packed file.

    Records are arrays of one row (its shape and dtype, in the file's byte order); strings, vlen and
    compounds with them as h5py gives them; for several names dicts of these; 1-D arrays where a
    packed file holds encoded samples or tokens. Samples of packed files are checked against their
    CRC.

    Args:
        path: a local file; or, where `opened` has the files of its server, a URL.
        name: dataset inside the file; or several of equal length.
        direct: read the file itself where its layout is known; False: through h5py alone.
        cache_dir: where the table of a dataset of many chunks is kept; None: the user's cache
            folder.
        opened: what is open and decoded, to be shared with other sources.
        how: what is made of the arrays.

    Raises:
        MissingNameError: no dataset of that name; the message lists those there are.
        FormatError: no rows, references instead of values, a filter that nobody here knows, or a
            file that is shorter than it says.
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
        how: Interpretation | None = None,
    ) -> None:
        opened = opened or OpenHDF5()
        self._how = how = how or Interpretation()
        hdf5, is_remote = opened.hdf5, opened.files.is_remote
        self._file = (
            os.fspath(path) if is_remote else os.path.abspath(os.path.expanduser(os.fspath(path)))
        )
        self.info = packed_info(self._file, hdf5)
        self._offsets: SharedArray | None = None
        fields, chunks = dict[str, ArrayReader | LibraryRows](), list[Any]()
        with hdf5.reading(self._file) as file:
            for one in (name,) if isinstance(name, str) else name:
                if file.userblock_size and isinstance(
                    item := file.get(one), h5py.Group | h5py.Dataset
                ):
                    check_matlab(item, f"{redact(self._file)}: {one!r}")
                dataset = hdf5.dataset(file, one, self._file)
                rows = rows_of(
                    dataset,
                    self._file,
                    one,
                    hdf5,
                    opened.library,
                    direct=direct,
                    cache_dir=cache_dir,
                )
                fields[one] = how.reader(dataset, rows, opened, self._file, one)
                chunks.append(dataset.chunks if how == Interpretation() else [dataset.chunks, *how])
            shown = redact(path) if is_remote else self._file
            super().__init__(
                shown, opened, name if isinstance(name, str) else tuple(name), fields, chunks
            )
            if self.info is not None and name == DATA:
                self.part = None if self.info.part is None else PackPart(*self.info.part)
                self._read_index(file, self.info)

    @classmethod
    def of_layouts(
        cls, path: str, layouts: Sequence[ArrayLayout], is_one: bool, opened: OpenHDF5
    ) -> HDF5Source:
        """The source of a remote file, of which `layouts` gave these; h5py opens nothing."""
        source = cls.__new__(cls)
        source._how, source._file, source.info, source._offsets = Interpretation(), path, None, None
        fields = {
            one.name: ArrayReader(
                one.opened(path, opened.files), opened.chunks, f"{path}\0{one.name}"
            )
            for one in layouts
        }
        name = layouts[0].name if is_one else tuple(fields)
        super(HDF5Source, source).__init__(
            redact(path), opened, name, fields, [one.chunks for one in layouts]
        )
        return source

    def layouts(self) -> list[ArrayLayout] | None:
        """The layout of each array, where all are read directly, as they are; else None. See
        NOTE [ kept layouts ].
        """
        if (
            self.info is not None
            or self._how != Interpretation()
            or not all(type(field) is ArrayReader for field in self._fields.values())
        ):
            return None
        cuts: list[Any] = [grid[-1] for grid in self._grids]
        found = [
            layout_of(reader.chunks, cut) for reader, cut in zip(self._readers, cuts, strict=True)
        ]
        return None if None in found else [one for one in found if one is not None]

    def _read_index(self, file: h5py.File, packed: PackedInfo) -> None:
        """Offsets, checksums and names of a packed file, which must fit each other."""
        if packed.is_flat:
            self._offsets = SharedArray(self._column(file, OFFSETS).astype(np.int64, copy=False))
        self._crc = SharedArray(self._column(file, CRC)) if CRC in file else None
        ends: list[tuple[str, npt.NDArray[Any], int]] = []
        if self._offsets is not None:
            ends.append((OFFSETS, self._offsets.array, self.shape[0]))
        if NAMES in file:
            self.names = PackedNames.from_arrays(
                self._column(file, NAMES), self._column(file, NAME_OFFSETS)
            )
            ends.append((NAME_OFFSETS, self.names.arrays[1], len(self.names.arrays[0])))
        wrong = [name for name, offsets, end in ends if not are_offsets(offsets, packed.count, end)]
        if self._offsets is None and self.shape[0] != packed.count:
            wrong.append(DATA)
        if self._crc is not None and self._crc.array.shape != (packed.count,):
            wrong.append(CRC)
        if wrong:
            raise FormatError(
                f"{redact(self.path)} is damaged: {', '.join(wrong)} don't fit the "
                f"{packed.count:,} samples it should hold: pack it again"
            )

    def _column(self, file: h5py.File, name: str) -> npt.NDArray[Any]:
        dataset = self._opened.hdf5.dataset(file, name, self._file)
        check_has_values(dataset, f"{redact(self.path)}: {name!r}")
        Versions(dataset, self._file, name, self._opened.hdf5)
        column = np.asarray(dataset)
        expected = self.info.checksums.get(name) if self.info is not None else None
        if expected is not None and crc_of(column) != expected:
            raise FormatError(
                f"{redact(self.path)}: {name!r} has a wrong checksum, the file is damaged: pack "
                "it again"
            )
        decoding = decoding_of(dataset)
        return column if decoding is None else decoding[0](column)

    @property
    def is_flat(self) -> bool:
        return self._offsets is not None

    def _spans(self, indices: IntArray | slice) -> tuple[IntArray, IntArray] | None:
        if self._offsets is None:
            return None
        offsets = self._offsets.array
        return offsets[:-1][indices], offsets[1:][indices]

    def stored_column(self, name: str) -> npt.NDArray[Any]:
        with self._opened.hdf5.reading(self._file) as file:
            column = self._column(file, name)
            packing = (
                packing_of(self._opened.hdf5.dataset(file, name, self._file))
                if self._how.decode_cf
                else None
            )
        column = column if packing is None else np.asarray(packing.decode(column))
        if self._how.reverse_axes and column.size == len(self) == max(column.shape, default=0):
            column = column.reshape(-1)  # MATLAB has no arrays of one axis
        if column.ndim == 0 or len(column) != len(self):
            raise FormatError(
                f"{redact(self.path)}: {name!r} has shape {column.shape}, not one row for each of "
                f"{len(self)} samples"
            )
        return column

    def ragged(self, name: str) -> tuple[npt.NDArray[Any], IntArray]:
        items, offsets = self.whole(name), self.whole(offsets_named(name))
        if not are_offsets(offsets, len(self), len(items)):
            raise FormatError(
                f"{redact(self.path)} is damaged: {offsets_named(name)} don't fit {name}: pack it "
                "again"
            )
        return items, offsets.astype(np.int64, copy=False)

    def whole(self, name: str) -> npt.NDArray[Any]:
        """An array as a whole, compared with its checksum."""
        with self._opened.hdf5.reading(self._file) as file:
            return self._column(file, name)

    def has_array(self, name: str) -> bool:
        with self._opened.hdf5.reading(self._file) as file:
            return name in file
