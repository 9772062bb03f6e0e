"""Byte ranges and their coalescing, against plain Python."""

import numpy as np
from hypothesis import example, given, strategies as st

from headrace.io.ranges import WHOLE, ByteRanges, coalesce

Span = tuple[str, int, int]


@st.composite
def a_span(draw: st.DrawFn) -> Span:
    path, start, size = draw(st.sampled_from("abc")), draw(st.integers(0, 500)), draw(SIZES)
    return (path, 0, WHOLE) if size < 0 else (path, start, start + size)


SIZES = st.integers(-1, 120)  # -1: a whole file
SPANS = st.lists(st.none() | a_span(), max_size=14)  # None: never written


def plainly(spans: list[Span | None], gap: int, most: int | None) -> list[Span]:
    """The requests, one range at a time."""
    found: list[Span] = []
    names = list(dict.fromkeys(one[0] for one in spans if one is not None))
    for path, start, stop in sorted(
        (one for one in spans if one and one[2] > one[1]),
        key=lambda one: (names.index(one[0]), one[1]),
    ):
        if found and found[-1][0] == path:
            _, first, end = found[-1]
            is_long = most is not None and max(stop, end) - first > most
            if start <= end + gap and (start < end or not is_long):
                found[-1] = path, first, max(end, stop)
                continue
        found.append((path, start, stop))
    return found


@example([("a", 0, 100), ("a", 100, 100), ("a", 190, 100), ("b", 0, 9)], 20, 150)
@given(SPANS, st.integers(0, 40), st.one_of(st.none(), st.integers(1, 300)))
def test_coalesced_requests(spans: list[Span | None], gap: int, most: int | None) -> None:
    ranges = ByteRanges.of(spans)
    requests = coalesce(ranges, gap, most)
    assert list(requests.ranges.each()) == plainly(spans, gap, most)
    served = requests.order.tolist()
    assert sorted(served) == [
        number for number, one in enumerate(spans) if one is not None and one[2] > one[1]
    ]
    for request, (path, start, stop) in enumerate(requests.ranges.each()):
        for number in served[requests.edges[request] : requests.edges[request + 1]]:
            one = spans[number]
            assert one is not None and one[0] == path and start <= one[1] <= one[2] <= stop


@given(SPANS, st.integers(1, 90))
def test_split(spans: list[Span | None], most: int) -> None:
    ranges = ByteRanges.of(spans)
    pieces, edges = ranges.split(most)
    assert len(edges) == ranges.size + 1 and edges[-1] == pieces.size
    assert all(0 < stop - start <= most for _, start, stop in pieces.each())
    for number, (path, start, stop) in enumerate(ranges.each()):
        some = list(pieces.take(np.arange(edges[number], edges[number + 1])).each())
        bytes_of = [byte for _, first, end in some for byte in range(first, end)]
        assert bytes_of == list(range(start, stop)) and all(one[0] == path for one in some)


@given(st.lists(SPANS, max_size=4))
def test_joined(drawn: list[list[Span | None]]) -> None:
    parts = [ByteRanges.of(one) for one in drawn]
    joined = ByteRanges.joined(parts)
    assert list(joined.each()) == [one for part in parts for one in part.each()]
    assert len(set(joined.paths)) == len(joined.paths)
