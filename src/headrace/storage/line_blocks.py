"""Which lines of texts lie together, so that they may be read at once?"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.storage.arrays import BLOCK_BYTES
from headrace.storage.texts import LinesSource


class BlockedLines(LinesSource):
    """Lines, or records, that are shuffled in blocks: those that begin in the same 2 MiB of a file's (decompressed) text."""

    def blocks(self) -> npt.NDArray[np.int64]:
        places, edges = self._table.long, [0]
        for number, text in enumerate(self._texts):
            first, last = int(self._first[number]), int(self._first[number + 1])  # lines, blank ones too
            starts = places[first + number : last + number]  # the table has an end for each file before this one
            cuts = np.searchsorted(starts, np.arange(text.begin + BLOCK_BYTES, text.end, BLOCK_BYTES))
            edges.extend((first + cuts).tolist())
            edges.append(last)
        blanks = self._shift + np.arange(len(self._shift))  # their numbers among all lines
        lines = np.array(edges, np.int64)
        sizes = np.diff(lines - np.searchsorted(blanks, lines))
        return sizes[sizes > 0].astype(np.int64)
