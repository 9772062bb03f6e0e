"""The arrays of a Zarr pack: their shapes, chunks and metadata, which follow from its plan alone.

Part i of the pack is shard i of `data`, and chunk i of each array beside it: no two parts share an
object. Samples of one shape are the rows of `data`; pixels with their masks those of `data` and of
`mask`, which has shards too. Encoded images lie flat in `data`, those of a part one behind the
other from the start of its shard on; the rest of a shard has no chunks, and takes no room.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from headrace.errors import ConfigError
from headrace.io.resolve.packs import ARRAYS
from headrace.storage.arrays.compressors import LEVELS, shuffles
from headrace.storage.arrays.packed import (
    CRC,
    DATA,
    IMAGE,
    IMAGE_ID,
    IMAGE_SIZE,
    MASK,
    MASK_STARTS,
    NAME_STARTS,
    NAME_STOPS,
    NAMES,
    PACKED_ATTRIBUTE,
    PACKED_CHECKSUM,
    RAGGED,
    STARTS,
    STOPS,
    TARGETS,
    PackedInfo,
    are_targets,
    edges_named,
    info_text,
    offsets_named,
)

ROW_CHUNK, FLAT_CHUNK = 64 << 10, 256 << 10
"""Bytes of a chunk: of rows that are smaller, a chunk has several of them; flat bytes have no
checksum for each chunk, so any part of one can be read by itself, and only programs that read whole
chunks read more than they need.
"""
NODE = "zarr.json"
BLOSC_LEVEL = 5
_INDEX_CODECS: list[dict[str, Any]] = [
    {"name": "bytes", "configuration": {"endian": "little"}},
    {"name": "crc32c"},
]


class Stored(NamedTuple):
    """An object of a part: its name in the folder of the pack, its bytes and their CRC."""

    name: str
    nbytes: int
    crc32: int


@dataclass(frozen=True)
class ArrayLayout:
    """An array of a pack.

    Attributes:
        name: of the array.
        shape, dtype: of the whole array.
        length: items along the first axis that a part has: of its shard, or of its chunk where
            there are no shards.
        chunk: items along the first axis of a chunk inside of a shard; None: there are no shards.
        checked: True if each chunk has a checksum.
        compression: one of `COMPRESSIONS`; None: chunks are stored as they are.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    length: int
    chunk: int | None = None
    checked: bool = True
    compression: str | None = None

    @property
    def item_bytes(self) -> int:
        """Bytes of an item of the first axis."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk before its checksum."""
        return (self.length if self.chunk is None else self.chunk) * self.item_bytes

    @property
    def chunks_each(self) -> int:
        """Chunks in a shard."""
        return 1 if self.chunk is None else self.length // self.chunk

    def key(self, part: int) -> str:
        """The name of the object that a part has of it, in the folder of the pack."""
        return f"{ARRAYS}/{self.name}/{'.'.join(['c', str(part), *['0'] * (len(self.shape) - 1)])}"

    def metadata(self) -> dict[str, Any]:
        """Those of Zarr 3."""
        endian = (
            {"configuration": {"endian": "big" if self.dtype.byteorder == ">" else "little"}}
            if self.dtype.itemsize > 1
            else {}
        )
        codecs: list[dict[str, Any]] = [{"name": "bytes", **endian}]
        if self.compression is not None:
            codecs.append(_compressor(self.compression, self.dtype))
        if self.checked:
            codecs.append({"name": "crc32c"})
        if self.chunk is not None:
            sharding = {
                "chunk_shape": [self.chunk, *self.shape[1:]],
                "codecs": codecs,
                "index_codecs": _INDEX_CODECS,
                "index_location": "end",
            }
            codecs = [{"name": "sharding_indexed", "configuration": sharding}]
        fill: Any = {"b": False, "f": 0.0, "c": [0.0, 0.0]}.get(self.dtype.kind, 0)
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.shape),
            "data_type": self.dtype.name,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [self.length, *self.shape[1:]]},
            },
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": fill,
            "codecs": codecs,
            "attributes": {},
            "storage_transformers": [],
        }


