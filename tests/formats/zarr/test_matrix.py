"""Every layout, codec and dtype of Zarr gives what zarr-python gives, by every path."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, TransposeCodec, ZstdCodec

from headrace.errors import FormatError
from headrace.formats.tree import TreeSource
from tests.formats import arrays
from tests.formats.arrays import ROWS, N, chunk_shapes, values, zarr_rows
from tests.formats.specimens import V2_COMMON

DTYPES = ["i4", "u1", "i2", "i8", "f2", "f4", "f8", "c8", "c16", "?"]
V3: dict[str, Any] = {
    "raw": {"compressors": None},
    "zstd": {"compressors": [ZstdCodec(level=3)]},
    "zstd, checksum": {"compressors": [ZstdCodec(level=3, checksum=True)]},
    "gzip": {"compressors": [GzipCodec(level=4)]},
    "blosc": {"compressors": [BloscCodec(cname="lz4", shuffle="shuffle", typesize=4)]},
    "blosc, zstd": {"compressors": [BloscCodec(cname="zstd", shuffle="bitshuffle", typesize=2)]},
    "crc32c": {"compressors": [Crc32cCodec()]},
    "zstd, crc32c": {"compressors": [ZstdCodec(), Crc32cCodec()]},
    "big-endian": {"compressors": None, "serializer": BytesCodec(endian="big")},
    "big-endian, zstd": {"compressors": [ZstdCodec()], "serializer": BytesCodec(endian="big")},
}
SEPARATOR = {"chunk_key_encoding": {"name": "v2", "separator": "/"}}
V2: dict[str, Any] = {
    **V2_COMMON,
    "F": {"compressors": None, "order": "F"},
    "F, zstd": {"compressors": numcodecs.Zstd(3), "order": "F"},
    "lz4": {"compressors": numcodecs.LZ4()},
    "bz2": {"compressors": numcodecs.BZ2()},
    "delta, zlib": {"filters": [numcodecs.Delta("i8")], "compressors": numcodecs.Zlib(3)},
    "separator": {"compressors": numcodecs.Zstd(3), **SEPARATOR},
}
LIBRARY = {"lz4", "bz2", "delta, zlib"}
QUICK = {"raw", "zlib", "zstd, crc32c"}
FOR_DTYPES = {"delta, zlib": ["i8"], "shuffle, zlib": ["i4", ">f4", "f8", "c16"]}


def check(path: Path, name: str, expected: Any, direct: bool = True) -> TreeSource:
    source: TreeSource = arrays.check(zarr_rows(path, name, direct=direct), expected)
    return source


def some_slow(names: Any) -> list[Any]:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


def filled(root: Any, name: str, data: np.ndarray[Any, Any], **how: Any) -> np.ndarray[Any, Any]:
    array = root.create_array(name, shape=data.shape, dtype=data.dtype, **how)
    array[...] = data
    return np.asarray(array[...])


@pytest.mark.parametrize("codecs", some_slow(V3))
def test_codecs_and_chunk_shapes_of_version_3(tmp_path: Path, codecs: str) -> None:
    """Plain, and in shards with the index at either end."""
    root, expected = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=3), {}
    first = list(V3).index(codecs)
    for name, row in ROWS.items():
        for number, chunks in enumerate(chunk_shapes(row)):
            data = values(DTYPES[(first + len(expected)) % len(DTYPES)], row)
            how = {"chunks": chunks, **V3[codecs]}
            if number % 2 == first % 2:
                expected[f"{name} {number}"] = filled(root, f"{name} {number}", data, **how)
            elif chunks[0] < N:
                shape = (chunks[0] * 3, *(extent * 2 for extent in chunks[1:]))
                shards = {"shape": shape, "index_location": ("start", "end")[number // 2 % 2]}
                name_ = f"{name} {number} shards"
                expected[name_] = filled(root, name_, data, **how, shards=shards)
    for name, array in expected.items():
        source = check(tmp_path / "a.zarr", name, array)
        assert source.is_direct, source.describe().ways
        assert ("shards" in source.describe().ways[name]) == ("shards" in name)
    check(tmp_path / "a.zarr", name, array, direct=False)


@pytest.mark.parametrize("codecs", some_slow(V2))
def test_codecs_and_chunk_shapes_of_version_2(tmp_path: Path, codecs: str) -> None:
    root, expected = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=2), {}
    dtypes = FOR_DTYPES.get(codecs, [*DTYPES, ">i4", ">f8"])
    for name, row in ROWS.items():
        for number, chunks in enumerate(chunk_shapes(row)):
            data = values(dtypes[(len(expected) + len(codecs)) % len(dtypes)], row)
            name_ = f"{name} {number}"
            expected[name_] = filled(root, name_, data, chunks=chunks, **V2[codecs])
    for name, array in expected.items():
        source = check(tmp_path / "a.zarr", name, array)
        assert source.is_direct == (codecs not in LIBRARY), source.describe().ways


def test_transposed(tmp_path: Path) -> None:
    root = zarr.open_group(tmp_path / "a.zarr", mode="w")
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        how: Any = {"filters": [TransposeCodec(order=order)], "compressors": [ZstdCodec()]}
        expected = filled(root, str(order), values("i4", (6, 3)), chunks=(4, 4, 3), **how)
        source = check(tmp_path / "a.zarr", str(order), expected)
        assert source.is_direct == (order != (1, 0, 2))


@pytest.mark.parametrize(("version", "shards"), [(2, None), (3, None), (3, (8, 8))])
def test_what_was_never_written_is_the_fill_value(
    tmp_path: Path, version: Any, shards: Any
) -> None:
    root = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=version)
    fills = {"f4": np.nan, "f8": -np.inf, "i2": -7, "u8": 2**64 - 1, "bool": True, "c8": 1 + 2j}
    for dtype, fill in fills.items():
        how: Any = {"chunks": (4, 4), "shards": shards, "fill_value": fill}
        array = root.create_array(dtype, shape=(N, 6), dtype=dtype, **how)
        array[5:7, 1:3] = 1
        assert check(tmp_path / "a.zarr", dtype, np.asarray(array[...])).is_direct
        with pytest.raises(FormatError, match=r"chunk \(3, 0\)"):
            zarr_rows(tmp_path / "a.zarr", dtype, missing="error").read([12])


@pytest.mark.parametrize("version", [2, 3])
def test_zip_files(tmp_path: Path, version: int) -> None:
    data = values("f4", (4, 6, 3))
    with zarr.storage.ZipStore(tmp_path / "a.zip", mode="w") as store:
        root = zarr.open_group(store, mode="w", zarr_format=version)
        filled(root, "x", data, chunks=(2, 4, 6, 3))
        filled(root, "y", data, chunks=(1, 4, 6, 3), compressors=None)
        if version == 3:
            filled(root, "s", data, chunks=(1, 4, 6, 3), shards=(4, 4, 6, 3))
    for name in ("x", "y", "s")[:version]:
        assert check(tmp_path / "a.zip", name, data).is_direct
    with zarr.storage.ZipStore(tmp_path / "b.zip", mode="w", compression=8) as store:
        root = zarr.open_group(store, mode="w", zarr_format=version)
        filled(root, "x", data, chunks=(2, 4, 6, 3))
    source = check(tmp_path / "b.zip", "x", data)
    assert not source.is_direct and "compressed itself" in source.describe().ways["x"]


def test_arrays_and_groups_by_name(tmp_path: Path) -> None:
    root = zarr.open_group(tmp_path / "a.zarr", mode="w")
    filled(root, "deep/er/x", values("i4", (3,)), chunks=(4, 3))
    assert len(zarr_rows(tmp_path / "a.zarr")) == N  # the only one
    filled(root, "labels", values("i8", ()), chunks=(4,))
    for names in ([], ["nowhere"]):
        with pytest.raises(KeyError, match=r"'deep/er/x', 'labels'"):
            zarr_rows(tmp_path / "a.zarr", *names)
    source = zarr_rows(tmp_path / "a.zarr", ["deep/er/x", "labels"])
    assert sorted(source.read([3])[0]) == ["deep/er/x", "labels"]
    assert np.array_equal(source.column("labels"), values("i8", ()))
    # an array that is a store itself
    assert check(tmp_path / "a.zarr" / "labels", "", values("i8", ())).is_direct


def test_nothing_stays_open(tmp_path: Path) -> None:
    root = zarr.open_group(tmp_path / "a.zarr", mode="w")
    filled(root, "x", values("i4", (3,)), chunks=(1, 3), shards=(4, 3))
    before = set(os.listdir("/proc/self/fd"))
    source = zarr_rows(tmp_path / "a.zarr", "x")
    source.read([1, 2, 12])
    assert len(set(os.listdir("/proc/self/fd")) - before) == 2
    source.close()
    assert set(os.listdir("/proc/self/fd")) == before
