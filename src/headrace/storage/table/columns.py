"""The decoded columns of a row group or record batch, whose rows are taken by number.

A column lies in the memory that pyarrow decoded it to, or that its rows were read to: numbers as
NumPy arrays, texts, bytes and lists by their offsets. Its rows become values only when they are
asked for.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.dtypes import ArraySpec, IntArray
from headrace.errors import FormatError
from headrace.storage.table.library import pyarrow

Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of rows that are lists of lists in the file, by the names of columns."""
Mask = npt.NDArray[np.bool_]


class Column(ABC):
    """Values of one column.

    Attributes:
        valid: [n] False where there is no value; None: there are all.
    """

    valid: Mask | None = None

    @abstractmethod
    def values(self, rows: IntArray) -> list[Any]:
        """The values of rows: NumPy arrays, str, bytes, lists and dicts of these; None where there
        is none.

        Raises:
            FormatError: a number is missing, or a text is no UTF-8.
        """

    def value(self, row: int) -> Any:
        """That of one row."""
        return self.values(np.array([row]))[0]

    def settle(self) -> None:  # noqa: B027
        """Does once what each row would take anew, where the column lies in memory that it was
        decoded to.
        """

    def _has(self, rows: IntArray) -> list[bool]:
        return [True] * len(rows) if self.valid is None else self.valid[rows].tolist()


