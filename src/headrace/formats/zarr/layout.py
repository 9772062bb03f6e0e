"""The layout of a Zarr array, from metadata that hold nothing but what is known here.

The layouts are those of the Zarr specifications, versions 2 and 3, and of its sharding codec (ZEP
2). Every key, and every value that decoding depends on, is looked at: what is unusual in the
slightest is left to zarr-python, which knows more, or refuses it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from headrace.formats.arrays.chunks import COUNTABLE
from headrace.formats.arrays.codecs import (
    GZIP,
    ZLIB,
    Blosc,
    Codec,
    Crc32c,
    Inflate,
    Pipeline,
    Unshuffle,
    Zstd,
)

_DTYPES = {"bool", "float16", "float32", "float64", "complex64", "complex128"}
_DTYPES |= {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_BLOSC = {"typesize", "cname", "clevel", "shuffle", "blocksize"}
_ZSTD = {"level", "checksum"}
_Options = Mapping[str, set[str]]
"""By the names of codecs, their options."""
_OPTIONS_2: _Options = {
    "gzip": {"level"},
    "zlib": {"level"},
    "zstd": _ZSTD,
    "blosc": _BLOSC,
    "shuffle": {"elementsize"},
}
_OPTIONS_3: _Options = {
    "gzip": {"level"},
    "zstd": _ZSTD,
    "blosc": _BLOSC,
    "crc32c": set(),
    "bytes": {"endian"},
    "transpose": {"order"},
    "sharding_indexed": {"chunk_shape", "codecs", "index_codecs", "index_location"},
}
_CODECS: dict[str, Codec] = {
    "zlib": Inflate(ZLIB),
    "gzip": Inflate(GZIP),
    "zstd": Zstd(),
    "blosc": Blosc(),
    "crc32c": Crc32c(),
}
_KEYS_2 = {"zarr_format", "node_type", "shape", "chunks", "dtype", "compressor", "fill_value"}
_KEYS_2 |= {"order", "filters", "dimension_separator"}
_KEYS_3 = {"zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding"}
_KEYS_3 |= {"fill_value", "codecs", "attributes", "dimension_names", "storage_transformers"}


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


def layout_of(metadata: dict[str, Any]) -> Layout:
    """The layout that metadata describe.

    Raises:
        UnknownLayout: there is something in them that is not known here.
    """
    try:
        version = metadata["zarr_format"]
        _check(type(version) is int and version in (2, 3), f"zarr_format {version!r}")
        unknown = [key for key in metadata if key not in (_KEYS_2 if version == 2 else _KEYS_3)]
        _check(not unknown, f"its metadata have {', '.join(unknown)}")
        layout = _layout_2(metadata) if version == 2 else _layout_3(metadata)
        _check(len(layout.files) == len(layout.shape), f"chunks of {len(layout.files)} axes")
        _check(layout.separator in (".", "/"), f"separator {layout.separator!r}")
        largest = max(math.prod(layout.files), math.prod(layout.chunks))
        _check(largest * 16 <= COUNTABLE, f"chunks of {list(layout.files)} elements")
        return layout
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UnknownLayout(
            f"its metadata are unusual ({type(error).__name__}: {error})"
        ) from error


def _check(is_known: bool, what: str) -> None:
    """Raises an UnknownLayout where something is not known."""
    if not is_known:
        raise UnknownLayout(what)


def _layout_3(metadata: dict[str, Any]) -> Layout:
    kind = metadata["data_type"]
    codecs = metadata["codecs"]
    _check(kind in _DTYPES, f"data type {kind!r}")
    _check(metadata.get("storage_transformers", []) == [], "it has storage_transformers")
    _, grid = _named(metadata["chunk_grid"], {"regular": {"chunk_shape"}}, "chunk grid")
    keys, encoding = _named(
        metadata["chunk_key_encoding"],
        {"default": {"separator"}, "v2": {"separator"}},
        "chunk keys",
    )
    shape = _extents(metadata["shape"], least=0)
    files = _extents(grid["chunk_shape"])
    # what is not needed here must not be damaged either
    names = metadata.get("dimension_names") or [None] * len(shape)
    are_names = len(names) == len(shape) and all(
        name is None or isinstance(name, str) for name in names
    )
    has_attributes = isinstance(metadata.get("attributes", {}), dict)
    _check(are_names and has_attributes, "dimension_names or attributes that are none")
    chunks = files
    index_at = None
    if [codec["name"] for codec in codecs] == ["sharding_indexed"]:
        _, options = _named(codecs[0], _OPTIONS_3, "codec")
        codecs = options["codecs"]
        chunks = _extents(options["chunk_shape"])
        index_at = options.get("index_location", "end")
        of_index = [_named(codec, _OPTIONS_3, "codec") for codec in options["index_codecs"]]
        _check(
            of_index == [("bytes", {"endian": "little"}), ("crc32c", {})],
            "a shard index with other codecs than [bytes, crc32c]",
        )
        is_whole = not any(f % c for f, c in zip(files, chunks, strict=True))
        _check(
            index_at in ("start", "end") and is_whole, "shards that are not made of whole chunks"
        )
    dtype = np.dtype(kind)
    order, endian, steps = _codecs_3(codecs, len(shape), dtype)
    return Layout(
        shape,
        files,
        chunks,
        dtype.newbyteorder(endian),
        _fill(metadata["fill_value"], dtype),
        order,
        tuple(steps),
        "c" if keys == "default" else "",
        encoding.get("separator", "/" if keys == "default" else "."),
        index_at,
    )


def _layout_2(metadata: dict[str, Any]) -> Layout:
    kind = metadata["dtype"]
    is_known = isinstance(kind, str) and np.dtype(kind).str == kind
    _check(is_known and np.dtype(kind).name in _DTYPES, f"data type {kind!r}")
    dtype = np.dtype(kind)
    extents = _extents(metadata["chunks"])
    filters = metadata["filters"]
    _check(filters is None or isinstance(filters, list), f"filters {filters!r}")
    steps: list[Codec] = []
    for codec in filters or []:
        name, options = _named(codec, _OPTIONS_2, "filter")
        _check(name == "shuffle", f"filter {name!r}")
        itemsize = options.get("elementsize", 4)
        is_whole = itemsize >= 1 and not math.prod(extents) * dtype.itemsize % itemsize
        _check(is_whole, f"shuffled by {itemsize} bytes")
        steps.append(Unshuffle(itemsize))
    if metadata["compressor"] is not None:
        name, _ = _named(metadata["compressor"], _OPTIONS_2, "compressor")
        _check(name in _CODECS, f"compressor {name!r}")
        steps.append(_CODECS[name])
    order = metadata["order"]
    _check(order in ("C", "F"), f"order {order!r}")
    fill = np.zeros((), dtype)[()]
    if metadata["fill_value"] is not None:
        fill = _fill(metadata["fill_value"], dtype)
    shape = _extents(metadata["shape"], least=0)
    separator = metadata.get("dimension_separator", ".")
    return Layout(shape, extents, extents, dtype, fill, order, tuple(steps), "", separator, None)


def _named(given: Any, known: _Options, what: str) -> tuple[str, dict[str, Any]]:
    """The name and the options of a codec or the like.

    Args:
        given: ``{"name": "zstd", "configuration": {"level": 3}}`` of version 3, or ``{"id": "zstd",
            "level": 3}`` of version 2.
        known: what may stand there.
        what: for messages.

    Raises:
        UnknownLayout: there is one that is not known.
    """
    if "id" in given:
        name = given["id"]
        options = {key: value for key, value in given.items() if key != "id"}
    else:
        name = given["name"]
        options = given.get("configuration", {})
        _check(given.keys() <= {"name", "configuration"}, f"{what} {given!r}")
    _check(name in known, f"{what} {name!r}")
    _check(options.keys() <= known[name], f"{what} {name!r} with {options!r}")
    return name, options


def _extents(given: Any, least: int = 1) -> tuple[int, ...]:
    if not isinstance(given, list) or any(
        type(extent) is not int or not least <= extent <= COUNTABLE for extent in given
    ):
        raise ValueError(f"extents {given!r}")
    return tuple(given)


def _codecs_3(
    codecs: Sequence[dict[str, Any]], axes: int, dtype: np.dtype[Any]
) -> tuple[str, str, list[Codec]]:
    """Order and byte order of the elements, and the codecs of the bytes."""
    rest = [_named(codec, _OPTIONS_3, "codec") for codec in codecs]
    order = "C"
    if rest and rest[0][0] == "transpose":
        axis_order = rest.pop(0)[1]["order"]
        as_stored = list(range(axes))
        if axis_order != as_stored:
            order = "F"
            _check(axis_order == as_stored[::-1], f"transposed to {axis_order!r}")
    _check(bool(rest) and rest[0][0] == "bytes", f"codecs {[name for name, _ in rest]}")
    endian = "="
    if dtype.itemsize > 1:
        endian = {"little": "<", "big": ">"}[rest[0][1]["endian"]]
    for name, _ in rest[1:]:
        _check(name in _CODECS, f"codec {name!r}")
    steps = [_CODECS[name] for name, _ in rest[1:]]
    try:
        Pipeline(steps)
    except ValueError as error:
        raise UnknownLayout(str(error)) from error
    return order, endian, steps


def _fill(given: Any, dtype: np.dtype[Any]) -> Any:
    """The fill value as a scalar of that dtype.

    Raises:
        ValueError: it is none.
    """
    native = dtype.newbyteorder("=")
    if dtype.kind == "c":
        real, imaginary = given
        part = np.dtype(f"f{dtype.itemsize // 2}")
        return native.type(complex(_fill(real, part), _fill(imaginary, part)))
    if isinstance(given, str) and dtype.kind == "f":
        if given.startswith("0x") and len(given) == 2 + 2 * dtype.itemsize:
            return np.array(int(given[2:], 16), f"u{dtype.itemsize}").view(native)[()]
        if given not in ("NaN", "Infinity", "-Infinity"):
            raise ValueError(f"fill value {given!r}")
        return native.type(float(given.replace("Infinity", "inf")))
    if type(given) not in {"b": (bool,), "f": (int, float)}.get(dtype.kind, (int,)):
        raise ValueError(f"fill value {given!r}")
    with np.errstate(over="ignore"):
        return np.array(given, native)[()]
