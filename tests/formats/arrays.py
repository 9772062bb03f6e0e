"""What the matrices of HDF5 and Zarr share: arrays, the chunks that they are cut into, and the ways
in which rows are read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.formats.tree import TreeSource
from headrace.formats.zarr.tree import OpenZarr

N = 13
ROWS: dict[str, tuple[int, ...]] = {"scalar": (), "1-D": (5,), "image": (4, 6, 3)}
ORDERS = [[*range(N)], [N - 1, 0, 3, 3, 7], [2, 4, 6, 8]]


def zarr_rows(path: Any, name: Any = None, **options: Any) -> TreeSource:
    return TreeSource(path, name, OpenZarr(**options))


def values(dtype: str, row: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Random bytes as numbers: every bit counts (of truth values only one)."""
    kind, random = np.dtype(dtype), np.random.default_rng(1)
    if kind.kind == "b":
        return random.integers(0, 2, (N, *row)).astype(bool)
    data = random.integers(0, 256, int(np.prod((N, *row))) * kind.itemsize, dtype=np.uint8)
    return data.view(kind).reshape((N, *row))


def chunk_shapes(row: tuple[int, ...]) -> list[tuple[int, ...]]:
    """One row, some with an edge, all, more than there are; and rows that are cut."""
    shapes = [(height, *row) for height in (1, 4, N, 20)]
    if row:
        shapes.append((4, *(extent // 2 + 1 for extent in row)))
    return shapes


def check(source: Any, expected: np.ndarray[Any, Any]) -> Any:
    """Rows alone, in any order and twice, from held chunks, and written into a batch; gives the
    source, closed.
    """
    assert len(source) == len(expected)
    dtype = expected.dtype
    for hold in (0, 1 << 20):
        source.hold_chunks(hold)
        for order in ORDERS:
            for index, row in zip(order, source.read(order), strict=True):
                assert row.shape == expected.shape[1:]
                assert row.dtype.newbyteorder("=") == dtype.newbyteorder("=")
                assert row.astype(dtype).tobytes() == expected[index, ...].tobytes(), index
    like = source.array_spec
    if dtype.isnative and like is not None:
        assert like == (expected.shape[1:], dtype)
        batch = np.empty((len(ORDERS[1]), *like[0]), like[1])
        source.read_into(ORDERS[1], [batch[number, ...] for number in range(len(batch))])
        assert batch.tobytes() == expected[ORDERS[1]].tobytes()
    source.close()
    return source