class Numbers(Column):
    """Numbers, or arrays of them of one shape.

    Args:
        name: of the column.
        data: [n, ...], NaN where a floating-point number is missing.
        valid: see `Column`; of floating-point numbers None.
    """

    def __init__(self, name: str, data: npt.NDArray[Any], valid: Mask | None) -> None:
        self.name, self.data, self.valid = name, data, valid

    def take(self, rows: IntArray, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Copies of rows, [len(rows), ...].

        Args:
            rows: their numbers.
            out: where they go, C-contiguous, of their shape and dtype; None: to memory of their
                own.

        Raises:
            FormatError: one is missing.
        """
        if self.valid is not None and not self.valid[rows].all():
            raise self._missing()
        # of an array that is not aligned `take` would copy the whole
        if out is None or not self.data.flags.aligned:
            taken: npt.NDArray[Any] = self.data[rows]
            if out is not None:
                out[...] = taken
            return taken
        return self.data.take(rows, 0, out, "clip")  # "raise" would write to a copy of `out` first

    def view(self, row: int) -> Any:
        """One row, which lies where it was decoded to.

        Raises:
            FormatError: it is missing.
        """
        if self.valid is not None and not self.valid[row]:
            raise self._missing()
        return self.data[row]

    def value(self, row: int) -> Any:
        return np.array(self.view(row))

    def _missing(self) -> FormatError:
        return FormatError(
            f"column {self.name!r} has no value (null) there, and {self.data.dtype} has none for "
            "that: fill it, or leave it out"
        )

    def values(self, rows: IntArray) -> list[Any]:
        taken = self.take(rows)
        return [taken[number, ...] for number in range(len(taken))]


class Texts(Column):
    """Texts or bytes, which lie one behind the other.

    Args:
        name: of the column.
        offsets: [n + 1] of the first byte of each.
        data: the bytes of all.
        is_text: True if they are UTF-8.
        valid: see `Column`.
    """

    def __init__(
        self,
        name: str,
        offsets: npt.NDArray[Any],
        data: memoryview,
        is_text: bool,
        valid: Mask | None,
    ) -> None:
        self.name, self._offsets, self._data, self._is_text, self.valid = (
            name,
            offsets,
            data,
            is_text,
            valid,
        )
        # all texts as one, if they are ASCII: then a byte is a character
        self._whole: str | None = None

    def settle(self) -> None:
        if not self._is_text:
            return
        try:
            self._whole = str(self._data[: int(self._offsets[-1])], "ascii")
        except UnicodeDecodeError:  # each row is decoded by itself
            return
        self._data = memoryview(b"")

    def values(self, rows: IntArray) -> list[Any]:
        data, begins, ends = (
            self._data,
            self._offsets[rows].tolist(),
            self._offsets[rows + 1].tolist(),
        )
        if self._whole is not None:
            whole = self._whole
            texts: list[Any] = [whole[begin:end] for begin, end in zip(begins, ends, strict=True)]
            return (
                texts
                if self.valid is None
                else [
                    text if has else None for text, has in zip(texts, self._has(rows), strict=True)
                ]
            )
        spans = zip(begins, ends, self._has(rows), strict=True)
        if not self._is_text:
            return [bytes(data[begin:end]) if has else None for begin, end, has in spans]
        try:
            return [str(data[begin:end], "utf-8") if has else None for begin, end, has in spans]
        except UnicodeDecodeError as error:
            raise self._no_text(error) from None

    def value(self, row: int) -> Any:
        if self.valid is not None and not self.valid[row]:
            return None
        begin, end = self._offsets.item(row), self._offsets.item(row + 1)
        if self._whole is not None:
            return self._whole[begin:end]
        data = self._data[begin:end]
        try:
            return str(data, "utf-8") if self._is_text else bytes(data)
        except UnicodeDecodeError as error:
            raise self._no_text(error) from None

    def _no_text(self, error: UnicodeDecodeError) -> FormatError:
        return FormatError(f"column {self.name!r} holds a text that is no UTF-8: {error}")


class Lists(Column):
    """Lists of any length: of numbers as arrays, else as lists.

    Args:
        offsets: [n + 1] of the first item of each.
        items: of all lists.
        valid: see `Column`.
    """

    def __init__(self, offsets: npt.NDArray[Any], items: Column, valid: Mask | None) -> None:
        self._offsets, self._items, self.valid = offsets, items, valid

    def values(self, rows: IntArray) -> list[Any]:
        begins, ends = (
            self._offsets[rows].astype(np.int64),
            self._offsets[rows + 1].astype(np.int64),
        )
        lengths = ends - begins
        starts = np.cumsum(lengths) - lengths
        inside = np.arange(int(lengths.sum())) + np.repeat(begins - starts, lengths)
        items: Any = (
            self._items.take(inside)
            if isinstance(self._items, Numbers)
            else self._items.values(inside)
        )
        spans = zip(starts.tolist(), (starts + lengths).tolist(), self._has(rows), strict=True)
        return [items[start:stop] if has else None for start, stop, has in spans]


class Structs(Column):
    """Dicts of other columns."""

    def __init__(self, fields: dict[str, Column], valid: Mask | None) -> None:
        self.fields, self.valid = fields, valid

    def values(self, rows: IntArray) -> list[Any]:
        there = np.array(self._has(rows), bool)
        columns = {name: column.values(rows[there]) for name, column in self.fields.items()}
        made = zip(*columns.values(), strict=True) if columns else [()] * int(there.sum())
        found = iter([dict(zip(columns, row, strict=True)) for row in made])
        return [next(found) if has else None for has in there.tolist()]


class Coded(Column):
    """Texts or bytes, of which each row holds the number of one in a dictionary.

    Args:
        name: of the column.
        codes: [n] the number of each; anything where there is none.
        items: the dictionary.
        count: items of the dictionary.
        valid: see `Column`.
    """

    def __init__(
        self, name: str, codes: npt.NDArray[Any], items: Column, count: int, valid: Mask | None
    ) -> None:
        self.name, self._codes, self._items, self._count, self.valid = (
            name,
            codes,
            items,
            count,
            valid,
        )

    def settle(self) -> None:
        self._items.settle()

    def values(self, rows: IntArray) -> list[Any]:
        present = rows if self.valid is None else rows[self.valid[rows]]
        codes, places = np.unique(self._codes[present], return_inverse=True)
        if len(codes):
            self._check(codes[0])
            self._check(codes[-1])
        items = self._items.values(codes.astype(np.int64))
        found = iter([items[place] for place in places.tolist()])
        return [next(found) if has else None for has in self._has(rows)]

    def value(self, row: int) -> Any:
        if self.valid is not None and not self.valid[row]:
            return None
        code = int(self._codes[row])
        self._check(code)
        return self._items.value(code)

    def _check(self, code: int) -> None:
        if not 0 <= code < self._count:
            raise FormatError(
                f"column {self.name!r} refers to item {code:,} of its dictionary, which has "
                f"{self._count:,}: the file is damaged"
            )


class Nothing(Column):
    """A column without values."""

    def values(self, rows: IntArray) -> list[Any]:
        return [None] * len(rows)


# -- what types there are


def refused(kind: Any) -> str | None:
    """What a type, or one inside of it, is called that no sample can hold; None: samples can
    hold it.
    """
    types = pyarrow().types
    kind = _plain_type(kind)
    if types.is_struct(kind):
        return next(
            (
                name
                for name in (refused(kind.field(number).type) for number in range(kind.num_fields))
                if name
            ),
            None,
        )
    if is_list(kind) or types.is_fixed_size_list(kind):
        return refused(kind.value_type)
    is_known = (
        is_number(kind)
        or types.is_null(kind)
        or types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_fixed_size_binary(kind)
        or types.is_string_view(kind)
        or types.is_binary_view(kind)
    )
    return None if is_known else str(kind)


def is_text(kind: Any) -> bool:
    """True for a type of texts."""
    types, kind = pyarrow().types, _plain_type(kind)
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_categorical(kind: Any) -> bool:
    """True for a type of texts that are dictionary-encoded, such as categoricals of pandas."""
    pa = pyarrow()
    while isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    return bool(pa.types.is_dictionary(kind)) and is_text(kind)


def is_bytes(kind: Any) -> bool:
    """True for a type of bytes."""
    types, kind = pyarrow().types, _plain_type(kind)
    return bool(
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_binary_view(kind)
        or types.is_fixed_size_binary(kind)
    )


def holds_images(kind: Any) -> bool:
    """True for bytes, and structs with a field "bytes", as HuggingFace stores images."""
    kind = _plain_type(kind)
    if pyarrow().types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind = kind.field("bytes").type
    return is_bytes(kind)


def holds_chats(kind: Any) -> bool:
    """True for lists of structs with a field "role" or "from", as conversations are stored."""
    types, kind = pyarrow().types, _plain_type(kind)
    if not is_list(kind):
        return False
    kind = _plain_type(kind.value_type)
    return (
        bool(types.is_struct(kind))
        and max(kind.get_field_index("role"), kind.get_field_index("from")) >= 0
    )


def spec_of(kind: Any, shape: tuple[int, ...] | None) -> ArraySpec | None:
    """Shape and dtype of the values of a column, if they are numbers or arrays of one shape;
    `shape` is that of rows that are lists.
    """
    shape = tensor_shape(kind) if shape is None else shape
    types, kind, sizes = pyarrow().types, _plain_type(kind), list[int]()
    while types.is_fixed_size_list(kind) or (shape is not None and is_list(kind)):
        sizes.append(kind.list_size if types.is_fixed_size_list(kind) else -1)
        kind = _plain_type(kind.value_type)
    if not is_number(kind):
        return None
    return ArraySpec(tuple(sizes) if shape is None else shape, np.dtype(kind.to_pandas_dtype()))


def is_number(kind: Any) -> bool:
    """True for a type of numbers, and of booleans."""
    types = pyarrow().types
    return bool(types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind))


def offset_dtype(kind: Any) -> np.dtype[Any]:
    """Of the offsets of a type of lists, texts or bytes."""
    types = pyarrow().types
    is_wide = types.is_large_list(kind) or types.is_large_string(kind)
    return np.dtype(np.int64 if is_wide or types.is_large_binary(kind) else np.int32)


def is_list(kind: Any) -> bool:
    """True for a type of lists of any length."""
    types = pyarrow().types
    return bool(types.is_list(kind) or types.is_large_list(kind))


def tensor_shape(kind: Any) -> tuple[int, ...] | None:
    """The shape of a row of Arrow's type of tensors of one shape; None: another type."""
    if not isinstance(kind, pyarrow().FixedShapeTensorType):
        return None
    return tuple(kind.shape[axis] for axis in kind.permutation or range(len(kind.shape)))


def _plain_type(kind: Any) -> Any:
    """The type of what values are stored as."""
    pa = pyarrow()
    while isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    return _plain_type(kind.value_type) if pa.types.is_dictionary(kind) else kind


# -- from Arrow's arrays


def column_of(name: str, array: Any, shape: tuple[int, ...] | None = None) -> Column:
    """A column of an array of pyarrow's.

    Args:
        name: of the column.
        array: its values.
        shape: of rows that are lists of lists in the file, and have all one shape.

    Raises:
        FormatError: rows have another shape.
    """
    pa = pyarrow()
    types = pa.types
    if shape is None and tensor_shape(array.type) is not None:
        return in_axes_of(array.type, column_of(name, array.storage))
    while isinstance(array, pa.ExtensionArray):
        array = array.storage
    if types.is_dictionary(array.type):
        # decoded, they may take any memory
        if is_text(array.type.value_type) or is_bytes(array.type.value_type):
            codes = _numbers(name, array.indices, None).data
            return Coded(
                name,
                codes,
                column_of(name, array.dictionary),
                len(array.dictionary),
                _valid_of(array),
            )
        array = array.dictionary_decode()
    if types.is_string_view(array.type):
        array = array.cast(pa.large_string())
    elif types.is_binary_view(array.type):
        array = array.cast(pa.large_binary())
    kind, valid = array.type, _valid_of(array)
    if shape is not None or types.is_fixed_size_list(kind):
        return _shaped(name, array, valid, shape)
    if types.is_struct(kind):
        return Structs(
            {
                field.name: column_of(f"{name}.{field.name}", array.field(at))
                for at, field in enumerate(kind)
            },
            valid,
        )
    if is_list(kind):
        offsets = _flat(array.buffers()[1], offset_dtype(kind), array.offset, len(array) + 1)
        return Lists(offsets, column_of(name, array.values), valid)
    if types.is_fixed_size_binary(kind):
        width = kind.byte_width
        if width:
            offsets = np.arange(array.offset, array.offset + len(array) + 1, dtype=np.int64) * width
        else:  # any number of rows takes no bytes
            offsets = np.broadcast_to(np.int64(0), len(array) + 1)
        return Texts(name, offsets, _bytes(array.buffers()[1]), False, valid)
    if types.is_null(kind):
        return Nothing()
    if is_number(kind):
        return _numbers(name, array, valid)
    _, places, data = array.buffers()
    offsets = _flat(places, offset_dtype(kind), array.offset, len(array) + 1)
    return Texts(
        name, offsets, _bytes(data), types.is_string(kind) or types.is_large_string(kind), valid
    )


def in_axes_of(kind: Any, column: Column) -> Column:
    """The rows of a column as Arrow's type of tensors says, whose axes may be stored in another
    order.
    """
    # values without numbers are refused where they are asked for
    if not isinstance(column, Numbers):
        return column
    data = column.data.reshape(len(column.data), *kind.shape)
    if kind.permutation is not None:
        axes = [axis + 1 for axis in kind.permutation]
        data = np.ascontiguousarray(data.transpose(0, *axes))
    return Numbers(column.name, data, column.valid)


def _numbers(name: str, array: Any, valid: Mask | None) -> Numbers:
    if pyarrow().types.is_boolean(array.type):
        return Numbers(name, _bits(array.buffers()[1], array.offset, len(array)), valid)
    data = _flat(array.buffers()[1], array.type.to_pandas_dtype(), array.offset, len(array))
    return numbers_of(name, data, valid)


def numbers_of(name: str, data: npt.NDArray[Any], valid: Mask | None) -> Numbers:
    """A column of numbers; floating-point numbers that are missing are NaN."""
    if valid is None or data.dtype.kind != "f":
        return Numbers(name, data, valid)
    return Numbers(name, np.where(valid, data, data.dtype.type(np.nan)), None)


def _shaped(name: str, array: Any, valid: Mask | None, shape: tuple[int, ...] | None) -> Column:
    """Arrays of one shape: lists of a fixed size, and those of which the file says a shape."""
    types = pyarrow().types
    count = len(array)
    sizes = list[int]()
    rows = array
    while types.is_fixed_size_list(array.type) or is_list(array.type):
        if array is not rows and array.null_count:  # lists inside are missing
            inner = _valid_of(array)
            assert inner is not None
            whole: Mask = np.logical_and.reduce(inner.reshape(count, -1), axis=1)
            valid = whole if valid is None else whole & valid
        if types.is_fixed_size_list(array.type):
            size = array.type.list_size
            sizes.append(size)
            array = array.values[array.offset * size : (array.offset + len(array)) * size]
        else:
            offsets = array.offsets
            array = array.values[offsets[0].as_py() : offsets[-1].as_py()]
    items = column_of(name, array)
    shape = tuple(sizes) if shape is None else shape
    if not isinstance(items, Numbers):
        steps = np.arange(count + 1, dtype=np.int64) * (len(array) // max(1, count))
        return Lists(steps, items, valid)
    if math.prod(shape) * count != len(items.data):
        raise FormatError(
            f"column {name!r} holds {len(items.data):,} numbers in {count:,} rows, and rows of "
            f"shape {list(shape)} by its schema"
        )
    data = items.data.reshape(count, *shape)
    if items.valid is not None:
        whole = np.logical_and.reduce(items.valid.reshape(count, -1), axis=1)
        valid = whole if valid is None else whole & valid
    return Numbers(name, data, valid)


def _valid_of(array: Any) -> Mask | None:
    if not array.null_count or pyarrow().types.is_null(array.type):
        return None
    return _bits(array.buffers()[0], array.offset, len(array))


def _bits(buffer: Any, offset: int, count: int) -> Mask:
    if buffer is None:
        return np.zeros(count, bool)
    start, stop = offset // 8, -(-(offset + count) // 8)
    bits = np.unpackbits(np.frombuffer(buffer, np.uint8)[start:stop], bitorder="little")
    return bits[offset - 8 * start : offset - 8 * start + count].view(np.bool_)


def _flat(buffer: Any, dtype: Any, offset: int, count: int) -> npt.NDArray[Any]:
    if buffer is None or not buffer.size:
        return np.zeros(count, dtype)  # of no rows there may be no offsets
    return np.frombuffer(buffer, dtype, count, offset * np.dtype(dtype).itemsize)


def _bytes(buffer: Any) -> memoryview:
    return memoryview(b"") if buffer is None else memoryview(buffer)


def whole_array(column: Any) -> Any:
    """A column of a table, or of a record batch, of pyarrow's as one array."""
    pa = pyarrow()
    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
