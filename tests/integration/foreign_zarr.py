"""Zarr stores that other libraries write, and what these read of them: tensorstore, and zarr-python
with numcodecs.

`test_foreign_zarr.py` compares what headrace reads of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numcodecs
import numpy as np
import zarr

ROWS = (11, 6, 5)
"""Shape of most arrays: no multiple of their chunks."""
CHUNKS = [4, 6, 3]


class Case(NamedTuple):
    """An array that another library wrote, what that reads of it, and whether headrace reads it
    without zarr-python.
    """

    path: Path
    values: Any
    is_direct: bool


def data(dtype: str, shape: tuple[int, ...] = ROWS) -> Any:
    """Values of all sizes."""
    kind, random = np.dtype(dtype), np.random.default_rng(7)
    if kind.kind == "b":
        return random.integers(0, 2, shape).astype(bool)
    if kind.kind in "fc":
        return (random.standard_normal(shape) * 100).astype(kind)
    return (
        random.integers(0, 256, int(np.prod(shape)) * kind.itemsize, dtype=np.uint8)
        .view(kind)
        .reshape(shape)
    )


# -- tensorstore

BLOSC: dict[str, Any] = {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1}
SHARD_INDEX: list[Any] = [
    {"name": "bytes", "configuration": {"endian": "little"}},
    {"name": "crc32c"},
]


def _little(dtype: str) -> dict[str, Any]:
    if np.dtype(dtype).itemsize == 1:
        return {"name": "bytes"}
    return {"name": "bytes", "configuration": {"endian": "little"}}


def _tensorstore_2() -> Iterator[tuple[str, dict[str, Any]]]:
    zlib, zstd = {"id": "zlib", "level": 4}, {"id": "zstd", "level": 3}
    blosc_zstd = {**BLOSC, "cname": "zstd", "shuffle": 2}
    compressors: list[Any] = [None, BLOSC, blosc_zstd, zlib, zstd, {"id": "bz2", "level": 2}]
    dtypes = ["|u1", "<i4", ">i2", "<f8", "<c8", "|b1", "<f2", ">f4", "<u8", "<i8", ">c16", "<f4"]
    fills: list[Any] = [None, 3, None, "NaN", None, True, None, "-Infinity", 2**63, None, None, 1.5]
    for number, (compressor, order) in enumerate(itertools.product(compressors, "CF")):
        metadata = {"shape": list(ROWS), "chunks": CHUNKS, "dtype": dtypes[number]}
        metadata |= {"compressor": compressor, "order": order, "fill_value": fills[number]}
        yield f"{number}", {**metadata, "dimension_separator": "./"[number % 2]}


def _tensorstore_3() -> Iterator[tuple[str, dict[str, Any]]]:
    gzip, zstd = ({"name": name, "configuration": {"level": 3}} for name in ("gzip", "zstd"))
    how = {"cname": "lz4", "clevel": 5, "shuffle": "bitshuffle", "typesize": 4, "blocksize": 0}
    blosc = {"name": "blosc", "configuration": how}
    big = {"name": "bytes", "configuration": {"endian": "big"}}
    turned = {"name": "transpose", "configuration": {"order": [2, 1, 0]}}
    oddly = {"name": "transpose", "configuration": {"order": [1, 0, 2]}}
    ways: list[tuple[str, list[Any]]] = [
        ("float32", [_little("f4")]),
        ("int16", [big, gzip]),
        ("uint8", [_little("u1"), zstd]),
        ("int32", [_little("i4"), blosc]),
        ("float64", [turned, _little("f8"), zstd, {"name": "crc32c"}]),
        ("complex64", [oddly, _little("c8"), gzip]),
        ("bool", [_little("?"), {"name": "crc32c"}]),
        ("uint64", [_little("u8"), blosc]),
    ]
    fills: list[Any] = ["NaN", -5, 7, 0, "Infinity", [1.5, "NaN"], True, 2**64 - 1]
    for number, ((dtype, codecs), fill) in enumerate(zip(ways, fills, strict=True)):
        separator = {"separator": "./"[number % 2]}
        keys = {"name": ("default", "v2")[number % 2], "configuration": separator}
        said = {"shape": list(ROWS), "data_type": dtype, "fill_value": fill}
        said["chunk_key_encoding"] = keys
        grid = {"name": "regular", "configuration": {"chunk_shape": CHUNKS}}
        yield f"{number}", {**said, "codecs": codecs, "chunk_grid": grid}
        shards = {"chunk_shape": [2, 3, 3], "codecs": codecs, "index_codecs": SHARD_INDEX}
        shards["index_location"] = ("start", "end")[number % 2]
        sharding = {"name": "sharding_indexed", "configuration": shards}
        grid = {"name": "regular", "configuration": {"chunk_shape": [6, 6, 3]}}
        yield f"{number} in shards", {**said, "codecs": [sharding], "chunk_grid": grid}


def write_tensorstore(folder: Path) -> list[Case]:
    """What tensorstore writes by its drivers zarr and zarr3; some rows are never written."""
    import tensorstore

    cases = []
    for driver, stores in (("zarr", _tensorstore_2()), ("zarr3", _tensorstore_3())):
        for name, metadata in stores:
            path = folder / f"tensorstore {driver} {name}.zarr"
            place = {"driver": "file", "path": f"{path}/"}
            spec = {"driver": driver, "kvstore": place, "metadata": metadata}
            store = tensorstore.open(spec, create=True).result()
            values = data(store.dtype.numpy_dtype.str)
            store[:7].write(values[:7]).result()
            compressor = metadata.get("compressor") or {}
            is_turned_oddly = "[1, 0, 2]" in str(metadata.get("codecs"))
            is_library = compressor.get("id") == "bz2" or is_turned_oddly
            cases.append(Case(path, store.read().result(), not is_library))
    return cases


# -- zarr-python and numcodecs


def write_numcodecs(folder: Path) -> list[Case]:
    """Version 2 with compressors, filters, orders, fill values and separators of all kinds."""
    filters: list[tuple[str, list[Any]]] = [
        ("<i4", [numcodecs.Delta("<i4")]),
        ("<f8", [numcodecs.FixedScaleOffset(0, 10, "<f8", "<i4")]),
        ("|b1", [numcodecs.PackBits()]),
        ("<f4", [numcodecs.Quantize(3, "<f4")]),
        ("<i8", [numcodecs.AsType("<i4", "<i8")]),
        ("<u2", [numcodecs.Shuffle(2)]),
        ("<f4", []),
    ]
    blosc = numcodecs.Blosc
    compressors: list[Any] = [None, numcodecs.LZ4(), numcodecs.BZ2(), numcodecs.LZMA()]
    compressors += [numcodecs.Zlib(1), numcodecs.GZip(3), numcodecs.Zstd(5, checksum=True)]
    compressors += [blosc("blosclz", 5, blosc.BITSHUFFLE), blosc("zlib", 3, blosc.SHUFFLE, 64)]
    compressors.append(blosc("lz4hc", 9, blosc.NOSHUFFLE))
    known = (numcodecs.Zlib, numcodecs.GZip, numcodecs.Zstd, numcodecs.Blosc, type(None))
    cases = []
    for number, ((dtype, some), compressor) in enumerate(itertools.product(filters, compressors)):
        path = folder / f"numcodecs {number}.zarr"
        array = zarr.create_array(
            path,
            shape=ROWS,
            chunks=(4, 4, 3),
            dtype=np.dtype(dtype),
            zarr_format=2,
            filters=some or None,
            compressors=compressor,
            order="CF"[number % 2],  # type: ignore[arg-type]
            fill_value=[None, 0, 1][number % 3],
            chunk_key_encoding={"name": "v2", "separator": "./"[number // 2 % 2]},
        )
        values = data(dtype) if dtype != "<i8" else data("<i4").astype("<i8")
        array[:7] = np.clip(values[:7], -1e6, 1e6) if dtype == "<f8" else values[:7]
        is_known = isinstance(compressor, known) and all(
            isinstance(one, numcodecs.Shuffle) for one in some
        )
        cases.append(Case(path, array[...], is_known))
    return cases
