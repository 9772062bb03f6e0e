"""Rows of HDF5 files: those of datasets, and the samples of what `headrace.pack` wrote."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.dtypes import AnyArray, ArraySpec, IntArray
from headrace.errors import FormatError
from headrace.formats.arrays.packed import (
    CRC,
    DATA,
    IMAGE,
    MASK,
    MASK_STARTS,
    NAME_OFFSETS,
    NAMES,
    OFFSETS,
    TARGETS,
    PackPart,
    are_offsets,
    crc_of,
    offsets_named,
    target_named,
)
from headrace.formats.hdf5.tree import OpenHDF5
from headrace.formats.resolve.file_set import PackedNames
from headrace.formats.source import Description, Rows
from headrace.formats.tree import OpenTrees, Tree, TreeSource
from headrace.io.paths import in_one_line
from headrace.io.ranges import ByteRanges
from headrace.memory.anonymous import SharedArray


class HDF5Source(TreeSource):
    """Rows of datasets of an HDF5 file, or the samples of a packed file.

    Records are arrays of one row (its shape and dtype, in the file's byte order); strings, vlen and
    compounds with them as h5py gives them; for several names dicts of these; 1-D arrays where a
    packed file holds encoded samples or tokens. Samples of packed files are checked against their
    CRC.

    Args:
        path, name, opened, targets: see `TreeSource`.

    Attributes:
        names, crc: of the samples of a pack, or None.
        gives_pairs, gives_images: records are pairs of an image and its mask; or images alone, out
            of pairs.
    """

    names: PackedNames | None = None
    crc: SharedArray | None = None
    gives_pairs: bool = False
    gives_images: bool = False
    _offsets: SharedArray | None = None
    _mask_starts: SharedArray | None = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        name: str | Sequence[str] | None = DATA,
        opened: OpenTrees[Any] | None = None,
        targets: str | None = None,
    ) -> None:
        super().__init__(path, name, opened or OpenHDF5(), targets)

    # -- packs

    def _look_into(self, tree: Tree) -> None:
        """Reads offsets, checksums and names of a packed file, which must fit each other."""
        packed = self.info
        if packed is None or self.name != DATA:
            return
        self.of_samples = packed
        self.part = None if packed.part is None else PackPart(*packed.part)
        wrong: list[str] = []
        if packed.is_flat:
            offsets = self._whole(tree, OFFSETS).astype(np.int64, copy=False)
            self._offsets = SharedArray(offsets)
            if not are_offsets(offsets, packed.count, self.shape[0]):
                wrong.append(OFFSETS)
        elif self.shape[0] != packed.count:
            wrong.append(DATA)
        if tree.is_array(NAMES):
            joined = self._whole(tree, NAMES)
            edges = self._whole(tree, NAME_OFFSETS)
            self.names = PackedNames.from_arrays(joined, edges)
            if not are_offsets(edges, packed.count, len(joined)):
                wrong.append(NAME_OFFSETS)
        if tree.is_array(CRC):
            self.crc = SharedArray(self._whole(tree, CRC))
            if self.crc.array.shape != (packed.count,):
                wrong.append(CRC)
        if wrong:
            raise FormatError(
                f"{self.path} is damaged: {', '.join(wrong)} don't fit the {packed.count:,} "
                "samples it should hold: pack it again"
            )

    def give_pairs(self, images_alone: bool = False) -> None:
        """Makes `read` return pairs of an image and its mask, as bytes or pixels; or images alone.

        Raises:
            FormatError: where masks begin doesn't fit the samples.
        """
        spans = self._spans(slice(None))
        if spans is not None:
            begins = self.column(MASK_STARTS)
            fit = begins.dtype == np.int64 and begins.ndim == 1
            if not fit or (begins < spans[0]).any() or (begins > spans[1]).any():
                raise FormatError(
                    f"{self.path} is damaged: {MASK_STARTS} don't fit the samples: pack it again"
                )
            self._mask_starts = SharedArray(begins)
        elif self.dtype.names != (IMAGE, MASK):
            raise FormatError(
                f"{self.path} is damaged: its rows have the fields {self.dtype.names}: pack it "
                "again"
            )
        self.gives_pairs = not images_alone
        self.gives_images = images_alone

    def _spans(self, indices: IntArray | slice) -> tuple[IntArray, IntArray] | None:
        """Where samples begin and end that lie flat, one behind the other; None: they are rows."""
        if self._offsets is None:
            return None
        offsets = self._offsets.array
        return offsets[:-1][indices], offsets[1:][indices]

    def column(self, name: str) -> AnyArray:
        """A whole array with one row a sample, such as the targets; of targets that are dicts a
        compound, with a field for each column.

        Raises:
            MissingNameError, FormatError: no such array; another number of rows.
        """
        columns = self._columns_of(name)
        arrays = dict[str, AnyArray]()
        for one, stored in columns.items():
            arrays[one] = super().column(stored)
        if columns.keys() == {""}:
            return arrays[""]
        kinds = [(one, array.dtype, array.shape[1:]) for one, array in arrays.items()]
        rows = np.empty(len(self), kinds)
        for one, array in arrays.items():
            rows[one] = array
        return rows

    def whole(self, name: str) -> AnyArray:
        """An array as a whole, compared with its checksum."""
        with self.tree() as tree:
            return self._whole(tree, name)

    def has_column(self, name: str) -> bool:
        """True if there is such a `column`."""
        with self.tree() as tree:
            return all(map(tree.is_array, self._columns_of(name).values()))

    def _columns_of(self, name: str) -> dict[str, str]:
        """The arrays of the columns of targets that are dicts; of others one without a name."""
        columns = None
        if self.info is not None and name == TARGETS:
            columns = self.info.target_columns
        if columns is None:
            return {"": name}
        return {column: target_named(number) for number, (column, _) in enumerate(columns)}

    def ragged(self, name: str) -> tuple[AnyArray, IntArray]:
        """An array of `RAGGED`, and where the items of each sample begin ([n + 1]).

        Raises:
            MissingNameError, FormatError: no such array; it is damaged.
        """
        items = self.whole(name)
        offsets = self.whole(offsets_named(name))
        if not are_offsets(offsets, len(self), len(items)):
            raise FormatError(
                f"{self.path} is damaged: {offsets_named(name)} don't fit {name}: pack it again"
            )
        return items, offsets.astype(np.int64, copy=False)

    def edges(self) -> IntArray | None:
        """The first byte of each sample in the file, and the end of the last ([n + 1]), where
        they lie one behind the other as they are.
        """
        reader = self._readers[0] if self._readers else None
        begin = None if reader is None else reader.begin
        if begin is None:
            return None
        rows = np.arange(len(self) + 1)
        if self._offsets is not None:
            rows = self._offsets.array
        edges: IntArray = begin + rows * self._row_bytes
        return edges

    # -- what it is

    @property
    def is_flat(self) -> bool:
        return self._offsets is not None

    def describe(self) -> Description:
        found = super().describe()
        info = self.of_samples
        if info is None:
            return found
        if self.is_flat:
            reader = self._readers[0]
            found.columns = [reader.describe(DATA, [reader.shape[0] / max(1, len(self))])]
        found.facts["packed"] = f"{info.kind}, stored {info.store}"
        if info.target_columns is not None:
            found.facts["targets"] = ", ".join(name for name, _ in info.target_columns)
        return found

    def __len__(self) -> int:
        if self._offsets is None:
            return super().__len__()
        return len(self._offsets.array) - 1

    def sizes(self) -> IntArray:
        spans = self._spans(slice(None))
        if spans is None:
            return super().sizes()
        return (spans[1] - spans[0]) * self._row_bytes

    def image_sizes(self) -> IntArray:
        """Bytes of each image without its mask ([n] int64), where samples are pairs."""
        spans = self._spans(slice(None))
        if spans is None or self._mask_starts is None:
            return np.full(len(self), self.dtype[IMAGE].itemsize, np.int64)
        sizes: IntArray = self._mask_starts.array - spans[0]
        return sizes

    @property
    def array_spec(self) -> ArraySpec | None:
        if self.is_flat:
            return None
        return super().array_spec

    def blocks_of(self, nbytes: int) -> IntArray:
        spans = self._spans(slice(None))
        if spans is None:
            return super().blocks_of(nbytes)
        numbers = spans[0] * self._row_bytes // nbytes
        return np.unique(numbers, return_counts=True)[1].astype(np.int64)

    def fingerprint(self) -> str:
        """The one of the packed dataset; else a hash of names, shapes, dtypes and chunk grids."""
        if self.of_samples is None:
            return super().fingerprint()
        return self.of_samples.fingerprint

    def location(self, index: int) -> str:
        if self.names is None:
            return super().location(index)
        return f"{super().location(index)} ({in_one_line(self.names[index])})"

    # -- reading

    def read_into(self, indices: Sequence[int], rows: Rows) -> None:
        super().read_into(indices, rows)
        self.check(indices, rows)

    def read(self, indices: Sequence[int]) -> list[Any]:
        spans = self._spans(np.asarray(indices, np.int64))
        if spans is None:
            records = super().read(indices)
        else:
            sizes = (spans[1] - spans[0]).tolist()
            records = [np.empty((size, *self.shape[1:]), self.dtype) for size in sizes]
            self._readers[0].read_spans(spans[0], records, self.run)
        self.check(indices, records)
        if not (self.gives_pairs or self.gives_images):
            return records
        if spans is None or self._mask_starts is None:
            # a copy: in the row it may be at any address
            pairs = [(row[IMAGE], np.array(row[MASK])) for row in records]
        else:
            begins = self._mask_starts.array[np.asarray(indices, np.int64)] - spans[0]
            each = zip(records, begins.tolist(), strict=True)
            pairs = [(record[:size], record[size:]) for record, size in each]
        if self.gives_images:
            return [image for image, _ in pairs]
        return pairs

    def _located(self, indices: IntArray, missing: bool) -> list[ByteRanges]:
        spans = self._spans(indices)
        if spans is None:
            return super()._located(indices, missing)
        return [self._readers[0].span_ranges(*spans, missing)]

    def check(self, indices: Sequence[int], records: Rows | Sequence[Any]) -> None:
        if self.crc is None:
            return
        for index, array in zip(indices, records, strict=True):
            if crc_of(array) != int(self.crc.array[index]):
                raise FormatError(self.damaged(index))

    def damaged(self, index: int) -> str:
        """The message for a sample with a wrong checksum."""
        return f"{self.location(index)}: wrong checksum, the file is damaged: pack it again"
