"""Columns of tables: pyarrow, which is imported on first use; the types of columns; and the columns
of a row group or record batch, whose values are made on access: numbers as NumPy arrays, texts by
pyarrow.

pyarrow gets bytes that `headrace.io` has read; it opens no files and uses no threads, since workers
may be forked.
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.dtypes import AnyArray, ArraySpec, IntArray
from headrace.errors import ConfigError, FormatError
from headrace.io.files import Fetch, HeldBytes

Mask = npt.NDArray[np.bool_]
_IN_ONE_BUFFER = ("string", "large_string", "binary", "large_binary")


# -- pyarrow


@functools.cache
def pyarrow() -> Any:
    """The package pyarrow, with its modules for Parquet and Arrow files.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            "Parquet and Arrow files need the package pyarrow: pip install 'headrace[arrow]'"
        ) from error
    return pyarrow


def nothing_else(start: int, stop: int) -> memoryview:
    """A `Fetch` for a file of which all bytes are in memory."""
    raise FormatError(f"it ends at byte {start:,}, within a message of {stop - start:,} bytes")


def zeros(start: int, stop: int) -> memoryview:
    """A `Fetch` of zeros, which take no memory, since nobody writes to them."""
    if hasattr(mmap, "PROT_READ"):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        return memoryview(mmap.mmap(-1, stop - start, flags=flags, prot=mmap.PROT_READ))
    return memoryview(mmap.mmap(-1, stop - start))


def opened(parts: Sequence[memoryview], more: int = 0, fetch: Fetch = nothing_else) -> Any:
    """A file for pyarrow: some bytes, one after the other, and `more` bytes that are fetched."""
    held = []
    size = 0
    for part in parts:
        held.append((size, part))
        size += len(part)
    return pyarrow().PythonFile(HeldBytes(size + more, held, fetch), mode="r")


# -- types


_IDS = {
    "number": "BOOL UINT8 INT8 UINT16 INT16 UINT32 INT32 UINT64 INT64 HALF_FLOAT FLOAT DOUBLE",
    "text": "STRING LARGE_STRING STRING_VIEW",
    "bytes": "BINARY LARGE_BINARY BINARY_VIEW FIXED_SIZE_BINARY",
    "list": "LIST LARGE_LIST",
    "fixed": "FIXED_SIZE_LIST",
    "struct": "STRUCT",
    "null": "NA",
}
"""Kinds of types, by the names of pyarrow's constants."""


@functools.cache
def _by_id() -> dict[int, str]:
    found = {}
    for what, names in _IDS.items():
        for name in names.split():
            found[getattr(pyarrow().lib, f"Type_{name}")] = what
    return found


def what_is(kind: Any) -> str:
    """The kind of a type: "number", "text", "bytes", "list", "fixed" (lists of a fixed size),
    "struct" or "null"; "": values that can't be in a sample.
    """
    return _by_id().get(plain_type(kind).id, "")


def storage_of(kind: Any) -> Any:
    """The storage type of an extension type."""
    while isinstance(kind, pyarrow().BaseExtensionType):
        kind = kind.storage_type
    return kind


def plain_type(kind: Any) -> Any:
    """The type without extension types and dictionaries."""
    kind = storage_of(kind)
    if pyarrow().types.is_dictionary(kind):
        return plain_type(kind.value_type)
    return kind


def inner_types(kind: Any) -> list[Any]:
    """The types of the fields of a struct, or of the items of a list."""
    kind = plain_type(kind)
    if what_is(kind) == "struct":
        return [kind.field(number).type for number in range(kind.num_fields)]
    if what_is(kind) in ("list", "fixed"):
        return [kind.value_type]
    return []


def refused(kind: Any) -> str | None:
    """The type, or the type inside it, whose values can't be in a sample; None: they can."""
    if not what_is(kind):
        return str(plain_type(kind))
    return next(filter(None, map(refused, inner_types(kind))), None)


def holds_images(kind: Any) -> bool:
    """True for bytes, and for structs with a field "bytes", as HuggingFace stores images."""
    kind = plain_type(kind)
    if what_is(kind) == "struct" and kind.get_field_index("bytes") >= 0:
        kind = kind.field("bytes").type
    return what_is(kind) == "bytes"


def spec_of(kind: Any, shape: tuple[int, ...] | None) -> ArraySpec | None:
    """Shape and dtype of the values of a column, if they are numbers or arrays of one shape.
    `shape`: that of rows that are stored as lists.
    """
    if shape is None and isinstance(kind, pyarrow().FixedShapeTensorType):
        axes = kind.permutation or range(len(kind.shape))
        shape = tuple(kind.shape[axis] for axis in axes)
    kind = plain_type(kind)
    sizes = []
    while what_is(kind) == "fixed" or (shape is not None and what_is(kind) == "list"):
        sizes.append(getattr(kind, "list_size", -1))
        kind = plain_type(kind.value_type)
    if what_is(kind) != "number":
        return None
    return ArraySpec(tuple(sizes) if shape is None else shape, np.dtype(kind.to_pandas_dtype()))


