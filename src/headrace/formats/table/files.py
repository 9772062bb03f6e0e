"""Table files: what all formats have in common, a schema, and blocks of rows that are decoded
together. And Parquet files: the column chunks of row groups are read by ranges, and decoded by
pyarrow.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.dtypes import ArraySpec, IntArray
from headrace.errors import AccessError, FormatError, MissingNameError
from headrace.formats.arrays.reader import Block
from headrace.formats.resolve.file_set import BOOKKEEPING, READERS, FileSet, Format
from headrace.formats.table.columns import (
    Column,
    column_of,
    pyarrow,
    refused,
    spec_of,
)
from headrace.io.files import Files, HeldBytes
from headrace.io.library_errors import asking
from headrace.io.paths import is_url, listed_names, named_part, redact
from headrace.io.ranges import ByteRanges

PARQUET_MAGIC = b"PAR1"
NPY_MAGIC = b"\x93NUMPY"
MAGIC = b"ARROW1"
"""The beginning and end of an Arrow file."""
CONTINUED = b"\xff\xff\xff\xff"
"""The beginning of each message of a stream, and so of the stream."""
_SPLIT = re.compile(
    r"(?:([\w.]*?[A-Za-z_]\w*)-)?\d{4,5}(?:-of-\d{4,5})?(?:-[0-9a-f]+)?\.(?:parquet|arrow)"
)
"""Names that HuggingFace gives the files of a split."""
_SPLITS = re.compile(r"(?:train|test|val|valid|validation|dev|eval|unsupervised|extra)(?:[\W_].*)?")
_CACHED = re.compile(r"cache-[0-9a-f]{16}.*\.arrow")
"""Names of files that HuggingFace's `datasets` caches next to a dataset."""
TAIL = 64 << 10
"""Bytes at the end of a file that are read first."""
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_PAGE_HEADS = 4 << 10  # bytes of the headers and statistics of a few data pages
_ENCRYPTED_MAGIC = b"PARE"
_IS_ENCRYPTED = "is encrypted, or some of its columns are, which is not supported: decrypt it"
_SIGNATURE = 28  # bytes after the footer, in files with encrypted columns


def _by_content(path: str) -> str | None:
    """The format of a local file by its content: "parquet", "arrow", "numpy", or None."""
    with open(path, "rb", buffering=0) as file:
        head = file.read(8)
    if head.startswith(PARQUET_MAGIC):
        return "parquet"
    if head.startswith(NPY_MAGIC):
        return "numpy"
    is_stream = head.startswith(CONTINUED) and len(head) == 8 and head[6:] == b"\0\0"
    return "arrow" if is_stream or head.startswith(MAGIC) else None


def is_table(path: str) -> bool:
    """True if a local file is Parquet, Arrow or .npy by its first bytes."""
    try:
        return _by_content(path) is not None
    except OSError:
        return False


TABLES = Format(
    "tables",
    READERS["TableDataset"],
    keeps_order=True,
    recognizes=is_table,
    bookkeeping=BOOKKEEPING,
    dataset="TableDataset",
)


def table_paths(files: FileSet, shown: str) -> list[str]:
    """The paths or URLs of the files of a table, without those that HuggingFace's `datasets` caches
    next to it.

    Args:
        files: the files below the path.
        shown: the path, for messages.

    Raises:
        FormatError: a folder holds the splits of a dataset.
    """
    paths = files.urls()
    parts = [os.fsdecode(files.names[number]).rpartition("/") for number in range(len(files))]
    saved = {folder for folder, _, name in parts if _SPLIT.fullmatch(name)}
    chosen = []
    splits = dict[str, str]()
    for path, (folder, _, name) in zip(paths, parts, strict=True):
        if _CACHED.fullmatch(name) or (folder in saved and name.startswith("cache-")):
            continue
        chosen.append(path)
        place = path.rpartition("/")[0]
        globs = {folder.rpartition("/")[2]: place}
        if found := _SPLIT.fullmatch(name):
            globs[found[1] or ""] = f"{place}/{found[1]}-*"
        for word in filter(_SPLITS.fullmatch, globs):
            splits.setdefault(word, globs[word])
    if files.searched and len(splits) > 1:
        named = ", ".join(f"{word} {redact(splits[word])!r}" for word in sorted(splits))
        raise FormatError(
            f"{shown} holds the splits of a dataset, which are not one table: pass the files of "
            f"one: {named}"
        )
    return chosen or paths


