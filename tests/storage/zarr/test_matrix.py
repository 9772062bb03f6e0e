"""Every layout, codec and dtype of Zarr gives what zarr-python gives, by every path."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, TransposeCodec, ZstdCodec

from headrace.errors import FormatError
from headrace.storage.zarr.rows import ZarrSource
from tests.storage.specimens import V2_COMMON

pytestmark = pytest.mark.quick_every(8)

N = 13
DTYPES = ["u1", "i2", "u4", "i8", "f2", "f4", "f8", "c8", "c16", "?"]
QUICK = {"u1", ">i4", "f4", "c8"}  # the others are run with the slow tests
ROWS: dict[str, tuple[int, ...]] = {"scalar": (), "1-D": (5,), "image": (4, 6, 3)}
ORDERS = [[*range(N)], [N - 1, 0, 3, 3, 7], [5], [*range(N)][::-1], [2, 4, 6, 8]]
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
V2: dict[str, Any] = {
    **V2_COMMON,
    "F": {"compressors": None, "order": "F"},
    "F, zstd": {"compressors": numcodecs.Zstd(3), "order": "F"},
    "lz4": {"compressors": numcodecs.LZ4()},
    "bz2": {"compressors": numcodecs.BZ2()},
    "delta, zlib": {"filters": [numcodecs.Delta("i8")], "compressors": numcodecs.Zlib(3)},
    "separator": {
        "compressors": numcodecs.Zstd(3),
        "chunk_key_encoding": {"name": "v2", "separator": "/"},
    },
}
LIBRARY = {"lz4", "bz2", "delta, zlib"}


def some_slow(dtypes: list[str]) -> list[Any]:
    return [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in dtypes
    ]


def values(dtype: str, row: tuple[int, ...]) -> np.ndarray[Any, Any]:
    kind, random = np.dtype(dtype), np.random.default_rng(1)
    if kind.kind == "b":
        return random.integers(0, 2, (N, *row)).astype(bool)
    if kind.kind in "fc":
        return random.standard_normal((N, *row)).astype(kind)
    data = random.integers(0, 256, int(np.prod((N, *row))) * kind.itemsize, dtype=np.uint8)
    return data.view(kind).reshape((N, *row))


def chunk_shapes(row: tuple[int, ...]) -> list[tuple[int, ...]]:
    whole = [(height, *row) for height in (1, 4, 13, 20)]
    return whole + [
        (height, *(max(1, extent // 2 + 1) for extent in row))
        for height in (1, 4)
        if any(extent > 1 for extent in row)
    ]


def check(path: Path, name: str, expected: np.ndarray[Any, Any], direct: bool = True) -> ZarrSource:
    source = ZarrSource(path, name, direct=direct)
    for hold in (0, 1 << 20):
        source.hold_chunks(hold)
        for order in ORDERS:
            for index, row in zip(order, source.read(order), strict=True):
                assert (
                    row.dtype.newbyteorder("=") == expected.dtype.newbyteorder("=")
                    and row.shape == expected.shape[1:]
                )
                assert row.astype(expected.dtype).tobytes() == expected[index, ...].tobytes(), (
                    name,
                    index,
                    order,
                )
    like = source.array_spec
    if like is not None:
        batch = np.empty((5, *like[0]), like[1])
        source.read_into(ORDERS[1], [batch[number, ...] for number in range(5)])
        assert batch.tobytes() == expected[ORDERS[1]].tobytes()
    source.close()
    return source


def filled(root: Any, name: str, data: np.ndarray[Any, Any], **how: Any) -> np.ndarray[Any, Any]:
    array = root.create_array(name, shape=data.shape, dtype=data.dtype, **how)
    array[...] = data
    return np.asarray(array[...])


@pytest.mark.quick_every(16)
@pytest.mark.parametrize("codecs", V3)
@pytest.mark.parametrize("dtype", some_slow(DTYPES))
def test_version_3(tmp_path: Path, dtype: str, codecs: str) -> None:
    """Each pair over all rows and chunk shapes, plain and in shards, with the index at either
    end.
    """
    root, expected = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=3), {}
    for name, row in ROWS.items():
        for number, chunks in enumerate(chunk_shapes(row)):
            data, how = values(dtype, row), {"chunks": chunks, **V3[codecs]}
            expected[f"{name}/{number}"] = filled(root, f"{name}/{number}", data, **how)
            if chunks[0] < N:
                shards = (chunks[0] * 3, *(extent * 2 for extent in chunks[1:]))
                at = ("start", "end")[number % 2]
                expected[f"{name}/s{number}"] = filled(
                    root,
                    f"{name}/s{number}",
                    data,
                    **how,
                    shards={"shape": shards, "index_location": at},
                )
    for name, array in expected.items():
        source = check(tmp_path / "a.zarr", name, array)
        assert source.is_direct, source.how()
        assert ("shards" in source.how()[name]) == ("/s" in name)
    check(tmp_path / "a.zarr", "image/0", expected["image/0"], direct=False)


@pytest.mark.quick_every(16)
@pytest.mark.parametrize("codecs", V2)
@pytest.mark.parametrize("dtype", some_slow([*DTYPES, ">i4", ">f8"]))
def test_version_2(tmp_path: Path, dtype: str, codecs: str) -> None:
    if codecs == "delta, zlib" and dtype != "i8":
        pytest.skip("delta is made for one dtype")
    if codecs == "shuffle, zlib" and np.dtype(dtype).itemsize % 4:
        pytest.skip("shuffle is made for elements of 4 bytes")
    root, expected = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=2), {}
    for name, row in ROWS.items():
        for number, chunks in enumerate(chunk_shapes(row)):
            expected[f"{name}/{number}"] = filled(
                root, f"{name}/{number}", values(dtype, row), chunks=chunks, **V2[codecs]
            )
    for name, array in expected.items():
        source = check(tmp_path / "a.zarr", name, array)
        assert source.is_direct == (codecs not in LIBRARY), source.how()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_transposed(tmp_path: Path, order: tuple[int, ...]) -> None:
    data = values("i4", (6, 3))
    root = zarr.open_group(tmp_path / "a.zarr", mode="w")
    expected = filled(
        root,
        "x",
        data,
        chunks=(4, 4, 3),
        filters=[TransposeCodec(order=order)],
        compressors=[ZstdCodec()],
    )
    assert check(tmp_path / "a.zarr", "x", expected).is_direct == (order != (1, 0, 2))


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(
    ("dtype", "fill"),
    [("f4", np.nan), ("f8", -np.inf), ("i2", -7), ("u8", 2**64 - 1), ("?", True), ("c8", 1 + 2j)],
)
def test_what_was_never_written_is_the_fill_value(
    tmp_path: Path, version: int, dtype: str, fill: Any
) -> None:
    root = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=version)
    for name, shards in (("x", None), ("s", (8, 8)))[: version - 1]:
        array = root.create_array(
            name, shape=(N, 6), dtype=dtype, chunks=(4, 4), shards=shards, fill_value=fill
        )
        array[5:7, 1:3] = 1
        source = check(tmp_path / "a.zarr", name, np.asarray(array[...]))
        assert source.is_direct
        with pytest.raises(Exception, match=r"chunk \(3, 0\) of '.' is missing"):
            ZarrSource(tmp_path / "a.zarr", name, missing="error").read([12])


@pytest.mark.parametrize("shards", [None, (8, 6)])
def test_missing_error_keeps_the_fast_path(tmp_path: Path, shards: Any) -> None:
    root = zarr.open_group(tmp_path / "a.zarr", mode="w")
    array = root.create_array(
        "x", shape=(N, 6), dtype="i4", chunks=(4, 6), shards=shards, compressors=None
    )
    array[:8] = np.arange(48).reshape(8, 6)
    filled_up, strict = (
        ZarrSource(tmp_path / "a.zarr", "x", missing=missing) for missing in ("fill", "error")
    )
    indices = [zarr_source._first.chunks.index for zarr_source in (filled_up, strict)]  # type: ignore[union-attr]
    assert type(indices[0]) is type(indices[1]) and strict.how() == filled_up.how()
    rows = np.array([5, 0, 7])
    assert list(strict.byte_ranges(rows).each()) == list(filled_up.byte_ranges(rows).each())
    assert np.array_equal(strict.read([5, 0, 7]), array[:][[5, 0, 7]]) and not np.any(
        filled_up.read([9])
    )
    with pytest.raises(FormatError, match=r"chunk \(2, 0\) of 'x' is missing, and missing='error'"):
        strict.read([1, 9])


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
        filled(
            zarr.open_group(store, mode="w", zarr_format=version), "x", data, chunks=(2, 4, 6, 3)
        )
    source = check(tmp_path / "b.zip", "x", data)
    assert not source.is_direct and "compressed itself" in source.how()["x"]


def test_arrays_and_groups_by_name(tmp_path: Path) -> None:
    root = zarr.open_group(tmp_path / "a.zarr", mode="w")
    filled(root, "deep/er/x", values("i4", (3,)), chunks=(4, 3))
    assert len(ZarrSource(tmp_path / "a.zarr")) == N  # the only one
    filled(root, "labels", values("i8", ()), chunks=(4,))
    with pytest.raises(
        KeyError, match=r"has 2 arrays, name one of them as dataset_name: 'deep/er/x', 'labels'"
    ):
        ZarrSource(tmp_path / "a.zarr")
    with pytest.raises(KeyError, match=r"has no array 'nowhere'; it has: 'deep/er/x', 'labels'"):
        ZarrSource(tmp_path / "a.zarr", "nowhere")
    source = ZarrSource(tmp_path / "a.zarr", ["deep/er/x", "labels"])
    assert sorted(source.read([3])[0]) == ["deep/er/x", "labels"]
    assert np.array_equal(source.column("labels"), values("i8", ()))
    # an array that is a store itself
    assert check(tmp_path / "a.zarr" / "labels", "", values("i8", ())).is_direct


def test_what_is_unusual_goes_to_zarr(tmp_path: Path) -> None:
    root = zarr.open_group(tmp_path / "a.zarr", mode="w")
    filled(root, "x", values("i4", (3,)), chunks=(4, 3))
    place = tmp_path / "a.zarr" / "x" / "zarr.json"
    said = json.loads(place.read_text())
    said["something_new"] = {"must_understand": False}
    place.write_text(json.dumps(said))
    assert "something_new" in ZarrSource(tmp_path / "a.zarr", "x").how()["x"]


def test_nothing_stays_open(tmp_path: Path) -> None:
    root = zarr.open_group(tmp_path / "a.zarr", mode="w")
    filled(root, "x", values("i4", (3,)), chunks=(1, 3), shards=(4, 3))
    before = set(os.listdir("/proc/self/fd"))
    source = ZarrSource(tmp_path / "a.zarr", "x")
    source.read([1, 2, 12])
    assert len(set(os.listdir("/proc/self/fd")) - before) == 2
    source.close()
    assert set(os.listdir("/proc/self/fd")) == before
