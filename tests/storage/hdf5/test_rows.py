"""Rows of HDF5 files: the same bytes on both paths, and errors that name the place."""

from __future__ import annotations

import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from h5py import h5d, h5p, h5s, h5t

from headrace.errors import (
    DataNotFoundError,
    FileChangedError,
    FormatError,
    HeadraceError,
    MissingNameError,
)
from headrace.storage.arrays.packed import crc_of
from headrace.storage.hdf5.files import is_hdf5
from headrace.storage.hdf5.packed import packed_info
from headrace.storage.hdf5.rows import HDF5Source

N = 12
DTYPES = ["u1", "i2", "i8", "f2", "f4", "f8", "?", "c8", "c16"]


def values(dtype: str, row: tuple[int, ...], n: int = N) -> np.ndarray[Any, Any]:
    """Random bytes as numbers: every bit counts (of truth values only one)."""
    kind = np.dtype(dtype)
    shape = (n, *row)
    if kind.kind == "b":
        return np.random.default_rng(1).integers(0, 2, shape).astype(bool)
    data = np.random.default_rng(1).integers(
        0, 256, int(np.prod(shape)) * kind.itemsize, dtype=np.uint8
    )
    return data.view(kind).reshape(shape)


def write(path: Path, array: np.ndarray[Any, Any], **how: Any) -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=array, **how)
    return path


def check(source: HDF5Source, array: np.ndarray[Any, Any]) -> None:
    """Every row, bit for bit, dtype and shape included; in any order, and one twice."""
    assert len(source) == len(array)
    order = [*range(len(array)), 0, len(array) - 1, 3]
    for index, row in zip(order, source.read(order), strict=True):
        assert isinstance(row, np.ndarray)
        assert (row.dtype, row.shape) == (array.dtype, array.shape[1:])
        assert row.tobytes() == array[index].tobytes()
    source.close()


