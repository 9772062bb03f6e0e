"""Which files are tables, and what each has in common, whatever its format: a schema, and blocks
of rows that are decoded together.
"""

from __future__ import annotations

import json
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.dtypes import ArraySpec, IntArray
from headrace.errors import AccessError, FormatError, MissingNameError
from headrace.io.library_errors import asking
from headrace.io.nearest_names import listed_names
from headrace.io.paths import is_url, named_part, redact
from headrace.io.ranges import ByteRanges
from headrace.io.resolve.contents import BOOKKEEPING, READERS
from headrace.io.resolve.file_set import FileSet, Kind
from headrace.storage.table.columns import Column, Shapes, column_of, refused, spec_of, whole_array
from headrace.storage.table.messages import CONTINUED, MAGIC

PARQUET_MAGIC, NPY_MAGIC = b"PAR1", b"\x93NUMPY"
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


TABLES = Kind(
    "tables",
    READERS["TableDataset"],
    keeps_order=True,
    recognizes=is_table,
    bookkeeping=frozenset(map(os.fsdecode, BOOKKEEPING)),
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


@dataclass(slots=True)
class Block:
    """The decoded columns of a row group or a record batch.

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


@dataclass(slots=True)
class Chosen:
    """The columns that are read.

    Attributes:
        names: of the columns.
        shapes: see `headrace.storage.table.columns.Shapes`.
    """

    names: tuple[str, ...]
    shapes: Shapes = field(default_factory=dict)


class TableFile(ABC):
    """A file of a table. Travels to workers.

    Args:
        path: or URL.
        shown: as messages name it.
        schema: of pyarrow.
        rows: [blocks] int64, of each block.

    Attributes:
        chosen: the columns that are read: see `choose`.
    """

    kind: str
    """Such as "Parquet"."""
    block_is: str
    """What a block is called."""
    blocks_are: str
    """What several are called."""
    is_in_place = False
    """True if of a block only the bytes of rows are read: see `take`."""
    chosen: Chosen

    def __init__(self, path: str, shown: str, schema: Any, rows: IntArray) -> None:
        self.path, self.shown, self.schema, self.rows = path, shown, schema, rows

    def choose(self, names: Sequence[str]) -> None:
        """Says which columns are read.

        Raises:
            MissingNameError: one is not there; the message lists those that are.
            FormatError: no sample can hold one.
        """
        self.check(names)
        shapes = shapes_in(self.schema)
        self.chosen = Chosen(tuple(names), {name: shapes[name] for name in names if name in shapes})

    def check(self, names: Sequence[str]) -> None:
        """Raises the errors of `choose`."""
        for name in names:
            if (count := self.schema.names.count(name)) != 1:
                what = f"has no column {name!r}" if not count else f"has {count} columns {name!r}"
                raise MissingNameError(
                    f"{self.shown} {what}; it has: {listed_names(set(self.schema.names), name)}"
                )
            if (kind := refused(self.schema.field(name).type)) is not None:
                raise FormatError(
                    f"{self.shown}: column {name!r} is of type {kind}, which no tensor can hold: "
                    "leave it out with columns=[...], or write "
                    "it as a number or a text"
                )

    @property
    def kinds(self) -> dict[str, str]:
        """The types of the columns that are read, in words."""
        return {name: str(self.schema.field(name).type) for name in self.chosen.names}

    def spec(self, name: str) -> ArraySpec | None:
        """Shape and dtype of the values of a column that is read, if they are alike; else None."""
        return spec_of(self.schema.field(name).type, self.chosen.shapes.get(name))

    @property
    def fixed_nbytes(self) -> int:
        """Bytes that a row takes of the columns whose values are alike."""
        specs = [spec for name in self.chosen.names if (spec := self.spec(name)) is not None]
        return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)

    @property
    def mask_nbytes(self) -> int:
        """Bytes of the bits that say which numbers of a row are there, of the same columns."""
        return sum(
            -(-math.prod(spec.shape) // 8)
            for name in self.chosen.names
            if (spec := self.spec(name)) is not None
        )

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
            shapes = self.chosen.shapes
            columns = dict[str, Column]()
            for name in self.chosen.names:
                array = whole_array(table.column(name))
                array.validate()  # that buffers are as long as so many rows need
                columns[name] = column_of(name, array, shapes.get(name))
            for column in columns.values():
                column.settle()
            return Block(columns, table.num_rows, table.nbytes)

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
    found: dict[str, tuple[int, ...]] = {}
    for name, feature in features_in(schema).items():
        shape = (
            feature.get("shape")
            if isinstance(feature, dict) and str(feature.get("_type", "")).startswith("Array")
            else None
        )
        if isinstance(shape, list) and all(
            isinstance(extent, int) and extent >= 0 for extent in shape
        ):
            found[name] = tuple(shape)
    return found


def classes_in(schema: Any, name: str) -> list[str]:
    """The names of the classes that HuggingFace's `datasets` notes of a column of class numbers
    (`ClassLabel`); else [].
    """
    feature = features_in(schema).get(name)
    names = (
        feature.get("names")
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
        else None
    )
    return [str(one) for one in names] if isinstance(names, list) else []


def features_in(schema: Any) -> dict[str, Any]:
    """What HuggingFace's `datasets` notes of the columns, by name."""
    try:
        noted = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = noted["info"]["features"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return features if isinstance(features, dict) else {}


def unknown(path: str, kind: str, error: object) -> FormatError:
    """The error of a file that is not what it should be."""
    return FormatError(f"{redact(path)} is no {kind} file, or a damaged one: {error}")
