"""The layout of a Zarr array, from metadata that hold nothing but what is known here.

The layouts are those of the Zarr specifications, versions 2 and 3, and of its sharding codec (ZEP
2). Every key and the type of every value is looked at: what is unusual in the slightest is left to
zarr-python, which knows more, or refuses it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from headrace.storage.arrays.chunks import COUNTABLE
from headrace.storage.arrays.codecs import (
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

_KINDS = [
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    "float16",
    "float32",
    "float64",
]
_KINDS += ["complex64", "complex128"]
_BLOSC = {"typesize": int, "cname": str, "clevel": int, "shuffle": str, "blocksize": int}
_Options = Mapping[str, Mapping[str, type]]
"""By the names of codecs, their options and the types of these."""
_OPTIONS: _Options = {"gzip": {"level": int}, "zstd": {"level": int, "checksum": bool}}
_OPTIONS_2: _Options = {
    **_OPTIONS,
    "zlib": {"level": int},
    "blosc": {**_BLOSC, "shuffle": int},
    "shuffle": {"elementsize": int},
}
_OPTIONS_3: _Options = {
    **_OPTIONS,
    "blosc": _BLOSC,
    "crc32c": {},
    "bytes": {"endian": str},
    "transpose": {"order": list},
    "sharding_indexed": {
        "chunk_shape": list,
        "codecs": list,
        "index_codecs": list,
        "index_location": str,
    },
}
_CODECS: dict[str, Codec] = {
    "zlib": Inflate(ZLIB),
    "gzip": Inflate(GZIP),
    "zstd": Zstd(),
    "blosc": Blosc(),
    "crc32c": Crc32c(),
}
_VALUES: dict[str, Any] = {
    "level": range(-100, 23),
    "clevel": range(10),
    "typesize": range(1, 1 << 31),
    "blocksize": range(1 << 31),
}
_VALUES |= {
    "cname": ("lz4", "lz4hc", "blosclz", "snappy", "zlib", "zstd"),
    "shuffle": ("noshuffle", "shuffle", "bitshuffle", -1, 0, 1, 2),
}
_KEYS_2 = {
    "zarr_format",
    "node_type",
    "shape",
    "chunks",
    "dtype",
    "compressor",
    "fill_value",
    "order",
    "filters",
    "dimension_separator",
}
_KEYS_3 = {
    "zarr_format",
    "node_type",
    "shape",
    "data_type",
    "chunk_grid",
    "chunk_key_encoding",
    "fill_value",
    "codecs",
    "attributes",
}
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


def layout_of(metadata: dict[str, Any]) -> Layout:
    """The layout that metadata describe.

    Raises:
        UnknownLayout: there is something in them that is not known here.
    """
    try:
        layout = (_layout_3 if metadata.get("zarr_format") == 3 else _layout_2)(metadata)
        if len(layout.files) != len(layout.shape):
            raise UnknownLayout(f"chunks of {len(layout.files)} axes")
        if max(map(math.prod, (layout.files, layout.chunks))) * 16 > COUNTABLE:
            raise UnknownLayout(f"chunks of {list(layout.files)} elements")
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
    unknown = [key for key in metadata if key not in _KEYS_3]
    is_plain = (
        metadata.get("storage_transformers", []) == [] and type(metadata["zarr_format"]) is int
    )
    _check(
        not unknown and is_plain,
        f"its metadata have {', '.join(unknown) or 'storage_transformers'}",
    )
    kind, codecs = metadata["data_type"], metadata["codecs"]
    _check(kind in _KINDS, f"data type {kind!r}")
    _, grid = _named(metadata["chunk_grid"], {"regular": {"chunk_shape": list}}, "chunk grid")
    separators = {"separator": str}
    keys, encoding = _named(
        metadata["chunk_key_encoding"],
        {"default": separators, "v2": separators},
        "chunk keys",
        False,
    )
    separator = encoding.get("separator", "/" if keys == "default" else ".")
    shape, files = _extents(metadata["shape"], least=0), _extents(grid["chunk_shape"])
    names, axes = metadata.get("dimension_names"), len(shape)
    is_list = (
        isinstance(names, list)
        and len(names) == axes
        and all(name is None or isinstance(name, str) for name in names)
    )
    has_names = names is None or is_list  # what is not needed here must not be damaged either
    _check(
        has_names and isinstance(metadata.get("attributes", {}), dict),
        "dimension_names or attributes that are none",
    )
    chunks, index_at = files, None
    if [codec["name"] for codec in codecs] == ["sharding_indexed"]:
        _, options = _named(codecs[0], _OPTIONS_3, "codec")
        codecs, chunks, index_at = (
            options["codecs"],
            _extents(options["chunk_shape"]),
            options.get("index_location", "end"),
        )
        of_index = [_named(codec, _OPTIONS_3, "codec", False) for codec in options["index_codecs"]]
        _check(
            of_index == [("bytes", {"endian": "little"}), ("crc32c", {})],
            "a shard index with other codecs than [bytes, crc32c]",
        )
        is_whole = len(chunks) == len(files) and not any(
            f % c for f, c in zip(files, chunks, strict=True)
        )
        _check(
            index_at in ("start", "end") and is_whole, "shards that are not made of whole chunks"
        )
    dtype = np.dtype(kind)
    order, endian, steps = _codecs_3(codecs, axes, dtype)
    prefix, fill = "c" if keys == "default" else "", _fill(metadata["fill_value"], dtype)
    return Layout(
        shape,
        files,
        chunks,
        dtype.newbyteorder(endian),
        fill,
        order,
        tuple(steps),
        prefix,
        _separator(separator),
        index_at,
    )


def _layout_2(metadata: dict[str, Any]) -> Layout:
    version = metadata.get("zarr_format")
    _check(version == 2 and type(version) is int, f"zarr_format {version!r}")
    unknown = [key for key in metadata if key not in _KEYS_2]
    _check(not unknown, f"its metadata have {', '.join(unknown)}")
    kind, chunks, steps = metadata["dtype"], metadata["chunks"], list[Codec]()
    is_known = (
        isinstance(kind, str) and np.dtype(kind).name in _KINDS and np.dtype(kind).str == kind
    )
    _check(is_known, f"data type {kind!r}")
    dtype, filters, compressor = np.dtype(kind), metadata["filters"], metadata["compressor"]
    _check(filters is None or isinstance(filters, list), f"filters {filters!r}")
    for codec in filters or []:
        name, options = _named(codec, _OPTIONS_2, "filter")
        _check(name == "shuffle", f"filter {name!r}")
        itemsize = options.get("elementsize", 4)
        is_whole = itemsize >= 1 and not math.prod(_extents(chunks)) * dtype.itemsize % itemsize
        _check(is_whole, f"shuffled by {itemsize} bytes")
        steps.append(Unshuffle(itemsize))
    if compressor is not None:
        name, _ = _named(compressor, _OPTIONS_2, "compressor")
        _check(name in _CODECS, f"compressor {name!r}")
        steps.append(_CODECS[name])
    _check(metadata["order"] in ("C", "F"), f"order {metadata['order']!r}")
    extents, separator = _extents(chunks), _separator(metadata.get("dimension_separator", "."))
    fill = (
        np.zeros((), dtype)[()]
        if metadata["fill_value"] is None
        else _fill(metadata["fill_value"], dtype)
    )
    shape = _extents(metadata["shape"], least=0)
    return Layout(
        shape, extents, extents, dtype, fill, metadata["order"], tuple(steps), "", separator, None
    )


def _named(
    given: Any, known: _Options, what: str, required: bool = True
) -> tuple[str, dict[str, Any]]:
    """The name and the options of a codec or the like.

    Args:
        given: ``{"name": "zstd", "configuration": {"level": 3}}`` of version 3, or ``{"id": "zstd",
            "level": 3}`` of version 2.
        known: what may stand there.
        what: for messages.
        required: False: the configuration may be left out.

    Raises:
        UnknownLayout: there is one that is not known, or has another type.
    """
    name = given["id"] if "id" in given else given["name"]
    _check(name in known, f"{what} {name!r}")
    if "id" in given:
        options = {key: value for key, value in given.items() if key != "id"}
    else:
        options = (
            given["configuration"] if required and known[name] else given.get("configuration", {})
        )
        _check(given.keys() <= {"name", "configuration"}, f"{what} {given!r}")
    for key, value in options.items():
        is_known = (
            key in known[name]
            and type(value) is known[name][key]
            and (key not in _VALUES or value in _VALUES[key])
        )
        _check(is_known, f"{what} {name!r} with {key}={value!r}")
    return name, options


def _extents(given: Any, least: int = 1) -> tuple[int, ...]:
    if not isinstance(given, list) or any(
        type(extent) is not int or not least <= extent <= COUNTABLE for extent in given
    ):
        raise ValueError(f"extents {given!r}")
    return tuple(given)


def _separator(given: Any) -> str:
    _check(given in (".", "/"), f"separator {given!r}")
    return str(given)


def _codecs_3(
    codecs: Sequence[dict[str, Any]], axes: int, dtype: np.dtype[Any]
) -> tuple[str, str, list[Codec]]:
    """Order and byte order of the elements, and the codecs of the bytes."""
    rest, order = (
        [_named(codec, _OPTIONS_3, "codec", codec.get("name") != "bytes") for codec in codecs],
        "C",
    )
    if rest and rest[0][0] == "transpose":
        axis_order, as_stored = rest.pop(0)[1]["order"], list(range(axes))
        is_known = all(type(axis) is int for axis in axis_order) and axis_order in (
            as_stored,
            as_stored[::-1],
        )
        _check(is_known, f"transposed to {axis_order!r}")
        order = "C" if axis_order == as_stored else "F"
    _check(bool(rest), "no codec that makes bytes")
    _check(rest[0][0] == "bytes", f"codec {rest[0][0]!r}")
    endian = {"little": "<", "big": ">"}[rest[0][1]["endian"]] if dtype.itemsize > 1 else "="
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
        if not isinstance(given, list) or len(given) != 2:
            raise ValueError(f"fill value {given!r}")
        part = np.dtype(f"f{dtype.itemsize // 2}")
        return native.type(complex(_fill(given[0], part), _fill(given[1], part)))
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
