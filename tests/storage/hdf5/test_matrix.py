"""Every layout, filter and dtype of HDF5 gives the bytes that h5py gives, by every path."""

from __future__ import annotations

import ctypes
import itertools
import os
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest

from headrace.storage.hdf5.rows import HDF5Source

pytestmark = pytest.mark.quick_every(8)

N = 13
DTYPES = ["u1", "i1", ">u2", "i4", "u8", "f2", "f4", ">f8", "c8", "?"]
QUICK = {"u1", "i4", ">f8", "?"}  # the others are run with the slow tests
ROWS: dict[str, tuple[int, ...]] = {"scalar": (), "1-D": (5,), "image": (4, 6, 3), "one": (1,)}
SHUFFLED = {"compression": "gzip", "shuffle": True}
FILTERS: dict[str, dict[str, Any]] = {
    "raw": {},
    "gzip": {"compression": "gzip"},
    "gzip, shuffle": SHUFFLED,
    "gzip, shuffle, fletcher32": {**SHUFFLED, "fletcher32": True},
    "fletcher32": {"fletcher32": True},
    "shuffle, fletcher32": {"shuffle": True, "fletcher32": True},
    "lzf": {"compression": "lzf"},
    "zstd": dict(hdf5plugin.Zstd()),
    "blosc": dict(hdf5plugin.Blosc()),
    "blosc, zstd, bitshuffle": dict(hdf5plugin.Blosc(cname="zstd", shuffle=2)),
    "lz4": dict(hdf5plugin.LZ4()),
    "bitshuffle": dict(hdf5plugin.Bitshuffle()),
    "blosc2": dict(hdf5plugin.Blosc2()),
}
DIRECT = {name for name in FILTERS if name not in ("lzf", "bitshuffle", "blosc2")}
HEIGHTS = [1, 4, 13, 20]  # rows a chunk: one, some with an edge, all, more than there are
ORDERS = [[*range(N)], [N - 1, 0, 3, 3, 7], [5], [*range(N)][::-1], [0, 0, 0], [2, 4, 6, 8]]


def some_slow(dtypes: list[str]) -> list[Any]:
    return [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in dtypes
    ]


def values(dtype: str, row: tuple[int, ...]) -> np.ndarray[Any, Any]:
    kind = np.dtype(dtype)
    random = np.random.default_rng(1)
    if kind.kind == "b":
        return random.integers(0, 2, (N, *row)).astype(bool)
    data = random.integers(0, 256, int(np.prod((N, *row))) * kind.itemsize, dtype=np.uint8)
    return data.view(kind).reshape((N, *row))


