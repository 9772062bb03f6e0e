"""How are stretches of files read with as few calls as may be?"""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.errors import FormatError
from headrace.storage.handles import WorkerFiles
from headrace.storage.paths import redact

_GAP = 16 << 10  # bytes between two stretches that are rather read than left out
_RUN = 8 << 20  # bytes that one call reads at most
_IOV_MAX = 1024


class Stretch(NamedTuple):
    """Where the stored bytes of a chunk lie."""

    path: str
    offset: int
    nbytes: int
    skipped: int = 0
    """Bit i: codec i was not used."""


def runs(wanted: Iterable[tuple[str, int, int]], nbytes: int) -> Iterator[tuple[int, list[int]]]:
    """Of sorted (path, offset, number) of equal length those that follow one another: the first offset, and the numbers."""
    begin, numbers = -1, list[int]()
    for _, offset, number in wanted:
        if numbers and (offset != begin + nbytes * len(numbers) or len(numbers) >= _IOV_MAX or nbytes * len(numbers) >= _RUN):
            yield begin, numbers
            numbers = []
        if not numbers:
            begin = offset
        numbers.append(number)
    if numbers:
        yield begin, numbers


def read_stretches(stretches: Sequence[Stretch | None], files: WorkerFiles[int]) -> list[memoryview | None]:
    """The bytes of stretches, those that lie close together by one call.

    Raises:
        FormatError: a file ends before one of them does.
        OSError: a file can't be opened or read.
    """
    found: list[memoryview | None] = [None] * len(stretches)
    wanted = sorted((part.path, part.offset, part.nbytes, number) for number, part in enumerate(stretches) if part is not None)
    by_path = [(path, list(same)) for path, same in itertools.groupby(wanted, operator.itemgetter(0))]
    with contextlib.closing(files.reading_each([path for path, _ in by_path])) as opened:
        for (path, same), fd in zip(by_path, opened, strict=True):
            first = 0
            while first < len(same):
                _, begin, nbytes, _ = same[first]
                end, last = begin + nbytes, first + 1
                while last < len(same):
                    _, offset, nbytes, _ = same[last]
                    if offset - end > _GAP or offset + nbytes - begin > _RUN:
                        break
                    end, last = max(end, offset + nbytes), last + 1
                buffer = memoryview(np.empty(end - begin, np.uint8))  # type: ignore[arg-type]
                fill(fd, [buffer], begin, path)
                for _, offset, nbytes, number in same[first:last]:
                    found[number] = buffer[offset - begin : offset - begin + nbytes]
                first = last
    return found


def bytes_of(array: npt.NDArray[Any]) -> memoryview:
    """The bytes of a C-contiguous array, to be written to."""
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def fill(fd: int, buffers: list[memoryview], offset: int, path: str) -> None:
    """Reads from a file until buffers are full."""
    wanted = sum(map(len, buffers))
    got = 0
    while got < wanted:  # one call gives 2 GiB at most
        more = os.preadv(fd, buffers, offset + got)
        if more == 0:
            raise FormatError(f"{redact(path)} ends before byte {offset + wanted:,}: the file is cut short")
        got += more
        while buffers and more >= len(buffers[0]):
            more -= len(buffers[0])
            buffers = buffers[1:]
        if more:
            buffers = [buffers[0][more:], *buffers[1:]]
