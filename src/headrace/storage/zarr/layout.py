"""The layout of a Zarr array, from metadata that hold nothing but what is known here.

The layouts are those of the Zarr specifications, versions 2 and 3, and of its sharding codec (ZEP 2). Every key and the type of every
value is looked at: what is unusual in the slightest is left to zarr-python, which knows more, or refuses it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from headrace.storage.arrays.chunks import COUNTABLE
from headrace.storage.arrays.codecs import GZIP, ZLIB, Blosc, Codec, Crc32c, Inflate, Pipeline, Unshuffle, Zstd

_KINDS = ["bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)), "float16", "float32", "float64"]
_KINDS += ["complex64", "complex128"]
_BLOSC = {"typesize": int, "cname": str, "clevel": int, "shuffle": str, "blocksize": int}
_OPTIONS_3: dict[str, dict[str, type]] = {
    "gzip": {"level": int},
    "zstd": {"level": int, "checksum": bool},
    "blosc": _BLOSC,
    "crc32c": {},
    "bytes": {"endian": str},
    "transpose": {"order": list},
    "sharding_indexed": {"chunk_shape": list, "codecs": list, "index_codecs": list, "index_location": str},
}
_OPTIONS_2: dict[str, dict[str, type]] = {
    "zlib": {"level": int},
    "gzip": {"level": int},
    "zstd": {"level": int, "checksum": bool},
    "blosc": {**_BLOSC, "shuffle": int},
    "shuffle": {"elementsize": int},
}
_RANGES: dict[str, Any] = {"level": range(-100, 23), "clevel": range(10), "typesize": range(1, 1 << 31), "blocksize": range(1 << 31)}
_RANGES |= {"cname": ("lz4", "lz4hc", "blosclz", "snappy", "zlib", "zstd"), "shuffle": ("noshuffle", "shuffle", "bitshuffle", -1, 0, 1, 2)}
_KEYS_2 = {"zarr_format", "node_type", "shape", "chunks", "dtype", "compressor", "fill_value", "order", "filters", "dimension_separator"}
_KEYS_3 = {"zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value", "codecs", "attributes"}
_KEYS_3 |= {"dimension_names", "storage_transformers"}


class UnknownLayout(Exception):
    """Why an array can't be read directly."""


class Layout(NamedTuple):
    """What the metadata say of an array."""

    shape: tuple[int, ...]
    files: tuple[int, ...]
    """Extents of what lies in one file: a chunk, or a shard."""
    chunks: tuple[int, ...]
    dtype: np.dtype[Any]
    fill: Any
    order: str
    codecs: tuple[Codec, ...]
    prefix: str
    """Of the names of files: "c" or ""."""
    separator: str
    index_at: str | None
    """Where a shard's index lies, "start" or "end"; None: there are no shards."""


def layout_of(said: dict[str, Any]) -> Layout:
    """The layout that metadata describe.

    Raises:
        UnknownLayout: there is something in them that is not known here.
    """
    try:
        found = _layout_3(said) if said.get("zarr_format") == 3 else _layout_2(said)
        if len(found.files) != len(found.shape):
            raise UnknownLayout(f"chunks of {len(found.files)} axes")
        if max(map(math.prod, (found.files, found.chunks))) * 16 > COUNTABLE:
            raise UnknownLayout(f"chunks of {list(found.files)} elements")
        return found
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UnknownLayout(f"its metadata are unusual ({type(error).__name__}: {error})") from error


