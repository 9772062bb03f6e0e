"""The samples of packs, whatever format holds them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.dtypes import ArraySpec, IntArray
from headrace.errors import FormatError
from headrace.io.packed_strings import PackedNames
from headrace.io.paths import in_one_line, redact
from headrace.io.ranges import ByteRanges
from headrace.memory.anonymous import SharedArray
from headrace.storage.arrays.packed import (
    DATA,
    IMAGE,
    MASK,
    MASK_STARTS,
    TARGETS,
    PackedInfo,
    crc_of,
    target_named,
)
from headrace.storage.arrays.reader import ArrayReader, Map
from headrace.storage.arrays.rows import ArraysSource
from headrace.storage.describe import Description
from headrace.storage.source import Rows


class PackedSource(ArraysSource):
    """Rows of arrays, which may be the samples of a pack: those are checked against their CRC.

    Attributes:
        info: what the pack says about itself; None: it is none.
        names: of the samples, or None.
    """

    info: PackedInfo | None = None
    names: PackedNames | None = None
    _crc: SharedArray | None = None
    _mask_starts: SharedArray | None = None
    gives_pairs, gives_images = False, False
    """True if records are pairs of an image and its mask; or images alone, out of pairs."""

    def give_pairs(self, images_alone: bool = False) -> None:
        """From now on `read` gives pairs: of the bytes of an image and of its mask, or of pixels
        and theirs; or the first of both alone.

        Raises:
            FormatError: where masks begin doesn't fit the samples.
        """
        spans = self._spans(slice(None))
        if spans is not None:
            begins = self.column(MASK_STARTS)
            if (
                begins.dtype != np.int64
                or begins.ndim != 1
                or (begins < spans[0]).any()
                or (begins > spans[1]).any()
            ):
                raise FormatError(
                    f"{redact(self.path)} is damaged: {MASK_STARTS} don't fit the samples: pack "
                    "it again"
                )
            self._mask_starts = SharedArray(begins)
        elif self.dtype.names != (IMAGE, MASK):
            raise FormatError(
                f"{redact(self.path)} is damaged: its rows have the fields {self.dtype.names}: "
                "pack it again"
            )
        self.gives_pairs, self.gives_images = not images_alone, images_alone

    @abstractmethod
    def _spans(self, indices: IntArray | slice) -> tuple[IntArray, IntArray] | None:
        """Where samples begin and end that lie flat, one behind the other; None: they are rows."""

    def column(self, name: str) -> npt.NDArray[Any]:
        """A whole array with one row a sample, such as the targets; of targets that are dicts a
        compound, with a field for each column.

        Raises:
            MissingNameError, FormatError: no such array; another number of rows.
        """
        if (columns := self._columns_of(name)) is None:
            return self.stored_column(name)
        arrays = {
            one: self.stored_column(target_named(number)) for number, one in enumerate(columns)
        }
        rows = np.empty(
            len(self), [(one, array.dtype, array.shape[1:]) for one, array in arrays.items()]
        )
        for one, array in arrays.items():
            rows[one] = array
        return rows

    def has_column(self, name: str) -> bool:
        """True if there is such a `column`."""
        columns = self._columns_of(name)
        return (
            self.has_array(name)
            if columns is None
            else all(self.has_array(target_named(number)) for number in range(len(columns)))
        )

    def _columns_of(self, name: str) -> list[str] | None:
        """The names of the columns of targets that are dicts; None: the name is that of an
        array.
        """
        columns = None if self.info is None or name != TARGETS else self.info.target_columns
        return None if columns is None else [column for column, _ in columns]

    @abstractmethod
    def stored_column(self, name: str) -> npt.NDArray[Any]:
        """`column` of an array as it is stored."""

    @abstractmethod
    def has_array(self, name: str) -> bool:
        """True if there is an array of that name."""

    @abstractmethod
    def ragged(self, name: str) -> tuple[npt.NDArray[Any], IntArray]:
        """An array of `RAGGED`, without what may lie between the items of two samples; and where
        those of each sample begin ([n + 1]).

        Raises:
            MissingNameError, FormatError: no such array; it is damaged.
        """

    # -- what it is

    @property
    @abstractmethod
    def is_flat(self) -> bool:
        """True if the samples lie flat, one behind the other."""

    @property
    def of_samples(self) -> PackedInfo | None:
        """`info`, if the rows are the samples of a pack; None: there is no pack, or they are
        what lies beside its samples.
        """
        return self.info if self.name == DATA else None

    def describe(self) -> Description:
        found, info = super().describe(), self.of_samples
        if info is None:
            return found
        reader = self._readers[0]
        if self.is_flat and isinstance(reader, ArrayReader):
            mean = reader.shape[0] / max(1, len(self))
            found.columns = [reader.describe(DATA, [mean])]
        found.facts["packed"] = f"{info.kind}, stored {info.store}"
        if info.target_columns is not None:
            found.facts["targets"] = ", ".join(name for name, _ in info.target_columns)
        return found

    def __len__(self) -> int:
        return self.info.count if self.is_flat and self.info is not None else super().__len__()

    @property
    def checksums(self) -> npt.NDArray[np.uint32] | None:
        """The CRC of each sample ([n]); None: there are none."""
        return None if self._crc is None else self._crc.array

    def edges(self) -> IntArray | None:
        """The first byte of each sample in the file, and the end of the last ([n + 1]), where
        they lie one behind the other as they are.
        """
        spans, reader = self._spans(slice(None)), self._readers[0]
        begin = reader.begin if isinstance(reader, ArrayReader) else None
        if begin is None or (spans is not None and not np.array_equal(spans[0][1:], spans[1][:-1])):
            return None
        rows = (
            np.arange(len(self) + 1)
            if spans is None
            else np.concatenate([spans[0][:1] if len(self) else [0], spans[1]])
        )
        edges: IntArray = begin + rows * self._row_bytes
        return edges

    def sizes(self) -> npt.NDArray[np.int64]:
        """The size of each sample in bytes ([n] int64); of objects nobody knows it: 0."""
        spans = self._spans(slice(None))
        return super().sizes() if spans is None else (spans[1] - spans[0]) * self._row_bytes

    # -- reading

    @property
    def array_spec(self) -> ArraySpec | None:
        return None if self.is_flat else super().array_spec

    def read_into(self, indices: Sequence[int], rows: Rows) -> None:
        super().read_into(indices, rows)
        self.check(indices, rows)

    def gather(self, rows: IntArray, out: npt.NDArray[Any], run: Map | None = None) -> None:
        super().gather(rows, out, run)
        self.check(rows.tolist(), out)

    def read(self, indices: Sequence[int]) -> list[Any]:
        spans = self._spans(np.asarray(indices, np.int64))
        records = self._read_rows(indices) if spans is None else self._read_spans(*spans)
        self.check(indices, records)
        if self.gives_images:
            return [image for image, _ in self._pairs(indices, records)]
        return self._pairs(indices, records) if self.gives_pairs else records

    def _read_rows(self, indices: Sequence[int]) -> list[Any]:
        return super().read(indices)

    def _pairs(self, indices: Sequence[int], records: list[Any]) -> list[Any]:
        spans = self._spans(np.asarray(indices, np.int64))
        if spans is None or self._mask_starts is None:
            # a copy: in the row it may be at any address
            return [(row[IMAGE], np.array(row[MASK])) for row in records]
        sizes = (self._mask_starts.array[np.asarray(indices, np.int64)] - spans[0]).tolist()
        return [(record[:size], record[size:]) for record, size in zip(records, sizes, strict=True)]

    def image_sizes(self) -> IntArray:
        """Bytes of each image without its mask ([n] int64), where samples are pairs."""
        spans = self._spans(slice(None))
        if spans is None or self._mask_starts is None:
            return np.full(len(self), self.dtype[IMAGE].itemsize, np.int64)
        sizes: IntArray = self._mask_starts.array - spans[0]
        return sizes

    def _read_spans(self, starts: IntArray, stops: IntArray) -> list[Any]:
        samples = [
            np.empty((count, *self.shape[1:]), self.dtype) for count in (stops - starts).tolist()
        ]
        self._readers[0].read_spans(starts, samples, self.run)
        return samples

    def _located(self, indices: npt.NDArray[np.int64]) -> list[ByteRanges]:
        spans = self._spans(indices)
        return (
            super()._located(indices) if spans is None else [self._readers[0].span_ranges(*spans)]
        )

    def check(self, indices: Sequence[int], records: Rows | Sequence[Any]) -> None:
        if self._crc is None:
            return
        for index, array in zip(indices, records, strict=True):
            if crc_of(array) != int(self._crc.array[index]):
                raise FormatError(self.damaged(index))

    def damaged(self, index: int) -> str:
        """What messages say of a sample that is not what was packed."""
        return f"{self.location(index)}: wrong checksum, the file is damaged: pack it again"

    def blocks_of(self, nbytes: int) -> npt.NDArray[np.int64]:
        spans = self._spans(slice(None))
        if spans is None:
            return super().blocks_of(nbytes)
        return np.unique(spans[0] * self._row_bytes // nbytes, return_counts=True)[1].astype(
            np.int64
        )

    def fingerprint(self) -> str:
        """The one of the packed dataset; else a hash of names, shapes, dtypes and chunk grids."""
        info = self.of_samples
        return super().fingerprint() if info is None else info.fingerprint

    def location(self, index: int) -> str:
        name = f" ({in_one_line(self.names[index])})" if self.names is not None else ""
        return f"{redact(self.path)}, {' and '.join(self._names)}, row {index}{name}"