def chunk_shapes(row: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Whole rows, and rows that are cut, with edges that don't fit."""
    whole = [(height, *row) for height in HEIGHTS]
    cut = [
        (height, *(max(1, extent // 2 + 1) for extent in row))
        for height in (1, 4)
        if any(extent > 1 for extent in row)
    ]
    return whole + cut


def check(path: Path, name: str, expected: np.ndarray[Any, Any], direct: bool) -> HDF5Source:
    source = HDF5Source(path, name, direct=direct)
    for hold in (0, 1 << 20):
        source.hold_chunks(hold)
        for order in ORDERS:
            for index, row in zip(order, source.read(order), strict=True):
                assert (row.dtype, row.shape) == (expected.dtype, expected.shape[1:])
                assert row.tobytes() == expected[index, ...].tobytes(), (name, index, order)
    like = source.array_spec
    assert like == ((expected.shape[1:], expected.dtype) if expected.dtype.isnative else None)
    if like is not None:
        batch = np.empty((len(ORDERS[1]), *like[0]), like[1])
        source.read_into(ORDERS[1], [batch[number, ...] for number in range(len(batch))])
        assert batch.tobytes() == expected[ORDERS[1]].tobytes()
    source.close()
    return source


@pytest.mark.quick_every(18)
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("dtype", some_slow(DTYPES))
def test_chunked(tmp_path: Path, dtype: str, filters: str) -> None:
    """Each of 120 pairs over all rows and chunk shapes."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, row in ROWS.items():
            for number, chunks in enumerate(chunk_shapes(row)):
                # a chunk may be larger than what there is
                maxshape = (None, *row) if number == 3 else None
                if chunks[0] > N and maxshape is None:
                    continue
                file.create_dataset(
                    f"{name}/{number}",
                    data=values(dtype, row),
                    chunks=chunks,
                    maxshape=maxshape,
                    **FILTERS[filters],
                )
    count = 0
    for name, row in ROWS.items():
        for number in range(len(chunk_shapes(row))):
            with h5py.File(tmp_path / "a.h5") as file:
                expected = file[f"{name}/{number}"][:]
            source = check(tmp_path / "a.h5", f"{name}/{number}", expected, direct=True)
            assert source.is_direct == (filters in DIRECT), source.how()
            if dtype in ("u1", ">f8"):
                check(tmp_path / "a.h5", f"{name}/{number}", expected, direct=False)
            count += 1
    assert count >= 16


@pytest.mark.parametrize("libver", ["earliest", "v108", "v110", "latest"])
@pytest.mark.parametrize("userblock", [0, 512])
def test_files_of_all_versions(tmp_path: Path, libver: str, userblock: int) -> None:
    options = {"userblock_size": userblock} if userblock else {}
    kinds = [
        (None, {}),
        ((1, 6), {}),
        ((4, 6), {}),
        ((4, 4), FILTERS["gzip, shuffle, fletcher32"]),
        ((13, 6), FILTERS["gzip"]),
    ]
    with h5py.File(tmp_path / "a.h5", "w", libver=(libver, "latest"), **options) as file:
        for number, (chunks, filters) in enumerate(kinds):
            for grows in (False, True):
                if chunks is None and grows:
                    continue
                maxshape = (None, None) if grows else None  # another kind of index
                file.create_dataset(
                    f"{number}{grows}",
                    data=values("i4", (6,)),
                    chunks=chunks,
                    maxshape=maxshape,
                    **filters,
                )
    with h5py.File(tmp_path / "a.h5") as file:
        names = list(file)
    for name in names:
        assert check(tmp_path / "a.h5", name, values("i4", (6,)), direct=True).is_direct, name


@pytest.mark.parametrize("fill", [None, 0, 7])
@pytest.mark.parametrize("filters", ["raw", "gzip, shuffle"])
def test_what_was_never_written_is_the_fill_value(
    tmp_path: Path, fill: int | None, filters: str
) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        rows = file.create_dataset(
            "x", (N, 6), "i4", chunks=(4, 4), fillvalue=fill, **FILTERS[filters]
        )
        rows[5:7, 1:3] = 3
        file.create_dataset(
            "empty", (N, 6), "f4", chunks=(2, 6), fillvalue=fill, **FILTERS[filters]
        )
        file.create_dataset("contiguous", (N, 6), "f4", fillvalue=fill)
        expected = {name: file[name][:] for name in file}
    for name, array in expected.items():
        check(tmp_path / "a.h5", name, array, direct=True)


@pytest.mark.parametrize("time", ["IFSET", "ALLOC", "NEVER"])
def test_fill_values_follow_their_fill_time(tmp_path: Path, time: str) -> None:
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk((4, 6))
    plist.set_fill_time(getattr(h5py.h5d, f"FILL_TIME_{time}"))
    plist.set_fill_value(np.array(7, "i4"))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        h5py.h5d.create(file.id, b"x", h5py.h5t.STD_I32LE, h5py.h5s.create_simple((N, 6)), plist)
        file["x"][5] = 3
        expected = file["x"][:]
    assert check(tmp_path / "a.h5", "x", expected, direct=True).is_direct


@pytest.mark.parametrize("chunks", [None, (4, 6)])
def test_a_fill_value_may_be_undefined(tmp_path: Path, chunks: Any) -> None:
    filters = {} if chunks is None else {"compression": "gzip"}
    with h5py.File(tmp_path / "a.h5", "w", libver="earliest") as file:
        rows = file.create_dataset(
            "x", (N, 6), "i4", chunks=chunks, fillvalue=0x5A5B5C5D, **filters
        )
        rows[5] = 3
    data = (tmp_path / "a.h5").read_bytes()
    message = bytes([4, 0, 0, 0, 0x5D, 0x5C, 0x5B, 0x5A])  # behind "the value is defined"
    at = data.index(message) - 1
    assert data[at] == 1
    (tmp_path / "a.h5").write_bytes(data[:at] + b"\0" + data[at + 1 :])
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["x"].id.get_create_plist().fill_value_defined() == h5py.h5d.FILL_VALUE_UNDEFINED
        expected = file["x"][:]
    assert check(tmp_path / "a.h5", "x", expected, direct=True).is_direct


@pytest.mark.parametrize("filters", ["raw", "gzip, shuffle", "lzf"])
def test_elements_may_be_arrays(tmp_path: Path, filters: str) -> None:
    array = values("f4", (3, 2))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        rows = file.create_dataset(
            "x", (N,), np.dtype(("f4", (3, 2))), chunks=(4,), **FILTERS[filters]
        )
        rows[:] = array
        deep = file.create_dataset(
            "deep", (N, 5), np.dtype((">i2", (2,))), chunks=(4, 3), **FILTERS[filters]
        )
        deep[:] = values(">i2", (5, 2))
        file.create_dataset("flat", (N,), np.dtype(("f4", (3, 2))))[:] = array
        file.create_dataset(
            "unwritten", (N,), np.dtype(("f4", (3, 2))), chunks=(4,), **FILTERS[filters]
        )[5] = array[5]
        expected = file["unwritten"][:]
    assert check(tmp_path / "a.h5", "x", array, direct=True).is_direct == (filters != "lzf")
    check(tmp_path / "a.h5", "x", array, direct=False)
    check(tmp_path / "a.h5", "deep", values(">i2", (5, 2)), direct=True)
    assert check(tmp_path / "a.h5", "flat", array, direct=True).is_direct
    check(tmp_path / "a.h5", "unwritten", expected, direct=True)


@pytest.mark.parametrize(
    "filters", [["shuffle"], ["shuffle", "deflate"], ["deflate", "fletcher32"]]
)
# bytes of chunks that are compared whatever their size
@pytest.mark.parametrize("probe", [1 << 24, 8])
def test_edge_chunks_may_not_be_filtered(
    tmp_path: Path, filters: list[str], probe: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.storage.hdf5.probe._PROBE", probe)
    array, plist = values("i4", (6,)), h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk((4, 6))
    for name in filters:
        getattr(plist, f"set_{name}")(*[4] * (name == "deflate"))
    maps = Path("/proc/self/maps")
    library = (
        {
            line.split()[-1]
            for line in maps.read_text().splitlines()
            if "/libhdf5-" in line or "/libhdf5.so" in line
        }
        if maps.exists()
        else ()
    )
    if not library:
        pytest.skip("h5py has no function for it, and HDF5's library is not found")
    set_options = ctypes.CDLL(library.pop()).H5Pset_chunk_opts
    set_options.argtypes = [ctypes.c_int64, ctypes.c_uint]
    assert set_options(plist.id, 2) == 0  # H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        h5py.h5d.create(
            file.id, b"x", h5py.h5t.STD_I32LE, h5py.h5s.create_simple(array.shape), plist
        )
        file["x"][:] = array
        file.create_dataset("filtered", data=array, chunks=(4, 6), shuffle=True, compression="gzip")
    assert not check(tmp_path / "a.h5", "x", array, direct=True).is_direct
    assert check(tmp_path / "a.h5", "filtered", array, direct=True).is_direct


@pytest.mark.parametrize("filters", ["raw", "gzip, shuffle"])
def test_bit_fields_are_read_directly(tmp_path: Path, filters: str) -> None:
    """PyTables writes truth values as such, alone and in tables."""
    h5t, table = h5py.h5t, h5py.h5t.create(h5py.h5t.COMPOUND, 10)
    for name, at, kind in (
        (b"flag", 0, h5t.STD_B8LE),
        (b"number", 1, h5t.IEEE_F64LE),
        (b"bits", 9, h5t.STD_B8LE),
    ):
        table.insert(name, at, kind)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, kind in (("flags", h5t.STD_B8LE), ("wide", h5t.STD_B16BE), ("table", table)):
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plist.set_chunk((4,))
            if filters != "raw":
                plist.set_shuffle()
                plist.set_deflate(4)
            h5py.h5d.create(file.id, name.encode(), kind, h5py.h5s.create_simple((N,)), plist)
            dtype = file[name].dtype
            raw = (
                np.random.default_rng(0)
                .integers(0, 2, (N, dtype.itemsize), np.uint8)
                .view(dtype)
                .reshape(N)
            )
            file[name].id.write(h5py.h5s.ALL, h5py.h5s.ALL, np.ascontiguousarray(raw), kind)
        expected = {name: file[name][:] for name in file}
    for name, array in expected.items():
        assert array.tobytes().strip(b"\0")
        check(tmp_path / "a.h5", name, array, direct=False)
        assert check(tmp_path / "a.h5", name, array, direct=True).is_direct, name


def test_chunks_whose_filters_were_skipped(tmp_path: Path) -> None:
    array = values("i4", (6,))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        rows = file.create_dataset("x", data=array, chunks=(1, 6), compression="gzip", shuffle=True)
        rows.id.write_direct_chunk((3, 0), array[3].tobytes(), filter_mask=0b11)
        rows.id.write_direct_chunk(
            (4, 0), array[4].view(np.uint8).reshape(6, 4).T.tobytes(), filter_mask=0b10
        )
        assert np.array_equal(rows[:], array)
    assert check(tmp_path / "a.h5", "x", array, direct=True).is_direct


def test_a_dataset_that_has_grown_and_shrunk(tmp_path: Path) -> None:
    array = values("i4", (6,))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        rows = file.create_dataset(
            "x",
            data=np.concatenate([array, array]),
            chunks=(4, 4),
            maxshape=(None, None),
            compression="gzip",
        )
        rows.resize((N, 6))
        rows.resize((N, 9))
        rows.resize((N, 6))
    assert check(tmp_path / "a.h5", "x", array, direct=True).is_direct


def test_layouts_that_only_h5py_knows(tmp_path: Path) -> None:
    array = values("i4", (6,))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=array, chunks=(2, 6), compression="gzip")
        layout = h5py.VirtualLayout((N, 6), "i4")
        layout[:] = h5py.VirtualSource(file["x"])
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset("scaled", data=array // 1000, chunks=(4, 6), scaleoffset=0)
        file.create_dataset(
            "external", data=array, external=[(str(tmp_path / "raw.bin"), 0, h5py.h5f.UNLIMITED)]
        )
        expected = {name: file[name][:] for name in file}
    for name, found in expected.items():
        source = check(tmp_path / "a.h5", name, found, direct=True)
        assert source.is_direct == (name == "x")
        assert source.how()[name].startswith("pread" if name == "x" else "h5py: ")


def test_enough_combinations() -> None:
    shapes = sum(len(chunk_shapes(row)) for row in ROWS.values())
    assert len(list(itertools.product(DTYPES, FILTERS))) * shapes >= 400


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=values("i4", (6,)), chunks=(2, 6), compression="gzip")
        file.create_dataset("y", data=values("i4", (6,)), chunks=(2, 6), compression="lzf")
    before = set(os.listdir("/proc/self/fd"))
    sources = [HDF5Source(tmp_path / "a.h5", name) for name in ("x", "y")]
    for source in sources:
        source.read([1, 2])
    assert len(set(os.listdir("/proc/self/fd")) - before) == 2
    sources[0].close()
    del sources, source
    assert set(os.listdir("/proc/self/fd")) == before
