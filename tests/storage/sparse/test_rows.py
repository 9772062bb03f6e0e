"""Spans of arrays, and rows of sparse matrices as arrays, beside plain NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.storage.arrays.spans import read_joined
from headrace.storage.hdf5.rows import OpenHDF5
from headrace.storage.source import one_after_the_other
from headrace.storage.sparse.hdf5 import HDF5Groups
from headrace.storage.sparse.rows import CSRRows
from headrace.storage.sparse.zarr import ZarrGroups
from headrace.storage.zarr.rows import OpenZarr

LENGTH = 200
VALUES = np.random.default_rng(0).integers(0, 99, LENGTH).astype("i4")
HOLES = np.full(LENGTH, 7, "i4")
HOLES[32:64] = VALUES[32:64]


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What reads the same array in several layouts, those of HDF5 and of Zarr; and one of which
    some chunks were never written.
    """
    folder: Path = tmp_path_factory.mktemp("spans")
    path = str(folder / "a.h5")
    with h5py.File(path, "w") as file:
        file["plain"] = VALUES
        file.create_dataset("raw", data=VALUES, chunks=(16,))
        file.create_dataset("gzip", data=VALUES, chunks=(16,), compression="gzip")
        file.create_dataset("lzf", data=VALUES, chunks=(64,), compression="lzf")
        for name, compression in (("holes", None), ("gzip holes", "gzip")):
            how: Any = {"chunks": (16,), "fillvalue": 7, "compression": compression}
            file.create_dataset(name, (LENGTH,), "i4", **how)[32:64] = VALUES[32:64]
    root = zarr.open_group(folder / "a.zarr", mode="w")
    root.create_array("files", data=VALUES, chunks=(16,), compressors=None)
    root.create_array("shards", data=VALUES, chunks=(8,), shards=(64,))
    hdf5, stores = OpenHDF5(), OpenZarr()
    with hdf5.hdf5.reading(path) as file:
        groups = HDF5Groups(file, path, hdf5)
        of_hdf5 = [(groups.spans(name)[0], HOLES if "holes" in name else VALUES) for name in file]
    store = ZarrGroups(stores.store(folder / "a.zarr"), stores)
    of_zarr = [(store.spans(name)[0], VALUES) for name in ("files", "shards")]
    hdf5.chunks.resize(1 << 20)
    stores.chunks.resize(100)  # a few chunks
    yield of_hdf5, of_zarr
    hdf5.close()
    stores.close()


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, LENGTH), st.integers(0, 60)), max_size=8))
def test_spans_one_behind_the_other(readers: Any, spans: list[tuple[int, int]]) -> None:
    """Of each array alone, and of those of a file together, which share a cache."""
    firsts = np.array([first for first, _ in spans], np.int64)
    ends = np.minimum(firsts + np.array([count for _, count in spans], np.int64), LENGTH)
    for together in readers:
        for group in (*([one] for one in together), together):
            found = read_joined([reader for reader, _ in group], firsts, ends, one_after_the_other)
            for rows, (reader, values) in zip(found, group, strict=True):
                parts = [values[a:b] for a, b in zip(firsts, ends, strict=True)]
                assert np.array_equal(rows, np.concatenate([values[:0], *parts])), reader.how


def scattered(rows: CSRRows, shape: tuple[int, int]) -> np.ndarray[Any, Any]:
    out = np.full(shape, np.nan, "f4")
    rows.scatter(out)
    return out


@given(st.data())
def test_rows_are_those_of_a_dense_array(data: Any) -> None:
    rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    pair = st.tuples(st.integers(0, columns - 1), st.integers(-3, 3))
    each = [data.draw(st.lists(pair, max_size=6)) for _ in range(rows)]
    sizes = np.array([len(one) for one in each], np.int64)
    dense, pairs = np.zeros((rows, columns), "f4"), []
    for row, one in enumerate(each):
        for column, value in one:
            dense[row, column] += value
            pairs.append((column, value))
    table = np.array(pairs, np.int64).reshape(-1, 2)
    given_rows = CSRRows.of(sizes, table[:, 0].astype("i4"), table[:, 1].astype("f4"))
    found = given_rows.canonical(columns)
    assert np.array_equal(scattered(found, dense.shape), dense)
    assert all((np.diff(indices) > 0).all() for indices, _ in found.records())
    assert found.outside(columns) is None
    chosen = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=6))
    order = np.array(chosen, np.int64)
    assert np.array_equal(scattered(found.take(order), (len(order), columns)), dense[order])
    picked = data.draw(st.permutations(range(columns)))[: data.draw(st.integers(1, columns))]
    numbers = np.full(columns, -1, "i4")
    numbers[picked] = np.arange(len(picked))
    selected = found.select(numbers).canonical(len(picked))
    assert np.array_equal(scattered(selected, (rows, len(picked))), dense[:, picked])
    again = CSRRows.joined(found.records())
    assert all(np.array_equal(a, b) for a, b in zip(again, found, strict=True))


@given(
    st.lists(st.lists(st.integers(-1, 5), max_size=4), min_size=1, max_size=5),
    st.sampled_from(["i2", ">i4", "i8", "u2", ">u4"]),
)
def test_only_canonical_rows_pass_the_check(each: list[list[int]], dtype: str) -> None:
    columns = np.array([column for one in each for column in one], "i8").astype(dtype)
    rows = CSRRows.of(np.array([len(one) for one in each]), columns, np.ones(len(columns)))
    assert rows.is_canonical(5) == (rows.outside(5) is None and rows.canonical(5) is rows)


def test_the_first_column_outside_is_named() -> None:
    rows = CSRRows.of(np.array([2, 0, 1, 2]), np.array([0, 1, 4, 0, -1]), np.ones(5))
    assert rows.outside(4) == (2, 4) and rows.outside(5) == (3, -1)