def _compressor(name: str, dtype: np.dtype[Any]) -> dict[str, Any]:
    """The codec of Zarr: of LZ4 it has Blosc's alone."""
    if name == "lz4":
        shuffle = "shuffle" if shuffles(dtype) else "noshuffle"
        blosc = {
            "typesize": dtype.itemsize,
            "cname": "lz4",
            "clevel": BLOSC_LEVEL,
            "shuffle": shuffle,
            "blocksize": 0,
        }
        return {"name": "blosc", "configuration": blosc}
    return {
        "name": name,
        "configuration": {"level": LEVELS[name], **({"checksum": False} if name == "zstd" else {})},
    }


@dataclass(frozen=True)
class ZarrLayout:
    """The arrays of a pack.

    Attributes:
        parts: how many there are.
        count: number of samples.
        samples: of each part but the last, which may have fewer.
        arrays: by name; `data` comes first.
    """

    parts: int
    count: int
    samples: int
    arrays: dict[str, ArrayLayout]

    @property
    def data(self) -> ArrayLayout:
        """The array of the samples."""
        return self.arrays[DATA]

    @property
    def of_samples(self) -> list[ArrayLayout]:
        """The arrays of the samples, which have shards: `data`, and of pixels with their masks
        that of these.
        """
        return [array for array in self.arrays.values() if array.chunk is not None]

    @property
    def row(self) -> np.dtype[Any]:
        """Of a sample as it is packed: a dtype with a shape; of pixels with their masks one with
        fields; of flat ones that of an item.
        """
        rows = [(array.dtype, array.shape[1:]) for array in self.of_samples]
        return (
            np.dtype(rows[0])
            if len(rows) == 1
            else np.dtype([(name, *row) for name, row in zip((IMAGE, MASK), rows, strict=True)])
        )

    @property
    def is_flat(self) -> bool:
        """True if samples lie flat, one behind the other."""
        return STARTS in self.arrays

    def objects(self, part: int) -> list[str]:
        """The names of the objects of a part in the folder of the pack; those with the samples
        come first.
        """
        return [array.key(part) for array in self.arrays.values()]

    def metadata(self, info: PackedInfo) -> dict[str, bytes]:
        """The metadata files, by their names in the folder of the pack; that of the group,
        without which nobody opens it, comes last.
        """
        arrays = {name: array.metadata() for name, array in self.arrays.items()}
        text = info_text(info)
        group = {
            "zarr_format": 3,
            "node_type": "group",
            "attributes": {
                PACKED_ATTRIBUTE: text.decode("ascii"),
                PACKED_CHECKSUM: zlib.crc32(text),
            },
            "consolidated_metadata": {
                "kind": "inline",
                "must_understand": False,
                "metadata": arrays,
            },
        }
        files = {f"{ARRAYS}/{name}/{NODE}": _json(metadata) for name, metadata in arrays.items()}
        return {**files, f"{ARRAYS}/{NODE}": _json(group)}


def _json(metadata: dict[str, Any]) -> bytes:
    return json.dumps(metadata, sort_keys=True, indent=1).encode("ascii") + b"\n"


