"""The shards of MosaicML Streaming (MDS). Source: its documentation, "Dataset format"."""

from __future__ import annotations

import json
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np

from headrace.formats.resolve.file_set import Format
from headrace.formats.shards.heads import Shard
from headrace.formats.shards.source import (
    CODECS,
    Decoder,
    ShardColumn,
    ShardColumns,
    array,
    many,
    pixels,
    shard_path,
    text,
)

_VERSION = 2
_DTYPES = {
    **{8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32"},
    **{33: "int32", 34: "float32", 64: "uint64", 65: "int64", 66: "float64"},
}
"""Of the values of an array, by the byte that it may begin with."""
_IMAGES = {
    **dict.fromkeys(("jpeg", "list[jpeg]", "jpeg_array", "jpegarray"), "jpg"),
    **dict.fromkeys(("png", "list[png]"), "png"),
    **dict.fromkeys(("pil", "list[pil]"), "tiff"),
}
"""The extension that a file of an encoded image would have, by encoding."""


def _array(dtype: str, data: memoryview) -> Any:
    """An array that begins with its shape and, where `dtype` is "", before that with its dtype."""
    at = 0
    if not dtype:
        dtype = _DTYPES[data[0]]
        at = 1
    axes = data[at] >> 2
    extent = np.dtype(f"<u{1 << (data[at] & 3)}")
    shape = np.frombuffer(data, extent, axes, at + 1).tolist()
    return array(dtype, tuple(shape), data, at + 1 + axes * extent.itemsize)


_DECODERS: dict[str, Decoder] = {
    **dict.fromkeys(("bytes", "jpeg", "png"), bytes),
    # the first four bytes of these lists say nothing
    **dict.fromkeys(("list[jpeg]", "list[png]"), partial(many, 4, bytes)),
    **dict.fromkeys(("jpeg_array", "jpegarray"), partial(many, 0, bytes)),
    "list[pil]": partial(many, 4, pixels),
    "pil": pixels,
    "str": partial(text, str),
    "str_int": partial(text, int),
    "str_float": partial(text, float),
    "str_decimal": partial(text, Decimal),
    "json": partial(text, json.loads),
    "int": partial(array, "int64", ()),
    **{dtype: partial(array, dtype, ()) for dtype in _DTYPES.values()},
}
"""What makes a value of its bytes, by encoding; of arrays see `_decoder_of`."""


def _decoder_of(encoding: str) -> Decoder | None:
    """The decoder of an encoding, such as ``ndarray:uint8:3,32,32``; None: it is not read."""
    name, _, fixed = encoding.partition(":")
    dtype, _, extents = fixed.partition(":")
    if name != "ndarray" or dtype not in ("", *_DTYPES.values()):
        return _DECODERS.get(encoding)
    if extents:
        return partial(array, dtype, tuple(map(int, extents.split(","))))
    return partial(_array, dtype)


class MdsColumns(ShardColumns):
    """The columns of shards that `streaming.MDSWriter` wrote."""

    written_by: str = f"MDS version {_VERSION}"

    def add(self, index: str, said: Any) -> None:
        for shard in said["shards"]:
            if (shard["format"], shard["version"]) != ("mds", _VERSION):
                raise ValueError(f"format {shard['format']!r}, version {shard['version']!r}")
            kinds = zip(shard["column_encodings"], shard["column_sizes"], strict=True)
            columns = [
                (name, ShardColumn(kind, size, _decoder_of(kind), _IMAGES.get(kind, "")))
                for name, (kind, size) in zip(shard["column_names"], kinds, strict=True)
            ]
            raw = shard["raw_data"]
            path = shard_path(index, raw["basename"])
            stored = raw["bytes"]
            codec = ""
            # who reads compressed shards may have left others beside them
            if shard["zip_data"] and path not in self.paths:
                path = shard_path(index, shard["zip_data"]["basename"])
                stored = shard["zip_data"]["bytes"]
                codec, _, _ = shard["compression"].partition(":")
            self.add_shard(Shard(path, shard["samples"], raw["bytes"], stored, codec), columns)


MDS = Format("MDS shards", (".mds", *(f".mds.{name}" for name in CODECS)), open=MdsColumns)
