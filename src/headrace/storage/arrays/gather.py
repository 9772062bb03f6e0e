"""Gathers many rows of an array into one array, in threads."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.storage.arrays.reader import ArrayReader, Map
from headrace.storage.source import one_after_the_other

# bytes between two rows that are rather read than asked for apart: both take a microsecond
_NEAR = 4 << 10
_STRETCH = 8 << 20  # bytes that are read by one call into scratch memory
_PARTS = 16  # of sorted rows, which threads share


def gather(reader: ArrayReader, rows: IntArray, out: npt.NDArray[Any], run: Map | None) -> None:
    """Writes rows of an array into the rows of another one.

    Args:
        reader: of the array.
        rows: [n] numbers of rows, in any order; one may come twice.
        out: [n, ...] of the array's dtype, C-contiguous.
        run: calls a function in threads; None: there are none.

    Raises:
        FormatError, OSError: see `ArrayReader`.
    """
    if not reader.reads_rows_as_they_are:
        reader.gather(rows, out, run or one_after_the_other)
        return
    is_sorted = bool((rows[1:] >= rows[:-1]).all())
    order = None if is_sorted else np.argsort(rows, kind="stable")
    in_order = rows if order is None else rows[order]
    parts = 1 if run is None or reader.chunks.is_remote else min(_PARTS, len(rows))
    edges = np.linspace(0, len(rows), parts + 1).astype(np.int64).tolist()

    def part(number: int) -> None:
        begin, end = edges[number], edges[number + 1]
        places = slice(begin, end) if order is None else order[begin:end]
        _gather_sorted(reader, in_order[begin:end], out, places)

    (run or one_after_the_other)(part, parts)


def _gather_sorted(
    reader: ArrayReader, rows: IntArray, out: npt.NDArray[Any], places: slice | IntArray
) -> None:
    """As `gather`, of rows in rising order, to their places in `out`."""
    if not len(rows):
        return
    row_bytes = max(1, out[:1].nbytes)
    steps = np.diff(rows)
    if isinstance(places, slice) and (steps == 1).all():
        reader.read_spans(rows[:1], [out[places]], one_after_the_other)
        return
    is_first = ((steps - 1) * row_bytes > _NEAR) | (
        np.diff((rows - rows[0]) * row_bytes // _STRETCH) > 0
    )
    starts = np.concatenate([[0], np.flatnonzero(is_first) + 1])
    if 2 * len(starts) > len(rows) or row_bytes > _STRETCH:
        found = (
            out[places]
            if isinstance(places, slice)
            else [out[place, ...] for place in places.tolist()]
        )
        reader.read_rows(rows.tolist(), found, one_after_the_other)
        return
    ends = np.append(starts[1:], len(rows))
    firsts, sizes = rows[starts], rows[ends - 1] - rows[starts] + 1
    at = 0
    while at < len(starts):  # as many stretches at once as fit the scratch memory
        stop = max(
            at + 1,
            int(np.searchsorted(np.cumsum(sizes[at:]) * row_bytes, _STRETCH, side="right")) + at,
        )
        begins = np.concatenate([[0], np.cumsum(sizes[at:stop])])
        scratch = np.empty((int(begins[-1]), *out.shape[1:]), out.dtype)
        outs = [scratch[first:last] for first, last in itertools.pairwise(begins.tolist())]
        reader.read_spans(firsts[at:stop], outs, one_after_the_other)
        some = slice(int(starts[at]), int(ends[stop - 1]))
        of = np.repeat(np.arange(stop - at), ends[at:stop] - starts[at:stop])
        taken = scratch[begins[of] + rows[some] - firsts[at:stop][of]]
        if isinstance(places, slice):
            out[places.start + some.start : places.start + some.stop] = taken
        else:
            out[places[some]] = taken
        at = stop
