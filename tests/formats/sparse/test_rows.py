"""Rows of sparse matrices as arrays, beside plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, strategies as st

from headrace.formats.sparse.rows import CSRRows


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
    chosen = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=6))
    taken = CSRRows.joined([found.records()[row] for row in chosen])
    assert np.array_equal(scattered(taken, (len(chosen), columns)), dense[chosen])
    picked = data.draw(st.permutations(range(columns)))[: data.draw(st.integers(1, columns))]
    numbers = np.full(columns, -1, "i4")
    numbers[picked] = np.arange(len(picked))
    selected = found.select(numbers).canonical(len(picked))
    assert np.array_equal(scattered(selected, (rows, len(picked))), dense[:, picked])
    again = CSRRows.joined(found.records())
    assert all(np.array_equal(a, b) for a, b in zip(again, found, strict=True))