def _layout_3(said: dict[str, Any]) -> Layout:
    unknown = [key for key in said if key not in _KEYS_3]
    if unknown or said.get("storage_transformers", []) != [] or type(said["zarr_format"]) is not int:
        raise UnknownLayout(f"its metadata have {', '.join(unknown) or 'storage_transformers'}")
    kind, codecs = said["data_type"], said["codecs"]
    if kind not in _KINDS:
        raise UnknownLayout(f"data type {kind!r}")
    _, grid = _named(said["chunk_grid"], {"regular": {"chunk_shape": list}}, "chunk grid")
    keys, encoding = _named(said["chunk_key_encoding"], {"default": {"separator": str}, "v2": {"separator": str}}, "chunk keys", False)
    separator = encoding.get("separator", "/" if keys == "default" else ".")
    shape, files = _extents(said["shape"], least=0), _extents(grid["chunk_shape"])
    _check_names(said.get("dimension_names"), said.get("attributes", {}), len(shape))
    chunks, index_at = files, None
    if [codec["name"] for codec in codecs] == ["sharding_indexed"]:
        _, options = _named(codecs[0], _OPTIONS_3, "codec")
        codecs, chunks, index_at = options["codecs"], _extents(options["chunk_shape"]), options.get("index_location", "end")
        found = [_named(codec, _OPTIONS_3, "codec", False) for codec in options["index_codecs"]]
        if found != [("bytes", {"endian": "little"}), ("crc32c", {})]:
            raise UnknownLayout("a shard index with other codecs than [bytes, crc32c]")
        if index_at not in ("start", "end") or len(chunks) != len(files) or any(f % c for f, c in zip(files, chunks, strict=True)):
            raise UnknownLayout("shards that are not made of whole chunks")
    dtype = np.dtype(kind)
    order, endian, steps = _codecs_3(codecs, len(shape), dtype)
    prefix, fill = "c" if keys == "default" else "", _fill(said["fill_value"], dtype)
    return Layout(shape, files, chunks, dtype.newbyteorder(endian), fill, order, tuple(steps), prefix, _separator(separator), index_at)


def _layout_2(said: dict[str, Any]) -> Layout:
    if said.get("zarr_format") != 2 or type(said["zarr_format"]) is not int:
        raise UnknownLayout(f"zarr_format {said.get('zarr_format')!r}")
    unknown = [key for key in said if key not in _KEYS_2]
    if unknown:
        raise UnknownLayout(f"its metadata have {', '.join(unknown)}")
    if not isinstance(said["dtype"], str) or np.dtype(said["dtype"]).name not in _KINDS or np.dtype(said["dtype"]).str != said["dtype"]:
        raise UnknownLayout(f"data type {said['dtype']!r}")
    dtype, steps = np.dtype(said["dtype"]), list[Codec]()
    filters, compressor = said["filters"], said["compressor"]
    if filters is not None and not isinstance(filters, list):
        raise UnknownLayout(f"filters {filters!r}")
    for codec in filters or []:
        name, options = _named(codec, _OPTIONS_2, "filter")
        if name != "shuffle":
            raise UnknownLayout(f"filter {name!r}")
        itemsize = options.get("elementsize", 4)
        if itemsize < 1 or math.prod(_extents(said["chunks"])) * dtype.itemsize % itemsize:
            raise UnknownLayout(f"shuffled by {itemsize} bytes")
        steps.append(Unshuffle(itemsize))
    if compressor is not None:
        name, _ = _named(compressor, _OPTIONS_2, "compressor")
        known = {"zlib": Inflate(ZLIB), "gzip": Inflate(GZIP), "zstd": Zstd(), "blosc": Blosc()}
        if name not in known:
            raise UnknownLayout(f"compressor {name!r}")
        steps.append(known[name])
    if said["order"] not in ("C", "F"):
        raise UnknownLayout(f"order {said['order']!r}")
    chunks, separator = _extents(said["chunks"]), _separator(said.get("dimension_separator", "."))
    fill = np.zeros((), dtype)[()] if said["fill_value"] is None else _fill(said["fill_value"], dtype)
    return Layout(_extents(said["shape"], least=0), chunks, chunks, dtype, fill, said["order"], tuple(steps), "", separator, None)


