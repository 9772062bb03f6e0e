"""Every layout, filter and dtype of HDF5 gives the bytes that h5py gives, by every path."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest
from h5py import h5d, h5p, h5s, h5t

from headrace.formats.hdf5.rows import HDF5Source
from headrace.formats.hdf5.tree import OpenHDF5
from tests.formats import arrays
from tests.formats.arrays import ROWS, N, chunk_shapes, values

DTYPES = ["u1", ">u2", "i4", "u8", "f2", "f4", ">f8", "c8", "c16", "?"]
SHUFFLED = {"compression": "gzip", "shuffle": True}
FILTERS: dict[str, dict[str, Any]] = {
    "raw": {},
    "gzip": {"compression": "gzip"},
    "gzip, shuffle": SHUFFLED,
    "gzip, shuffle, fletcher32": {**SHUFFLED, "fletcher32": True},
    "lzf": {"compression": "lzf"},
    "zstd": dict(hdf5plugin.Zstd()),
    "blosc": dict(hdf5plugin.Blosc()),
    "blosc, zstd, bitshuffle": dict(hdf5plugin.Blosc(cname="zstd", shuffle=2)),
    "lz4": dict(hdf5plugin.LZ4()),
}
RARE: dict[str, dict[str, Any]] = {
    "bitshuffle": dict(hdf5plugin.Bitshuffle()),
    "blosc2": dict(hdf5plugin.Blosc2()),
    "shuffle, fletcher32": {"shuffle": True, "fletcher32": True},
}
LIBRARY = {"lz4", "lzf", "bitshuffle", "blosc2"}


def check(path: Path, name: str, expected: Any, direct: bool = True) -> HDF5Source:
    source: HDF5Source = arrays.check(HDF5Source(path, name, OpenHDF5(direct=direct)), expected)
    return source


@pytest.mark.parametrize(
    "filters", [*FILTERS, *(pytest.param(name, marks=pytest.mark.slow) for name in RARE)]
)
@pytest.mark.quick_every(3)
def test_filters_and_chunk_shapes(tmp_path: Path, filters: str) -> None:
    expected: dict[str, Any] = {}
    all_filters = {**FILTERS, **RARE}
    first = list(all_filters).index(filters)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, row in ROWS.items():
            for number, chunks in enumerate(chunk_shapes(row)):
                dtype = DTYPES[(first + len(expected)) % len(DTYPES)]
                # a chunk may be larger than what there is
                maxshape = (None, *row) if chunks[0] > N else None
                expected[f"{name} {number}"] = data = values(dtype, row)
                file.create_dataset(
                    f"{name} {number}",
                    data=data,
                    chunks=chunks,
                    maxshape=maxshape,
                    **all_filters[filters],
                )
    for name, array in expected.items():
        source = check(tmp_path / "a.h5", name, array)
        assert source.is_direct == (filters not in LIBRARY), source.describe().ways
    assert not check(tmp_path / "a.h5", "image 4", expected["image 4"], direct=False).is_direct


@pytest.mark.parametrize("libver", ["earliest", "v108", "v110", "latest"])
def test_files_of_all_versions(tmp_path: Path, libver: str) -> None:
    """Every index of chunks, and a user block that shifts them."""
    kinds: list[tuple[Any, str]] = [
        (None, "raw"),
        ((1, 6), "raw"),
        ((4, 6), "raw"),
        ((4, 4), "gzip, shuffle, fletcher32"),
        ((N, 6), "gzip"),
    ]
    array = values("i4", (6,))
    for userblock in (0, 512):
        path = tmp_path / f"{userblock}.h5"
        with h5py.File(path, "w", libver=(libver, "latest"), userblock_size=userblock) as file:
            for number, (chunks, filters) in enumerate(kinds):
                for maxshape in (None, (None, None)):
                    if chunks is not None or maxshape is None:
                        file.create_dataset(
                            f"{number} {maxshape}",
                            data=array,
                            chunks=chunks,
                            maxshape=maxshape,
                            **FILTERS[filters],
                        )
            names = list(file)
        for name in names:
            assert check(path, name, array).is_direct, name


# -- fill values


@pytest.mark.parametrize("filters", ["raw", "gzip, shuffle"])
def test_what_was_never_written_is_the_fill_value(tmp_path: Path, filters: str) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for fill in (None, 0, 7):
            how = {"fillvalue": fill, **FILTERS[filters]}
            rows = file.create_dataset(f"{fill} some", (N, 6), "i4", chunks=(4, 4), **how)
            rows[5:7, 1:3] = 3
            file.create_dataset(f"{fill} none", (N, 6), "f4", chunks=(2, 6), **how)
            file.create_dataset(f"{fill} contiguous", (N, 6), "f4", fillvalue=fill)
        for time in ("IFSET", "ALLOC", "NEVER"):
            plist = h5p.create(h5p.DATASET_CREATE)
            plist.set_chunk((4, 6))
            plist.set_fill_time(getattr(h5d, f"FILL_TIME_{time}"))
            plist.set_fill_value(np.array(7, "i4"))
            h5d.create(file.id, time.encode(), h5t.STD_I32LE, h5s.create_simple((N, 6)), plist)
            file[time][5] = 3
        expected = {name: file[name][:] for name in file}
    for name, array in expected.items():
        check(tmp_path / "a.h5", name, array)


@pytest.mark.parametrize("how", [{}, {"chunks": (4, 6), "compression": "gzip"}])
def test_a_fill_value_may_be_undefined(tmp_path: Path, how: Any) -> None:
    with h5py.File(tmp_path / "a.h5", "w", libver="earliest") as file:
        rows = file.create_dataset("x", (N, 6), "i4", fillvalue=0x5A5B5C5D, **how)
        rows[5] = 3
    data = (tmp_path / "a.h5").read_bytes()
    message = bytes([4, 0, 0, 0, 0x5D, 0x5C, 0x5B, 0x5A])  # behind "the value is defined"
    at = data.index(message) - 1
    (tmp_path / "a.h5").write_bytes(data[:at] + b"\0" + data[at + 1 :])
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["x"].id.get_create_plist().fill_value_defined() == h5d.FILL_VALUE_UNDEFINED
        expected = file["x"][:]
    assert check(tmp_path / "a.h5", "x", expected).is_direct


# -- elements of other kinds


@pytest.mark.parametrize("filters", ["raw", "gzip, shuffle", "lzf"])
def test_elements_may_be_arrays(tmp_path: Path, filters: str) -> None:
    array, how, kind = values("f4", (3, 2)), FILTERS[filters], np.dtype(("f4", (3, 2)))
    deep = values(">i2", (5, 2))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (N,), kind, chunks=(4,), **how)[:] = array
        file.create_dataset("deep", (N, 5), np.dtype((">i2", (2,))), chunks=(4, 3), **how)[:] = deep
        file.create_dataset("flat", (N,), kind)[:] = array
        file.create_dataset("unwritten", (N,), kind, chunks=(4,), **how)[5] = array[5]
        unwritten = file["unwritten"][:]
    assert check(tmp_path / "a.h5", "x", array).is_direct == (filters != "lzf")
    check(tmp_path / "a.h5", "x", array, direct=False)
    check(tmp_path / "a.h5", "deep", deep)
    assert check(tmp_path / "a.h5", "flat", array).is_direct
    check(tmp_path / "a.h5", "unwritten", unwritten)


@pytest.mark.parametrize("filters", ["raw", "gzip, shuffle"])
def test_bit_fields_are_read_through_h5py(tmp_path: Path, filters: str) -> None:
    """PyTables writes truth values as such, alone and in tables."""
    table = h5t.create(h5t.COMPOUND, 10)
    table.insert(b"flag", 0, h5t.STD_B8LE)
    table.insert(b"number", 1, h5t.IEEE_F64LE)
    table.insert(b"bits", 9, h5t.STD_B8LE)
    draws = np.random.default_rng(0)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, kind in (("flags", h5t.STD_B8LE), ("wide", h5t.STD_B16BE), ("table", table)):
            plist = h5p.create(h5p.DATASET_CREATE)
            plist.set_chunk((4,))
            if filters != "raw":
                plist.set_shuffle()
                plist.set_deflate(4)
            h5d.create(file.id, name.encode(), kind, h5s.create_simple((N,)), plist)
            dtype = file[name].dtype
            raw = draws.integers(0, 2, (N, dtype.itemsize), np.uint8).view(dtype).reshape(N)
            file[name].id.write(h5s.ALL, h5s.ALL, np.ascontiguousarray(raw), kind)
        expected = {name: file[name][:] for name in file}
    for name, array in expected.items():
        assert array.tobytes().strip(b"\0")
        assert not check(tmp_path / "a.h5", name, array).is_direct, name


@pytest.mark.parametrize("is_text", [False, True])  # read directly, and through h5py
def test_fields_beside_a_caller_of_h5py(tmp_path: Path, is_text: bool) -> None:
    """HDF5 sorts the fields of a compound for all who have it open, when one of them reads it."""
    field = h5t.NATIVE_INT32
    if is_text:
        field = h5t.C_S1.copy()
        field.set_size(4)
    inner, outer = h5t.create(h5t.COMPOUND, 8), h5t.create(h5t.COMPOUND, 12)
    inner.insert(b"a", 4, field)
    inner.insert(b"b", 0, field)
    outer.insert(b"inner", 4, inner)
    outer.insert(b"c", 0, field)
    path, plist = tmp_path / "a.h5", h5p.create(h5p.DATASET_CREATE)
    plist.set_chunk((5,))
    with h5py.File(path, "w") as file:
        h5d.create(file.id, b"x", outer, h5s.create_simple((N,)), plist)
        rows = np.zeros(N, file["x"].dtype)
        rows["inner"]["a"] = np.arange(N)
        rows["inner"]["b"] = np.arange(N) + 30
        rows["c"] = np.arange(N) + 60
        file["x"][...] = rows

    def values_of(source: HDF5Source) -> list[tuple[int, int, int]]:
        read = source.read(range(N))
        source.close()
        return [(int(row["inner"]["a"]), int(row["inner"]["b"]), int(row["c"])) for row in read]

    alone = HDF5Source(path, "x")
    expected, fingerprint = [(row, row + 30, row + 60) for row in range(N)], alone.fingerprint()
    assert values_of(alone) == expected
    with h5py.File(path) as file:
        rows = file["x"]
        assert rows.dtype.names == ("inner", "c")
        before = HDF5Source(path, "x")
        assert rows[0]["c"] == (b"60" if is_text else 60)
        after = HDF5Source(path, "x")
        assert before.fingerprint() == after.fingerprint() == fingerprint
        assert values_of(before) == values_of(after) == expected


# -- chunks and layouts that are not as usual


def hdf5_library() -> ctypes.CDLL:
    """The one that h5py has loaded."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    for line in lines:
        if "/libhdf5-" in line or "/libhdf5.so" in line:
            return ctypes.CDLL(line.split()[-1])
    pytest.skip("h5py has no function for it, and HDF5's library is not found")


