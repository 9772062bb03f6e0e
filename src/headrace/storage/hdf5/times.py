"""Reads datasets whose dtype h5py does not say, or says in a varying order of fields.

Times that PyTables stored are of HDF5's class H5T_TIME, for which h5py has no dtype.

PyTables stores a Time32 as a whole number of seconds, and a Time64 as two numbers of 32 bits:
seconds in the upper half, microseconds in the lower one. HDF5 itself copies times, and converts
them to nothing else, so they are read as integers of their size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from headrace.errors import FormatError

_REMEDY = "read it with PyTables or pandas, and write the times as float64 or int64"
_WRITERS = (b"TABLE", b"ARRAY", b"CARRAY", b"EARRAY")  # what PyTables notes of its arrays as CLASS


class TimedDataset(h5py.Dataset):  # type: ignore[misc]
    """A dataset of times, or of compounds with times, as it is stored: a time is an integer of its
    size.

    Args:
        dataset: of which h5py says no dtype.
        stored: its dtype, with integers for times.
    """

    def __init__(self, dataset: h5py.Dataset, stored: np.dtype[Any]) -> None:
        super().__init__(dataset.id)
        self._stored = stored

    @property
    def dtype(self) -> np.dtype[Any]:
        """As stored; compounds have the offsets of the file."""
        return self._stored

    @property
    def fillvalue(self) -> Any:
        """None: h5py can't tell it."""
        return None

    def __getitem__(self, part: Any, new_dtype: Any = None) -> Any:
        """The elements of a part, by slices of step 1 and integers."""
        parts = part if isinstance(part, tuple) else (part,)
        at = next((at for at, one in enumerate(parts) if one is ...), len(parts))
        rest = (slice(None),) * (self.ndim - len(parts) + (at < len(parts)))
        parts = (*parts[:at], *rest, *parts[at + 1 :])
        edges = [
            (one if isinstance(one, slice) else slice(one, one + 1)).indices(n)[:2]
            for one, n in zip(parts, self.shape, strict=True)
        ]
        counts = tuple(max(0, stop - start) for start, stop in edges)
        shape = tuple(
            count for count, one in zip(counts, parts, strict=True) if isinstance(one, slice)
        )
        elements = () if self._stored.subdtype is None else self._stored.shape
        out = np.zeros((*counts, *elements), self._stored.base)
        if out.size:
            space = self.id.get_space()
            space.select_hyperslab(tuple(start for start, _ in edges), counts)
            self.id.read(
                h5py.h5s.create_simple(counts),
                space,
                out,
                _memory_type(self.id.get_type(), self._stored),
            )
        return out.reshape((*shape, *elements))

    def __array__(self, dtype: Any = None, copy: bool | None = True) -> npt.NDArray[Any]:
        return np.asarray(self[(slice(None),) * self.ndim], dtype)


class OrderedDataset(h5py.Dataset):  # type: ignore[misc]
    """A dataset of compounds, whose fields are in the order of their bytes.

    HDF5 sorts the fields of a type so when it first reads a dataset, for all who have it open: the
    order that h5py gives depends on who has read before.

    Args:
        dataset: as h5py opens it.
        ordered: its dtype, with sorted fields.
    """

    def __init__(self, dataset: h5py.Dataset, ordered: np.dtype[Any]) -> None:
        super().__init__(dataset.id)
        self._ordered = ordered

    @property
    def dtype(self) -> np.dtype[Any]:
        """With fields in the order of their bytes."""
        return self._ordered

    def __getitem__(self, part: Any, new_dtype: Any = None) -> Any:
        return super().__getitem__(part, self._ordered if new_dtype is None else new_dtype)


def with_ordered_fields(dataset: h5py.Dataset) -> h5py.Dataset:
    """A dataset that h5py has a dtype for, with the fields of compounds in the order of their
    bytes.
    """
    if isinstance(dataset, TimedDataset | OrderedDataset):
        return dataset
    ordered = _ordered(dataset.dtype)
    return dataset if ordered is dataset.dtype else OrderedDataset(dataset, ordered)