@pytest.mark.parametrize("row", [(), (5,), (4, 3, 2)], ids=["scalar", "1-D", "3-D"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_contiguous_rows_are_the_same_directly_and_through_h5py(
    tmp_path: Path, dtype: str, row: tuple[int, ...]
) -> None:
    array = values(dtype, row)
    path = write(tmp_path / "a.h5", array)
    direct, plain = HDF5Source(path, "x"), HDF5Source(path, "x", direct=False)
    assert direct.is_direct and not plain.is_direct
    check(direct, array)
    check(plain, array)


@pytest.mark.parametrize(
    "how",
    [
        {"chunks": (1, 5)},
        {"chunks": (1, 5), "compression": "gzip"},
        {"chunks": (4, 5), "compression": "gzip", "shuffle": True, "fletcher32": True},
        {"chunks": (5, 2)},
        {"maxshape": (None, 5)},
    ],
    ids=["one sample a chunk", "gzip", "gzip, shuffle, fletcher32", "cut rows", "may grow"],
)
def test_chunked_rows(tmp_path: Path, how: dict[str, Any]) -> None:
    array = values("f4", (5,))
    path = write(tmp_path / "a.h5", array, **how)
    direct, plain = HDF5Source(path, "x"), HDF5Source(path, "x", direct=False)
    assert direct.is_direct and not plain.is_direct
    check(direct, array)
    check(plain, array)


@pytest.mark.parametrize("dtype", [">i4", ">f8"])
def test_big_endian_rows_keep_their_byte_order(tmp_path: Path, dtype: str) -> None:
    array = values(dtype, (5,))
    source = HDF5Source(write(tmp_path / "a.h5", array), "x")
    assert source.is_direct
    check(source, array)


def test_a_user_block_shifts_the_rows(tmp_path: Path) -> None:
    array = values("i4", (5,))
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=1024) as file:
        file["x"] = array
    source = HDF5Source(tmp_path / "a.h5", "x")
    assert source.is_direct
    check(source, array)


def test_layouts_that_have_no_place_of_their_own(tmp_path: Path) -> None:
    array = values("i4", (5,))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = array
        layout = h5py.VirtualLayout((N, 5), "i4")
        layout[:] = h5py.VirtualSource(file["x"])
        file.create_virtual_dataset("virtual", layout)
        raw = [(tmp_path / "raw.bin", 0, h5py.h5f.UNLIMITED)]
        file.create_dataset("external", (N, 5), "i4", external=raw)[:] = array
        compact = h5p.create(h5p.DATASET_CREATE)
        compact.set_layout(h5d.COMPACT)
        h5d.create(file.id, b"compact", h5t.STD_I32LE, h5s.create_simple((N, 5)), compact)
        file["compact"][:] = array
        narrow = h5t.STD_I16LE.copy()
        narrow.set_precision(12)
        h5d.create(file.id, b"12 bits", narrow, h5s.create_simple((N,)))
        file["12 bits"][:] = np.arange(N) - 5
        file.create_dataset("unwritten", (N, 5), "i4", fillvalue=7)
    for name in ("virtual", "external", "compact"):
        source = HDF5Source(tmp_path / "a.h5", name)
        assert not source.is_direct, name
        check(source, array)
    check(HDF5Source(tmp_path / "a.h5", "12 bits"), np.arange(N, dtype=np.int16) - 5)
    check(HDF5Source(tmp_path / "a.h5", "unwritten"), np.full((N, 5), 7, np.int32))


def test_rows_without_bytes_and_files_without_rows(tmp_path: Path) -> None:
    check(
        HDF5Source(write(tmp_path / "a.h5", np.empty((N, 0), np.float32)), "x"),
        np.empty((N, 0), np.float32),
    )
    empty = HDF5Source(write(tmp_path / "b.h5", np.empty((0, 3), np.float32)), "x")
    assert len(empty) == 0 and empty.read([]) == [] and len(empty.blocks()) == 0


def test_blocks_follow_the_chunks(tmp_path: Path) -> None:
    source = HDF5Source(write(tmp_path / "a.h5", values("u1", (5,)), chunks=(5, 5)), "x")
    assert source.blocks().tolist() == [5, 5, 2]
    assert source.sizes().tolist() == [5] * N


def test_a_pickled_source_reads_the_same_rows(tmp_path: Path) -> None:
    array = values("f4", (5,))
    source = HDF5Source(write(tmp_path / "a.h5", array), "x")
    source.read([0])
    check(pickle.loads(pickle.dumps(source)), array)
    source.close()


def test_a_missing_name_lists_the_names_that_are_there(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["train/images"], file["labels"] = np.zeros((3, 2)), np.zeros(3)
    with pytest.raises(
        MissingNameError, match=r"a\.h5 has no dataset 'data'; it has: labels, train/images"
    ) as caught:
        HDF5Source(tmp_path / "a.h5")
    assert isinstance(caught.value, KeyError)
    with pytest.raises(MissingNameError, match="'train'"):
        HDF5Source(tmp_path / "a.h5", "train")  # a group


@pytest.mark.parametrize("is_text", [False, True])  # read directly, and through h5py
@pytest.mark.parametrize("chunks", [None, (5,)])
def test_fields_beside_a_caller_of_h5py(
    tmp_path: Path, chunks: tuple[int, ...] | None, is_text: bool
) -> None:
    """HDF5 sorts the fields of a compound for all who have it open, when one of them reads it."""
    text = h5t.C_S1.copy()
    text.set_size(4)
    field = text if is_text else h5t.NATIVE_INT32
    inner, outer = h5t.create(h5t.COMPOUND, 8), h5t.create(h5t.COMPOUND, 12)
    inner.insert(b"a", 4, field)
    inner.insert(b"b", 0, field)
    outer.insert(b"inner", 4, inner)
    outer.insert(b"c", 0, field)
    path, plist = tmp_path / "a.h5", h5p.create(h5p.DATASET_CREATE)
    if chunks is not None:
        plist.set_chunk(chunks)
    with h5py.File(path, "w") as file:
        h5d.create(file.id, b"x", outer, h5s.create_simple((N,)), plist)
        rows = np.zeros(N, file["x"].dtype)
        rows["inner"]["a"], rows["inner"]["b"], rows["c"] = (
            np.arange(N),
            np.arange(N) + 30,
            np.arange(N) + 60,
        )
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


def test_what_has_no_rows_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["one"] = 3.0
    with pytest.raises(FormatError, match="'one' is a single value"):
        HDF5Source(tmp_path / "a.h5", "one")


def test_a_truncated_file_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", values("u1", (5000,)))
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(FormatError, match=r"a\.h5 is no HDF5 file, or not a whole one.*truncated"):
        HDF5Source(path, "x")


def test_a_file_truncated_while_it_is_open_names_the_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", values("u1", (5000,)))
    source = HDF5Source(path, "x")
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(FileChangedError, match=r"a\.h5 has been changed since it was opened"):
        source.read([N - 1])
    source.close()


def test_no_hdf5_file_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "words.h5").write_text("words")
    assert (
        not is_hdf5(tmp_path / "words.h5")
        and not is_hdf5(tmp_path / "none.h5")
        and not is_hdf5(tmp_path)
    )
    with pytest.raises(FormatError, match=r"words\.h5 is no HDF5 file"):
        HDF5Source(tmp_path / "words.h5")
    with pytest.raises(DataNotFoundError, match=r"none\.h5 does not exist"):
        HDF5Source(tmp_path / "none.h5")


def test_damage_inside_names_the_file(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w", libver=("v108", "v108")) as file:
        file["x"] = np.arange(10)
        header = h5py.h5o.get_info(file["x"].id).addr
    data = bytearray((tmp_path / "a.h5").read_bytes())
    data[header + 20] ^= 0xFF
    (tmp_path / "a.h5").write_bytes(data)
    with pytest.raises(HeadraceError, match=r"a\.h5"):
        HDF5Source(tmp_path / "a.h5", "x")


def test_columns_have_one_row_a_sample(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["data"], file["good"], file["short"], file["one"] = (
            np.zeros((4, 2)),
            np.arange(4),
            np.arange(3),
            1,
        )
    source = HDF5Source(tmp_path / "a.h5")
    assert source.column("good").tolist() == [0, 1, 2, 3]
    for name in ("short", "one"):
        with pytest.raises(FormatError, match=f"'{name}' has shape"):
            source.column(name)
    with pytest.raises(MissingNameError, match="it has: data, good, one, short"):
        source.column("none")


def test_fingerprints_tell_layouts_apart_and_not_places(tmp_path: Path) -> None:
    array = values("i4", (5,))
    first = HDF5Source(write(tmp_path / "a.h5", array), "x").fingerprint()
    assert HDF5Source(write(tmp_path / "b.h5", array + 1), "x").fingerprint() == first
    others = [
        write(tmp_path / "c.h5", array[1:]),
        write(tmp_path / "d.h5", array, chunks=(1, 5)),
        write(tmp_path / "e.h5", values("f4", (5,))),
    ]
    assert len({first, *(HDF5Source(p, "x").fingerprint() for p in others)}) == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "damaged"),
        ("[]", "damaged"),
        ('{"version": 1}', "damaged"),
        ('{"version": 99}', "packed by a later headrace.*upgrade"),
    ],
)
def test_what_a_packed_file_says_is_checked(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "a.h5", np.zeros(3))
    assert packed_info(path) is None
    with h5py.File(path, "a") as file:
        file.attrs["headrace"] = text
    with pytest.raises(FormatError, match=rf"a\.h5.*{message}"):
        packed_info(path)


@pytest.mark.parametrize("dtype", [*DTYPES, ">i4", ">c16", "g"])
def test_checksums_are_of_the_bytes(dtype: str) -> None:
    for shape in ((), (0,), (3, 0), (4, 3)):
        array = np.ones(shape, dtype)
        assert crc_of(array) == zlib.crc32(array.tobytes())
    turned = np.arange(12, dtype="i4").reshape(3, 4).T
    assert crc_of(turned) == zlib.crc32(turned.tobytes())
