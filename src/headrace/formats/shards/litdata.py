"""The chunks of LitData. Source: its `streaming/writer.py` and `serializers.py`, 0.2.40 and 0.2.76.

Samples are trees of lists, tuples and dicts; each leaf is a column, named by its path: "label", "0"
or "boxes/0".
"""

from __future__ import annotations

import contextlib
import copy
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from headrace.errors import DataNotFoundError, FormatError
from headrace.formats.resolve.file_set import Format
from headrace.formats.shards.heads import COPY, INDEX, Shard, size_of
from headrace.formats.shards.source import (
    ALL,
    Decoder,
    ShardColumn,
    ShardColumns,
    array,
    many,
    pixels,
    shard_path,
    text,
)
from headrace.formats.source import Columns
from headrace.formats.table.arrow import INDEX as ARROW, ArrowTable, scanned
from headrace.formats.table.columns import pyarrow
from headrace.formats.table.source import TableSource
from headrace.io.array_file import Arrays
from headrace.io.files import Files
from headrace.io.index import IndexKind, learn_indexed
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges

_INTS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_FLOATS = ("float16", "float32", "float64", "complex64", "complex128")
_NUMPY = dict(enumerate((*_INTS, *_FLOATS, "bool")))
"""Dtypes of arrays, by their number."""
_TORCH = {
    **{0: "float32", 1: "float32", 2: "float64", 3: "float64", 4: "complex64", 5: "complex64"},
    **{6: "complex128", 7: "complex128", 8: "float16", 9: "float16", 11: "uint8", 12: "int8"},
    **{13: "int16", 14: "int16", 15: "int32", 16: "int32", 17: "int64", 18: "int64"},
    **{19: "bool", 20: "uint16"},
}
"""Dtypes of tensors, by their number; NumPy has no bfloat16."""
_FILES = ("bytes", "file", "video", "audio", "nifti", "mesh", "pdf")
"""What is handed over as its bytes."""
_EXTENSIONS = {
    "jpeg": "jpg",
    "jpeg_array": "jpg",
    "image": "jpg",
    "pil": "tiff",
    "tifffile": "tiff",
}
"""The extension that a file of an encoded image would have, by encoding."""
_MOST = 255  # axes
_UNREAD = ("encryption", "temporal_schema")
_TAIL = struct.Struct("<I8s")
_TABLE = b"LDARW01\0"
"""What a chunk ends with: the bytes of an Arrow table before that, and a magic."""
_ALONE = "value"
"""The column of samples that are no trees."""


def _array(dtypes: Mapping[int, str], data: memoryview) -> Any:
    """An array that begins with the number of its dtype and its shape: in little-endian numbers, or
    in big-endian ones, as LitData writes them of tensors since 0.2.60.
    """
    order = "<"
    if max(struct.unpack_from("<2I", data)) > _MOST:
        order = ">"
    number, axes = struct.unpack_from(f"{order}2I", data)
    shape = struct.unpack_from(f"{order}{axes}I", data, 8)
    return array(dtypes[number], shape, data, 8 + 4 * axes)


_DECODERS: dict[str, Decoder] = {
    **dict.fromkeys((*_FILES, "image", "jpeg", "tifffile"), bytes),
    **dict.fromkeys(("str", "text"), partial(text, str)),
    "bool": partial(array, "bool", ()),
    "int": partial(array, "int64", ()),
    "float": partial(array, "float64", ()),
    "pil": pixels,
    "jpeg_array": partial(many, 0, bytes),
    "json": partial(text, json.loads),
    "numpy": partial(_array, _NUMPY),
    "tensor": partial(_array, _TORCH),
}
"""What makes a value of its bytes, by encoding; of others see `_decoder_of`."""


def _decoder_of(encoding: str) -> Decoder | None:
    """The decoder of an encoding, such as ``no_header_tensor:17``; None: it is not read."""
    name, _, number = encoding.partition(":")
    dtypes = {"no_header_numpy": _NUMPY, "no_header_tensor": _TORCH}.get(name)
    if dtypes is None:
        return _DECODERS.get(name)
    if int(number) not in dtypes:
        return None
    return partial(array, dtypes[int(number)], (-1,))


def _leaves(tree: Any, path: str = "") -> Iterator[str]:
    """The paths of the leaves of a tree, as torch's `treespec_dumps` describes it."""
    if tree["type"] is None:
        yield path or _ALONE
        return
    names = [str(number) for number in range(len(tree["children_spec"]))]
    if tree["type"] == "builtins.dict":
        names = json.loads(tree["context"])
    for name, child in zip(names, tree["children_spec"], strict=True):
        yield from _leaves(child, f"{path}/{name}" if path else str(name))


