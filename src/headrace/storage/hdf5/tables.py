"""Tables that pandas wrote by PyTables (``HDFStore``, ``to_hdf``), formats "fixed" and "table":
which arrays hold which columns.

Column labels stand in attributes as pickles. Of these only lists of plain texts and numbers are
read: nothing that a file names is ever imported or called.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple

import h5py
import numpy as np

from headrace.errors import FormatError
from headrace.io.paths import redact
from headrace.storage.arrays.values import as_value
from headrace.storage.hdf5.times import readable

FIXED = ("frame", "series")


class Column(NamedTuple):
    """Where the values of a column are in a record.

    Attributes:
        name: of the column.
        array: name of the dataset that it lies in.
        field: of its rows, if they are compounds.
        place: in the row or field, if that is an array; None: it is the value.
        is_truth: True if numbers are truth values.
        categories: what codes stand for; a code of -1 stands for none.
    """

    name: str
    array: str
    field: str | None = None
    place: int | None = None
    is_truth: bool = False
    categories: tuple[Any, ...] | None = None

    def of(self, record: Mapping[str, Any], encoding: str | None) -> Any:
        """The value of the column in a record."""
        value = record[self.array]
        value = value if self.field is None else value[self.field]
        value = value if self.place is None else value[self.place]
        if self.categories is not None:
            return None if value < 0 else as_value(self.categories[int(value)], encoding)
        return np.bool_(value) if self.is_truth else as_value(value, encoding)


def tables_in(file: h5py.File) -> list[str]:
    """The names of the tables of pandas in a file."""
    found: list[str] = []

    def note(name: str, item: Any) -> None:
        if (
            isinstance(item, h5py.Group)
            and "pandas_type" in item.attrs
            and "/meta/" not in f"/{name}/"
        ):
            found.append(name)

    file.visititems(note)
    return found


def columns_of(group: h5py.Group, path: str, name: str) -> list[Column]:
    """The columns of a table.

    Args:
        group: of the table.
        path, name: of the file and of the group.

    Raises:
        FormatError: it holds objects that are pickled, or is of a kind that has no rows.
    """
    where, kind = f"{redact(path)}: {name!r}", _text(group.attrs.get("pandas_type", b""))
    if kind in FIXED:
        return _fixed(group, name, where, kind)
    if kind in ("frame_table", "series_table") and isinstance(group.get("table"), h5py.Dataset):
        return _table(group, name, where)
    raise FormatError(
        f"{where} is a {kind} of pandas, which is not supported: write it with to_hdf(..., "
        "format='table')"
    )


def _fixed(group: h5py.Group, name: str, where: str, kind: str) -> list[Column]:
    if kind == "series":
        label = _text(group.attrs.get("name", b"")) or "values"
        return [
            _array_column(
                group, f"{name}/values", "values", "values" if label == "N." else label, None, where
            )
        ]
    columns: dict[str, Column] = {}
    for number in range(int(group.attrs.get("nblocks", 0))):
        items, values = f"block{number}_items", f"block{number}_values"
        for place, label in enumerate(_labels(group, items, where)):
            columns[label] = _array_column(group, f"{name}/{values}", values, label, place, where)
    order = _labels(group, "axis0", where)
    if not columns:
        raise FormatError(f"{where} is a table of pandas without columns")
    return [columns[label] for label in order if label in columns]


def _array_column(
    group: h5py.Group, array: str, values: str, label: str, place: int | None, where: str
) -> Column:
    dataset = readable(group[values], f"{where}: {label!r}")
    if (
        _text(dataset.attrs.get("PSEUDOATOM", b"")) == "object"
        or h5py.check_vlen_dtype(dataset.dtype) is not None
    ):
        raise FormatError(
            f"{where}: {label!r} holds Python objects as a pickle, which is never opened: write "
            "strings with to_hdf(..., format='table')"
        )
    if "shape" in dataset.attrs:  # so pandas writes what is empty
        raise FormatError(f"{where} has no rows")
    return Column(label, array, None, place, _is_truth(dataset.id.get_type()))


def _labels(group: h5py.Group, name: str, where: str) -> list[str]:
    """The labels of columns, as text."""
    dataset = group.get(name)
    if not isinstance(dataset, h5py.Dataset):
        raise FormatError(
            f"{where}: {name!r} is missing, the labels of columns: labels of several levels are "
            "not supported"
        )
    if _text(dataset.attrs.get("PSEUDOATOM", b"")) == "object":
        raise FormatError(
            f"{where}: the labels of its columns are Python objects as a pickle, which is never "
            "opened: write texts as labels"
        )
    return [
        one.decode() if isinstance(one, bytes) else str(one)
        for one in np.asarray(dataset).reshape(-1).tolist()
    ]


def _table(group: h5py.Group, name: str, where: str) -> list[Column]:
    table = readable(group["table"], where)
    kind, array = table.id.get_type(), f"{name}/table"
    index = {
        _text(one)
        for one in np.atleast_1d(_unpickled(group.attrs.get("index_cols"), where) or [])
        .reshape(-1)
        .tolist()
    }
    found: list[Column] = []
    for field in table.dtype.names or ():
        if field == "index" or field in index:
            continue
        labels = _unpickled(table.attrs.get(f"{field}_kind"), where)
        labels = [field] if not isinstance(labels, (list, tuple)) else [str(one) for one in labels]
        member = kind.get_member_type(
            kind.get_member_index(field.encode("utf-8", "surrogateescape"))
        )
        is_truth = _is_truth(member) or _text(table.attrs.get(f"{field}_dtype", b"")) == "bool"
        categories = (
            _categories(group, field)
            if _text(table.attrs.get(f"{field}_meta", b"")) == "category"
            else None
        )
        is_array = table.dtype[field].subdtype is not None
        found += [
            Column(label, array, field, place if is_array else None, is_truth, categories)
            for place, label in enumerate(labels)
        ]
    axes = _unpickled(group.attrs.get("non_index_axes"), where)
    order = {str(label): place for place, label in enumerate(axes[0][1])} if axes else {}
    return sorted(found, key=lambda column: order.get(column.name, len(order)))


def _categories(group: h5py.Group, field: str) -> tuple[Any, ...] | None:
    meta = group.get(f"meta/{field}/meta/table")
    if not isinstance(meta, h5py.Dataset) or "values" not in (meta.dtype.names or ()):
        return None
    values = np.asarray(meta)["values"]
    return tuple(values.reshape(len(values), -1)[:, 0].tolist())


def _is_truth(kind: h5py.h5t.TypeID) -> bool:
    if isinstance(kind, h5py.h5t.TypeArrayID):
        kind = kind.get_super()
    return isinstance(kind, h5py.h5t.TypeBitfieldID)


def _text(value: Any) -> str:
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.reshape(())[()]
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


class _PlainUnpickler(pickle.Unpickler):
    """Opens pickles of lists, texts and numbers; whatever names a class or a function is
    refused.
    """

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _unpickled(value: Any, where: str) -> Any:
    """What an attribute holds: a plain value, or a list as a pickle."""
    if value is None or not isinstance(value, (bytes, np.bytes_)):
        return value
    try:
        return _PlainUnpickler(io.BytesIO(bytes(value))).load()
    except Exception as error:  # pickles that are damaged raise anything
        raise FormatError(
            f"{where}: the labels of its columns can't be read "
            f"({' '.join(str(error).split()) or type(error).__name__}): write plain texts "
            "as labels"
        ) from error
