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
from headrace.io.files import Files
from headrace.io.library_errors import asking
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges
from headrace.storage.table.encrypted import encrypted_leaves
from headrace.storage.table.files import PARQUET_MAGIC, TableFile, unknown
from headrace.storage.table.library import HeldBytes, pyarrow

TAIL = 64 << 10
"""Bytes at the end of a file that are read first."""
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_PAGE_HEADS = 4 << 10  # bytes of the headers and statistics of a few data pages
_ENCRYPTED_MAGIC = b"PARE"
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

    kind, block_is, blocks_are = "Parquet", "row group", "row groups"

    def __init__(self, path: str, shown: str, files: Files, tail: bytes) -> None:
        self.files = files
        self._size = files.version(path).size
        if tail.endswith(_ENCRYPTED_MAGIC):
            raise FormatError(
                f"{redact(shown)} is a Parquet file with an encrypted footer, which is not "
                "supported: write it again without encryption"
            )
        if len(tail) < 12 or not tail.endswith(PARQUET_MAGIC):
            raise unknown(
                shown,
                "Parquet",
                "it does not end as one does, and is cut short, or was never closed",
            )
        length = int.from_bytes(tail[-8:-4], "little")
        if length + 12 > self._size:
            raise unknown(
                shown,
                "Parquet",
                f"its footer would have {length:,} bytes, and it has {self._size:,} in all",
            )
        self._end = self._size - length - 8  # of the row groups
        if length + 8 > len(tail):
            tail = files.read_joined(ByteRanges.of([(path, self._size - length - 8, self._size)]))
        held = HeldBytes(self._size, [(self._size - len(tail), memoryview(tail))], self._read)
        with asking("pyarrow", shown):
            self._metadata = pyarrow().parquet.read_metadata(held)
            schema = self._metadata.schema.to_arrow_schema()
            rows = [
                self._metadata.row_group(number).num_rows
                for number in range(self._metadata.num_row_groups)
            ]
            self._encrypted: frozenset[int] = frozenset()
            if length - self._metadata.serialized_size == _SIGNATURE:
                self._encrypted = encrypted_leaves(bytes(tail[-8 - length : -8]))
        super().__init__(path, shown, schema, np.array(rows, np.int64))

    def _leaves_of_columns(self) -> dict[str, range]:
        """The columns of the file that each column of the schema consists of."""
        leaves, at = dict[str, range](), 0
        for field in self.schema:
            count = _leaves(field.type)
            leaves[field.name], at = range(at, at + count), at + count
        if at != self._metadata.num_columns:
            raise FormatError(
                f"{self.shown}: its schema has {at} columns, and its row groups have "
                f"{self._metadata.num_columns}"
            )
        return leaves

    @property
    def encrypted(self) -> list[str]:
        """The names of the encrypted columns."""
        leaves = self._leaves_of_columns()
        return [name for name in leaves if not self._encrypted.isdisjoint(leaves[name])]

    def check(self, names: Sequence[str]) -> None:
        super().check(names)
        encrypted = self.encrypted if self._encrypted else []
        for name in names:
            if name in encrypted:
                raise FormatError(
                    f"{self.shown}: column {name!r} is encrypted, which is not supported: leave "
                    "it out with "
                    "columns=[...], or write the file again without encryption"
                )

    def choose(self, names: Sequence[str]) -> None:
        super().choose(names)
        leaves = self._leaves_of_columns()
        wanted = [leaf for name in names for leaf in leaves[name]]
        ends = np.cumsum([0, *(len(leaves[name]) for name in names)]).tolist()
        self._leaves = {
            name: slice(*edges) for name, edges in zip(names, itertools.pairwise(ends), strict=True)
        }
        places = np.zeros((3, len(self.rows), len(wanted)), np.int64)
        with asking("pyarrow", self.shown):
            widths = [self._width(leaf) for leaf in wanted]
            coded = np.zeros(len(wanted), bool)
            for number in range(len(self.rows)):
                group = self._metadata.row_group(number)
                for at, leaf in enumerate(wanted):
                    chunk = group.column(leaf)
                    start, first = chunk.data_page_offset, chunk.dictionary_page_offset
                    start = start if first is None or not 0 < first < start else first
                    nbytes = chunk.total_uncompressed_size
                    if _is_coded(chunk):
                        coded[at] = True
                        nbytes += 4 * chunk.num_values
                    nbytes = max(nbytes, widths[at] * chunk.num_values)
                    places[:, number, at] = start, start + chunk.total_compressed_size, nbytes
            self._coded = [
                self._metadata.schema.column(wanted[at]).path for at in np.flatnonzero(coded)
            ]
        places[:, self.rows == 0] = 4  # of no rows nothing is read, wherever it is said to lie
        self._starts, self._stops, sizes = places
        wrong = (self._starts < 4) | (self._stops < self._starts) | (self._stops > self._end)
        if wrong.any():
            number, at = (int(one[0]) for one in np.nonzero(wrong))
            raise FormatError(
                f"{self.where(number)} would lie at bytes {self._starts[number, at]:,} to "
                f"{self._stops[number, at]:,}, and the row "
                f"groups of the file end at byte {self._end:,}: it is cut short"
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

    @property
    def compression(self) -> list[str]:
        """The codecs of the first row group's columns."""
        group = self._metadata.row_group(0) if len(self.rows) else None
        if group is None:
            return []
        readable = set(range(self._metadata.num_columns)) - self._encrypted
        return sorted({group.column(number).compression for number in readable})

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
        return file.read_row_group(block, columns=list(self.chosen.names), use_threads=False)

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
    if isinstance(kind, pa.BaseExtensionType):
        return _leaves(kind.storage_type)
    if pa.types.is_map(kind):
        return _leaves(kind.key_type) + _leaves(kind.item_type)
    if pa.types.is_struct(kind):
        return sum(_leaves(kind.field(number).type) for number in range(kind.num_fields))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _leaves(kind.value_type)
    return 1