def rows_options(
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    shard_size: int,
    chunks: int | None = None,
    compression: str | None = None,
) -> dict[str, Any]:
    """What a plan says of samples that are rows.

    Args:
        shape: of all samples, [n, *row].
        dtype: of them; of pixels with their masks it has a field for each.
        shard_size: bytes of a part, about, before they are compressed.
        chunks: samples a chunk; None: as many as suit their bytes.
        compression: of chunks.

    Raises:
        ConfigError: Zarr has no such dtype.
    """
    rows = [dtype[name] for name in dtype.names or ()] or [np.dtype((dtype, shape[1:]))]
    for row in rows:
        check_dtype("samples", row.base)
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    if not row_bytes:
        raise ConfigError(
            f"format='zarr' can't hold samples of shape {list(shape[1:])}, which have no elements"
        )
    chunk = max(1, min(chunks or ROW_CHUNK // row_bytes, shape[0], shard_size // row_bytes))
    parts = max(1, -(-shape[0] * row_bytes // shard_size))
    samples = -(-shape[0] // (parts * chunk)) * chunk
    said = [{"row": list(row.shape), "dtype": row.base.str} for row in rows]
    options = {"samples": samples, **said[0], "chunk": chunk, "compression": compression}
    return options if len(rows) == 1 else {**options, MASK: said[1]}


def flat_options(
    sizes: np.ndarray[Any, np.dtype[np.int64]],
    most: np.ndarray[Any, np.dtype[np.int64]],
    shard_size: int,
) -> dict[str, Any]:
    """What a plan says of encoded images.

    Args:
        sizes: [n], bytes of each, about.
        most: [n], what each has at most.
        shard_size: bytes of a part, about.
    """
    parts = max(1, -(-int(sizes.sum()) // shard_size))
    samples = -(-len(sizes) // parts)
    largest = max(1, int(np.add.reduceat(most, np.arange(0, len(most), samples)).max()))
    chunk = min(FLAT_CHUNK, largest)
    return {"samples": samples, "chunk": chunk, "shard": -(-largest // chunk) * chunk}


def check_dtype(what: str, dtype: np.dtype[Any]) -> None:
    """Raises a ConfigError where Zarr has no such dtype."""
    if dtype.kind not in "biufc" or dtype.itemsize > (16 if dtype.kind == "c" else 8):
        raise ConfigError(
            f"format='zarr' can't hold {what} of dtype {dtype}: leave out format to pack to HDF5"
        )


def beside_options(columns: Mapping[str, np.ndarray[Any, Any]], samples: int) -> dict[str, Any]:
    """What a plan says of masks, boxes and columns of targets beside the samples; {}: there are
    none.

    Args:
        columns: beside all samples, by name.
        samples: of a part.
    """
    options: dict[str, Any] = {}
    for name in sorted(columns):
        column = columns[name]
        said = {"dtype": column.dtype.str, "shape": list(column.shape[1:])}
        if name in RAGGED:
            counts = np.diff(columns[offsets_named(name)])
            most = int(np.add.reduceat(counts, np.arange(0, len(counts), samples)).max())
            options.setdefault("ragged", {})[name] = {**said, "length": max(1, most)}
        elif name in (MASK_STARTS, IMAGE_ID, IMAGE_SIZE) or (are_targets(name) and name != TARGETS):
            options.setdefault("beside", {})[name] = said
    return options


def zarr_layout(count: int, parts: int, options: Mapping[str, Any]) -> ZarrLayout:
    """The layout that the options of a plan describe."""
    samples, chunk = options["samples"], options["chunk"]
    columns: dict[str, tuple[tuple[int, ...], str]] = {CRC: ((), "<u4")}
    if "shard" in options:
        shard = options["shard"]
        arrays = [
            ArrayLayout(DATA, (parts * shard,), np.dtype(np.uint8), shard, chunk, checked=False)
        ]
        columns |= {STARTS: ((), "<i8"), STOPS: ((), "<i8")}
    else:
        arrays = [
            ArrayLayout(
                name,
                (count, *said["row"]),
                np.dtype(said["dtype"]),
                samples,
                chunk,
                compression=options["compression"],
            )
            for name, said in ((DATA, options), (MASK, options.get(MASK)))
            if said is not None
        ]
    if (targets := options.get("targets")) is not None:
        columns[TARGETS] = tuple(targets["shape"]), targets["dtype"]
    if (names := options.get("names")) is not None:
        arrays.append(ArrayLayout(NAMES, (parts * names,), np.dtype(np.uint8), names))
        columns |= {NAME_STARTS: ((), "<i8"), NAME_STOPS: ((), "<i8")}
    for name, said in options.get("ragged", {}).items():
        length, shape = said["length"], said["shape"]
        arrays.append(ArrayLayout(name, (parts * length, *shape), np.dtype(said["dtype"]), length))
        columns |= {edge: ((), "<i8") for edge in edges_named(name)}
    columns |= {
        name: (tuple(said["shape"]), said["dtype"])
        for name, said in options.get("beside", {}).items()
    }
    arrays += [
        ArrayLayout(name, (count, *shape), np.dtype(dtype), samples)
        for name, (shape, dtype) in columns.items()
    ]
    return ZarrLayout(parts, count, samples, {array.name: array for array in arrays})