@pytest.mark.parametrize(
    "filters", [["shuffle"], ["fletcher32"], ["shuffle", "deflate"], ["deflate", "fletcher32"]]
)
def test_edge_chunks_may_not_be_filtered(tmp_path: Path, filters: list[str]) -> None:
    array, plist = values("i4", (6,)), h5p.create(h5p.DATASET_CREATE)
    plist.set_chunk((4, 6))
    for name in filters:
        getattr(plist, f"set_{name}")(*[4] * (name == "deflate"))
    set_options = hdf5_library().H5Pset_chunk_opts
    set_options.argtypes = [ctypes.c_int64, ctypes.c_uint]
    assert set_options(plist.id, 2) == 0  # H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        h5d.create(file.id, b"x", h5t.STD_I32LE, h5s.create_simple(array.shape), plist)
        file["x"][:] = array
        file.create_dataset("filtered", data=array, chunks=(4, 6), **SHUFFLED)
    assert not check(tmp_path / "a.h5", "x", array).is_direct
    assert check(tmp_path / "a.h5", "filtered", array).is_direct


def test_chunks_whose_filters_were_skipped(tmp_path: Path) -> None:
    array = values("i4", (6,))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        rows = file.create_dataset("x", data=array, chunks=(1, 6), **SHUFFLED)
        rows.id.write_direct_chunk((3, 0), array[3].tobytes(), filter_mask=0b11)
        shuffled = array[4].view(np.uint8).reshape(6, 4).T.tobytes()
        rows.id.write_direct_chunk((4, 0), shuffled, filter_mask=0b10)
        plain = file.create_dataset("without", data=array, chunks=(4, 3))
        plain.id.write_direct_chunk((4, 0), array[4:8, :3].tobytes(), filter_mask=1)
    assert check(tmp_path / "a.h5", "x", array).is_direct
    assert check(tmp_path / "a.h5", "without", array).is_direct