def check_has_values(dataset: h5py.Dataset, where: str) -> None:
    """Raises a FormatError for a dataset of a null dataspace."""
    if dataset.shape is None:
        raise FormatError(f"{where} has a null dataspace, and so no values: name another dataset")


def readable(dataset: Any, where: str) -> Any:
    """A dataset whose dtype h5py knows, with the fields of compounds in the order of their bytes;
    one with times as a `TimedDataset`. What is no dataset stays as it is.

    Args:
        dataset: open.
        where: names it in messages.

    Raises:
        FormatError: its times are none of PyTables'.
    """
    if not isinstance(dataset, h5py.Dataset) or isinstance(dataset, TimedDataset | OrderedDataset):
        return dataset
    kind = dataset.id.get_type()
    if not _has_times(kind):
        return with_ordered_fields(dataset)
    stored = stored_dtype(kind)
    if stored is None:
        raise FormatError(
            f"{where} holds times (H5T_TIME) among elements of any size, which h5py can't read: "
            f"{_REMEDY}"
        )
    writer = dataset.attrs.get("CLASS")
    if (writer.encode() if isinstance(writer, str) else writer) not in _WRITERS:
        raise FormatError(
            f"{where} holds times (H5T_TIME) that PyTables did not write, whose unit the file "
            f"does not say: {_REMEDY}"
        )
    return TimedDataset(dataset, stored)


def decoding_of(
    dataset: h5py.Dataset,
) -> tuple[Callable[[npt.NDArray[Any]], npt.NDArray[Any]], np.dtype[Any]] | None:
    """What makes values of stored elements, and their dtype: seconds since 1970, int32 of a Time32
    and float64 of a Time64. None: there is nothing to decode.
    """
    if not isinstance(dataset, TimedDataset):
        return None
    kind = dataset.id.get_type()
    decoded = _decoded(kind, dataset.dtype).base
    return (lambda stored: _decode(kind, stored, decoded)), decoded


