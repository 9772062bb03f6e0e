"""Rows of uncompressed record batches, of which only their own bytes are read.

The metadata of a record batch says where the buffers of each column lie, and pyarrow reads it. The
buffers themselves stay in the file (https://arrow.apache.org/docs/format/Columnar.html), from which
the bytes of rows are read by their positions, and become arrays of pyarrow's. Nothing is mapped: if
somebody cuts the file short while it is read, that is an error, and no signal that ends the process
(SIGBUS).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.errors import FormatError
from headrace.formats.table.columns import inner_types, what_is
from headrace.formats.table.library import opened, pyarrow, zeros
from headrace.io.files import Files
from headrace.io.local.files import bytes_of
from headrace.io.ranges import ByteRanges

_WIDE = 8 << 10  # bytes of a row that are read to where they stay, rather than joined


def fits(kind: Any) -> bool:
    """True if rows of a type can be read without the others of their record batch."""
    pa = pyarrow()
    while isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_dictionary(kind):
        return what_is(kind) in ("text", "bytes")
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return False
    return all(map(fits, inner_types(kind)))


def read_batch(
    parts: Sequence[memoryview], schema: Any, names: Sequence[str], more: int = 0
) -> Any:
    """A record batch of pyarrow's, whose columns lie in `parts` where they are not compressed.

    Args:
        parts: of a stream, one after the other: the messages with the schema and all dictionaries,
            and the record batch.
        schema: of the stream.
        names: of the columns that are wanted.

    Raises:
        Exception: whatever pyarrow makes of a damaged one.
    """
    ipc = pyarrow().ipc
    numbers = [schema.get_field_index(name) for name in names]
    options = ipc.IpcReadOptions(included_fields=numbers, use_threads=False)
    return ipc.open_stream(opened(parts), options=options).read_next_batch()


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
) -> Batch | None:
    """Asks pyarrow for the buffers of a record batch: it is given memory that is all zeros. None:
    it makes others of them, since they are compressed or of another byte order.

    Args:
        head: the messages with the schema and all dictionaries.
        metadata: of the record batch, with its length.
        start, stop: where the buffers begin and end in the file.
        schema: of the file.
        names: of the columns.

    Raises:
        Exception: whatever pyarrow makes of a damaged one.
    """
    body = zeros(0, max(1, stop - start))
    parts = [memoryview(head), memoryview(metadata), body[: stop - start]]
    batch = read_batch(parts, schema, names)
    arrays = [batch.column(name) for name in names]
    for array in arrays:
        array.validate()  # that buffers are as long as so many rows need
    address = pyarrow().py_buffer(body).address
    starts = []
    stops = []
    for buffer in [buffer for array in arrays for buffer in array.buffers()]:
        at = -1
        if buffer is not None and buffer.size:
            at = buffer.address - address + start
            if not start <= at <= at + buffer.size <= stop:
                return None
        starts.append(at)
        stops.append(at if at < 0 else at + buffer.size)
    return Batch(arrays, starts, stops)


class StoredRows:
    """Reads rows of the record batches of a file, a column after the other.

    Of each row a span of items is read of each buffer: one of its own column, of lists as many as
    it has of that of their items, and so on.

    Args:
        files: by which it is read.
        path: of the file.
        rows: [n] their numbers in their record batches.
        starts, stops: [buffers, n] where the buffers of these record batches lie; see `Batch`.
    """

    def __init__(
        self, files: Files, path: str, rows: IntArray, starts: IntArray, stops: IntArray
    ) -> None:
        self._files = files
        self._path = path
        self._rows = rows
        self._starts = starts
        self._stops = stops
        self._firsts = np.maximum(starts, 0)
        self._is_there: list[bool] = np.any(starts >= 0, axis=1).tolist()
        self._buffers = iter(range(len(starts)))

    def column(self, like: Any) -> Any:
        """The rows of the next column, as an array of pyarrow's.

        Args:
            like: an array of the column's, that says its type, and has its dictionary.

        Raises:
            FormatError: the file is damaged.
            FileChangedError, OSError: the file can't be read, or is another one.
        """
        return self._spans(like, self._rows, None)

    def _spans(self, like: Any, begins: IntArray, lengths: IntArray | None) -> Any:
        """The items of spans of the next column, or of one inside, one span after the other.
        `lengths`: None: one item each.
        """
        pa = pyarrow()
        kind = like.type
        if isinstance(like, pa.ExtensionArray):
            return pa.ExtensionArray.from_storage(kind, self._spans(like.storage, begins, lengths))
        what = what_is(kind)
        if what == "null":
            next(self._buffers)
            return pa.nulls(_total(begins, lengths))
        buffers = [self._valid(begins, lengths)]
        children = []
        if what == "struct":
            for number in range(kind.num_fields):
                children.append(self._spans(like.field(number), begins, lengths))
        elif what == "fixed":
            size = kind.list_size
            sizes = size * (np.ones_like(begins) if lengths is None else lengths)
            children.append(self._spans(like.values, begins * size, sizes))
        elif pa.types.is_dictionary(kind):
            buffers.append(self._numbers(kind.index_type, begins, lengths))
        elif what == "number" or pa.types.is_fixed_size_binary(kind):
            buffers.append(self._numbers(kind, begins, lengths))
        else:
            offsets, firsts, ends = self._offsets(kind, begins, lengths)
            buffers.append(pa.py_buffer(offsets))
            if what == "list":
                children.append(self._spans(like.values, firsts, ends - firsts))
            else:
                buffers.append(pa.py_buffer(self._joined(next(self._buffers), firsts, ends)))
        count = _total(begins, lengths)
        if not pa.types.is_dictionary(kind):
            return pa.Array.from_buffers(kind, count, buffers, children=children)
        codes = pa.Array.from_buffers(kind.index_type, count, buffers)
        return pa.DictionaryArray.from_arrays(codes, like.dictionary, safe=False)

    # -- the buffers of columns, in the order of the format

    def _valid(self, begins: IntArray, lengths: IntArray | None) -> Any:
        """Bits that are 0 where there is no value; None: there are all."""
        buffer = next(self._buffers)
        if not self._is_there[buffer]:
            return None
        if lengths is None:
            lengths = np.ones_like(begins)
        has_bits = self._starts[buffer] >= 0
        bits = np.ones(int(lengths.sum()), np.uint8)
        bits[np.repeat(has_bits, lengths)] = self._bits(buffer, begins, lengths * has_bits)
        return pyarrow().py_buffer(np.packbits(bits, bitorder="little"))

    def _offsets(
        self, kind: Any, begins: IntArray, lengths: IntArray | None
    ) -> tuple[npt.NDArray[Any], IntArray, IntArray]:
        """Offsets of lists, texts or bytes one behind the other; and where those of each span
        begin and end in the file.
        """
        dtype = np.dtype(np.int64 if str(kind).startswith("large") else np.int32)
        width = dtype.itemsize
        buffer = next(self._buffers)
        if lengths is None:
            data = self._joined(buffer, begins * width, (begins + 2) * width)
            firsts, ends = np.frombuffer(data, dtype).reshape(-1, 2).T.astype(np.int64)
            sizes = ends - firsts
        else:
            filled = lengths > 0
            counts = lengths + filled
            data = self._joined(buffer, begins * width, (begins + counts) * width)
            offsets = np.frombuffer(data, dtype).astype(np.int64)
            last = np.cumsum(counts)[filled] - 1  # of each span that is not empty
            firsts = np.zeros_like(begins)
            ends = np.zeros_like(begins)
            firsts[filled] = offsets[last - lengths[filled]]
            ends[filled] = offsets[last]
            sizes = np.delete(np.diff(offsets), last[:-1])
        if firsts.min() < 0 or sizes.min(initial=0) < 0:
            raise FormatError("a value would end before it begins: the file is damaged")
        made = np.zeros(len(sizes) + 1, dtype)
        np.cumsum(sizes, out=made[1:])
        return made, firsts, ends

    def _numbers(self, kind: Any, begins: IntArray, lengths: IntArray | None) -> Any:
        """The numbers of spans, or bytes of a fixed size."""
        buffer = next(self._buffers)
        ends = begins + (1 if lengths is None else lengths)
        if pyarrow().types.is_boolean(kind):
            bits = self._bits(buffer, begins, ends - begins)
            return pyarrow().py_buffer(np.packbits(bits, bitorder="little"))
        width = kind.byte_width
        return pyarrow().py_buffer(self._joined(buffer, begins * width, ends * width))

    def _bits(self, buffer: int, begins: IntArray, lengths: IntArray) -> npt.NDArray[np.uint8]:
        firsts = begins // 8
        ends = np.where(lengths > 0, -(-(begins + lengths) // 8), firsts)
        data = np.frombuffer(self._joined(buffer, firsts, ends), np.uint8)
        bits = np.unpackbits(data, bitorder="little")
        nbytes = ends - firsts
        starts = 8 * (np.cumsum(nbytes) - nbytes) + begins % 8  # of each span among the bits
        inside = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return bits[np.repeat(starts, lengths) + inside]

    def _joined(self, buffer: int, begins: IntArray, ends: IntArray) -> Any:
        """Bytes of a buffer, one range after the other."""
        first = self._firsts[buffer]
        nbytes = ends - begins
        total = int(nbytes.sum())
        if not total:
            return b""
        starts = first + begins
        stops = first + ends
        if ((stops > self._stops[buffer]) & (nbytes > 0)).any():
            raise FormatError("a row lies outside of its record batch: the file is damaged")
        ranges = ByteRanges.in_file(self._path, starts, stops)
        if total < _WIDE * len(begins):
            return self._files.read_joined(ranges)
        data = np.empty(total, np.uint8)
        view = bytes_of(data)
        edges = np.cumsum([0, *nbytes]).tolist()
        buffers = [view[start:stop] for start, stop in itertools.pairwise(edges)]
        self._files.read_into(ranges, buffers)
        return data


def _total(begins: IntArray, lengths: IntArray | None) -> int:
    if lengths is None:
        return len(begins)
    return int(lengths.sum())