# -- columns


class Column(ABC):
    """The values of a column of a block, or of a column inside it."""

    @abstractmethod
    def value(self, row: int) -> Any:
        """The value of a row: a NumPy array, str, bytes, or a list or dict of these; None: it is
        missing.

        Raises:
            FormatError: a number is missing, or a text is no UTF-8.
        """

    def values(self, rows: IntArray) -> list[Any]:
        """The values of some rows."""
        return list(map(self.value, rows.tolist()))


class Numbers(Column):
    """Numbers, or arrays of them of one shape.

    Args:
        name: of the column.
        data: [n, ...], NaN where a floating-point number is missing.
        valid: [n] False where a row, or a number in it, is missing; None: all are there.
    """

    def __init__(self, name: str, data: AnyArray, valid: Mask | None) -> None:
        self._name = name
        self._data = np.require(data, requirements="A")  # else `take` copies all of it
        self.valid = valid

    def take(self, rows: IntArray) -> AnyArray:
        """Copies of rows, [len(rows), ...].

        Raises:
            FormatError: one is missing.
        """
        if self.valid is not None:
            self._check(rows)
        return self._data.take(rows, 0)  # in less time than by an index

    def view(self, rows: slice | int) -> Any:
        """A row, or some, as they lie; see `take`."""
        if self.valid is not None:
            self._check(rows)
        return self._data[rows]

    def _check(self, rows: IntArray | slice | int) -> None:
        assert self.valid is not None
        if not self.valid[rows].all():
            raise FormatError(
                f"column {self._name!r} is null, and {self._data.dtype} has no null: fill it, or "
                "leave the column out"
            )

    def value(self, row: int) -> Any:
        return np.array(self.view(row))


class Texts(Column):
    """Texts or bytes, in the buffers of an array of pyarrow's. Those of a dictionary stay in it:
    decoded they may take any memory.
    """

    def __init__(self, name: str, array: Any) -> None:
        pa = pyarrow()
        self._name = name
        self._codes: AnyArray | None = None
        self._is_wrong: Mask | None = None  # where codes are of no item, if some are
        rows = len(array)
        if pa.types.is_dictionary(array.type):
            codes = _flat(array.indices)
            # pyarrow would look wrong codes up in the dictionary, and crash
            self._valid = _valid_of(array.indices)
            if self._valid is not None:
                codes = np.where(self._valid, codes, 0)
            array = array.dictionary
            is_wrong = (codes < 0) | (codes >= len(array))
            if self._valid is not None:
                is_wrong &= self._valid
            if is_wrong.any():
                self._is_wrong = is_wrong
            filled = _valid_of(array)
            if filled is not None:
                filled = filled.take(codes, mode="clip")
                self._valid = filled if self._valid is None else self._valid & filled
            self._codes = codes
        else:
            self._valid = _valid_of(array)
        is_text = what_is(array.type) == "text"
        if str(array.type) not in _IN_ONE_BUFFER:
            array = array.cast(pa.large_string() if is_text else pa.large_binary())
        _, offsets, data = array.buffers()
        dtype = np.dtype(np.int64 if str(array.type).startswith("large") else np.int32)
        self._count = len(array)
        self._offsets = np.zeros(2, dtype)
        if len(array):
            start = array.offset * dtype.itemsize
            self._offsets = np.frombuffer(offsets, dtype, len(array) + 1, start)
        self._data: Any = memoryview(data or b"")
        self._make: Callable[[Any], str | bytes] = bytes
        if is_text:
            self._make = functools.partial(str, encoding="utf-8")
            # of ASCII parts need no decoding; of a dictionary few items may be needed
            if len(array) <= rows:
                with contextlib.suppress(UnicodeDecodeError):
                    self._data = str(self._data[: self._offsets[-1]], "ascii")
                    self._make = str

    def value(self, row: int) -> Any:
        if self._is_wrong is not None and self._is_wrong[row]:
            assert self._codes is not None
            raise FormatError(
                f"column {self._name!r} refers to item {self._codes[row]:,} of its dictionary, "
                f"which has {self._count:,}: the file is damaged"
            )
        if self._valid is not None and not self._valid[row]:
            return None
        item = row
        if self._codes is not None:
            item = self._codes.item(row)
        try:
            return self._make(self._data[self._offsets.item(item) : self._offsets.item(item + 1)])
        except UnicodeDecodeError as error:
            raise FormatError(
                f"column {self._name!r} holds a text that is not UTF-8: {error}"
            ) from None

    def values(self, rows: IntArray) -> list[Any]:
        if self._is_wrong is not None:
            return super().values(rows)
        items = rows
        if self._codes is not None:
            items = self._codes[rows]
        begins = self._offsets[items].tolist()
        ends = self._offsets[items + 1].tolist()
        data = self._data
        make = self._make
        values: list[Any]
        try:
            values = [make(data[begin:end]) for begin, end in zip(begins, ends, strict=True)]
        except UnicodeDecodeError:  # perhaps where there is no value
            return super().values(rows)
        if self._valid is not None:
            for number in np.flatnonzero(~self._valid[rows]).tolist():
                values[number] = None
        return values


