"""What is a record of an array in plain terms?"""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.errors import FormatError


def as_value(record: Any, dtype: np.dtype[Any] | None = None) -> Any:
    """A record in plain terms: strings as str, compounds as dicts of their fields, arrays of strings as lists; numbers stay.

    Raises:
        FormatError: a string is not UTF-8.
    """
    dtype = getattr(record, "dtype", None) if dtype is None else dtype
    if isinstance(record, (bytes, np.bytes_)):
        return _text(record)
    if isinstance(record, str) or dtype is None:
        return str(record) if isinstance(record, str) else record
    if dtype.names is not None:
        return {name: as_value(record[name], dtype[name]) for name in dtype.names}
    if dtype.kind in "SUO" and isinstance(record, np.ndarray):
        return as_value(record[()]) if record.ndim == 0 else [as_value(item) for item in record]
    return record


def _text(data: bytes) -> str:
    try:
        return bytes(data).decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"a string is not UTF-8: {error}") from error


def is_plain(dtype: np.dtype[Any]) -> bool:
    """Is `as_value` of its rows the row itself?"""
    return dtype.names is None and dtype.kind not in "SUO"
