"""How are the lines and records of texts that are far away read at random?

By the same table of places as those of local files, kept in `cache_dir` and mapped. A line is a range there, and the lines of a batch are
read by few requests. What can't be read at random, since it is compressed or its bytes don't show where its lines end, is read through a
plain copy on this machine (`headrace.storage.text.remote_plain`).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.errors import DataNotFoundError, FormatError
from headrace.io.array_file import Arrays, MappedArrays
from headrace.io.index import IndexKind
from headrace.io.packed_strings import PackedNames
from headrace.io.paths import cache_folder, redact, without_query
from headrace.io.ranges import ByteRanges, coalesce
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import RemoteFiles
from headrace.io.resolve.expressions import DataPath
from headrace.io.resolve.file_set import FileSet, Kind
from headrace.io.resolve.resolver import resolve
from headrace.io.single_flight import one_builder
from headrace.storage.files import fingerprint_names
from headrace.storage.text import records
from headrace.storage.text.lines import Newline
from headrace.storage.text.plain import Room, is_compressed
from headrace.storage.text.remote_index import LineIndex, arrays_of, index_beside
from headrace.storage.text.remote_plain import far_plain_copy
from headrace.storage.text.remote_scan import FarScan, NotedScan, OddQuotesError
from headrace.storage.text.scan import Scan, TextFile
from headrace.storage.text.source import HeldArrays, LinesSource

_AHEAD = 32 << 20  # bytes that are fetched ahead of who reads all lines in order, and as many that are held in the midst of it


class FarTexts(NamedTuple):
    """Texts of one server."""

    files: RemoteFiles
    listing: FileSet
    urls: list[str]
    """Of each file of the listing."""


def far_texts(data_path: DataPath | FileSet, extensions: Sequence[str], options: RemoteOptions, listing: FileSet | None = None) -> FarTexts:
    """The texts that some URLs lead to, with size and version of each.

    Args:
        data_path: a URL, or a list: of files, of folders (or prefixes), or globs.
        extensions: endings of the files that count, in any case.
        options: how they are reached.
        listing: of these URLs, where it is known.

    Raises:
        ConfigError: URLs and paths are mixed, or of several servers.
        DataNotFoundError, AccessError, RemoteError: nothing there, or nothing that fits; see `Remote.versions`.
    """
    if listing is None:
        listing = resolve(data_path, Kind("texts", tuple(map(str.lower, extensions))), options)
        files: RemoteFiles = listing.server
    else:
        files = RemoteFiles(listing.url(0), options)
    try:
        urls = listing.urls()
        for url, version in zip(urls, files.learn(urls, beside=lambda _: True), strict=True):
            if not version.size and files.is_folder(url):
                raise DataNotFoundError(f"{redact(url)} is a folder with the name of a file: add a slash to its end")
    except BaseException:
        files.close()
        raise
    return FarTexts(files, listing, urls)


class FarLinesSource(LinesSource):
    """`LinesSource` of texts that are far away: the same lines, blocks and fingerprint as those of a copy on this machine.

    Args:
        texts: which.
        unit, newline, encoding, errors, room, progress: see `LinesSource`.
        folder: where the table, and plain copies, are kept.

    Raises:
        FormatError, AccessError: as `LinesSource`.
        RemoteError, FileChangedError, DataNotFoundError: see `Remote.read`.
    """

    far: RemoteFiles

    def __init__(
        self,
        texts: FarTexts,
        unit: str,
        newline: Newline,
        encoding: str,
        errors: str,
        folder: Path,
        room: Room | None = None,
        progress: bool | None = None,
    ) -> None:
        self.far, self._urls = texts.files, texts.urls
        self._checks_quotes = False
        self._known = self._beside(unit, newline, encoding)
        super().__init__(texts.listing, unit, newline, encoding, errors, folder, folder, room, progress)
        self._known = {}
        self._is_far = np.array([not text.is_copy for text in self._texts], bool)

    def _beside(self, unit: str, newline: Newline, encoding: str) -> dict[int, LineIndex]:
        """What lies beside the texts, where it is of what is wanted of them."""
        found = [index_beside(self.far, url, INDEX) for url in self._urls]  # all of them: each is handed out once
        if newline is not None or encoding != "utf-8":
            return {}
        return {number: index for number, index in enumerate(found) if index is not None and index.unit == unit}

    def _paths(self) -> list[str]:
        return self._urls

    def _text(self, path: str, encoding: str, errors: str) -> TextFile:
        if is_compressed(without_query(path)) or self.is_transcoded:
            return self._near(path, far_plain_copy(self.far, path, encoding, errors, self._folder), encoding)
        return TextFile(path, path, 0, self.far.version(path).size, None)

    # -- the table

    def _known_by(self, text: TextFile) -> list[Any]:
        if text.stamp is not None:
            return super()._known_by(text)
        version = self.far.version(text.path)
        return [self.far.place, redact(text.path), version.size, version.tag]

    def _scan(self, progress: bool | None, size: int) -> Scan:
        return FarScan(self._to_scan, self.far, self._known, self._checks_quotes, progress, size)

    def _made(self, progress: bool | None) -> MappedArrays | HeldArrays:
        if any(not text.is_copy and self.far.version(text.path).tag is None for text in self._texts):
            return self._checked(lambda: self._held(progress))  # nobody could say whether what is kept still holds
        kept = self._kept_file()
        if (found := kept.found()) is not None:
            return found
        with one_builder(kept.path, self.far.patience):  # others wait, and find it then
            return self._checked(lambda: super(FarLinesSource, self)._made(progress))

    def _held(self, progress: bool | None) -> HeldArrays:
        return HeldArrays(*self._scanned(progress, self._size))

    def _checked(self, made: Callable[[], MappedArrays | HeldArrays]) -> MappedArrays | HeldArrays:
        try:
            return made()
        except OddQuotesError:  # the exception: tables are gone through twice then, as those of this machine are
            self._checks_quotes = True
            return made()

    # -- reading

    def _gathered(self, starts: IntArray, sizes: IntArray) -> bytes | None:
        return None if self._is_far[0] else super()._gathered(starts, sizes)

    def _read_all(self, files: IntArray, starts: IntArray, sizes: IntArray) -> list[bytes]:
        is_far = self._is_far[files]
        if not is_far.any():
            return super()._read_all(files, starts, sizes)
        found = list[Any]([None] * len(files))
        near, there = np.flatnonzero(~is_far), np.flatnonzero(is_far)
        for number, line in zip(near.tolist(), super()._read_all(files[near], starts[near], sizes[near]), strict=True):
            found[number] = line
        self.room.check(int(sizes[there].max()))
        ranges = ByteRanges(self._urls, files[there], starts[there], (starts + sizes)[there])
        for number, data in zip(there.tolist(), self.far.read(ranges), strict=True):
            found[number] = bytes(data or b"")
        return found

    def byte_ranges(self, indices: npt.NDArray[np.int64]) -> ByteRanges:
        """The bytes of lines, those that follow one another as one span; none of what is read through a plain copy."""
        files, starts, ends = self._places(np.unique(indices))
        there = self._is_far[files]
        files, starts, ends = files[there], starts[there], ends[there]
        return coalesce(ByteRanges(self._urls, files, starts, ends), 0).ranges

    @property
    def stored_nbytes(self) -> int:
        return sum(text.end for text in self._texts if not text.is_copy)

    # -- all of it, once

    @contextlib.contextmanager
    def of_one_version(self) -> Iterator[list[list[Any]] | None]:
        """As `TextFilesSource.of_one_version`: each read is of the version that was found at the start."""
        versions = [(url, self.far.version(url)) for url in self._urls]
        of = [[self.far.place, redact(url), version.size, version.tag] for url, version in versions]
        yield None if any(version.tag is None for _, version in versions) else of

    @contextlib.contextmanager
    def in_order(self) -> Iterator[Callable[[range], None]]:
        """Inside, lines are read from the first to the last, and blocks are fetched ahead.

        Yields:
            What is to be called before some are read, with their numbers.
        """
        edges = np.concatenate([[0], np.cumsum(self.blocks())]).tolist()
        at = 0

        def expect(some: range) -> None:
            nonlocal at
            while at < len(edges) - 1 and (edges[at] < some.stop or self.far.bytes_prefetched < _AHEAD):
                self.far.prefetch([self.byte_ranges(np.arange(edges[at], edges[at + 1]))])
                at += 1

        self.far.hold_prefetched(_AHEAD)
        try:
            yield expect
        finally:
            self.far.drop_prefetched()
            self.far.hold_prefetched(0)

    def take_counts(self) -> Counter[str]:
        return self.far.take_counts()

    def fingerprint(self) -> str:
        names = self.files.names
        if self._urls[0].startswith(("http://", "https://")):  # what is signed anew each day is the same text
            names = PackedNames(name.partition(b"?")[0] for name in names)
        return f"{fingerprint_names(*names.arrays)}:{self._unit}:{len(self)}"

    def how(self) -> dict[str, str]:
        return {**super().how(), "files": self.far.explain()}


class _Indexing(FarLinesSource):
    """A text whose index is being made: nothing of it is kept here."""

    scanned: NotedScan

    def _scan(self, progress: bool | None, size: int) -> Scan:
        self.scanned = NotedScan(self._to_scan, self.far, {}, self._checks_quotes, progress, size)
        return self.scanned

    def _made(self, progress: bool | None) -> MappedArrays | HeldArrays:
        return self._checked(lambda: self._held(progress))


def _index(files: RemoteFiles, url: str) -> Arrays:
    path = without_query(url)
    if is_compressed(path):
        raise FormatError(f"{redact(url)} is compressed: it is read through a plain copy, and has no use for an index")
    unit = "record" if path.lower().endswith(records.FORMATS) else "line"
    listing = resolve([url], Kind("texts", ("",)), server=files)
    scanned = _Indexing(FarTexts(files, listing, [url]), unit, None, "utf-8", "strict", cache_folder(files.options.cache_dir)).scanned
    return arrays_of(unit, scanned.header, iter(scanned.noted), scanned.blank)


INDEX = IndexKind("text", 1, ("u1", "u1", "<i8"), _index)
"""Of one text (`headrace.storage.text.remote_index`)."""