class LitDataColumns(ShardColumns):
    """The columns of chunks that `litdata.optimize` wrote."""

    written_by: str = "LitData"
    may_be_tables = False
    """True if LitData noted the types of samples, as the versions do that write tables."""

    def add(self, index: str, said: Any) -> None:
        config = said["config"]
        unread = [option for option in _UNREAD if config.get(option)]
        if unread:
            raise FormatError(
                f"{redact(index)}: {' and '.join(unread)} can't be read yet: use LitData's "
                "own loader, or write the data without"
            )
        names = [_ALONE]
        if config["data_spec"] is not None:
            _, tree = json.loads(config["data_spec"])
            names = list(_leaves(tree))
        nbytes = None
        if config.get("item_loader") == "TokensLoader":
            nbytes = ALL  # a document is its tokens, without their size
        columns = list[tuple[str, ShardColumn]]()
        for name, kind in zip(names, config["data_format"], strict=True):
            extension = _EXTENSIONS.get(kind.partition(":")[0], "")
            columns.append((name, ShardColumn(kind, nbytes, _decoder_of(kind), extension)))
        codec, _, _ = (config["compression"] or "").partition(":")
        level = config.get("compression_level") or "chunk"
        rows = 0
        if level == "batch":
            rows = config["compression_batch_size"]
        if type(rows) is not int or rows < (level == "batch"):
            raise ValueError(f"compression_batch_size {rows!r}")
        if level not in ("chunk", "batch", "sample") or (level != "chunk" and codec != "zstd"):
            raise ValueError(f"compression {codec!r}, compression_level {level!r}")
        each = ""
        if level == "sample":
            each = codec
            codec = ""
        self.may_be_tables |= bool(config.get("types")) and level == "chunk" and not codec
        for chunk in said["chunks"]:
            path = shard_path(index, chunk["filename"])
            nbytes = chunk["chunk_bytes"]
            stored = nbytes
            if codec and not rows:
                stored = 0
            shard = Shard(path, chunk["chunk_size"], nbytes, stored, codec, rows, each)
            self.add_shard(shard, columns)


def _table_in(files: Files, path: str) -> tuple[int, int]:
    """Where the Arrow table at the end of a chunk begins, and its bytes; 0: it has none."""
    size = files.version(path).size
    tail = files.read_joined(ByteRanges.of([(path, max(0, size - _TAIL.size), size)]))
    if len(tail) == _TAIL.size:
        nbytes, magic = _TAIL.unpack(tail)
        if magic == _TABLE and nbytes + _TAIL.size <= size:
            return size - _TAIL.size - nbytes, nbytes
    return size, 0


def _scan(files: Files, path: str) -> Arrays:
    base, nbytes = _table_in(files, path)
    if not nbytes:
        raise FormatError("it has no table at its end, but other samples have one")
    return scanned(files, path, base, nbytes)


_IN_CHUNK = IndexKind("litdata", 1, ARROW.types, _scan)
"""The index of the Arrow table of a chunk."""


class _TableColumns(Columns):
    """The columns of chunks that hold Arrow tables.

    Raises:
        ConfigError: pyarrow is not installed.
        FormatError: a table is damaged, or has other rows than the index says.
    """

    def __init__(self, shards: Sequence[Shard], files: Files) -> None:
        pyarrow()
        paths = [shard.path for shard in shards]
        learn_indexed(files, paths, _IN_CHUNK)
        self._files = files
        self._tables = [ArrowTable(path, redact(path), files, _IN_CHUNK) for path in paths]
        for shard, table in zip(shards, self._tables, strict=True):
            size_of(files, shard)
            rows = int(table.rows.sum())
            if rows != shard.samples:
                raise FormatError(
                    f"{table.shown} has {rows:,} samples, and {INDEX} says {shard.samples:,}: "
                    f"{COPY}"
                )
        self.names: list[str] = self._tables[0].schema.names

    def __len__(self) -> int:
        return sum(int(table.rows.sum()) for table in self._tables)

    def column(self, name: str) -> TableSource:
        return self.rows(name)

    def rows(self, names: str | Sequence[str]) -> TableSource:
        return TableSource(list(map(copy.copy, self._tables)), self._files, names)


def _opened(paths: Sequence[str], files: Files) -> Columns:
    """The columns of chunks. Since 0.2.71 LitData writes samples of plain values as tables."""
    columns = LitDataColumns(paths, files)
    if not columns.may_be_tables:
        return columns
    for shard in columns.shards:
        with contextlib.suppress(DataNotFoundError):  # an error of its samples
            _, nbytes = _table_in(files, shard.path)
            return _TableColumns(columns.shards, files) if nbytes else columns
    return columns


LITDATA = Format(
    "LitData chunks",
    (*(f"{digit}.bin" for digit in range(10)), ".zstd.bin"),  # "chunk-0-12.bin"
    bookkeeping=(INDEX.encode(), b"readme.md"),
    open=_opened,
)
