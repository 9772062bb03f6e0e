"""Converts records of arrays to plain values."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.errors import FormatError


def as_value(record: Any, encoding: str | None = "utf-8") -> Any:
    """A record in plain terms: strings as str (without an encoding bytes), compounds as dicts of
    their fields, arrays of strings as lists; numbers stay.
    """
    dtype = getattr(record, "dtype", None)
    if isinstance(record, (bytes, np.bytes_)):
        if encoding is None:
            return bytes(record)
        return _text(record, encoding)
    if isinstance(record, str) or dtype is None:
        if isinstance(record, str):
            return str(record)
        return record
    if dtype.names is not None:
        return {name: as_value(record[name], encoding) for name in dtype.names}
    if dtype.kind in "SUO" and isinstance(record, np.ndarray):
        if record.ndim == 0:
            return as_value(record[()], encoding)
        return [as_value(item, encoding) for item in record]
    # a field lies among the others of its compound, at any byte and with their strides: torch has
    # no such tensors
    if isinstance(record, np.ndarray):
        return np.require(record, requirements=["C", "A"])
    return record


def _text(data: bytes, encoding: str) -> str:
    try:
        return bytes(data).decode(encoding)
    except UnicodeDecodeError as error:
        raise FormatError(
            f"a string is not {encoding.upper()}: {error}: for an HDF5 file pass its encoding=, "
            "or encoding=None to get bytes"
        ) from error


def is_plain(dtype: np.dtype[Any]) -> bool:
    """True if `as_value` of its rows is the row itself."""
    return dtype.names is None and dtype.kind not in "SUO"


def long_doubles_in(dtype: np.dtype[Any]) -> str | None:
    """Where a dtype holds numbers of more than 64 bits: the names of the fields that lead there,
    "" for itself; None: nowhere.
    """
    if dtype.names is not None:
        fields = ((name, long_doubles_in(dtype[name])) for name in dtype.names)
        return next(
            (f"{name}.{rest}".rstrip(".") for name, rest in fields if rest is not None), None
        )
    return "" if dtype.base.char in "gG" else None
