"""Lists the names in a file that are nearest to one that is missing, for messages."""

from __future__ import annotations

import difflib
import heapq
import itertools
from collections.abc import Callable, Iterable

from headrace.io.paths import composed

_MOST = 10
_COMPARED = 100  # names that are compared letter by letter: of 20,000 that alone takes seconds


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
    if others > 0:
        found = _nearest(wanted.lower(), found) if wanted else found[:_MOST]
    shown = [
        ascii(name) if name != wanted and composed(name) == composed(wanted) else show(name)
        for name in found
    ]
    return (", ".join(shown) or "none") + (f" and {others:,} more" if others > 0 else "")


def _nearest(wanted: str, names: list[str]) -> list[str]:
    def shares_ends(name: str) -> float:
        lower = name.lower()
        return (_same(wanted, lower) + _same(reversed(wanted), reversed(lower))) / (
            len(wanted) + len(name)
        )

    matcher = difflib.SequenceMatcher(b=wanted, autojunk=False)

    def ratio(name: str) -> float:
        matcher.set_seq1(name.lower())
        return matcher.ratio()

    return heapq.nlargest(_MOST, heapq.nlargest(_COMPARED, names, key=shares_ends), key=ratio)


def _same(one: Iterable[str], other: Iterable[str]) -> int:
    """How many letters two names begin with that are the same."""
    return sum(
        1
        for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    )
