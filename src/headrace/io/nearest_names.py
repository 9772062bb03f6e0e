"""Lists the names in a file that are nearest to one that is missing, for messages."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from headrace.io.paths import composed

_MOST = 10


def listed_names(names: Iterable[str], wanted: str = "", show: Callable[[str], str] = str) -> str:
    """Names as part of a message: all of them up to ten; of more the ten that are nearest to a
    name, and how many others there are.

    Args:
        names: in any order.
        wanted: the name that is missing; "": none in particular, so that the first ten are listed.
        show: what a name looks like in the message. One that looks like the missing one is shown in
            ASCII.
    """
    found = sorted(names)
    others = len(found) - _MOST
    if others > 0 and wanted:

        def likeness(name: str) -> float:
            """The share of letters that two names begin and end with."""
            one = wanted.lower()
            other = name.lower()
            same = _same(one, other) + _same(one[::-1], other[::-1])
            return same / (len(wanted) + len(name))

        found = heapq.nlargest(_MOST, found, key=likeness)
    shown = [
        ascii(name) if name != wanted and composed(name) == composed(wanted) else show(name)
        for name in found[:_MOST]
    ]
    return (", ".join(shown) or "none") + (f" and {others:,} more" if others > 0 else "")


def _same(one: str, other: str) -> int:
    """The number of letters that two names begin with alike."""
    for count, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return count
    return min(len(one), len(other))
