"""Which files are tables, and what each has in common, whatever its format: a schema, and blocks
of rows that are decoded together.
"""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.dtypes import ArraySpec, IntArray
from headrace.errors import AccessError, FormatError, MissingNameError
from headrace.formats.resolve.file_set import BOOKKEEPING, READERS, FileSet, Format
from headrace.formats.table.columns import Column, column_of, refused, spec_of
from headrace.io.library_errors import asking
from headrace.io.nearest_names import listed_names
from headrace.io.paths import is_url, named_part, redact
from headrace.io.ranges import ByteRanges

PARQUET_MAGIC = b"PAR1"
NPY_MAGIC = b"\x93NUMPY"
MAGIC = b"ARROW1"
"""What an Arrow file begins and ends with."""
CONTINUED = b"\xff\xff\xff\xff"
"""What each message of a stream begins with, and so the stream."""
_ARRAYS = (".npy", ".npz")
_SPLIT = re.compile(
    r"(?:(?P<split>[\w.]*?[A-Za-z_]\w*)-)?\d{4,5}(?:-of-\d{4,5})?(?:-[0-9a-f]+)?\.(?:parquet|arrow)"
)
"""Names of the files of one split of a data set, as HuggingFace has them."""
_SPLITS = re.compile(r"(?:train|test|val|valid|validation|dev|eval|unsupervised|extra)(?:[\W_].*)?")


def is_table(path: str) -> bool:
    """True if a local file begins as Parquet, Arrow and .npy files do."""
    try:
        with open(path, "rb", buffering=0) as file:
            head = file.read(8)
    except OSError:
        return False
    return head.startswith((PARQUET_MAGIC, MAGIC, NPY_MAGIC)) or (
        head.startswith(CONTINUED) and len(head) == 8 and head[6:] == b"\0\0"
    )


TABLES = Format(
    "tables",
    READERS["TableDataset"],
    keeps_order=True,
    recognizes=is_table,
    bookkeeping=BOOKKEEPING,
    dataset="TableDataset",
)


def table_paths(files: FileSet, shown: str) -> list[int]:
    """The numbers of the files that are the table: without those that HuggingFace's `datasets`
    caches beside it.

    Args:
        files: that were found.
        shown: the path that was given, for messages.

    Raises:
        FormatError: they are the splits of a data set.
    """
    names = [os.fsdecode(files.names[number]) for number in range(len(files))]
    parts = [name.rpartition("/") for name in names]
    saved = {
        folder for folder, _, name in parts if _SPLIT.fullmatch(name) or name == "dataset.arrow"
    }
    chosen = [
        at
        for at, (folder, _, name) in enumerate(parts)
        if not (folder in saved and name.startswith(("cache-", "tmp")))
    ]
    if files.searched:
        splits = set[str]()
        for number in chosen:
            folder, _, name = parts[number]
            found = _SPLIT.fullmatch(name)
            for word in (folder.rpartition("/")[2], (found["split"] or "") if found else ""):
                if _SPLITS.fullmatch(word):
                    splits.add(word)
        if len(splits) > 1:
            raise FormatError(
                f"{shown} holds the splits of a data set ({', '.join(sorted(splits))}), which are "
                "not one table: pass the files of one, "
                "by its folder or by a glob such as 'folder/train-*.parquet'"
            )
    return chosen


def hold_arrays(files: FileSet, shown: str) -> bool:
    """True if files are NumPy's, and False if they are tables, by their names, or else by their
    content.

    Raises:
        FormatError: some are, and some are not.
        AccessError: this user may not read one.
    """
    found = [_is_array(files.url(number)) for number in range(len(files))]
    if any(found) != all(found):
        one, other = (redact(files.url(found.index(which))) for which in (True, False))
        raise FormatError(
            f"{shown} holds NumPy arrays, such as {one}, and tables, such as {other}: make one "
            "dataset of each"
        )
    return bool(found) and found[0]


def _is_array(path: str) -> bool:
    if TABLES.fits(path) or is_url(path):
        return named_part(path).lower().endswith(_ARRAYS)
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(len(NPY_MAGIC)) == NPY_MAGIC
    except PermissionError as error:
        raise AccessError(f"{redact(path)}: this user may not read the file") from error


class Block(NamedTuple):
    """The columns of a row group or a record batch, or of some rows.

    Attributes:
        columns: by name.
        rows: how many there are.
        nbytes: that the columns take.
    """

    columns: dict[str, Column]
    rows: int
    nbytes: int

    def __len__(self) -> int:
        return self.rows


