"""Samples of one shape: values, room, pressure, and copies of many of them at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from headrace.memory.store import MISSING, SampleStore

DTYPES = ["uint8", "int16", "uint16", "int64", "float16", "float32", "float64", "complex64", "bool"]


def filled(samples: list[Any]) -> SampleStore:
    store = SampleStore(len(samples), 1 << 20)
    for index, sample in enumerate(samples):
        store.put(index, sample)
    return store


def some(shape: tuple[int, ...], dtype: str, count: int = 12) -> list[np.ndarray[Any, Any]]:
    return [(np.random.default_rng(i).random(shape) * 100).astype(dtype) for i in range(count)]


def copied(
    store: SampleStore, indices: list[int], plain: bool = False
) -> np.ndarray[Any, Any] | None:
    rows = store.rows(np.array(indices))
    if rows is None:
        return None
    out = torch.from_numpy(np.empty((len(indices), *rows.spec.shape), rows.spec.dtype))
    if plain:
        for number in range(len(rows)):
            out[number] = torch.from_numpy(np.array(rows[number]))
    else:
        rows.copy_to(out)
    assert rows.are_held() and len(rows) == len(indices)
    return out.numpy()


def test_rows_are_the_samples_one_by_one() -> None:
    for shape in [(), (1,), (7, 5), (3, 40, 40)]:
        for dtype in DTYPES:
            samples = [np.asarray(sample) for sample in some(shape, dtype)]
            store, indices = filled(samples), [3, 0, 11, 3, 7]
            wanted = np.stack([samples[i] for i in indices])
            for plain in (True, False):
                found = copied(store, indices, plain)
                assert found is not None and found.dtype == wanted.dtype and (found == wanted).all()


def test_only_where_everything_is_of_one_kind() -> None:
    samples = some((3, 4), "uint8", 4)
    assert copied(filled(samples), [0, 1]) is not None
    others: list[Any] = [np.zeros(shape, np.uint8) for shape in ((3, 5), (4, 3), (0, 4))]
    others += [np.zeros((3, 4), np.int8), b"x" * 12, None, (samples[0],)]
    others += [np.ma.masked_array(samples[0]), np.array([None, 1], object)]
    for other in others:
        for mixed in ([*samples, other], [other, *samples]):
            store = filled(mixed)
            assert store.rows(np.array([1, 2])) is None  # for ever, even of those that are alike
            assert store.is_mixed and 4 in store
            assert all(store.put(index, value) for index, value in enumerate(mixed))
            assert (store.get(1 if mixed[0] is samples[0] else 2) == samples[1]).all()
            assert len(store) == 5 and store.rows(np.array([1, 2])) is None


def test_rows_that_had_to_go() -> None:
    samples = some((100, 7), "float32", 200)
    store = filled([*samples, None])
    assert store.is_mixed and [i for i in range(201) if i in store] == [200]
    assert len(store) == 1 == store.stats()["admitted"] - store.stats()["evicted"]
    assert store.put_many(range(200), np.stack(samples))
    assert all((store.get(i) == samples[i]).all() for i in range(200)) and store.get(200) is None


def test_a_reader_of_rows_that_had_to_go() -> None:
    store = filled(some((100, 7), "float32", 4))
    rows = store.rows(np.arange(4))
    assert rows is not None and rows.are_held()
    assert not store.put(0, "text") or 0 in store
    rows.copy_to(torch.empty(4, 100, 7))
    assert not rows.are_held()


def test_one_that_is_missing_and_none_at_all() -> None:
    store = SampleStore(5, 1 << 16)
    assert store.rows(np.array([0])) is None
    store.put(2, np.zeros(4))
    assert store.rows(np.array([2, 2])) is not None
    assert store.rows(np.array([2, 3])) is None
    assert store.rows(np.array([], np.int64)) is None


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_was_evicted_and_came_again(data: st.DataObject) -> None:
    """The log wraps round, whatever its capacity: positions stay multiples of an entry's size."""
    length, nbytes = 40, data.draw(st.sampled_from([1, 64, 100, 300]))
    store = SampleStore(length, data.draw(st.integers(600, 6000)), "lru")
    for index in data.draw(st.lists(st.integers(0, length - 1), max_size=120)):
        store.put(index, np.full(nbytes, index, np.uint8))
    held = [i for i in range(length) if i in store]
    if held:
        wanted = np.array(held)[data.draw(st.permutations(range(len(held))))]
        found = copied(store, wanted.tolist())
        assert found is not None and (found == wanted[:, None]).all()
    gone = next((i for i in range(length) if i not in store), None)
    assert gone is None or store.rows(np.array([*held, gone])) is None


def store_of(length: int, rows: int, policy: str = "keep") -> SampleStore:
    entry = SampleStore.nbytes_of(np.zeros(4, np.float32))
    return SampleStore(length, rows * entry + entry - 1, policy)


def rows_of(count: int) -> Any:
    return np.random.default_rng(1).integers(0, 100, (count, 4)).astype(np.float32)


def test_rows_for_which_there_is_no_room_are_refused() -> None:
    store, rows = store_of(20, 8), rows_of(20)
    assert store.put_many(range(6), list(rows[:6])) and store.put_many(range(3, 8), rows[3:8])
    assert not store.put(9, rows[9]) and store.header.full and store.get(9) is MISSING
    assert [np.array_equal(store.get(i), rows[i]) for i in range(8)] == [True] * 8
    store.use_lru()
    assert store.put_many(range(10, 14), rows[10:14])
    assert sum(i in store for i in range(20)) == 8 == len(store)
    assert all(np.array_equal(store.get(i), rows[i]) for i in range(20) if i in store)


@pytest.mark.parametrize("policy", ["keep", "lru"])
def test_pressure_takes_the_oldest_and_they_may_come_again(policy: str) -> None:
    store, rows = store_of(34, 24, policy), rows_of(34)
    assert store.put_many(range(24), rows[:24])
    entry = SampleStore.nbytes_of(rows[0])
    seen = store.rows(np.arange(5))
    assert store.adjust(12 * entry - 1) == 12 * entry == store.stats()["released_bytes"]
    assert store.nbytes == 12 * entry and store.limit == 12 * entry + 1
    assert seen is not None and not seen.are_held()
    assert [i for i in range(34) if i in store] == [*range(12, 24)]
    store.adjust(-10 * entry)
    # behind the end of the log, and at its beginning
    assert store.put_many(range(24, 34), rows[24:])
    assert all(np.array_equal(store.get(i), rows[i]) for i in range(12, 34))
    assert store.rows(np.arange(11, 14)) is None
