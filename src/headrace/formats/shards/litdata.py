"""The chunks of LitData. Source: its `streaming/writer.py` and `serializers.py`, 0.2.40 and 0.2.76.

Samples are trees of lists, tuples and dicts; each leaf is a column, named by its path: "label", "0"
or "boxes/0".
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from headrace.errors import FormatError
from headrace.formats.resolve.file_set import Format
from headrace.formats.shards.index import ShardColumns, shard_path
from headrace.formats.shards.source import ALL, INDEX, Shard, ShardColumn
from headrace.formats.shards.values import Decoder, array, many, pixels, text
from headrace.io.paths import redact

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
_UNREAD = ("encryption", "compression_level", "ipc_compression", "temporal_schema")
_PLAIN = {"str", "int", "float", "bool", "bytes", "null"}
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

    def add(self, index: str, said: Any) -> None:
        config = said["config"]
        types = config.get("types")
        unread = [option for option in _UNREAD if config.get(option)]
        if isinstance(types, dict) and not set(map(str, types.values())) - _PLAIN:
            unread.append("Arrow tables in chunks, as LitData since 0.2.71 writes plain values")
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
        for chunk in said["chunks"]:
            path = shard_path(index, chunk["filename"])
            stored = 0 if codec else chunk["chunk_bytes"]
            shard = Shard(path, chunk["chunk_size"], chunk["chunk_bytes"], stored, codec)
            self.add_shard(shard, columns)


LITDATA = Format(
    "LitData chunks",
    (*(f"{digit}.bin" for digit in range(10)), ".zstd.bin"),  # "chunk-0-12.bin"
    bookkeeping=(INDEX.encode(), b"readme.md"),
    open=LitDataColumns,
)