def kind_of_table(path: str) -> str:
    """The format of a file: "parquet", "arrow" or "numpy", by its name, or, if that tells nothing,
    by the first bytes of the local file.

    Raises:
        AccessError: this user may not read it.
    """
    if TABLES.fits(path) or is_url(path):
        name = named_part(path).lower()
        if name.endswith((".parquet", ".pq")):
            return "parquet"
        return "numpy" if name.endswith((".npy", ".npz")) else "arrow"
    try:
        return _by_content(path) or "arrow"
    except PermissionError as error:
        raise AccessError(f"{redact(path)}: this user may not read the file") from error


def hold_arrays(files: FileSet, shown: str) -> bool:
    """True if all files are NumPy files, False if all are tables.

    Raises:
        FormatError: there are both.
        AccessError: this user may not read one.
    """
    found = {kind_of_table(path) == "numpy": redact(path) for path in files.urls()}
    if len(found) > 1:
        raise FormatError(
            f"{shown} holds NumPy arrays, such as {found[True]}, and tables, such as "
            f"{found[False]}: make one dataset of each"
        )
    return True in found


class TableFile(ABC):
    """A file of a table. Picklable.

    Args:
        path: path or URL.
        shown: the path in messages.
        schema: schema of pyarrow.
        rows: [blocks] int64, the rows of each block.

    Attributes:
        names, kinds: names and types (as text) of the columns that are read, see `choose`.
        nbytes: [blocks] decoded bytes of each block, approximately.
    """

    kind: str
    """Such as "Parquet"."""
    block_is: str
    """Name of a block, such as "row group"."""
    blocks_are: str
    """Its plural."""
    is_in_place = False
    """True if only the bytes of rows are read, and not whole blocks: see `take`."""
    names: tuple[str, ...] = ()
    nbytes: IntArray

    def __init__(self, path: str, shown: str, schema: Any, rows: IntArray) -> None:
        self.path = path
        self.shown = shown
        self.schema = schema
        self.rows = rows
        with asking("pyarrow", shown):
            self._names: list[str] = schema.names
        # what HuggingFace's `datasets` noted of columns, such as the shapes of lists of lists
        self._features: dict[str, dict[str, Any]] = {}
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            noted = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
            for name, feature in noted["info"]["features"].items():
                if isinstance(feature, dict):
                    self._features[name] = feature

    def choose(self, names: Sequence[str]) -> None:
        """Chooses the columns that are read.

        Raises:
            MissingNameError: one is not there; the message lists those that are.
            FormatError: no sample can hold one.
        """
        self.names = tuple(names)
        self.kinds: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name in names:
            count = self._names.count(name)
            if count > 1:
                raise FormatError(
                    f"{self.shown} has {count} columns {name!r}: rename them, or choose others "
                    "with columns="
                )
            if not count:
                raise MissingNameError(
                    f"{self.shown} has no column {name!r}; it has: "
                    f"{listed_names(set(self._names), name)}"
                )
            kind = self.schema.field(name).type
            no_tensor = refused(kind)
            if no_tensor is not None:
                raise FormatError(
                    f"{self.shown}: column {name!r} is of type {no_tensor}, which no tensor can "
                    "hold: leave it out with columns=[...], or write it as a number or a text"
                )
            self.kinds[name] = str(kind)
            feature = self._features.get(name, {})
            shape = feature.get("shape")
            if not str(feature.get("_type")).startswith("Array") or not isinstance(shape, list):
                continue
            if all(isinstance(side, int) and side >= 0 for side in shape):
                self._shapes[name] = tuple(shape)

    def classes(self, name: str) -> list[str]:
        """The class names that HuggingFace's `datasets` stored for a column of class numbers
        (`ClassLabel`); else [].
        """
        feature = self._features.get(name, {})
        names = feature.get("names")
        if feature.get("_type") == "ClassLabel" and isinstance(names, list):
            return list(map(str, names))
        return []

    def spec(self, name: str) -> ArraySpec | None:
        """Shape and dtype of the values of a column, if all have the same; else None."""
        return spec_of(self.schema.field(name).type, self._shapes.get(name))

    @property
    def fixed_nbytes(self) -> int:
        """Bytes per row of the columns whose values have all one size."""
        specs = [self.spec(name) for name in self.names]
        return sum(spec.nbytes for spec in specs if spec is not None)

    @abstractmethod
    def ranges(self, block: int) -> ByteRanges:
        """The byte ranges that are read of a block."""

    @abstractmethod
    def read(self, block: int, held: list[tuple[int, memoryview]]) -> Any:
        """Decodes a block, as a table or record batch of pyarrow's.

        Args:
            block: number of the block.
            held: first byte and bytes of its ranges.

        Raises:
            Exception: any that pyarrow raises.
        """

    def decode(self, block: int, held: list[tuple[int, memoryview]]) -> Block:
        """Decodes the columns of a block, see `read`.

        Raises:
            FormatError: it is damaged.
        """
        with asking("pyarrow", self.where(block)):
            table = self.read(block, held)
            if table.num_rows != self.rows[block]:
                raise FormatError(
                    f"{self.where(block)} has {table.num_rows:,} rows, not {self.rows[block]:,}: "
                    "the file is damaged"
                )
            arrays = [table.column(name) for name in self.names]
            return Block(self.columns_of(arrays), table.num_rows, table.nbytes)

    def columns_of(self, arrays: Sequence[Any]) -> dict[str, Column]:
        """The columns of arrays of pyarrow's, one per name."""
        columns = {}
        for name, array in zip(self.names, arrays, strict=True):
            columns[name] = column_of(name, array, self._shapes.get(name))
        return columns

    def take(self, blocks: IntArray, rows: IntArray) -> dict[str, Column]:
        """Reads rows ([n]) of blocks ([n]). Only if `is_in_place`."""
        raise NotImplementedError

    def where(self, block: int) -> str:
        """A block, for messages."""
        return f"{self.shown}, {self.block_is} {block}"


