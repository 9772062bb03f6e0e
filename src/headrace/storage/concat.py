"""How do several sources become one?"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.storage.remote_files import RemoteFiles, Span
from headrace.storage.source import Rows, Source

S = TypeVar("S", bound=Source)


class ConcatSource(Source, Generic[S]):
    """The samples of some sources, one source after the other.

    Args:
        sources: one at least, with records of one kind.
    """

    def __init__(self, sources: Sequence[S]) -> None:
        self.sources = list(sources)
        self._starts = np.cumsum([0, *map(len, self.sources)])
        self.thread_safe = all(source.thread_safe for source in self.sources)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def place(self, index: int) -> tuple[int, int]:
        """The number of the source that a sample is in, and its index there."""
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return number, index - int(self._starts[number])

    def _parts(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> list[tuple[S, list[int], list[int]]]:
        """For each source that is needed the indices in it, and the places of these samples among `indices`."""
        wanted = np.asarray(indices, np.int64)
        numbers = np.searchsorted(self._starts, wanted, side="right") - 1
        parts = []
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            parts.append((self.sources[number], (wanted[places] - self._starts[number]).tolist(), places.tolist()))
        return parts

    def read(self, indices: Sequence[int]) -> list[Any]:
        parts = self._parts(indices)
        self._fetch_together(parts)
        return self._gathered(len(indices), parts, lambda source, some: source.read(some))

    def read_afresh(self, indices: Sequence[int]) -> list[Any]:
        return self._gathered(len(indices), self._parts(indices), lambda source, some: source.read_afresh(some))

    def _gathered(self, count: int, parts: list[tuple[S, list[int], list[int]]], read: Callable[[S, list[int]], list[Any]]) -> list[Any]:
        records: list[Any] = [None] * count
        for source, some, places in parts:
            for place, record in zip(places, read(source, some), strict=True):
                records[place] = record
        return records

    def _fetch_together(self, parts: list[tuple[S, list[int], list[int]]]) -> None:
        """What lies far away is asked for at once, and not file by file."""
        far = self.far
        if far is not None and len(parts) > 1:
            far.ahead([source.stored(np.asarray(some, np.int64)) for source, some, _ in parts], True)

    @property
    def far(self) -> RemoteFiles | None:  # type: ignore[override]
        """The files of the server that all sources read from."""
        found = {id(source.far): source.far for source in self.sources}
        return next(iter(found.values())) if len(found) == 1 else None

    def stored(self, indices: npt.NDArray[np.int64]) -> list[Span]:
        return [span for source, some, _ in self._parts(indices) for span in source.stored(np.asarray(some, np.int64))]

    @property
    def stored_asks(self) -> bool:  # type: ignore[override]
        return any(source.stored_asks for source in self.sources)

    @property
    def stored_nbytes(self) -> int:
        return sum(source.stored_nbytes for source in self.sources)

    def rows_like(self) -> tuple[tuple[int, ...], np.dtype[Any]] | None:
        found = self.sources[0].rows_like()
        return found if all(source.rows_like() == found for source in self.sources) else None

    def read_into(self, indices: Sequence[int], rows: Rows) -> None:
        parts = self._parts(indices)
        self._fetch_together(parts)
        for source, some, places in parts:
            source.read_into(some, [rows[place] for place in places])

    def use_threads(self, run: Callable[[Callable[[int], Any], int], list[Any]]) -> None:
        for source in self.sources:
            source.use_threads(run)

    @property
    def block_nbytes(self) -> int:
        return max(source.block_nbytes for source in self.sources)

    def hold_chunks(self, nbytes: int) -> None:
        for source in self.sources:
            source.hold_chunks(nbytes)

    def take_counts(self) -> Counter[str]:
        return sum((source.take_counts() for source in self.sources), Counter())

    def how(self) -> dict[str, str]:
        """By which path each array is read, and why; where sources differ, each way that there is."""
        ways: dict[str, dict[str, None]] = {}
        for source in self.sources:
            for name, way in source.how().items():
                ways.setdefault(name, {})[way] = None
        return {name: "; or ".join(some) for name, some in ways.items()}

    def blocks(self) -> npt.NDArray[np.int64] | None:
        found = [source.blocks() for source in self.sources]
        if any(sizes is None for sizes in found):
            return None
        return np.concatenate([sizes for sizes in found if sizes is not None]).astype(np.int64)

    def fingerprint(self) -> str:
        said = "\0".join(source.fingerprint() for source in self.sources)
        return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()

    def location(self, index: int) -> str:
        number, inner = self.place(index)
        return self.sources[number].location(inner)

    def close(self) -> None:
        """Closes what this process has open."""
        for source in self.sources:
            source.close()
