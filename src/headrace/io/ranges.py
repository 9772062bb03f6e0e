"""Which requests are made for ranges of files that are far away, and which range gets what of their answers?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

GAP, PIECE = 64 << 10, 4 << 20
"""Ranges with so few bytes between them are fetched as one; longer ones are cut."""


@dataclass(frozen=True, slots=True)
class Version:
    """A file at one moment."""

    size: int
    """Bytes."""
    tag: str | None
    """What changes when the content does: its ETag, or else when it was last changed; None: the server says nothing of the kind."""


@dataclass(frozen=True, slots=True)
class Range:
    """A stretch of a file."""

    path: str
    """URL, as the user gave it."""
    start: int
    stop: int
    version: Version | None = None
    """Of which version; None: of any."""

    def __len__(self) -> int:
        return self.stop - self.start


def plan(wanted: Sequence[Range]) -> tuple[list[Range], list[tuple[int, int]]]:
    """The pieces to ask for, and for each range the numbers of the first and last piece that it lies in."""
    order = sorted(range(len(wanted)), key=lambda n: (wanted[n].path, repr(wanted[n].version), wanted[n].start, wanted[n].stop))
    pieces: list[Range] = []
    places: list[tuple[int, int]] = [(0, 0)] * len(wanted)
    at = 0
    while at < len(order):
        first = wanted[order[at]]
        stop, end = first.stop, at + 1
        while end < len(order):
            following = wanted[order[end]]
            if (following.path, following.version) != (first.path, first.version) or following.start > stop + GAP:
                break
            if max(stop, following.stop) - first.start > PIECE and following.start >= stop:
                break  # it would be cut anyway
            stop, end = max(stop, following.stop), end + 1
        cut = [replace(first, start=s, stop=min(s + PIECE, stop)) for s in range(first.start, stop, PIECE)]
        for number in order[at:end]:
            one = wanted[number]
            if len(one):
                places[number] = (
                    len(pieces) + (one.start - first.start) // PIECE,
                    len(pieces) + (one.stop - 1 - first.start) // PIECE,
                )
        pieces += cut
        at = end
    return pieces, places


def assembled(wanted: Range, pieces: Sequence[Range], found: Sequence[bytes], place: tuple[int, int]) -> bytes:
    """The bytes of a range, of the pieces that `plan` has made and what was found of them."""
    if not len(wanted):
        return b""
    parts = []
    for piece, data in zip(pieces[place[0] : place[1] + 1], found[place[0] : place[1] + 1], strict=True):
        parts.append(memoryview(data)[max(0, wanted.start - piece.start) : wanted.stop - piece.start])
    if len(parts) > 1:
        return b"".join(parts)
    data = found[place[0]]
    return data if len(parts[0]) == len(data) else bytes(parts[0])  # whole: without a copy
