"""Parquet files: the column chunks of row groups are read by ranges, and decoded by pyarrow.

The footer, which says where they lie, is read when the file is opened, by one or two requests, and travels to workers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.dtypes import IntArray
from headrace.errors import FormatError
from headrace.io.files import Files
from headrace.io.library_errors import asking
from headrace.io.ranges import ByteRanges
from headrace.storage.table.files import PARQUET_MAGIC, TableFile, unknown
from headrace.storage.table.library import HeldBytes, pyarrow

TAIL = 64 << 10
"""Bytes at the end of a file that are read first."""


class ParquetTable(TableFile):
    """A Parquet file.

    Args:
        path, shown: see `TableFile`.
        files: by which it is read.
        tail: its last bytes, `TAIL` of them.

    Raises:
        FormatError: it is none, or cut short.
    """

    kind, block_is, blocks_are = "Parquet", "row group", "row groups"

    def __init__(self, path: str, shown: str, files: Files, tail: bytes) -> None:
        self.files = files
        self._size = files.version(path).size
        if len(tail) < 12 or not tail.endswith(PARQUET_MAGIC):
            raise unknown(shown, "Parquet", "it does not end as one does, and is cut short, or was never closed")
        length = int.from_bytes(tail[-8:-4], "little")
        if length + 12 > self._size:
            raise unknown(shown, "Parquet", f"its footer would have {length:,} bytes, and it has {self._size:,} in all")
        self._end = self._size - length - 8  # of the row groups
        if length + 8 > len(tail):
            tail = files.read_joined(ByteRanges.of([(path, self._size - length - 8, self._size)]))
        held = HeldBytes(self._size, [(self._size - len(tail), memoryview(tail))], self._read)
        with asking("pyarrow", shown):
            self._metadata = pyarrow().parquet.read_metadata(held)
            schema = self._metadata.schema.to_arrow_schema()
            rows = [self._metadata.row_group(number).num_rows for number in range(self._metadata.num_row_groups)]
        super().__init__(path, shown, schema, np.array(rows, np.int64))

    def choose(self, names: Sequence[str]) -> None:
        super().choose(names)
        leaves, at = dict[str, range](), 0
        for field in self.schema:
            count = _leaves(field.type)
            leaves[field.name], at = range(at, at + count), at + count
        if at != self._metadata.num_columns:
            raise FormatError(f"{self.shown}: its schema has {at} columns, and its row groups have {self._metadata.num_columns}")
        wanted = [leaf for name in names for leaf in leaves[name]]
        ends = np.cumsum([0, *(len(leaves[name]) for name in names)]).tolist()
        self._leaves = {name: slice(*edges) for name, edges in zip(names, itertools.pairwise(ends), strict=True)}
        places = np.zeros((3, len(self.rows), len(wanted)), np.int64)
        for number in range(len(self.rows)):
            group = self._metadata.row_group(number)
            for at, leaf in enumerate(wanted):
                chunk = group.column(leaf)
                start, first = chunk.data_page_offset, chunk.dictionary_page_offset
                start = start if first is None or not 0 < first < start else first
                places[:, number, at] = start, start + chunk.total_compressed_size, chunk.total_uncompressed_size
        places[:, self.rows == 0] = 4  # of no rows nothing is read, wherever it is said to lie
        self._starts, self._stops, sizes = places
        wrong = (self._starts < 4) | (self._stops < self._starts) | (self._stops > self._end)
        if wrong.any():
            number, at = (int(one[0]) for one in np.nonzero(wrong))
            raise FormatError(
                f"{self.where(number)} would lie at bytes {self._starts[number, at]:,} to {self._stops[number, at]:,}, and the row "
                f"groups of the file end at byte {self._end:,}: it is cut short"
            )
        self._nbytes: IntArray = np.maximum(sizes.sum(axis=1), self.rows * self.fixed_nbytes)

    @property
    def nbytes(self) -> IntArray:
        return self._nbytes

    @property
    def compression(self) -> list[str]:
        """The codecs of the first row group's columns."""
        group = self._metadata.row_group(0) if len(self.rows) else None
        return [] if group is None else sorted({group.column(number).compression for number in range(self._metadata.num_columns)})

    def stored_of(self, name: str) -> int:
        """Bytes of a column that is read, as they are stored."""
        return int((self._stops - self._starts)[:, self._leaves[name]].sum())

    def ranges(self, blocks: Sequence[int]) -> list[ByteRanges]:
        return [ByteRanges.in_file(self.path, self._starts[block], self._stops[block]) for block in blocks]

    def read(self, block: int, held: list[tuple[int, memoryview]]) -> Any:
        pa = pyarrow()
        file = pa.parquet.ParquetFile(
            pa.PythonFile(HeldBytes(self._size, held, self._read), mode="r"), metadata=self._metadata, pre_buffer=False,
            page_checksum_verification=True,
        )  # fmt: skip
        return file.read_row_group(block, columns=list(self.chosen.names), use_threads=False)

    def _read(self, start: int, stop: int) -> memoryview:
        """What is asked for besides the ranges of a row group."""
        return memoryview(self.files.read_joined(ByteRanges.of([(self.path, start, stop)])))


def _leaves(kind: Any) -> int:
    """Columns of the file that a column of the schema consists of."""
    pa = pyarrow()
    if isinstance(kind, pa.BaseExtensionType):
        return _leaves(kind.storage_type)
    if pa.types.is_map(kind):
        return _leaves(kind.key_type) + _leaves(kind.item_type)
    if pa.types.is_struct(kind):
        return sum(_leaves(kind.field(number).type) for number in range(kind.num_fields))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _leaves(kind.value_type)
    return 1