class TableFile(ABC):
    """A file of a table. Travels to workers.

    Args:
        path: or URL.
        shown: as messages name it.
        schema: of pyarrow.
        rows: [blocks] int64, of each block.

    Attributes:
        names: of the columns that are read: see `choose`.
    """

    kind: str
    """Such as "Parquet"."""
    block_is: str
    """What a block is called."""
    blocks_are: str
    """What several are called."""
    is_in_place = False
    """True if of a block only the bytes of rows are read: see `take`."""
    names: tuple[str, ...] = ()

    def __init__(self, path: str, shown: str, schema: Any, rows: IntArray) -> None:
        self.path = path
        self.shown = shown
        self.schema = schema
        self.rows = rows
        self._shapes = shapes_in(schema)

    def choose(self, names: Sequence[str]) -> None:
        """Says which columns are read.

        Raises:
            MissingNameError: one is not there; the message lists those that are.
            FormatError: no sample can hold one.
        """
        self.names = tuple(names)
        for name in names:
            count = self.schema.names.count(name)
            if count != 1:
                what = f"has no column {name!r}" if not count else f"has {count} columns {name!r}"
                raise MissingNameError(
                    f"{self.shown} {what}; it has: {listed_names(set(self.schema.names), name)}"
                )
            kind = refused(self.schema.field(name).type)
            if kind is not None:
                raise FormatError(
                    f"{self.shown}: column {name!r} is of type {kind}, which no tensor can hold: "
                    "leave it out with columns=[...], or write it as a number or a text"
                )

    @property
    def kinds(self) -> dict[str, str]:
        """The types of the columns that are read, in words."""
        return {name: str(self.schema.field(name).type) for name in self.names}

    def spec(self, name: str) -> ArraySpec | None:
        """Shape and dtype of the values of a column, if they are alike; else None."""
        return spec_of(self.schema.field(name).type, self._shapes.get(name))

    @property
    def fixed_nbytes(self) -> int:
        """Bytes that a row takes of the columns that are read whose values are alike."""
        specs = [self.spec(name) for name in self.names]
        return sum(spec.nbytes for spec in specs if spec is not None)

    @abstractmethod
    def ranges(self, blocks: Sequence[int]) -> list[ByteRanges]:
        """Where the bytes of each block lie that are read of it."""

    @abstractmethod
    def read(self, block: int, held: list[tuple[int, memoryview]]) -> Any:
        """The columns of a block that are read, as a table or record batch of pyarrow's.

        Args:
            block: its number.
            held: first byte and bytes of its ranges.

        Raises:
            Exception: whatever pyarrow makes of it.
        """

    def decode(self, block: int, held: list[tuple[int, memoryview]]) -> Block:
        """A block: see `read`.

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
            return self.block(arrays, table.num_rows, table.nbytes)

    def block(self, arrays: Sequence[Any], rows: int, nbytes: int) -> Block:
        """A block of arrays of pyarrow's, one for each column that is read."""
        columns = {}
        for name, array in zip(self.names, arrays, strict=True):
            columns[name] = column_of(name, array, self._shapes.get(name))
        return Block(columns, rows, nbytes)

    def take(self, blocks: IntArray, rows: IntArray) -> Block:
        """Rows of blocks, [n] each; only where `is_in_place`."""
        raise NotImplementedError

    @property
    @abstractmethod
    def nbytes(self) -> npt.NDArray[np.int64]:
        """[blocks] bytes of each, decoded, about."""

    def where(self, block: int) -> str:
        """A block as messages name it."""
        return f"{self.shown}, {self.block_is} {block}"


def shapes_in(schema: Any) -> dict[str, tuple[int, ...]]:
    """The shapes that HuggingFace's `datasets` notes of columns that are lists of lists in the
    file (`Array2D` and so on).
    """
    found = {}
    for name in schema.names:
        shape = None
        if str(feature_in(schema, name).get("_type")).startswith("Array"):
            shape = feature_in(schema, name).get("shape")
        if isinstance(shape, list) and all(isinstance(side, int) and side >= 0 for side in shape):
            found[name] = tuple(shape)
    return found


def classes_in(schema: Any, name: str) -> list[str]:
    """The names of the classes that HuggingFace's `datasets` notes of a column of class numbers
    (`ClassLabel`); else [].
    """
    feature = feature_in(schema, name)
    names = feature.get("names") if feature.get("_type") == "ClassLabel" else None
    if isinstance(names, list):
        return list(map(str, names))
    return []


def feature_in(schema: Any, name: str) -> dict[str, Any]:
    """What HuggingFace's `datasets` notes of a column."""
    try:
        noted = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        feature = noted["info"]["features"][name]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    if isinstance(feature, dict):
        return feature
    return {}
