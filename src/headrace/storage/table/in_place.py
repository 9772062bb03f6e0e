"""Rows of uncompressed record batches, of which only their own bytes are read.

The metadata of a record batch says where the buffers of each column lie, and pyarrow reads it. The
buffers themselves stay in the file (https://arrow.apache.org/docs/format/Columnar.html), from which
the bytes of rows are read by their positions. Nothing is mapped: if somebody cuts the file short
while it is read, that is an error, and no signal that ends the process (SIGBUS).
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.errors import FormatError
from headrace.io.files import Files
from headrace.io.local.files import bytes_of
from headrace.io.ranges import ByteRanges
from headrace.storage.table.columns import (
    Coded,
    Column,
    Lists,
    Mask,
    Nothing,
    Numbers,
    Structs,
    Texts,
    column_of,
    in_axes_of,
    is_bytes,
    is_list,
    is_number,
    is_text,
    numbers_of,
    offset_dtype,
    tensor_shape,
)
from headrace.storage.table.library import pyarrow, read_batch

_WIDE = 8 << 10  # bytes of a row that are read to where they stay, rather than joined
_OUTSIDE = "a row lies outside of its record batch: the file is damaged"


def fits(kind: Any) -> bool:
    """True if rows of a type can be read without the others of their record batch."""
    pa = pyarrow()
    types = pa.types
    while isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if types.is_dictionary(kind):
        return is_text(kind) or is_bytes(kind)
    if types.is_struct(kind):
        return all(fits(kind.field(number).type) for number in range(kind.num_fields))
    if types.is_fixed_size_list(kind) or is_list(kind):
        return fits(kind.value_type)
    return not (types.is_string_view(kind) or types.is_binary_view(kind))


class Batch(NamedTuple):
    """A record batch, without the bytes of its columns.

    Attributes:
        arrays: of pyarrow's, with types and dictionaries; their values are never looked at.
        starts, stops: where each buffer lies in the file, in the order of the format, all columns
            one after the other; -1: there is none.
    """

    arrays: list[Any]
    starts: list[int]
    stops: list[int]


def batch_of(
    head: bytes, metadata: bytes, start: int, stop: int, schema: Any, names: Sequence[str]
) -> Batch:
    """Asks pyarrow for the buffers of a record batch: it is given memory that is all zeros.

    Args:
        head: the messages with the schema and all dictionaries.
        metadata: of the record batch, with its length.
        start, stop: where the buffers begin and end in the file.
        schema: of the file.
        names: of the columns.

    Raises:
        Exception: whatever pyarrow makes of a damaged one.
    """
    size = max(1, stop - start)
    nothing = (
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
        if hasattr(mmap, "PROT_READ")
        else mmap.mmap(-1, size)
    )
    body = memoryview(nothing)[: stop - start]
    batch = read_batch([memoryview(head), memoryview(metadata), body], schema, names)
    arrays = [batch.column(name) for name in names]
    for array in arrays:
        array.validate()  # that buffers are as long as so many rows need
    address = pyarrow().py_buffer(nothing).address
    starts, stops = list[int](), list[int]()
    for buffer in (buffer for array in arrays for buffer in array.buffers()):
        at = -1 if buffer is None else buffer.address - address + start
        starts.append(at)
        stops.append(-1 if buffer is None else at + buffer.size)
    return Batch(arrays, starts, stops)


class StoredRows:
    """Reads rows of the record batches of a file, a column after the other.

    Args:
        files: by which it is read.
        path: of the file.
        rows: [n] their numbers in their record batches.
        starts, stops: [buffers, n] where the buffers of these record batches lie; see `Batch`.
    """

    def __init__(
        self, files: Files, path: str, rows: IntArray, starts: IntArray, stops: IntArray
    ) -> None:
        self._files, self._path = files, path
        self._rows, self._starts, self._stops = rows, starts, stops
        self._buffers = iter(range(len(starts)))
        self._is_there = np.any(starts >= 0, axis=1)
        self._types = pyarrow().types

    def column(self, name: str, array: Any, shape: tuple[int, ...] | None) -> Column:
        """The rows of the next column.

        Args:
            name: of the column.
            array: of pyarrow's, that says its type, and has its dictionary.
            shape: see `column_of`.

        Raises:
            FormatError: the file is damaged; rows have another shape.
            FileChangedError, OSError: the file can't be read, or is another one.
        """
        return self._column(name, array, None, self._rows, shape)

    def _column(
        self,
        name: str,
        array: Any,
        of: IntArray | None,
        rows: IntArray,
        shape: tuple[int, ...] | None = None,
    ) -> Column:
        """Any items of the next column, or of a column inside.

        Args:
            name, array, shape: see `column`.
            of: the row whose record batch they are in; None: item i is in that of row i.
            rows: their numbers in the record batch.
        """
        pa, types = pyarrow(), self._types
        if shape is None and tensor_shape(array.type) is not None:
            return in_axes_of(array.type, self._column(name, array.storage, of, rows))
        while isinstance(array, pa.ExtensionArray):
            array = array.storage
        kind = array.type
        valid = self._valid(of, rows)
        if types.is_null(kind):
            return Nothing()
        if types.is_fixed_size_list(kind) or shape is not None:
            return self._arrays(name, array, of, rows, valid, shape)
        if types.is_struct(kind):
            fields = dict[str, Column]()
            for at, field in enumerate(kind):
                inner = f"{name}.{field.name}"
                fields[field.name] = self._column(inner, array.field(at), of, rows)
            return Structs(fields, valid)
        if types.is_dictionary(kind):
            codes = self._numbers(kind.index_type, of, rows, 1)[:, 0]
            items = column_of(name, array.dictionary)
            return Coded(name, codes, items, len(array.dictionary), valid)
        if types.is_fixed_size_binary(kind):
            width = kind.byte_width
            data = self._fixed(next(self._buffers), of, rows * width, width)
            offsets = np.arange(len(rows) + 1, dtype=np.int64) * width
            return Texts(name, offsets, bytes_of(data), False, valid)
        if is_number(kind):
            return numbers_of(name, self._numbers(kind, of, rows, 1)[:, 0], valid)
        begins, ends = self._offsets(kind, of, rows, rows + 1)
        offsets = np.concatenate([[0], np.cumsum(ends - begins)])
        if is_list(kind):
            return Lists(offsets, self._items(name, array.values, of, begins, ends), valid)
        texts = self._joined(next(self._buffers), of, begins, ends)
        return Texts(name, offsets, memoryview(texts), is_text(kind), valid)

    def _items(
        self, name: str, array: Any, of: IntArray | None, begins: IntArray, ends: IntArray
    ) -> Column:
        """The items `begins` to `ends` of lists, one list after the other."""
        lengths = ends - begins
        firsts = np.cumsum(lengths) - lengths
        rows = np.arange(int(lengths.sum())) + np.repeat(begins - firsts, lengths)
        return self._column(name, array, np.repeat(_all(of, begins), lengths), rows)

    def _arrays(
        self,
        name: str,
        array: Any,
        of: IntArray | None,
        rows: IntArray,
        valid: Mask | None,
        shape: tuple[int, ...] | None,
    ) -> Column:
        """Lists of a fixed size, and those of which the file says a shape."""
        types, sizes = self._types, list[int]()
        there = np.ones(len(rows), bool) if valid is None else valid.copy()
        of, begins, ends = _all(of, rows)[there], rows[there], rows[there] + 1
        whole = np.ones(len(begins), bool)  # of which no inner list is missing
        while True:
            if types.is_fixed_size_list(array.type):
                sizes.append(array.type.list_size)
                begins, ends = begins * sizes[-1], ends * sizes[-1]
            else:
                begins, ends = self._offsets(array.type, of, begins, ends)
            array = array.values
            kind = array.type
            if not (types.is_fixed_size_list(kind) or is_list(kind)):
                break
            has = self._valid_spans(of, begins, ends)
            whole &= True if has is None else has.all(axis=1)
        shape = tuple(sizes) if shape is None else shape
        count = math.prod(shape)
        if not is_number(kind):
            lengths = np.zeros(len(rows), np.int64)
            lengths[there] = ends - begins
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            return Lists(offsets, self._items(name, array, of, begins, ends), valid)
        if (ends - begins != count).any():
            raise FormatError(
                f"column {name!r} holds rows of other than {count:,} numbers, and rows of shape "
                f"{list(shape)} by its schema"
            )
        has = self._valid_spans(of, begins, ends)
        numbers = self._numbers(kind, of, begins, count)
        if has is not None and numbers.dtype.kind == "f":
            numbers = np.where(has, numbers, numbers.dtype.type(np.nan))
        elif has is not None:
            whole &= has.all(axis=1)
        if there.all() and whole.all():
            return Numbers(name, numbers.reshape(len(rows), *shape), None)
        data = np.zeros((len(rows), count), numbers.dtype)
        data[there] = numbers
        there[there] = whole
        return Numbers(name, data.reshape(len(rows), *shape), there)

    # -- the buffers of columns, in the order of the format

    def _valid(self, of: IntArray | None, rows: IntArray) -> Mask | None:
        """[n] False where there is no value; None: there are all."""
        has = self._valid_spans(of, rows, rows + 1)
        return None if has is None else has[:, 0]

    def _valid_spans(self, of: IntArray | None, begins: IntArray, ends: IntArray) -> Mask | None:
        """[n, length] the same of spans, which are equally long."""
        buffer = next(self._buffers)
        if not self._is_there[buffer] or not len(begins):
            return None
        has_mask = self._in(self._starts, buffer, of) >= 0
        length = int(ends[0] - begins[0])
        if (ends - begins != length).any():
            raise FormatError("lists in an array have different lengths: the file is damaged")
        valid = np.ones((len(begins), length), bool)
        valid[has_mask] = self._bits(buffer, _all(of, begins)[has_mask], begins[has_mask], length)
        return valid

    def _offsets(
        self, kind: Any, of: IntArray | None, begins: IntArray, ends: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Where lists, texts or bytes from `begins` to `ends` begin and end."""
        buffer, dtype = next(self._buffers), offset_dtype(kind)
        width = dtype.itemsize
        if (ends - begins == 1).all():  # they lie side by side
            both = self._fixed(buffer, of, begins * width, 2 * width).view(dtype)
            firsts, lasts = both[:, 0].astype(np.int64), both[:, 1].astype(np.int64)
        else:
            firsts, lasts = (
                self._fixed(buffer, of, at * width, width).view(dtype)[:, 0].astype(np.int64)
                for at in (begins, ends)
            )
        if (firsts < 0).any() or (lasts < firsts).any():
            raise FormatError("a value would end before it begins: the file is damaged")
        return firsts, lasts

    def _numbers(
        self, kind: Any, of: IntArray | None, begins: IntArray, count: int
    ) -> npt.NDArray[Any]:
        """[n, count] numbers from each of `begins` on."""
        buffer = next(self._buffers)
        if self._types.is_boolean(kind):
            return self._bits(buffer, of, begins, count)
        dtype = np.dtype(kind.to_pandas_dtype())
        data = self._fixed(buffer, of, begins * dtype.itemsize, count * dtype.itemsize)
        return data.view(dtype)

    def _bits(self, buffer: int, of: IntArray | None, begins: IntArray, count: int) -> Mask:
        """[n, count] bits from each of `begins` on."""
        if not len(begins) or not count:
            return np.ones((len(begins), count), bool)
        first, width = begins // 8, 1 + (count + 6) // 8
        # the last bytes of a buffer may be fewer
        room = self._in(self._stops, buffer, of) - self._in(self._starts, buffer, of)
        first = np.maximum(np.minimum(first, room - width), 0)
        width = min(width, int(room.min()))
        bytes_ = self._fixed(buffer, of, first, width)
        bits = np.unpackbits(bytes_, axis=1, bitorder="little")
        places = (begins - 8 * first)[:, None] + np.arange(count)
        if places.max() >= bits.shape[1]:
            raise FormatError(_OUTSIDE)
        return np.take_along_axis(bits, places, axis=1).view(np.bool_)

    def _fixed(
        self, buffer: int, of: IntArray | None, begins: IntArray, nbytes: int
    ) -> npt.NDArray[np.uint8]:
        """[n, nbytes] bytes from each of `begins` on."""
        ends = begins + nbytes
        if nbytes < _WIDE:
            joined = self._joined(buffer, of, begins, ends)
            return np.frombuffer(joined, np.uint8).reshape(len(begins), nbytes)
        data = np.empty((len(begins), nbytes), np.uint8)
        ranges = self._ranges(buffer, of, begins, ends)
        self._files.read_into(ranges, [bytes_of(row) for row in data])
        return data

    def _joined(self, buffer: int, of: IntArray | None, begins: IntArray, ends: IntArray) -> bytes:
        """Bytes of a buffer, one range after the other."""
        return self._files.read_joined(self._ranges(buffer, of, begins, ends))

    def _ranges(
        self, buffer: int, of: IntArray | None, begins: IntArray, ends: IntArray
    ) -> ByteRanges:
        first = np.maximum(self._in(self._starts, buffer, of), 0)  # none, if there are no bytes
        stops = first + ends
        if (stops > self._in(self._stops, buffer, of)).any() and (ends > begins).any():
            raise FormatError(_OUTSIDE)
        return ByteRanges.in_file(self._path, first + begins, stops)

    @staticmethod
    def _in(places: IntArray, buffer: int, of: IntArray | None) -> IntArray:
        """Where a buffer begins or ends in the record batch of each item."""
        found: IntArray = places[buffer] if of is None else places[buffer, of]
        return found


def _all(of: IntArray | None, items: IntArray) -> IntArray:
    return np.arange(len(items)) if of is None else of
