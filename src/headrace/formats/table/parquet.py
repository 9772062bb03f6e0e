"""Parquet files: the column chunks of row groups are read by ranges, and decoded by pyarrow.

The footer, which says where they lie, is read when the file is opened, by one or two requests, and
travels to workers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.dtypes import IntArray
from headrace.errors import FormatError
from headrace.formats.table.columns import inner_types
from headrace.formats.table.files import PARQUET_MAGIC, TableFile
from headrace.formats.table.library import HeldBytes, pyarrow
from headrace.io.files import Files
from headrace.io.library_errors import asking
from headrace.io.ranges import ByteRanges

TAIL = 64 << 10
"""Bytes at the end of a file that are read first."""
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_PAGE_HEADS = 4 << 10  # bytes of the headers and statistics of a few data pages
_ENCRYPTED_MAGIC = b"PARE"
_IS_ENCRYPTED = "is encrypted, or some of its columns are, which is not supported: decrypt it"
_SIGNATURE = 28  # bytes after the footer, in files with encrypted columns


class ParquetTable(TableFile):
    """A Parquet file.

    Args:
        path, shown: see `TableFile`.
        files: by which it is read.
        tail: its last bytes, `TAIL` of them.

    Raises:
        FormatError: it is none, or cut short.
    """

    kind = "Parquet"
    block_is = "row group"
    blocks_are = "row groups"

    def __init__(self, path: str, shown: str, files: Files, tail: bytes) -> None:
        self.files = files
        self._size = files.version(path).size
        length = int.from_bytes(tail[-8:-4], "little")
        if tail.endswith(_ENCRYPTED_MAGIC):
            raise FormatError(f"{shown} {_IS_ENCRYPTED}")
        if len(tail) < 12 or not tail.endswith(PARQUET_MAGIC) or length + 12 > self._size:
            raise FormatError(
                f"{shown} is no Parquet file, or a damaged one: it does not end as one does, or "
                "is cut short"
            )
        self._end = self._size - length - 8  # of the row groups
        if length + 8 > len(tail):
            tail = files.read_joined(ByteRanges.of([(path, self._end, self._size)]))
        held = HeldBytes(self._size, [(self._size - len(tail), memoryview(tail))], self._read)
        with asking("pyarrow", shown):
            self._metadata = pyarrow().parquet.read_metadata(held)
            schema = self._metadata.schema.to_arrow_schema()
            if length - self._metadata.serialized_size == _SIGNATURE:
                raise FormatError(f"{shown} {_IS_ENCRYPTED}")
            groups = map(self._metadata.row_group, range(self._metadata.num_row_groups))
            rows = [group.num_rows for group in groups]
        super().__init__(path, shown, schema, np.array(rows, np.int64))

    def choose(self, names: Sequence[str]) -> None:
        super().choose(names)
        counts = [_leaves(field.type) for field in self.schema]
        if sum(counts) != self._metadata.num_columns:
            raise FormatError(
                f"{self.shown}: its schema has {sum(counts)} columns, and its row groups have "
                f"{self._metadata.num_columns}"
            )
        ends = np.cumsum([0, *counts]).tolist()
        leaves = dict(zip(self.schema.names, itertools.pairwise(ends), strict=True))
        wanted = [leaf for name in names for leaf in range(*leaves[name])]
        places = np.zeros((3, len(self.rows), len(wanted)), np.int64)
        coded = set()
        with asking("pyarrow", self.shown):
            widths = [self._width(leaf) for leaf in wanted]
            for number in range(len(self.rows)):
                group = self._metadata.row_group(number)
                for at, leaf in enumerate(wanted):
                    chunk = group.column(leaf)
                    start = chunk.data_page_offset
                    first = chunk.dictionary_page_offset
                    if first is not None and 0 < first < start:
                        start = first
                    nbytes = chunk.total_uncompressed_size
                    if _is_coded(chunk):
                        coded.add(self._metadata.schema.column(leaf).path)
                        nbytes += 4 * chunk.num_values
                    nbytes = max(nbytes, widths[at] * chunk.num_values)
                    places[:, number, at] = start, start + chunk.total_compressed_size, nbytes
        self._coded = sorted(coded)
        places[:, self.rows == 0] = 4  # of no rows nothing is read, wherever it is said to lie
        self._starts, self._stops, sizes = places
        wrong = (self._starts < 4) | (self._stops < self._starts) | (self._stops > self._end)
        if wrong.any():
            number, at = (int(one[0]) for one in np.nonzero(wrong))
            raise FormatError(
                f"{self.where(number)} would lie at bytes {self._starts[number, at]:,} to "
                f"{self._stops[number, at]:,}, and the row groups of the file end at byte "
                f"{self._end:,}: it is cut short"
            )
        self._nbytes: IntArray = np.maximum(sizes.sum(axis=1), self.rows * self.fixed_nbytes)

    def _width(self, leaf: int) -> int:
        """Bytes of a decoded value of a column of the file; 0 where values differ in length."""
        column = self._metadata.schema.column(leaf)
        if column.physical_type == "FIXED_LEN_BYTE_ARRAY":
            return int(column.length)
        return _WIDTHS.get(column.physical_type, 0)

    @property
    def nbytes(self) -> IntArray:
        return self._nbytes

    def ranges(self, blocks: Sequence[int]) -> list[ByteRanges]:
        return [
            ByteRanges.in_file(self.path, self._starts[block], self._stops[block])
            for block in blocks
        ]

    def read(self, block: int, held: list[tuple[int, memoryview]]) -> Any:
        pa = pyarrow()
        file = pa.parquet.ParquetFile(
            pa.PythonFile(HeldBytes(self._size, held, self._read), mode="r"),
            metadata=self._metadata,
            pre_buffer=False,
            read_dictionary=self._coded,
            page_checksum_verification=True,
        )
        return file.read_row_group(block, columns=list(self.names), use_threads=False)

    def _read(self, start: int, stop: int) -> memoryview:
        """What is asked for besides the ranges of a row group."""
        return memoryview(self.files.read_joined(ByteRanges.of([(self.path, start, stop)])))


def _is_coded(chunk: Any) -> bool:
    """True if a column chunk holds texts or bytes as numbers of values in its dictionary.

    Decoded, its repeated values may take any multiple of what is stored. A writer whose dictionary
    becomes too large goes on with plain values: then the data pages are longer than numbers of
    values would be.
    """
    first = chunk.dictionary_page_offset
    if (
        chunk.physical_type != "BYTE_ARRAY"
        or first is None
        or not 0 < first < chunk.data_page_offset
    ):
        return False
    data_nbytes = chunk.total_compressed_size - (chunk.data_page_offset - first)
    return bool(data_nbytes <= _PAGE_HEADS + 4 * chunk.num_values)


def _leaves(kind: Any) -> int:
    """Columns of the file that a column of the schema consists of."""
    pa = pyarrow()
    while isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_map(kind):
        return _leaves(kind.key_type) + _leaves(kind.item_type)
    if pa.types.is_dictionary(kind):
        return 1
    inner = inner_types(kind)
    if inner or pa.types.is_struct(kind):
        return sum(map(_leaves, inner))
    return 1