class Lists(Column):
    """Lists of any length: of numbers as arrays, else as lists.

    Args:
        ends: [n + 1] where the items of each begin and end.
        items: of all lists.
        valid: [n] False where there is none.
    """

    def __init__(self, ends: AnyArray, items: Column, valid: Mask | None) -> None:
        self._ends = ends
        self._items = items
        self._valid = valid

    def value(self, row: int) -> Any:
        if self._valid is not None and not self._valid[row]:
            return None
        begin = self._ends.item(row)
        end = self._ends.item(row + 1)
        if isinstance(self._items, Numbers):
            return self._items.view(slice(begin, end)).copy()
        return self._items.values(np.arange(begin, end))


class Structs(Column):
    """Dicts of other columns."""

    def __init__(self, fields: dict[str, Column], valid: Mask | None) -> None:
        self._fields = fields
        self._valid = valid

    def value(self, row: int) -> Any:
        if self._valid is not None and not self._valid[row]:
            return None
        return {name: column.value(row) for name, column in self._fields.items()}


def column_of(name: str, array: Any, shape: tuple[int, ...] | None = None) -> Column:
    """A column of an array of pyarrow's, or of several that are one.

    Args:
        name: of the column.
        array: its values.
        shape: of rows that are lists of lists in the file, and have all one shape.

    Raises:
        FormatError: rows have another shape.
        Exception: whatever pyarrow makes of a damaged one.
    """
    pa = pyarrow()
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks == 1 else pa.concat_arrays(array.chunks)
    array.validate()  # that buffers are as long as so many rows need
    spec = spec_of(array.type, shape)
    if spec is not None:
        return _numbers_of(name, array, spec.shape)
    array = _stored(array)
    what = what_is(array.type)
    if what == "struct":
        fields = {}
        for number, field in enumerate(array.type):
            fields[field.name] = column_of(f"{name}.{field.name}", array.field(number))
        return Structs(fields, _valid_of(array))
    if what in ("list", "fixed"):
        ends, items = _items_of(array)
        return Lists(ends, column_of(name, items), _valid_of(array))
    return Texts(name, array)


def _numbers_of(name: str, array: Any, shape: tuple[int, ...]) -> Numbers:
    """Numbers, which may lie in lists in lists."""
    axes = getattr(array.type, "permutation", None)
    sides = shape
    if axes is not None:
        sides = array.type.shape
    count = len(array)
    masks = []
    array = _stored(array)
    while what_is(array.type) != "number":
        masks.append(_valid_of(array))
        array = _items_of(array)[1]
    data = _flat(array)
    valid = _valid_of(array)
    if valid is not None and data.dtype.kind == "f":
        data = np.where(valid, data, data.dtype.type(np.nan))
    else:
        masks.append(valid)
    if math.prod(shape) * count != len(data):
        raise FormatError(
            f"column {name!r} holds {len(data):,} numbers in {count:,} rows, but its schema says "
            f"rows of shape {list(shape)}"
        )
    data = data.reshape(count, *sides)
    if axes is not None:
        data = np.ascontiguousarray(data.transpose(0, *(axis + 1 for axis in axes)))
    rows = [mask.reshape(count, -1).all(axis=1) for mask in masks if mask is not None]
    return Numbers(name, data, np.logical_and.reduce(rows) if rows else None)


def _stored(array: Any) -> Any:
    """What an array of an extension type is stored as, and numbers of a dictionary themselves."""
    pa = pyarrow()
    while isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type) and what_is(array.type) not in ("text", "bytes"):
        return _stored(array.dictionary_decode())
    return array


def _items_of(array: Any) -> tuple[AnyArray, Any]:
    """Where the items of lists begin and end ([n + 1]), and these, one list after the other,
    those of missing ones too.
    """
    if what_is(array.type) == "list":
        offsets = _flat(array.offsets)
    else:
        offsets = np.arange(array.offset, array.offset + len(array) + 1) * array.type.list_size
    first = offsets[0]
    return offsets - first, _stored(array.values[int(first) : int(offsets[-1])])


def _valid_of(array: Any) -> Mask | None:
    if not array.null_count:
        return None
    return _flat(array.is_valid())


def _flat(array: Any) -> AnyArray:
    """Numbers, whatever they are where one is missing. pyarrow's `to_numpy` would import pandas."""
    if pyarrow().types.is_boolean(array.type):
        return _flat(array.cast(pyarrow().uint8())).view(np.bool_)
    dtype = np.dtype(array.type.to_pandas_dtype())
    if not len(array):
        return np.zeros(0, dtype)
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)
