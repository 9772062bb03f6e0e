"""What the samples of a table are: dicts of the values of a row, or the value of one column."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.casting import cast, cast_into
from headrace.core.batcher import BatchReader, Collating, ColumnReader, is_known
from headrace.core.decoder import Decoder
from headrace.datasets.arrays import as_input
from headrace.datasets.columns import decoded
from headrace.datasets.image.pixels import Left
from headrace.dtypes import ArraySpec
from headrace.errors import FormatError
from headrace.formats.table.source import TableSource


class TableDecoder(Decoder):
    """Values of rows: numbers and arrays as tensors of their dtype, texts as str, bytes, lists and
    dicts of these.

    Args:
        specs: shape and dtype of the values of each column as they are stored, if they are alike.
        lists: names of the columns whose values are str or bytes.
        one: the name of the one column that samples are the values of; None: they are dicts.
        decoders: what decodes the bytes of columns, by their names.
        dtype: that numbers are cast to; None: they stay as they are.
        left: says what the memory budget leaves for one image.
    """

    def __init__(
        self,
        specs: Mapping[str, ArraySpec | None],
        lists: Sequence[str],
        one: str | None,
        decoders: Mapping[str, Callable[[bytes], Any]],
        dtype: np.dtype[Any] | None,
        left: Left,
    ) -> None:
        self._stored = dict(specs)
        self._specs = {name: _cast_spec(spec, dtype) for name, spec in specs.items()}
        self._lists = frozenset(lists)
        self._dtype = dtype
        self._one = one
        self._decoders = dict(decoders)
        self._left = left
        self._spec = None if one is None else self._specs[one]
        self.stores_values: bool = dtype is None and not decoders

    def decode(self, record: Any) -> Any:
        if self._dtype is not None:
            record = _cast(record, self._dtype)
        if not self._decoders:
            return record
        if self._one is not None:
            return self._decoded(self._one, record)
        return {name: self._decoded(name, value) for name, value in record.items()}

    def _decoded(self, name: str, value: Any) -> Any:
        if name not in self._decoders:
            return value
        data = value
        if isinstance(value, dict):
            data = value.get("bytes")
        if data is None:
            raise FormatError(f"column {name!r} has no bytes (null) there")
        return decoded(data, self._decoders[name], f"column {name!r}", self._left)

    def value_spec(self) -> ArraySpec | None:
        return self._spec

    def to_input(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return as_input(value)
        return {name: as_input(one) for name, one in value.items()}

    def sample_nbytes(self) -> int | None:
        sizes = [spec.nbytes for spec in self._specs.values() if spec is not None]
        if len(sizes) == len(self._specs):
            return sum(sizes)
        return None

    def own_reader(self, dataset: Any, collating: Collating) -> BatchReader | None:
        """Makes stacked batches of dicts column by column, where nothing is held."""
        source = dataset.sample_source
        decoder = dataset.sample_decoder
        if self._one is not None or self._decoders or not isinstance(source, TableSource):
            return None
        if not collating.stacks or not dataset.value_source.is_direct:
            return None
        if decoder.splits_targets or not decoder.makes_plain_samples:
            return None
        if not all(name in self._lists or is_known(spec) for name, spec in self._specs.items()):
            return None
        cast = {
            name: spec for name, spec in self._stored.items() if spec and spec != self._specs[name]
        }

        def read(indices: npt.NDArray[np.int64], outs: dict[str, Any]) -> int:
            beside = {}
            for name, spec in cast.items():
                beside[name] = np.empty((len(indices), *spec.shape), spec.dtype)
            source.read_columns(indices, {**outs, **beside})
            for name, values in beside.items():
                cast_into(values, outs[name])
            return sum(map(_nbytes, (*outs.values(), *beside.values())))

        return ColumnReader("column by column, straight from storage", dataset, self._specs, read)


def _nbytes(out: Any) -> int:
    if isinstance(out, list):
        return sum(len(value) for value in out if value)
    return int(out.nbytes)


def _cast_spec(spec: ArraySpec | None, dtype: np.dtype[Any] | None) -> ArraySpec | None:
    if spec is None or dtype is None or spec.dtype.kind not in "biufc":
        return spec
    return ArraySpec(spec.shape, dtype)


def _cast(value: Any, dtype: np.dtype[Any]) -> Any:
    """A value whose numbers have another dtype, those in lists and dicts too."""
    if isinstance(value, dict):
        return {name: _cast(one, dtype) for name, one in value.items()}
    if isinstance(value, list):
        return [_cast(one, dtype) for one in value]
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        return cast(value, dtype)
    return value
