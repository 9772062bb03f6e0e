"""How are the lines of texts that are far away found, with each byte fetched once?

By the same scan as those of local files, over pieces that come in order. What was looked at a moment ago is still there: of it the
scan is told what it asks for again (blank lines, the names of a table's fields).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from headrace.dtypes import IntArray
from headrace.io.ranges import ByteRanges
from headrace.io.remote_files import RemoteFiles
from headrace.io.sequential import Part, in_order
from headrace.storage.text import records
from headrace.storage.text.lines import QUOTE, Newline, Piece, line_starts, looked_at
from headrace.storage.text.remote_index import LineIndex
from headrace.storage.text.scan import UTF8_MARK, Scan, Scanned, TextBytes, TextFile

_BEHIND = 4  # pieces that were looked at, and are still there


class OddQuotesError(Exception):
    """A table has a quote where the parity of quotes would misjudge: another scan must check that first, and go through tables twice."""


class FarScan(Scan):
    """The pass over texts of which some, or all, are far away.

    Args:
        of: the texts.
        files: of the server.
        known: by the numbers of texts: what is known of them, so that nothing of these is fetched.
        checks_quotes: are tables gone through twice, since one of them has odd quotes?
        progress, size: see `Scan`.

    Raises:
        OddQuotesError: it must be said `checks_quotes`.
    """

    def __init__(
        self,
        of: Scanned,
        files: RemoteFiles,
        known: dict[int, LineIndex],
        checks_quotes: bool,
        progress: bool | None,
        size: int,
    ) -> None:
        super().__init__(of, progress, size)
        self._far, self._known, self._checks = files, known, checks_quotes
        self._all = self._parts()

    def __iter__(self) -> Iterator[IntArray]:
        try:
            yield from super().__iter__()
        finally:
            self._all.close()  # type: ignore[attr-defined]

    def _parts(self) -> Iterator[Part]:
        texts = [text for number, text in enumerate(self._texts) if not text.is_copy and number not in self._known]
        return in_order(self._far, ByteRanges.of((text.path, 0, text.end) for text in texts))

    def _file(self, file: TextBytes, number: int, text: TextFile) -> Iterator[IntArray]:
        known = self._known.get(number)
        if known is None:
            yield from super()._file(file, number, text)
            return
        self._headers.append(known.header)
        self._counts.append(known.count)
        self._blank.append(known.blank)
        shift = self._bases[number] - text.begin
        yield from (places + shift for places in known.places())
        self._bar.update(text.end)

    @contextlib.contextmanager
    def _opened(self, number: int, text: TextFile) -> Iterator[TextBytes]:
        if text.is_copy:
            with super()._opened(number, text) as file:
                yield file
            return
        looked = _Looked(self._far, text, self._all)
        yield TextBytes(looked.at, looked.pieces)

    def _places(self, file: TextBytes, number: int, text: TextFile, kind: str) -> Iterator[IntArray]:
        if not text.is_copy and not text.begin and self._codec[0] == "utf-8" and file.at(0, min(3, text.end)) == UTF8_MARK:
            text = replace(text, begin=3)
        yield from super()._places(file, number, text, kind)

    def _csv_places(self, file: TextBytes, text: TextFile, newline: Newline, delimiter: str) -> Iterator[IntArray]:
        if text.is_copy or self._checks:
            return super()._csv_places(file, text, newline, delimiter)
        return self._csv_places_at_once(file, text, newline, delimiter)

    def _csv_places_at_once(self, file: TextBytes, text: TextFile, newline: Newline, delimiter: str) -> Iterator[IntArray]:
        check = records.QuoteCheck(delimiter)

        def watch(piece: Any) -> None:
            self._watch(piece)
            check(piece)
            if not check.is_plain:
                raise OddQuotesError

        yield from line_starts(file.pieces, text.begin, text.end, newline, QUOTE, watch)
        if check.count % 2:
            raise OddQuotesError


class _Looked:
    """The bytes of a text that come in order, and those that came last.

    Args:
        files: of the server.
        text: which.
        parts: of all texts, those of this one next.
    """

    def __init__(self, files: RemoteFiles, text: TextFile, parts: Iterator[Part]) -> None:
        self._files, self._url, self._size = files, text.path, text.end
        self._parts, self._is_begun = parts, False
        self._behind: deque[Part] = deque(maxlen=_BEHIND)

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """From a byte of the first piece on; when they are asked for a second time they are fetched again."""
        if self._is_begun:
            self._parts = in_order(self._files, ByteRanges.of([(self._url, 0, self._size)]))
            self._behind.clear()
        self._is_begun = True
        known, at = [*self._behind], 0
        while at < self._size:
            start, part = known.pop() if known else self._next()
            data = np.frombuffer(part, np.uint8)[max(0, begin - start) : end - start]
            at = start + len(part)
            if data.size:
                yield looked_at(data)

    def _next(self) -> Part:
        part = next(self._parts)
        self._behind.append(part)
        return part

    def at(self, begin: int, size: int) -> bytes:
        """Some bytes; what has gone by, or is to come, is fetched for it."""
        if size and not self._behind:
            self._next()
        found = []
        for first, part in self._behind:
            start, stop = max(begin, first), min(begin + size, first + len(part))
            if start < stop:
                found.append(part[start - first : stop - first])
        data = b"".join(found)
        return data if len(data) == size else bytes(self._files.read(ByteRanges.of([(self._url, begin, begin + size)]))[0] or b"")


class NotedScan(FarScan):
    """A scan of one text whose index is to be made.

    Attributes:
        noted: where its lines begin, and the last one ends, in pieces.
    """

    noted: list[IntArray]

    def __iter__(self) -> Iterator[IntArray]:
        self.noted = []
        for places in super().__iter__():
            self.noted.append(places)
            yield places

    @property
    def header(self) -> list[str]:
        """Names of the fields."""
        return self._headers[0]

    @property
    def blank(self) -> IntArray:
        """Numbers of lines that are no records."""
        return self._blank[0]
