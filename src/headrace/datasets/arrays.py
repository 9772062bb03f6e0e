"""What do samples have in common that are rows or parts of arrays, whatever file they lie in?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.datasets.core.base import BaseDataset, as_tensor
from headrace.datasets.core.filling import Like
from headrace.errors import ConfigError, FormatError
from headrace.storage.arrays.rows import ArraysSource
from headrace.storage.arrays.values import as_value, is_plain, long_doubles_in
from headrace.storage.concat import ConcatSource


class ArrayDataset(BaseDataset):
    """Rows of arrays as tensors; several arrays as dicts of them. The common part of `HDF5Dataset` and `ZarrDataset`."""

    reads_urls = True
    _dtype: np.dtype[Any] | None = None
    _is_plain = False
    _encoding: str | None = "utf-8"
    """Of strings; None: they are bytes."""

    def _describe(self, sources: Sequence[ArraysSource], dtype: npt.DTypeLike | None) -> Any:
        """Notes what the rows are, before `BaseDataset` is set up; gives the sources as one.

        Raises:
            ConfigError: `dtype` is none.
            FormatError: the sources have different rows, or numbers that torch does not have.
        """
        self._dtype = dtype_named(dtype)
        first = sources[0]
        for source in sources[1:]:
            if source.rows_are != first.rows_are:
                raise FormatError(
                    f"{source.path} and {first.path} can't be one dataset: rows of {source.rows_are} here, and of {first.rows_are} there"
                )
        self._check_numbers(first)
        self._is_plain = isinstance(first.name, str) and is_plain(first.dtype) and not first.holds_objects
        return first if len(sources) == 1 else ConcatSource(sources)

    def _check_numbers(self, source: ArraysSource) -> None:
        for name, dtype in source.dtypes.items():
            field = long_doubles_in(dtype)
            if field or (field == "" and self._dtype is None):
                remedy = "convert that field" if field else 'pass dtype="float64" (or "complex128"), which keeps 15 digits'
                what = f"{name!r}, field {field!r}," if field else repr(name)
                raise FormatError(f"{source.path}: {what} holds long doubles ({dtype}), which torch does not have: {remedy}")

    def decode(self, record: Any) -> Any:
        """A row in plain terms, cast where `dtype` says so."""
        return self._decoded_record(record)

    def _decoded_record(self, record: Any) -> Any:
        if isinstance(record, dict):
            return {name: self._decoded_row(row) for name, row in record.items()}
        return self._decoded_row(record)

    def _decoded_row(self, row: Any) -> Any:
        value = row if self._is_plain else as_value(row, self._encoding)
        if self._dtype is not None and isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            return value.astype(self._dtype)
        return value

    @property
    def _decodes_plainly(self) -> bool:
        """True if a value is its row, cast perhaps: no subclass decodes in its own way."""
        return self._is_plain and type(self).decode is ArrayDataset.decode

    @property
    def stores_values(self) -> bool:
        return self._decodes_plainly and self._dtype is None

    def present(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self.present(one) for name, one in value.items()}
        if isinstance(value, np.generic):
            value = np.asarray(value)
        return as_tensor(value) if isinstance(value, np.ndarray) else value

    def value_like(self) -> Like | None:
        found = self._source.rows_like() if self._decodes_plainly else None
        return None if found is None or found[1].kind not in "biufc" else (found[0], self._dtype or found[1])

    def input_like(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Like | None:
        return (shape, dtype) if type(self).present is ArrayDataset.present else None

    def held_nbytes(self) -> int | None:
        if not self._decodes_plainly:
            return None
        factor = 1 if self._dtype is None else self._dtype.itemsize / max(1, self._sources[0].dtype.itemsize)
        return int(sum(source.total_bytes for source in self._sources) * factor)

    def sample_nbytes(self) -> int | None:
        like = self.value_like()
        if like is None or self.input_like(*like) is None or self._is_random or not len(self._source):
            return None
        return int(np.prod(like[0], dtype=np.int64)) * like[1].itemsize

    @property
    def _sources(self) -> list[Any]:
        source: Any = self._source
        return source.sources if isinstance(source, ConcatSource) else [source]


def dtype_named(dtype: npt.DTypeLike | None) -> np.dtype[Any] | None:
    """The dtype that a user asks for.

    Raises:
        ConfigError: it is none.
    """
    try:
        return None if dtype is None else np.dtype(dtype)
    except TypeError as error:
        raise ConfigError(f"dtype={dtype!r} is no NumPy dtype: {error}") from error


def joined_targets(columns: Sequence[npt.NDArray[Any]], encoding: str | None = "utf-8") -> Any:
    """The targets of several files, one after the other; strings and compounds in plain terms.

    Raises:
        FormatError: a string has another encoding.
    """
    if any(not is_plain(column.dtype) for column in columns):
        return [as_value(value, encoding) for column in columns for value in column]
    return columns[0] if len(columns) == 1 else np.concatenate(columns)