def _named(given: Any, known: Mapping[str, Mapping[str, type]], what: str, required: bool = True) -> tuple[str, dict[str, Any]]:
    """The name and the options of a codec or the like.

    Args:
        given: ``{"name": "zstd", "configuration": {"level": 3}}`` of version 3, or ``{"id": "zstd", "level": 3}`` of version 2.
        known: by name, the options and their types.
        what: for messages.
        required: may the configuration not be left out?

    Raises:
        UnknownLayout: there is one that is not known, or has another type.
    """
    name = given["id"] if "id" in given else given["name"]
    if name not in known:
        raise UnknownLayout(f"{what} {name!r}")
    if "id" in given:
        options = {key: value for key, value in given.items() if key != "id"}
    else:
        options = given["configuration"] if required and known[name] else given.get("configuration", {})
        if any(key not in ("name", "configuration") for key in given):
            raise UnknownLayout(f"{what} {given!r}")
    for key, value in options.items():
        if key not in known[name] or type(value) is not known[name][key] or (key in _RANGES and value not in _RANGES[key]):
            raise UnknownLayout(f"{what} {name!r} with {key}={value!r}")
    return name, options


def _extents(given: Any, least: int = 1) -> tuple[int, ...]:
    if not isinstance(given, list) or any(type(extent) is not int or not least <= extent <= COUNTABLE for extent in given):
        raise ValueError(f"extents {given!r}")
    return tuple(given)


def _separator(given: Any) -> str:
    if given not in (".", "/"):
        raise UnknownLayout(f"separator {given!r}")
    return str(given)


def _check_names(names: Any, attributes: Any, axes: int) -> None:
    """Raises an UnknownLayout where what is not needed here is damaged."""
    is_list = isinstance(names, list) and len(names) == axes and all(name is None or isinstance(name, str) for name in names)
    if not (names is None or is_list) or not isinstance(attributes, dict):
        raise UnknownLayout("dimension_names or attributes that are none")


def _codecs_3(codecs: Sequence[dict[str, Any]], axes: int, dtype: np.dtype[Any]) -> tuple[str, str, list[Codec]]:
    """Order and byte order of the elements, and the codecs of the bytes."""
    rest, order = [_named(codec, _OPTIONS_3, "codec", codec.get("name") != "bytes") for codec in codecs], "C"
    if rest and rest[0][0] == "transpose":
        axis_order = rest.pop(0)[1]["order"]
        if any(type(axis) is not int for axis in axis_order) or axis_order not in (list(range(axes)), list(range(axes))[::-1]):
            raise UnknownLayout(f"transposed to {axis_order!r}")
        order = "C" if axis_order == list(range(axes)) else "F"
    if not rest or rest[0][0] != "bytes":
        raise UnknownLayout(f"codec {rest[0][0]!r}" if rest else "no codec that makes bytes")
    endian = {"little": "<", "big": ">"}[rest[0][1]["endian"]] if dtype.itemsize > 1 else "="
    known = {"gzip": Inflate(GZIP), "zstd": Zstd(), "blosc": Blosc(), "crc32c": Crc32c()}
    names = [name for name, _ in rest[1:]]
    for name in names:
        if name not in known:
            raise UnknownLayout(f"codec {name!r}")
    steps = [known[name] for name in names]
    try:
        Pipeline(steps)
    except ValueError as error:
        raise UnknownLayout(str(error)) from error
    return order, endian, steps


def _fill(said: Any, dtype: np.dtype[Any]) -> Any:
    """The fill value as a scalar of that dtype.

    Raises:
        ValueError: it is none.
    """
    native = dtype.newbyteorder("=")
    if dtype.kind == "c":
        if not isinstance(said, list) or len(said) != 2:
            raise ValueError(f"fill value {said!r}")
        part = np.dtype(f"f{dtype.itemsize // 2}")
        return native.type(complex(_fill(said[0], part), _fill(said[1], part)))
    if isinstance(said, str) and dtype.kind == "f":
        if said.startswith("0x") and len(said) == 2 + 2 * dtype.itemsize:
            return np.array(int(said[2:], 16), f"u{dtype.itemsize}").view(native)[()]
        if said not in ("NaN", "Infinity", "-Infinity"):
            raise ValueError(f"fill value {said!r}")
        return native.type(float(said.replace("Infinity", "inf")))
    if type(said) not in {"b": (bool,), "f": (int, float)}.get(dtype.kind, (int,)):
        raise ValueError(f"fill value {said!r}")
    with np.errstate(over="ignore"):
        return np.array(said, native)[()]