@pytest.mark.parametrize("maxshape", [(None, 6), (N, None), (None, None)])
def test_chunks_of_what_grows(tmp_path: Path, maxshape: Any) -> None:
    """HDF5 itself lists chunks at wrong places where one axis grows that is not the first."""
    for libver in ("earliest", "latest"):
        path = tmp_path / f"{libver}.h5"
        how: Any = {"chunks": (4, 2), "maxshape": maxshape, "compression": "gzip"}
        with h5py.File(path, "w", libver=libver) as file:
            file.create_dataset("all", data=values("i4", (6,)), **how)
            some = file.create_dataset("some", (N, 6), "i4", **how)
            some[12, 5] = some[1, 3] = 9
            if maxshape == (None, None):
                some.resize((2 * N, 9))
                some[N - 3 :, 4:] = 5
                some.resize((N, 6))
            expected = {name: file[name][:] for name in file}
        for name, array in expected.items():
            assert check(path, name, array).is_direct == (maxshape != (N, None))


def test_layouts_that_only_h5py_knows(tmp_path: Path) -> None:
    array = values("i4", (6,))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=array, chunks=(2, 6), compression="gzip")
        file.create_dataset("scaled", data=array // 1000, chunks=(4, 6), scaleoffset=0)
        compact = h5p.create(h5p.DATASET_CREATE)
        compact.set_layout(h5d.COMPACT)
        h5d.create(file.id, b"compact", h5t.STD_I32LE, h5s.create_simple((N, 6)), compact)
        file["compact"][:] = array
        narrow = h5t.STD_I16LE.copy()
        narrow.set_precision(12)
        h5d.create(file.id, b"12 bits", narrow, h5s.create_simple((N,)))
        file["12 bits"][:] = np.arange(N) - 5
        expected = {name: file[name][:] for name in file}
    for name, found in expected.items():
        source = check(tmp_path / "a.h5", name, found)
        assert source.is_direct == (name == "x"), name
        assert source.describe().ways[name].startswith("pread" if name == "x" else "h5py: ")


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name in ("gzip", "lzf"):
            file.create_dataset(name, data=values("i4", (6,)), chunks=(2, 6), compression=name)
    before = set(os.listdir("/proc/self/fd"))
    sources = [HDF5Source(tmp_path / "a.h5", name) for name in ("gzip", "lzf")]
    for source in sources:
        source.read([1, 2])
    assert len(set(os.listdir("/proc/self/fd")) - before) == 2
    sources[0].close()
    del sources, source
    assert set(os.listdir("/proc/self/fd")) == before
