"""Whole numbers that differ."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from headrace.sorting import distinct


@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.sampled_from([np.int64, np.uint16, np.int8]))
def test_each_value_comes_once(values: list[int], dtype: type) -> None:
    array = np.array(values, np.int64).astype(dtype)
    found = distinct(array)
    assert found.dtype == array.dtype and np.array_equal(found, np.unique(array))


def test_any_shape() -> None:
    assert distinct([[3, 1], [3, 2]]).tolist() == [1, 2, 3]
    assert distinct(5).tolist() == [5]