def _ordered(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The same dtype with the fields of compounds in the order of their bytes; itself if they
    are.
    """
    if dtype.subdtype is not None:
        base = _ordered(dtype.base)
        return dtype if base is dtype.base else np.dtype((base, dtype.shape))
    if dtype.fields is None:
        return dtype
    fields = sorted(
        ((name, *dtype.fields[name][:2]) for name in dtype.names or ()), key=lambda field: field[2]
    )
    names = [name for name, *_ in fields]
    formats = [_ordered(inner) for _, inner, _ in fields]
    if names == list(dtype.names or ()) and all(
        inner is dtype[name] for name, inner in zip(names, formats, strict=True)
    ):
        return dtype
    offsets = [offset for *_, offset in fields]
    return np.dtype(
        {"names": names, "formats": formats, "offsets": offsets, "itemsize": dtype.itemsize}
    )


def _members(kind: Any) -> list[tuple[str, Any, int]]:
    """Name, type and offset of each field of a compound, in the order of their bytes."""
    members = []
    for number in range(kind.get_nmembers()):
        name = kind.get_member_name(number).decode("utf-8", "surrogateescape")
        members.append((name, kind.get_member_type(number), kind.get_member_offset(number)))
    return sorted(members, key=lambda member: member[2])


def described(dataset: h5py.Dataset) -> str:
    """The dtype of a dataset's values, in words."""
    try:
        return str(value_dtype(readable(dataset, "")))
    except FormatError:
        return "H5T_TIME"


def value_dtype(dataset: h5py.Dataset) -> np.dtype[Any]:
    """The dtype of a dataset's values: of times that of `decoding_of`."""
    decoding = decoding_of(dataset)
    dtype: np.dtype[Any] = dataset.dtype
    if decoding is None:
        return dtype
    return decoding[1] if dtype.subdtype is None else np.dtype((decoding[1], dtype.shape))


def _has_times(kind: Any) -> bool:
    if isinstance(kind, h5py.h5t.TypeCompoundID):
        return any(_has_times(member) for _, member, _ in _members(kind))
    if isinstance(kind, h5py.h5t.TypeArrayID | h5py.h5t.TypeVlenID):
        return _has_times(kind.get_super())
    return isinstance(kind, h5py.h5t.TypeTimeID)


def stored_dtype(kind: Any) -> np.dtype[Any] | None:
    """The dtype of elements with integers for times; None: some have any size."""
    if isinstance(kind, h5py.h5t.TypeTimeID):
        is_big = kind.equal(h5py.h5t.UNIX_D64BE) or kind.equal(h5py.h5t.UNIX_D32BE)
        return np.dtype(f"{'>' if is_big else '<'}i{kind.get_size()}")
    if isinstance(kind, h5py.h5t.TypeArrayID):
        inner = stored_dtype(kind.get_super())
        return None if inner is None else np.dtype((inner, kind.get_array_dims()))
    if isinstance(kind, h5py.h5t.TypeCompoundID) and _has_times(kind):
        members = _members(kind)
        formats = [stored_dtype(member) for _, member, _ in members]
        if None in formats:
            return None
        names, offsets = [name for name, *_ in members], [offset for *_, offset in members]
        return np.dtype(
            {"names": names, "formats": formats, "offsets": offsets, "itemsize": kind.get_size()}
        )
    if isinstance(kind, h5py.h5t.TypeVlenID):
        return None
    dtype: np.dtype[Any] = kind.dtype
    return None if dtype.hasobject or kind.get_size() != dtype.itemsize else dtype


def _memory_type(kind: Any, stored: np.dtype[Any]) -> Any:
    """What HDF5 converts elements to: times stay as they are, all else becomes what h5py makes
    of it.
    """
    if isinstance(kind, h5py.h5t.TypeTimeID):
        return kind
    if isinstance(kind, h5py.h5t.TypeArrayID) and _has_times(kind):
        return h5py.h5t.array_create(
            _memory_type(kind.get_super(), stored.base), kind.get_array_dims()
        )
    if isinstance(kind, h5py.h5t.TypeCompoundID) and _has_times(kind):
        memory = h5py.h5t.create(h5py.h5t.COMPOUND, stored.itemsize)
        for name, member, offset in _members(kind):
            memory.insert(
                name.encode("utf-8", "surrogateescape"), offset, _memory_type(member, stored[name])
            )
        return memory
    return h5py.h5t.py_create(stored, logical=True)


def _decoded(kind: Any, stored: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of values, of that of stored elements."""
    if isinstance(kind, h5py.h5t.TypeTimeID):
        return np.dtype("f8") if stored.itemsize == 8 else stored.newbyteorder("=")
    if isinstance(kind, h5py.h5t.TypeArrayID):
        return np.dtype((_decoded(kind.get_super(), stored.base), stored.shape))
    if isinstance(kind, h5py.h5t.TypeCompoundID) and _has_times(kind):
        return np.dtype(
            [(name, _decoded(member, stored[name])) for name, member, _ in _members(kind)]
        )
    return stored


def _decode(kind: Any, stored: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    while isinstance(kind, h5py.h5t.TypeArrayID):
        kind = kind.get_super()
    if isinstance(kind, h5py.h5t.TypeCompoundID) and _has_times(kind):
        values = np.empty(stored.shape, dtype)
        for name, member, _ in _members(kind):
            values[name] = _decode(member, stored[name], dtype[name].base)
        return values
    if isinstance(kind, h5py.h5t.TypeTimeID) and dtype.kind == "f":
        # seconds, and in the lower half microseconds, negative ones too
        whole = stored.astype(np.int64)
        return np.asarray(1e-6 * whole.astype(np.int32) + (whole >> 32))
    return stored.astype(dtype, copy=False)
