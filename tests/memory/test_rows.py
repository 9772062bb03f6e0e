"""Many samples are copied out of a store as one by one, and never while they are written over."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings, strategies as st

from headrace.memory.store import SampleStore

DTYPES = ["uint8", "int16", "uint16", "int64", "float16", "float32", "float64", "complex64", "bool"]


def filled(samples: list[Any], capacity: int = 1 << 20, policy: str = "keep") -> SampleStore:
    store = SampleStore(len(samples), capacity, policy)
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
    others += [np.asfortranarray(samples[0]), np.ma.masked_array(samples[0])]
    for other in [*others, np.array([None, 1], object)]:
        for mixed in ([*samples, other], [other, *samples]):
            store = filled(mixed)
            assert store.rows(np.array([1, 2])) is None  # for ever, even of those that are alike
            assert (store.get(1 if mixed[0] is samples[0] else 2) == samples[1]).all()


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
