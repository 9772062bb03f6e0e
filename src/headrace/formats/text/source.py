"""Text files as samples, local or remote: whole, or their lines and records, with random access.

Lines are located through a table of their places (see `headrace.formats.text.index`), built in one
pass, and cached in `cache_dir`: a large one is read by ranges, so that no process holds it in
memory. In the table the files are concatenated.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from headrace.dtypes import IntArray, distinct
from headrace.errors import FormatError
from headrace.formats.files import FilesSource, fingerprint_names
from headrace.formats.resolve.file_set import TEXTS, FileSet
from headrace.formats.resolve.find import learn
from headrace.formats.resolve.resolver import DataPath, resolve
from headrace.formats.source import Column, Description, RecordsSource, block_length
from headrace.formats.text import records
from headrace.formats.text.index import Scan, TextFile, first_from, kept_or_held, places_in
from headrace.formats.text.plain import (
    check_room,
    decompressed,
    is_compressed,
    pieces_of,
    plain_copy,
    shows_lines,
    undecodable,
)
from headrace.io.array_file import HEAD, ArrayFile, FileArrays
from headrace.io.files import Files
from headrace.io.local_files import LocalFiles, version_of
from headrace.io.paths import cache_folder, redact, without_query
from headrace.io.remote.options import RemoteOptions
from headrace.memory.budget import MemoryBudget

KEPT_FROM = 64 << 20
"""Bytes of text from which on its table is kept without a `cache_dir` too, in the user's cache
folder: smaller ones are scanned anew.
"""
_VERSION = 5
# bytes that are fetched ahead of who reads all lines in order, and as many that are held in the
# midst of it
_AHEAD = 32 << 20
_MARK = "\ufeff"
_TOGETHER = 1 << 16  # lines that are looked up together


class TextFilesSource(FilesSource):
    """Whole files. Those that are too large for the budget are not read.

    Args:
        data_path: the files.
        options: how URLs are read.
        budget: for one file. None: there is no limit.
        codec: how they are decoded: encoding and errors.
    """

    def __init__(
        self,
        data_path: DataPath,
        options: RemoteOptions,
        budget: MemoryBudget | None,
        codec: tuple[str, str] = ("utf-8", "strict"),
    ) -> None:
        super().__init__(data_path, TEXTS.endings, options)
        self._budget = budget
        self._codec = codec

    @contextlib.contextmanager
    def of_one_version(self) -> Iterator[list[list[Any]] | None]:
        """Context in which remote files are read in their current version.

        Yields:
            The identities of the files in this version. None: the server gives no versions.

        Raises:
            RemoteError, DataNotFoundError, AccessError: see `RemoteFiles.learn`.
        """
        server = self._server
        paths = list(self.listing)
        if server is None:
            yield [[path, *version_of(os.stat(path))] for path in map(os.path.abspath, paths)]
            return
        versions = server.learn(paths)
        try:
            is_known = all(version.tag is not None for version in versions)
            yield list(map(server.identity, paths)) if is_known else None
        finally:
            server.forget(paths)

    def read(self, indices: Sequence[int]) -> list[bytes]:
        """The bytes of files as stored. The size of a remote file is known once it is fetched."""
        if self._server is None:
            sizes = [os.stat(self.listing[i]).st_size for i in indices]
            check_room(max(sizes, default=0), self._budget)
        found = super().read(indices)
        check_room(max(map(len, found), default=0), self._budget)
        return found

    def head(self, index: int) -> bytes:
        """The first bytes of a file, decompressed; b"" if a local file can't be read.

        Raises:
            RemoteError, AccessError, DataNotFoundError, FormatError: a remote file can't be read.
        """
        if self._server is not None:
            return self._content(index, self.read([index])[0])
        try:
            path = self.listing[index]
            return next(pieces_of(path, open(path, "rb")), b"")
        except (OSError, FormatError):  # its sample says what is wrong
            return b""

    def row(self, index: int, record: bytes) -> str:
        """The text of a file, decompressed if it is compressed, without a mark.

        Raises:
            FormatError: it is damaged, or too large, or no text of the encoding.
        """
        try:
            return self._content(index, record).decode(*self._codec).removeprefix(_MARK)
        except UnicodeDecodeError as error:
            raise undecodable(error, 0) from None

    def _content(self, index: int, record: bytes) -> bytes:
        return decompressed(record, os.fsdecode(self.listing.names[index]), self._budget)


class LinesSource(RecordsSource):
    """Lines or records of texts, as bytes without their line end. Remote texts have the lines,
    blocks and fingerprint of a local copy. Blank lines between records belong to the record before.

    Compressed texts, and those whose bytes don't show where their lines end, are read through a
    plain copy. If one of several remote texts is, all of them are.

    Args:
        data_path: the files.
        unit: "line" or "record".
        reach: how URLs are read, and the folder of the table and of plain copies. Without a
            `cache_dir`, the table of local texts is kept if they are large.
        codec: encoding and errors of the text, as Python has them; only what shows no lines, or is
            compressed, is decoded here.
        budget: for one line or record; a file that is one JSON list is read as a whole, at the
            start.
        progress: show a progress bar; None: only on a terminal.
        delimiter: what stands between the fields of tables; None: a comma in .csv, a tab in .tsv.

    Attributes:
        codec: how the bytes that `read` gives are decoded: encoding and errors.
        texts: the files.
        headers: the names of the fields of each file; empty for a file that is not a table.

    Raises:
        FormatError: a file is damaged, or of a kind that has no records.
        AccessError: a file can't be read.
        RemoteError, FileChangedError, DataNotFoundError: see `Files.read`.
    """

    def __init__(
        self,
        data_path: DataPath | FileSet,
        unit: str,
        reach: RemoteOptions | None = None,
        *,
        codec: tuple[str, str] = ("utf-8", "strict"),
        budget: MemoryBudget | None = None,
        progress: bool | None = None,
        delimiter: str | None = None,
    ) -> None:
        reach = reach or RemoteOptions()
        self.listing: FileSet = resolve(data_path, TEXTS, reach)
        self._unit = unit
        self.has_records: bool = unit == "record"
        """True if samples are records, and not lines."""
        self._budget = budget
        self._cache_dir = os.path.abspath(cache_folder(reach.cache_dir))
        server = self.listing.server
        paths, files = self.listing.to_read()
        self.files: Files = files
        if server is not None:
            learn(paths, server)
        are_plain = shows_lines(codec[0])
        self.codec: tuple[str, str] = codec if are_plain else ("utf-8", "surrogatepass")
        copies = [not are_plain or is_compressed(without_query(path)) for path in paths]
        if server is not None and any(copies):
            copies = [True] * len(paths)
            self.files = LocalFiles()
        elif server is not None:
            server.check_ranges(paths[0])
        delimiters = records.delimiters_of(delimiter)
        self.texts: list[TextFile] = []
        for path, is_copy in zip(paths, copies, strict=True):
            kind = ""
            if unit == "record":
                kind = records.format_of(without_query(path))
            read = path
            head = 0
            end = files.version(path).size
            if is_copy:
                copy = plain_copy(files, path, codec, self._cache_dir)
                read = copy.path
                head = HEAD
                end = HEAD + copy.count
            self.texts.append(TextFile(path, read, head, end, kind, delimiters.get(kind)))
        self._identities = [files.identity(path) for path in paths]
        self._paths = [text.path for text in self.texts]
        self._bases = np.array([text.head for text in self.texts])
        ends = np.array([text.end for text in self.texts])
        self._nbytes = ends - self._bases
        # what is added to places in each file to get those in the table
        self._shifts = np.cumsum(ends) - ends
        self._has_versions = all(tag is not None for *_, tag in self._identities)
        self.keeps_tables: bool = self._has_versions
        """True if the places of lines and the targets of records are cached on disk: with a
        `cache_dir`, and for remote or large texts, unless the server gives no versions.
        """
        if server is None and reach.cache_dir is None:
            self.keeps_tables = bool(self._nbytes.sum() >= KEPT_FROM)
        self._table = self._found_table(delimiter, progress)
        self._first = np.array(self._table.short[0])
        self.headers: list[list[str]] = json.loads(bytes(self._table.short[1]))
        if not self.files.is_remote:
            files.close()  # each process opens what it reads
            self.files.close()
        self._blocks = dict[int, IntArray]()  # by their length
        self._coming = deque[tuple[int, int]]()  # blocks to prefetch, while all lines are read

    def _found_table(self, delimiter: str | None, progress: bool | None) -> FileArrays:
        """The table of lines, cached, or made now by a pass over all texts."""
        cached = None
        if self.keeps_tables:
            about = {
                "version": _VERSION,
                "of": self._identities,
                "unit": self._unit,
                "delimiter": delimiter,
                "codec": self.codec,
            }
            cached = ArrayFile(self._cache_dir, "lines", about)

        scan = Scan(self.files, self.texts, self.codec, self._budget, progress)
        return kept_or_held(cached, self.files.patience, "places of lines", "<u2", scan.table)

    # -- reading

    def bounds(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        files = self.file_of(rows)
        # of each file the table holds the end too
        starts, ends = places_in(self._table, rows + files)
        shifts = self._shifts.take(files)
        return starts - shifts, ends - shifts

    def blocks_of(self, nbytes: int) -> IntArray:
        """Lines that begin in the same `nbytes` of their file, or of its plain copy; each file
        begins a block.
        """
        if nbytes not in self._blocks:
            places = [np.arange(text.head, text.end, nbytes) for text in self.texts]
            files = np.repeat(np.arange(len(places)), list(map(len, places)))
            firsts = first_from(
                np.concatenate(places),
                self._first[files + 1],
                lambda lines: self.bounds(lines)[0],
                self._first[files],
            )
            edges = distinct(np.concatenate([firsts, [0, len(self)]]))
            self._blocks[nbytes] = np.diff(edges)
        return self._blocks[nbytes]

    def read(self, indices: Sequence[int]) -> list[bytes]:
        rows = np.asarray(indices, np.int64)
        coming = self._coming
        while coming and (
            coming[0][0] <= rows.max(initial=-1) or self.files.bytes_prefetched < _AHEAD
        ):
            self.files.prefetch([self.byte_ranges(np.arange(*coming.popleft()))])
        ranges = self.byte_ranges(rows)
        check_room(int(ranges.nbytes.max(initial=0)), self._budget)
        return self._without_ends(self.files.read_each(ranges))

    def read_joined(self, indices: IntArray) -> tuple[bytes, IntArray]:
        """What `read` gives of lines, one behind the other, and how many bytes each has ([n]
        int64).
        """
        ranges = self.byte_ranges(indices)
        sizes = ranges.nbytes
        check_room(int(sizes.max(initial=0)), self._budget)
        if len(self.texts) == 1:
            joined = self.files.read_joined(ranges)
        else:
            joined = b"".join(self.files.read_each(ranges))
        # each line has its end, and inside there is none
        if b"\r" not in joined and joined.count(b"\n") == len(sizes):
            return joined.replace(b"\n", b""), sizes - 1
        edges = [0, *np.cumsum(sizes).tolist()]
        lines = [joined[begin:end] for begin, end in itertools.pairwise(edges)]
        lines = self._without_ends(lines)
        return b"".join(lines), np.fromiter(map(len, lines), np.int64, len(lines))

    def _without_ends(self, lines: list[bytes]) -> list[bytes]:
        if self.has_records:
            return [line.rstrip(b"\r\n") for line in lines]
        return [line.removesuffix(b"\n").removesuffix(b"\r") for line in lines]

    @property
    def stored_nbytes(self) -> int:
        return int(self._nbytes.sum())

    # -- all of it, once

    @contextlib.contextmanager
    def of_one_version(self) -> Iterator[list[list[Any]] | None]:
        """As `TextFilesSource.of_one_version`: each read is of the version that was found at the
        start. Inside, all lines are read in order, and those of a server are prefetched.
        """
        if self.is_remote:
            edges = [0, *np.cumsum(self.blocks_of(block_length(self.cut_nbytes))).tolist()]
            self._coming.extend(itertools.pairwise(edges))
            self.files.hold_prefetched(_AHEAD)
        try:
            yield self._identities if self._has_versions else None
        finally:
            self._coming.clear()
            self.files.drop_prefetched()
            self.files.hold_prefetched(0)

    # -- what it holds

    def row(self, index: int, record: bytes) -> Any:
        """The text of a line; the JSON of a record, or a dict of its fields.

        Raises:
            FormatError: the bytes are not a text in the encoding, or not such a record.
        """
        try:
            text = record.decode(*self.codec)
        except UnicodeDecodeError as error:
            raise undecodable(error, self.offset_of(index)) from None
        if not self.has_records:
            return text
        number = self.number_of(index)
        file = self.texts[number]
        if file.delimiter is not None:
            return records.csv_fields(text, file.delimiter, self.headers[number])
        if file.kind == ".json":  # of a list: a comma may follow
            text = text.rstrip(", \t\r\n")
        return records.json_record(text)

    def number_of(self, index: int) -> int:
        """The number of the file of a line."""
        if len(self.texts) == 1:
            return 0
        return int(self.file_of(np.array(index)))

    def offset_of(self, index: int) -> int:
        """The byte in its file, or in the file's plain copy, where a line begins."""
        ranges = self.byte_ranges(np.array([index]))
        return int(ranges.start[0] - self._bases[ranges.file[0]])

    def sizes(self, indices: IntArray | None = None) -> IntArray:
        """Bytes of each line, or of some, its end included ([n] int64)."""
        if indices is None:
            indices = np.arange(len(self))
        sizes = np.empty(len(indices), np.int64)
        for start in range(0, len(indices), _TOGETHER):
            starts, ends = self.bounds(indices[start : start + _TOGETHER])
            sizes[start : start + _TOGETHER] = ends - starts
        return sizes

    def fingerprint(self) -> str:
        return f"{fingerprint_names(*self.listing.names.arrays)}:{self._unit}:{len(self)}"

    def location(self, index: int) -> str:
        file = self.number_of(index)
        number = index - int(self._first[file]) + 1
        return f"{redact(self.texts[file].shown)}, {self._unit} {number:,}"

    def describe(self) -> Description:
        copied = ""
        copies = np.count_nonzero(self._bases)
        if copies:
            copied = f", {copies} of them through plain copies in {redact(self._cache_dir)}"
        where = "in memory"
        if self._table.path:
            where = f"read from {redact(self._table.path)}"
        way = f"{len(self):,} of {len(self.texts):,} files{copied}; the index is {where}"
        nbytes = sum(text.end for text in self.texts)
        column = Column(f"{self._unit}s", way, "text", read=nbytes // max(1, len(self)))
        facts = {"files": self.files.explain()} if self.files.is_remote else {}
        return Description([column], facts, len(self.texts), nbytes)
