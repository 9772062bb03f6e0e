"""Rows of one shape in shared memory: values, room, pressure, and other processes."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.memory.row_store import RowStore, row_layout
from headrace.memory.store import MISSING

KINDS = [((4,), "f4"), ((), "i8"), ((3, 5), "u1"), ((700,), "f8"), ((2,), "c8"), ((1,), "?")]


def store_of(length: int, rows: int, shape: tuple[int, ...] = (4,), dtype: str = "f4") -> RowStore:
    layout = row_layout(shape, np.dtype(dtype))
    assert layout is not None
    return RowStore(length, rows * layout.entry, layout)


def rows_of(count: int, shape: tuple[int, ...] = (4,), dtype: str = "f4") -> Any:
    return np.random.default_rng(1).integers(0, 100, (count, *shape)).astype(dtype)


def test_rows_come_back_one_by_one_and_together() -> None:
    for shape, dtype in KINDS:
        check_rows(shape, dtype)


def check_rows(shape: tuple[int, ...], dtype: str) -> None:
    store, rows = store_of(48, 48, shape, dtype), rows_of(48, shape, dtype)
    order = np.random.default_rng(2).permutation(48)
    for some in np.split(order, 6):
        assert store.put_rows(some.tolist(), [rows[i, ...] for i in some])
    for index in range(48):
        found = store.get(index)
        assert (found.dtype, found.shape) == (rows.dtype, shape)
        assert np.array_equal(found, rows[index])
        found[...] = 0  # a copy
    together = store.rows(np.arange(48))
    assert together is not None
    assert all(np.array_equal(together[i], rows[i]) for i in range(48))
    assert together.are_held()
    assert len(store) == 48 and store.stats()["admitted"] == 48


def test_what_does_not_fit_is_refused() -> None:
    assert row_layout((0,), np.dtype("f4")) is None is row_layout((2,), np.dtype("U3"))
    store, rows = store_of(20, 8), rows_of(20)
    for other in (rows[0].astype("f8"), rows[:2], [1, 2, 3, 4]):
        assert not store.put(0, other)
    assert store.put_rows(range(6), list(rows[:6])) and store.put_rows(range(3, 8), list(rows[3:8]))
    assert not store.put(9, rows[9]) and store.is_full and store.get(9) is MISSING
    assert [np.array_equal(store.get(i), rows[i]) for i in range(8)] == [True] * 8


def test_pressure_takes_the_oldest_and_they_may_come_again() -> None:
    store, rows = store_of(34, 24), rows_of(34)
    assert store.put_rows(range(24), list(rows[:24]))
    entry = store.row_nbytes
    seen = store.rows(np.arange(5))
    assert store.release(12 * entry) == 12 * entry
    assert seen is not None and not seen.are_held()
    assert [i for i in range(34) if i in store] == [*range(12, 24)]
    store.grow(10 * entry)
    # behind the end of the log, and at its beginning
    assert store.put_rows(range(24, 34), list(rows[24:]))
    assert all(np.array_equal(store.get(i), rows[i]) for i in range(12, 34))
    assert store.rows(np.arange(11, 14)) is None