# -- Parquet


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
                f"{shown} is not a Parquet file, or is cut short: it does not end as one does"
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
        prefixes = tuple(f"{name}." for name in names)
        coded = set()
        with asking("pyarrow", self.shown):
            columns = map(self._metadata.schema.column, range(self._metadata.num_columns))
            paths = [column.path for column in columns]
            leaves = [leaf for leaf, path in enumerate(paths) if f"{path}.".startswith(prefixes)]
            places = np.zeros((3, len(self.rows), len(leaves)), np.int64)
            for number in range(len(self.rows)):
                group = self._metadata.row_group(number)
                for at, leaf in enumerate(leaves):
                    start, stop, nbytes, is_coded = self._place(group.column(leaf), leaf)
                    places[:, number, at] = start, stop, nbytes
                    if is_coded:
                        coded.add(paths[leaf])
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
        self.nbytes = np.maximum(sizes.sum(axis=1), self.rows * self.fixed_nbytes)

    def _place(self, chunk: Any, leaf: int) -> tuple[int, int, int, bool]:
        """First byte and end of a column chunk, its bytes decoded, and whether it holds texts or
        bytes as numbers of values in its dictionary.

        Decoded, its repeated values may take any multiple of what is stored. A writer whose
        dictionary becomes too large goes on with plain values: then the data pages are longer than
        numbers of values would be.
        """
        begin = start = chunk.data_page_offset
        if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < begin:
            start = chunk.dictionary_page_offset
        stop = start + chunk.total_compressed_size
        nbytes = chunk.total_uncompressed_size
        numbers = 4 * chunk.num_values
        if chunk.physical_type == "BYTE_ARRAY":
            is_coded = start < begin and stop - begin <= _PAGE_HEADS + numbers
            return start, stop, nbytes + numbers * is_coded, is_coded
        width = _WIDTHS.get(chunk.physical_type) or self._metadata.schema.column(leaf).length
        return start, stop, max(nbytes, width * chunk.num_values), False

    def ranges(self, block: int) -> ByteRanges:
        return ByteRanges.in_file(self.path, self._starts[block], self._stops[block])

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
