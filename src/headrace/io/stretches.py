"""Rows of places: being replaced by `headrace.io.ranges.ByteRanges`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.io.files import Files as Files
from headrace.io.local.files import bytes_of as bytes_of
from headrace.io.local.files import fill as fill
from headrace.io.ranges import WHOLE, ByteRanges

Span = tuple[str, int, int]


class Stretch(NamedTuple):
    """Where the stored bytes of a chunk lie."""

    path: str
    offset: int
    nbytes: int
    """Or WHOLE: a whole file that is far away."""
    skipped: int = 0
    """Bit i: codec i was not used."""

    @property
    def span(self) -> Span:
        """Path, first byte, end."""
        return self.path, self.offset, WHOLE if self.nbytes == WHOLE else self.offset + self.nbytes


class Places(NamedTuple):
    """Where many stretches lie, an element each."""

    paths: Sequence[str]
    files: npt.NDArray[np.int64]
    """[n] numbers of `paths`."""
    offsets: npt.NDArray[np.int64]
    """[n]; -1: never written."""
    nbytes: npt.NDArray[np.int64]
    """[n]"""

    def stretches(self) -> list[Stretch | None]:
        """The same one by one; None: never written."""
        found = zip(self.files.tolist(), self.offsets.tolist(), self.nbytes.tolist(), strict=True)
        return [None if offset < 0 else Stretch(self.paths[file], offset, nbytes) for file, offset, nbytes in found]

    def ranges(self) -> ByteRanges:
        return ByteRanges(self.paths, self.files, self.offsets, self.offsets + self.nbytes)

    def spans(self) -> list[Span]:
        """Path, first byte and end of each that was written."""
        paths, found = self.paths, zip(self.files.tolist(), self.offsets.tolist(), self.nbytes.tolist(), strict=True)
        return [(paths[file], offset, offset + nbytes) for file, offset, nbytes in found if offset >= 0]


def places_of(stretches: Sequence[Stretch | None]) -> Places:
    """The same as numbers."""
    paths = {part.path: None for part in stretches if part is not None}
    numbers = {path: number for number, path in enumerate(paths)}
    found = [(0, -1, 0) if part is None else (numbers[part.path], part.offset, part.nbytes) for part in stretches]
    columns = np.array(found, np.int64).reshape(-1, 3)
    return Places(list(paths), columns[:, 0], columns[:, 1], columns[:, 2])


def read_places(places: Places, parts: Sequence[memoryview], files: Files) -> None:
    """See `Files.read_into`."""
    files.read_into(places.ranges(), parts)


def read_stretches(stretches: Sequence[Stretch | None], files: Files) -> list[memoryview | None]:
    """See `Files.read`."""
    return files.read(ByteRanges.of(None if part is None else part.span for part in stretches))


def announce(spans: Sequence[Span], files: Files) -> None:
    """See `Files.prefetch`."""
    files.prefetch([ByteRanges.of(spans)])


def read_parts(spans: Sequence[Span], buffers: Sequence[memoryview], files: Files) -> None:
    """See `Files.read_into`."""
    files.read_into(ByteRanges.of(spans), buffers)
