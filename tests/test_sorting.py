"""Whole numbers are sorted, and never hashed."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.sorting import distinct


@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.sampled_from([np.int64, np.uint16, np.int8]))
def test_each_value_comes_once(values: list[int], dtype: type) -> None:
    array = np.array(values, np.int64).astype(dtype)
    found = distinct(array)
    assert found.dtype == array.dtype and np.array_equal(found, np.unique(array))


def test_any_shape() -> None:
    assert distinct([[3, 1], [3, 2]]).tolist() == [1, 2, 3]
    assert distinct(5).tolist() == [5]


def test_nobody_asks_numpy() -> None:
    """`np.unique` of numbers alone takes fifty times as long; with an index, an inverse, counts
    or an axis it sorts.
    """
    for path in Path(headrace.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "unique"
            ):
                assert node.keywords, f"{path}:{node.lineno}: headrace.sorting.distinct"
