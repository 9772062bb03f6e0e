"""Samples that are rows or parts of arrays, whatever file they lie in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.casting import DTypeArgument, as_tensor, cast, dtype_named
from headrace.core.dataset import BaseDataset
from headrace.core.decoder import Decoder
from headrace.core.views import ColumnTargets
from headrace.dtypes import ArraySpec
from headrace.errors import ConfigError, FormatError
from headrace.formats.arrays.rows import ArraysSource
from headrace.formats.arrays.values import as_value, is_plain, long_doubles_in
from headrace.formats.concat import ConcatSource
from headrace.formats.sparse.frames import Column, joined_column


def as_input(value: Any) -> Any:
    """A value with tensors in place of arrays and NumPy's numbers, those in lists and dicts too."""
    if isinstance(value, dict):
        return {name: as_input(one) for name, one in value.items()}
    if isinstance(value, list):
        return [as_input(one) for one in value]
    if not isinstance(value, (np.ndarray, np.generic)):
        return value
    array = np.asarray(value)
    return as_tensor(array if array.flags.writeable else array.copy())


class ArrayDecoder(Decoder):
    """Rows as tensors of their dtype, or of another one; strings, compounds and rows of any length
    in plain terms; dicts of these.

    Args:
        dtype: that numbers are cast to; None: they stay as they are.
        encoding: of strings; None: they are bytes.
        spec: of the records, if they are plain arrays of one kind.
        is_plain: True if records are plain arrays, though perhaps of several shapes.
        values: "bytes" or "str": what was packed as the bytes that records are (uint8 [n]).
    """

    def __init__(
        self,
        dtype: np.dtype[Any] | None = None,
        encoding: str | None = "utf-8",
        spec: tuple[tuple[int, ...], np.dtype[Any]] | None = None,
        is_plain: bool = False,
        values: str | None = None,
    ) -> None:
        self.dtype = dtype
        self.is_plain = is_plain and values is None
        self._values = values
        self._encoding = encoding
        self._spec: ArraySpec | None = None
        if self.is_plain and spec is not None and spec[1].kind in "biufc":
            self._spec = ArraySpec(spec[0], dtype or spec[1])
        self.stores_values: bool = self.is_plain and dtype is None
        self.casts_to = dtype if self.is_plain else None

    def decode(self, record: Any) -> Any:
        if isinstance(record, dict):
            return {name: self._decoded_row(row) for name, row in record.items()}
        return self._decoded_row(record)

    def _decoded_row(self, row: Any) -> Any:
        if self._values is not None:
            data = row.tobytes()
            if self._values == "str" and self._encoding is not None:
                return data.decode("utf-8")
            return data
        value = row
        if not self.is_plain:
            value = as_value(row, self._encoding)
        if self.dtype is not None and isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            return cast(value, self.dtype)
        return value

    def value_spec(self) -> ArraySpec | None:
        return self._spec

    def to_input(self, value: Any) -> Any:
        return as_input(value)

    def sample_nbytes(self) -> int | None:
        if self._spec is None:
            return None
        return self._spec.nbytes


class ArrayDataset(BaseDataset):
    """Rows of arrays as tensors; several arrays as dicts of them. The common part of
    `HDF5Dataset` and `ZarrDataset`.
    """

    reads_urls = True
    classes: list[str] | None = None
    _decoder: ArrayDecoder

    def held_nbytes(self) -> int | None:
        if not self._decoder.is_plain or "decode" in self._overridden:
            return None
        source = self.sample_source
        sources: list[Any] = source.sources if isinstance(source, ConcatSource) else [source]
        nbytes = sum(one.total_bytes for one in sources)
        if self._decoder.dtype is None:
            return int(nbytes)
        return int(nbytes * self._decoder.dtype.itemsize / max(1, sources[0].dtype.itemsize))


def joined_rows(
    sources: Sequence[ArraysSource], dtype: DTypeArgument | None, encoding: str | None = "utf-8"
) -> tuple[Any, ArrayDecoder]:
    """Several sources of rows as one, and the format of the samples.

    Raises:
        ConfigError: `dtype` is none.
        FormatError: the sources have different rows, or numbers that torch does not have.
    """
    cast_to = dtype_named(dtype)
    first = sources[0]
    # what was packed as bytes: "bytes" or "str"
    values = [None if one.of_samples is None else one.of_samples.values for one in sources]
    for other, kind in zip(sources, values, strict=True):
        rows = (other.rows_are, kind)
        if rows != (first.rows_are, values[0]):
            raise FormatError(
                f"{other.path} and {first.path} can't be one dataset: rows of "
                f"{kind or other.rows_are} here, and of {values[0] or first.rows_are} there"
            )
    for name, of_name in first.dtypes.items():
        field = long_doubles_in(of_name)
        if field or (field == "" and cast_to is None):
            what = f"{name!r}, field {field!r}," if field else repr(name) if name else "it"
            remedy = 'pass dtype="float64" (or "complex128"), which keeps 15 digits'
            if field:
                remedy = "convert that field"
            raise FormatError(
                f"{first.path}: {what} holds long doubles ({of_name}), which torch does not have: "
                f"{remedy}"
            )
    source: Any = first if len(sources) == 1 else ConcatSource(sources)
    plain = isinstance(first.name, str) and is_plain(first.dtype) and not first.holds_objects
    return source, ArrayDecoder(cast_to, encoding, source.array_spec, plain, values[0])


def checked_names(dataset_name: Any, target_name: Any) -> str | tuple[str, ...] | None:
    """Gives the name of an array, or several as a tuple.

    Raises:
        ConfigError: these, or that of the targets, are no names.
    """
    names = dataset_name
    if names is not None and not isinstance(names, str):
        names = tuple(names)
    if isinstance(names, tuple) and not (names and all(isinstance(name, str) for name in names)):
        raise ConfigError(
            f"dataset_name must be the name of an array, or a list of such, not {dataset_name!r}"
        )
    if not (target_name is None or isinstance(target_name, str)):
        raise ConfigError(f"target_name must be the name of one array, not {target_name!r}")
    return names  # type: ignore[no-any-return]


def joined_targets(
    columns: Sequence[npt.NDArray[Any] | Column],
    paths: Sequence[str],
    name: str,
    encoding: str | None = "utf-8",
) -> tuple[Any, list[str] | None]:
    """The targets of several files, one after the other, and the names of their classes; None: they
    have none. Strings and compounds come in plain terms, compounds of numbers as dicts.

    Args:
        columns: of each file; of AnnData's tables `Column`s.
        paths, name: of the files and of the targets in them, for messages.
        encoding: of strings.

    Raises:
        FormatError: they are categories in some files, and not in others; or a string is not in
            that encoding.
    """
    arrays = [column for column in columns if not isinstance(column, Column)]
    if len(arrays) < len(columns):
        tables = [column if isinstance(column, Column) else Column(column) for column in columns]
        joined = joined_column(tables, name)
        values = joined.values
        return values.tolist() if values.dtype == object else values, joined.categories
    fields: Any = arrays[0].dtype.fields or {}
    are_alike = len({array.dtype for array in arrays}) == 1
    if fields and are_alike and all(kind.base.kind in "biufc" for kind, *_ in fields.values()):
        return ColumnTargets.of_rows(np.concatenate(arrays)), None
    if all(is_plain(array.dtype) for array in arrays):
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays), None
    targets = []
    for array, path in zip(arrays, paths, strict=True):
        for row, value in enumerate(array):
            try:
                targets.append(as_value(value, encoding))
            except FormatError as error:
                raise FormatError(f"{path}: {name!r}, row {row}: {error}") from error
    return targets, None
