"""Memory that is read into, and used again when nobody holds views of it any more.

The system hands out fresh memory in pages that it clears, at the first touch of each. For a few MB
that takes several times as long as to read them from the page cache.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.memory.per_process import renew_after_fork

_LEAST = 256 << 10  # bytes of a buffer that is kept; the allocator itself recycles shorter ones
_MOST = 16 << 20  # bytes of all that are kept


class RecycledBuffers:
    """Hands out buffers, each of which is handed out again once all memoryviews of it are gone.

    Thread-safe. A forked child and a pickle begin without.
    """

    def __init__(self) -> None:
        self._reset()
        renew_after_fork(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[tuple[bytearray, weakref.ref[npt.NDArray[Any]]]] = []  # the oldest first

    after_fork = _reset

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that are kept, whether they are in use or not."""
        return sum(len(memory) for memory, _ in self._kept)

    def take(self, nbytes: int) -> memoryview:
        """A buffer of so many bytes, of any content, to be written to."""
        if not _LEAST <= nbytes <= _MOST:
            return memoryview(np.empty(nbytes, np.uint8))  # type: ignore[arg-type]
        with self._lock:
            for at, (memory, view) in enumerate(self._kept):
                if view() is None and nbytes <= len(memory) <= 2 * nbytes:
                    del self._kept[at]
                    break
            else:
                # a little more: the next one is seldom as long
                memory = bytearray(min(_MOST, nbytes + nbytes // 8))
            # Memoryviews refer to the array that they are of, and slices of it too, for its own
            # base is no array.
            lent = np.frombuffer(memory, np.uint8, nbytes)
            self._kept.append((memory, weakref.ref(lent)))
            while self.nbytes > _MOST:
                del self._kept[0]
        return memoryview(lent)  # type: ignore[arg-type]

    def close(self) -> None:
        """Forgets all buffers; those that are in use stay until their last view is gone."""
        with self._lock:
            self._kept.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()
