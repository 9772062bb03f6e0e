"""What the samples of a table are: dicts of the values of a row, or the value of one column;
images in it decoded.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from headrace.casting import cast
from headrace.core.batcher import BatchReader, Collating
from headrace.core.decoder import Decoder, Unnormalized
from headrace.datasets.arrays import as_input
from headrace.datasets.image.augment import Drawn
from headrace.datasets.image.format import ImageDecoder
from headrace.datasets.table.ways import reader_of_columns
from headrace.dtypes import ArraySpec
from headrace.errors import FormatError


def encoded_image(record: Any, column: str) -> bytes:
    """The encoded image in a value of a column: the value itself, or its field "bytes".

    Raises:
        FormatError: there is none.
    """
    data = record.get("bytes") if isinstance(record, dict) else record
    if isinstance(data, bytes):
        return data
    path = record.get("path") if isinstance(record, dict) else None
    if path:
        raise FormatError(
            f"column {column!r} holds the path of an image and not its bytes ({path!r}): open the "
            "folder with ImageDataset"
        )
    raise FormatError(f"column {column!r} has no image (null) there")


@dataclass(kw_only=True, eq=False)
class ColumnImages(ImageDecoder):
    """The images of one column, which nothing is read beside: as those of `ImageDataset`."""

    column: str = ""

    def decode(self, record: Any) -> Any:
        return super().decode(encoded_image(record, self.column))

    def draw(self, value: Any) -> Drawn | None:
        if self.is_encoded:  # a value, or a record that is not decoded yet
            value = encoded_image(value, self.column)
        return super().draw(value)


class ColumnImage(NamedTuple):
    """A column of images among others."""

    column: str
    format: ImageDecoder


class TableDecoder(Decoder):
    """Values of rows: numbers and arrays as tensors of their dtype, texts as str, bytes, lists and
    dicts of these.

    Args:
        specs: shape and dtype of the values of each column as they are stored, if they are alike.
        lists: names of the columns whose values are str or bytes.
        is_one: True if a sample is the value of the one column.
        image: the column of images, if there is one.
        dtype: that numbers are cast to; None: they stay as they are.
    """

    def __init__(
        self,
        specs: Mapping[str, ArraySpec | None],
        lists: Sequence[str],
        is_one: bool,
        image: ColumnImage | None = None,
        dtype: np.dtype[Any] | None = None,
    ) -> None:
        self._stored = dict(specs)
        self.specs = {name: _cast_spec(spec, dtype) for name, spec in specs.items()}
        self.lists = frozenset(lists)
        self.dtype = dtype
        self._image = image
        self._spec = next(iter(self.specs.values())) if is_one and image is None else None
        self.stores_values: bool = image is None and dtype is None

    def decode(self, record: Any) -> Any:
        if self.dtype is not None:
            record = _cast(record, self.dtype)
        if self._image is None:
            return record
        column = self._image.column
        return {**record, column: self._image.format.decode(encoded_image(record[column], column))}

    def value_spec(self) -> ArraySpec | None:
        return self._spec

    def to_input(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return as_input(value)
        made: dict[str, Any] = {}
        for name, one in value.items():
            if self._image is not None and name == self._image.column:
                made[name] = self._image.format.to_input(one)
            else:
                made[name] = as_input(one)
        return made

    def sample_nbytes(self) -> int | None:
        if self._image is not None:
            return None
        sizes = [spec.nbytes for spec in self.specs.values() if spec is not None]
        return sum(sizes) if len(sizes) == len(self.specs) else None

    def unnormalized(self) -> Unnormalized | str | None:
        left = None if self._image is None else self._image.format.unnormalized()
        if self._image is None or not isinstance(left, Unnormalized):
            return left
        made = copy.copy(self)
        column = self._image.column
        assert isinstance(left.format, ImageDecoder)
        made._image = ColumnImage(column, left.format)
        return Unnormalized(made, left.normalization, (column,))

    def own_reader(self, dataset: Any, collating: Collating) -> BatchReader | None:
        if self._spec is not None or self._image is not None:
            return None
        return reader_of_columns(dataset, collating, self._stored, self.specs, self.lists)


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
