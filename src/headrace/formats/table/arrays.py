"""Arrays in .npy files, and those that lie in .npz files as they are: rows are read by ranges,
straight into their batch.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.dtypes import AnyArray
from headrace.errors import ConfigError, FormatError, MissingNameError
from headrace.formats.arrays.chunks import ChunkTable, DirectChunks, Grid
from headrace.formats.arrays.codecs import Pipeline
from headrace.formats.arrays.reader import ArrayReader, OpenArrays
from headrace.formats.arrays.rows import ArraysSource
from headrace.formats.resolve.file_set import FileSet
from headrace.formats.table.files import NPY_MAGIC
from headrace.formats.tree import StoredArray
from headrace.formats.zips import members_of
from headrace.io.files import Files, HeldBytes
from headrace.io.local_files import LocalFiles
from headrace.io.paths import listed_names, redact
from headrace.io.ranges import ByteRanges

_HEAD = 16 << 10  # bytes that are read of an array for its header
_LONGEST = 1 << 20  # bytes of a header


class NumpySource(ArraysSource):
    """The rows of an array of a .npy file, or of arrays of a .npz file.

    Args:
        shown: the path of the file, as messages name it.
        opened: what is open, shared with other sources.
        arrays: those of the file, by name.
        names: of those that are read; a str: records are rows of that one, else dicts.

    Raises:
        FormatError: they have different numbers of rows.
    """

    def __init__(
        self,
        shown: str,
        opened: OpenArrays[Any],
        arrays: dict[str, StoredArray],
        names: str | tuple[str, ...],
    ) -> None:
        self._arrays = arrays
        some = (names,) if isinstance(names, str) else names
        fields = {name: _reader(name, opened, arrays[name]) for name in some}
        super().__init__(shown, opened, names, fields)

    def column(self, name: str) -> AnyArray:
        """All rows of an array of the file."""
        array = self._arrays[name]
        if array.shape[0] != len(self):
            raise FormatError(
                f"{self.path}: {name!r} has {array.shape[0]:,} rows, not one for each of "
                f"{len(self):,} samples"
            )
        return _reader(name, self._opened, array).whole(self.run)


def _reader(name: str, opened: OpenArrays[Any], array: StoredArray) -> ArrayReader:
    path = array.path
    grid = Grid(array.shape, (max(1, array.shape[0]), *array.shape[1:]))
    index = ChunkTable(path, np.array([[array.begin], [array.nbytes], [0]]))
    chunks = DirectChunks(grid, array.dtype, index, Pipeline(), opened.files, path=path, name=name)
    return ArrayReader(chunks, opened.chunks, f"{path}\0{name}")


def open_arrays(
    files: FileSet, columns: str | Sequence[str] | None, target_name: str | None
) -> list[NumpySource]:
    """The sources of .npy and .npz files.

    Args:
        files: what the path means.
        columns: names of arrays of .npz files; None: all but the targets. A .npy file has none.
        target_name: of the targets, which are no column.

    Raises:
        FormatError: a file is none of these, damaged, cut short, or holds an array that can't be
            read in place.
        MissingNameError: there is no such array; the message lists those there are.
        ConfigError: names are given for .npy files.
    """
    opened: OpenArrays[Any] = OpenArrays(files.server or LocalFiles())
    paths = files.urls()
    if files.server is not None:
        files.server.learn(paths)
    targets = [] if target_name is None else [target_name]
    sources = []
    for path in paths:
        arrays = arrays_of(path, opened.files)
        shown = redact(path)
        names: Any = columns
        if "" in arrays:
            if columns is not None or targets:
                raise ConfigError(
                    f"{shown} is one array without a name: leave out columns and target_name"
                )
            names = ""
        elif not isinstance(columns, str):
            names = tuple(columns or (name for name in arrays if name != target_name))
            if not names:
                raise FormatError(f"{shown} holds no array besides the targets")
        found: dict[str, StoredArray] = {}
        for name in (*([names] if isinstance(names, str) else names), *targets):
            if name not in arrays:
                raise MissingNameError(
                    f"{shown} has no array {name!r}; it has: {listed_names(arrays, name)}"
                )
            array = arrays[name]
            if isinstance(array, FormatError):
                raise array
            found[name] = array
        sources.append(NumpySource(shown, opened, found, names))
    return sources


def arrays_of(path: str, files: Files) -> dict[str, StoredArray | FormatError]:
    """The arrays of a .npy file (its name is "") or of a .npz file; of one that can't be read in
    place the reason.

    Raises:
        FormatError: it is neither, or damaged.
    """
    size = files.version(path).size
    shown = redact(path)

    def read(start: int, stop: int) -> memoryview:
        if not 0 <= start <= stop <= size:
            raise FormatError(
                f"{shown} refers to bytes {start:,} to {stop:,}, and has {size:,}: the file is "
                "damaged"
            )
        return memoryview(files.read_joined(ByteRanges.of([(path, start, stop)])))

    def opened(start: int) -> HeldBytes:
        """The file, at a byte from which a header is there."""
        held = HeldBytes(size, [(start, read(start, min(size, start + _HEAD)))], read)
        held.seek(start)
        return held

    file = opened(0)
    magic = bytes(file.read(4))
    if magic == NPY_MAGIC[:4]:
        file.seek(0)
        return {"": _array_in(path, file, size, shown)}
    if magic not in (b"PK\x03\x04", b"PK\x05\x06"):
        raise FormatError(
            f"{shown} is neither a .npy nor an .npz file: it may be damaged, or a server's error "
            "page: fetch it again"
        )
    arrays: dict[str, StoredArray | FormatError] = {}
    for info, begin in zip(*members_of(path, files), strict=True):
        name = info.filename.removesuffix(".npy")
        where = f"{shown}, {info.filename!r}"
        if info.is_dir() or not info.filename.endswith(".npy"):
            raise FormatError(
                f"{where} is not an array: the zip file was not written by numpy.savez"
            )
        if info.compress_type != zipfile.ZIP_STORED:
            arrays[name] = FormatError(
                f"{where} is compressed, so its rows can't be read in place: write the file with "
                "numpy.savez instead of "
                "numpy.savez_compressed, or the arrays to HDF5 in compressed chunks"
            )
            continue
        file = opened(int(begin))
        end = file.tell() + info.file_size
        if end > size:
            raise FormatError(
                f"{where} would end at byte {end:,}, and the file has {size:,}: it is cut short"
            )
        try:
            arrays[name] = _array_in(path, file, end, where)
        except FormatError as error:  # of no matter where it is not chosen
            arrays[name] = error
    return arrays


def _array_in(path: str, file: HeldBytes, end: int, where: str) -> StoredArray:
    """The array whose header begins where a file stands, and whose bytes end at a byte."""
    begin = file.tell()
    try:
        head = bytes(file.read(12))
        file.seek(begin)
        version: tuple[int, int] = np.lib.format.read_magic(file)
        header_of = np.lib.format.read_array_header_1_0
        if version > (1, 0):
            header_of = np.lib.format.read_array_header_2_0
            if int.from_bytes(head[8:], "little") > _LONGEST:
                raise ValueError("it would have many bytes")
        shape, is_fortran, dtype = header_of(file, max_header_size=_LONGEST)
        if not all(extent >= 0 for extent in shape):
            raise ValueError(f"shape {shape}")
        if version == (3, 0) and dtype.names is not None:
            dtype.names = tuple(name.encode("latin-1").decode() for name in dtype.names)
    except (ValueError, TypeError, MemoryError, RecursionError) as error:
        raise FormatError(
            f"{where}: its header can't be read ({error}): the file is damaged or cut short"
        ) from error
    if dtype.hasobject:
        raise FormatError(
            f"{where} holds Python objects (dtype {dtype}), which are pickles and may run code: "
            "write numbers, or texts of a fixed size "
            "(dtype 'U20')"
        )
    if not shape:
        raise FormatError(f"{where} is a single value, not an array of samples")
    # The order is of no matter where at most one axis has several elements.
    if is_fortran and 0 not in shape and sum(extent > 1 for extent in shape) > 1:
        raise FormatError(
            f"{where} lies column by column (Fortran order), with no row in one piece: save "
            "numpy.ascontiguousarray(array)"
        )
    array = StoredArray(shape, dtype, path, file.tell())
    if array.begin + array.nbytes > end:
        raise FormatError(
            f"{where} is cut short: {dtype} {list(shape)} takes {array.nbytes:,} bytes, and there "
            f"are {end - array.begin:,}"
        )
    return array
