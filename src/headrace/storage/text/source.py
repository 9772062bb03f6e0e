"""The lines and records of many text files, local or remote, with random access.

They are located through a table of their positions: little more than a byte per line (see
`headrace.storage.text.line_index`), built in one pass, and cached in `cache_dir`: a large one is
read by ranges, so that no process holds it in memory. In the table the files are concatenated.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.io.array_file import HEAD, ArrayFile, Unkept
from headrace.io.local.files import LocalFiles
from headrace.io.paths import redact, without_query
from headrace.io.ranges import ByteRanges
from headrace.io.remote_files import RemoteFiles
from headrace.io.resolve.file_set import FileSet
from headrace.io.single_flight import found_or_built
from headrace.sorting import distinct
from headrace.storage.blocks import block_length
from headrace.storage.describe import Column, Description
from headrace.storage.files import fingerprint_names
from headrace.storage.source import Locatable
from headrace.storage.text import records
from headrace.storage.text.files import Texts
from headrace.storage.text.line_index import Arrays, HeldArrays, PlacesEncoder, PlacesTable
from headrace.storage.text.lines import Newline, strip_end
from headrace.storage.text.plain import Room, is_compressed, plain_copy, shows_lines
from headrace.storage.text.scan import UTF8_MARK, OddQuotesError, Scan, TextFile

KEPT_FROM = 64 << 20
"""Bytes of text from which on its table is kept without a `cache_dir` too, in the user's cache
folder: smaller ones are scanned anew.
"""
_VERSION = 3
# bytes that are fetched ahead of who reads all lines in order, and as many that are held in the
# midst of it
_AHEAD = 32 << 20


class LinesSource(Locatable):
    """Lines, or records of more than one line, as bytes without their end. Remote ones are those of
    a copy on this machine: the same lines, blocks and fingerprint.

    What can't be read at random, since it is compressed or its bytes don't show where its lines
    end, is read through a plain copy.

    Args:
        texts: which.
        unit: "line" or "record".
        newline: see `headrace.storage.text.lines`.
        encoding, errors: of the text, as Python has them; only what shows no lines, or is
            compressed, is decoded here.
        folder: where the table, and plain copies, are kept.
        is_kept: False: only tables of large local texts are kept.
        room: for one line or record; a file in the form of one JSON list is read as a whole, at the
            start.
        progress: show a progress bar; None: only on a terminal.
        delimiter: what stands between the fields of tables; None: a comma in .csv, a tab in .tsv.

    Raises:
        FormatError: a file is damaged, or of a kind that has no records.
        AccessError: a file can't be read.
        RemoteError, FileChangedError, DataNotFoundError: see `Files.read`.
    """

    def __init__(
        self,
        texts: Texts,
        unit: str,
        newline: Newline,
        encoding: str,
        errors: str,
        folder: Path,
        *,
        is_kept: bool = True,
        room: Room | None = None,
        progress: bool | None = None,
        delimiter: str | None = None,
    ) -> None:
        self.delimiter, self._delimiters = delimiter, records.delimiters_of(delimiter)
        self.listing: FileSet = texts.listing
        self.files, self._copies, paths = texts.files, LocalFiles(), texts.paths
        self._unit, self._newline = unit, newline
        self._is_kept = is_kept
        self.room: Room = room or Room()
        self._cache_dir = os.path.abspath(folder)
        self._formats = (
            [records.format_of(without_query(path)) for path in paths] if unit == "record" else []
        )
        self.is_transcoded: bool = not shows_lines(encoding)
        self.codec: tuple[str, str] = (
            ("utf-8", "surrogatepass") if self.is_transcoded else (encoding, errors)
        )
        """How the bytes that `read` gives are decoded."""
        self._checks_quotes = False
        self._texts = [self._text(path, encoding, errors) for path in paths]
        if self.files.is_remote and not self._texts[0].is_copy:
            cast(RemoteFiles, self.files).check_ranges(self._texts[0].path)
        self._read_paths = [text.path for text in self._texts]
        self._is_copy = np.array([text.is_copy for text in self._texts], bool)
        # of each file, in the table
        self._bases = np.concatenate(
            [[0], np.cumsum([text.end - text.begin for text in self._texts])]
        )
        self._moved = np.array([text.begin for text in self._texts]) - self._bases[:-1]
        self._table = PlacesTable(self._made(progress))
        # the number of the first line of each file, and of all
        self._first = np.array(self._table.short[0])
        blanks = self._shift + np.arange(len(self._shift))
        # the same of what is no blank line
        self._first_row = self._first - np.searchsorted(blanks, self._first)
        self.headers: list[list[str]] = json.loads(bytes(self._table.short[2]))
        """The names of the fields, of each CSV or TSV file."""
        self._is_alike = len(set(self._formats)) <= 1 and all(
            names == self.headers[0] for names in self.headers
        )
        if not self.files.is_remote:
            self.files.close()  # each process opens what it reads
        self._blocks = dict[int, IntArray]()  # by their length

    def _text(self, path: str, encoding: str, errors: str) -> TextFile:
        files, read, begin = self.files, path, 0
        if is_compressed(without_query(path)) or self.is_transcoded:
            copy = plain_copy(files, path, encoding, errors, self._cache_dir)
            files, read, begin = self._copies, copy.path, HEAD
            end = HEAD + copy.count
        else:
            end = files.version(path).size
        if not files.is_remote and (encoding == "utf-8" or self.is_transcoded):
            mark = files.read_joined(ByteRanges.of([(read, begin, min(end, begin + 3))]))
            begin += 3 * (mark == UTF8_MARK)
        return TextFile(files, path, read, begin, end)

    # -- the table

    @property
    def keeps_tables(self) -> bool:
        """True if what is found out about the texts is kept on disk: where a folder is named,
        and of large texts.
        """
        if any(
            text.files.is_remote and text.files.version(text.path).tag is None
            for text in self._texts
        ):
            return False  # nobody could say whether it still holds
        return self._is_kept or (self._bases[-1] >= KEPT_FROM and not self.files.is_remote)

    def _scan(self, progress: bool | None) -> Scan:
        bases = self._bases.tolist()
        of_texts = (self._texts, self._formats, self._newline_in, self.codec)
        return Scan(
            *of_texts,
            self.room,
            bases,
            self._checks_quotes,
            progress,
            self._delimiters,
        )

    def _made(self, progress: bool | None) -> Arrays:
        if not self.keeps_tables:
            return self._checked(lambda: self._held(progress))
        of = [
            # a copy is named by its text
            [
                *([text.path, text.end, 0] if text.is_copy else text.files.identity(text.path)),
                text.begin,
            ]
            for text in self._texts
        ]
        about = {"version": _VERSION, "of": of, "unit": self._unit, "newline": self._newline}
        if self.delimiter is not None:
            about["delimiter"] = self.delimiter
        cached = ArrayFile(self._cache_dir, "lines", about)
        return found_or_built(
            cached,
            self.files.patience,
            lambda: self._checked(lambda: self._written(cached, progress)),
        )

    def _checked(self, make: Callable[[], Arrays]) -> Arrays:
        try:
            return make()
        except OddQuotesError:  # the exception: tables are gone through twice then
            self._checks_quotes = True
            return make()

    def _written(self, cached: ArrayFile, progress: bool | None) -> Arrays:
        with Unkept(
            self._cache_dir,
            "the table of lines is",
            "it is held in memory, and made at every start",
        ):
            with cached.writing("u1") as writer:
                scan, encoder = self._scan(progress), PlacesEncoder()
                for piece in encoder.encoded(scan):
                    writer.write(piece)
                writer.short([*scan.short(), np.array(encoder.edges, np.int64)])
            return cached.open()
        return self._held(progress)

    def _held(self, progress: bool | None) -> HeldArrays:
        scan, encoder = self._scan(progress), PlacesEncoder()
        encoded = np.concatenate([np.empty(0, np.uint8), *encoder.encoded(scan)])
        return HeldArrays(encoded, [*scan.short(), np.array(encoder.edges, np.int64)])

    # -- reading

    @property
    def _shift(self) -> IntArray:
        """For each line that is no record (a blank one) how many records come before it."""
        return self._table.short[1]

    def __len__(self) -> int:
        return int(self._first_row[-1])

    def _places(self, indices: Sequence[int] | IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """For each index the number of its file, and where it begins and ends there."""
        rows = np.asarray(indices, np.int64)
        if rows.size and rows.view(np.uint64).max() >= len(self):  # negative ones are the largest
            raise IndexError(f"lines {rows.min()} to {rows.max()} of {len(self):,}")
        is_one = len(self._texts) == 1
        files = (
            np.zeros(rows.size, np.int64)
            if is_one
            else np.searchsorted(self._first_row, rows, side="right") - 1
        )
        places = rows if is_one else rows + files  # in the table: of each file it holds the end too
        if len(self._shift):
            places = places + np.searchsorted(self._shift, rows, side="right")
        starts, ends = self._table.places.reach(places)
        if is_one and not self._moved[0]:  # the usual case
            return files, starts, ends
        moved = self._moved.take(files)
        return files, starts + moved, ends + moved

    @property
    def cut_nbytes(self) -> int:
        return sum(text.end - (HEAD if text.is_copy else 0) for text in self._texts)

    def blocks(self) -> IntArray:
        return self.blocks_of(block_length(self.cut_nbytes))

    def blocks_of(self, nbytes: int) -> IntArray:
        """Lines that begin in the same `nbytes` of their file, or of its plain copy; each file
        begins a block.
        """
        if nbytes not in self._blocks:
            counts = np.array(
                [-(-(text.end - (HEAD if text.is_copy else 0)) // nbytes) for text in self._texts],
                np.int64,
            )
            numbers = np.repeat(np.arange(len(counts)), counts)
            heads = np.array([HEAD if text.is_copy else 0 for text in self._texts], np.int64)
            # of each block in its file
            inside = np.arange(len(numbers)) - np.repeat(np.cumsum(counts) - counts, counts)
            wanted = heads[numbers] + inside * nbytes
            low, high = self._first_row[numbers], self._first_row[numbers + 1]
            while (low < high).any():  # the first line of each that begins there or later
                middle = (low + high) // 2
                is_before = (low < high) & (
                    self._places(np.minimum(middle, len(self) - 1).tolist())[1] < wanted
                )
                low, high = (
                    np.where(is_before, middle + 1, low),
                    np.where(is_before, high, np.minimum(middle, high)),
                )
            edges = distinct(np.concatenate([low, [0, len(self)]]))
            self._blocks[nbytes] = np.diff(edges)
        return self._blocks[nbytes]

    def read(self, indices: Sequence[int]) -> list[bytes]:
        files, starts, ends = self._places(indices)
        lines = self._read_all(files, starts, ends)
        if not self._formats:
            return _without_ends(lines, self._newline)
        return [
            strip_end(line, self._newline_in(number))
            for line, number in zip(lines, files.tolist(), strict=True)
        ]

    def read_joined(self, indices: IntArray) -> tuple[bytes, IntArray]:
        """What `read` gives of lines, one behind the other, and how many bytes each has ([n]
        int64).
        """
        if self._formats or self._newline not in (None, "\n"):
            return _joined(self.read(indices.tolist()))
        files, starts, ends = self._places(indices)
        sizes = ends - starts
        if len(self._texts) == 1:
            self.room.check(int(sizes.max(initial=0)))
            joined = self._texts[0].files.read_joined(
                ByteRanges(self._read_paths, files, starts, ends)
            )
        else:
            joined = b"".join(self._read_all(files, starts, ends))
        if b"\r" in joined:
            return _joined(self.read(indices.tolist()))
        if joined.count(b"\n") == len(sizes):  # of each line it is the end: inside there is none
            return joined.replace(b"\n", b""), sizes - 1
        ends = np.cumsum(sizes)
        lines = [
            joined[end - size : end]
            for end, size in zip(ends.tolist(), sizes.tolist(), strict=True)
        ]
        return _joined(_without_ends(lines, self._newline))

    def _read_all(self, files: IntArray, starts: IntArray, ends: IntArray) -> list[bytes]:
        self.room.check(int((ends - starts).max(initial=0)))
        ranges, is_copy = ByteRanges(self._read_paths, files, starts, ends), self._is_copy[files]
        if not is_copy.any():
            return self.files.read_each(ranges)
        found: list[Any] = [None] * len(files)
        for reader, chosen in (
            (self.files, np.flatnonzero(~is_copy)),
            (self._copies, np.flatnonzero(is_copy)),
        ):
            for number, line in zip(
                chosen.tolist(), reader.read_each(ranges.take(chosen)), strict=True
            ):
                found[number] = line
        return found

    def byte_ranges(self, indices: npt.NDArray[np.int64]) -> ByteRanges:
        """The bytes of lines; none of what is read through a plain copy."""
        files, starts, ends = self._places(indices)
        return ByteRanges(self._read_paths, files, starts, ends).take(~self._is_copy[files])

    @property
    def stored_nbytes(self) -> int:
        return sum(text.end for text in self._texts if text.files.is_remote)

    # -- all of it, once

    @contextlib.contextmanager
    def of_one_version(self) -> Iterator[list[list[Any]] | None]:
        """As `TextFilesSource.of_one_version`: each read is of the version that was found at the
        start.
        """
        of = [self.files.identity(text.shown) for text in self._texts]
        yield None if any(tag is None for *_, tag in of) else of

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
            while at < len(edges) - 1 and (
                edges[at] < some.stop or self.files.bytes_prefetched < _AHEAD
            ):
                self.files.prefetch([self.byte_ranges(np.arange(edges[at], edges[at + 1]))])
                at += 1

        self.files.hold_prefetched(_AHEAD)
        try:
            yield expect
        finally:
            self.files.drop_prefetched()
            self.files.hold_prefetched(0)

    def _newline_in(self, file: int) -> Newline:
        return (
            records.newline_of(self._formats[file], self._newline)
            if self._formats
            else self._newline
        )

    @property
    def newline(self) -> Newline:
        """What ends a line."""
        return self._newline

    @property
    def has_records(self) -> bool:
        """True if samples are records, and not lines."""
        return bool(self._formats)

    def fields(self, index: int, text: str) -> Any:
        """What a record says, by the names of its fields.

        Raises:
            FormatError: it is no such record.
        """
        file = 0 if self._is_alike else self._file_of(index)
        kind = self._formats[file]
        return (
            records.json_record(text, kind == ".json")
            if kind not in records.DELIMITERS
            else records.csv_fields(text, self._delimiters[kind], self.headers[file])
        )

    def is_of_table(self, index: int) -> bool:
        """True if a record is a row of a CSV or TSV file, whose fields are all texts."""
        return (
            bool(self._formats)
            and self._formats[0 if self._is_alike else self._file_of(index)] in records.DELIMITERS
        )

    def delimiter_in(self, file: int) -> str:
        """What stands between the fields of a file, which is a table."""
        return self._delimiters[self._formats[file]]

    @property
    def has_tables(self) -> bool:
        """True if a file is a table, whose fields a delimiter separates."""
        return any(kind in self._delimiters for kind in self._formats)

    def offset_of(self, index: int) -> int:
        """The byte in its file, or in the file's plain copy, where a line begins."""
        files, starts, _ = self._places([index])
        text = self._texts[int(files[0])]
        return int(starts[0]) - (HEAD if text.is_copy else 0)

    def _file_of(self, index: int) -> int:
        return int(np.searchsorted(self._first_row, index, side="right")) - 1

    def nbytes(self, indices: IntArray | None = None) -> IntArray:
        """Bytes of each line, or of some, its end included ([n] int64)."""
        if indices is not None:
            _, starts, ends = self._places(indices)
            return ends - starts
        lengths = self._table.places.distances(int(self._first[-1]) + len(self._texts) - 1)
        if len(self._texts) > 1:  # between two files lies no line
            lengths = np.delete(lengths, self._first[1:-1] + np.arange(len(self._first) - 2))
        return np.delete(lengths, self._shift + np.arange(len(self._shift)))

    def file_numbers(self) -> IntArray:
        """The number of the file of each line ([n] int64)."""
        return np.repeat(np.arange(len(self._texts)), np.diff(self._first_row))

    def fingerprint(self) -> str:
        return f"{fingerprint_names(*self.listing.names.arrays)}:{self._unit}:{len(self)}"

    def shown(self, file: int) -> str:
        """A file as messages name it."""
        return redact(self._texts[file].shown)

    def location(self, index: int) -> str:
        file = self._file_of(index)
        text, kind = self._texts[file], self._formats[file] if self._formats else ""
        if kind and kind != ".jsonl":
            return f"{redact(text.shown)}, record {index - int(self._first_row[file]) + 1:,}"
        line = (
            index
            + int(np.searchsorted(self._shift, index, side="right"))
            - int(self._first[file])
            + 1
        )
        return f"{redact(text.shown)}, line {line:,}"

    def describe(self) -> Description:
        copies = sum(text.is_copy for text in self._texts)
        path = self._table.path
        where = "in memory" if path is None else f"read from {redact(path)}"
        copied = (
            f", {copies} of them through plain copies in {redact(self._cache_dir)}"
            if copies
            else ""
        )
        way = f"{len(self):,} of {len(self._texts):,} files{copied}; the table of places is {where}"
        nbytes = sum(text.end for text in self._texts)
        column = Column(f"{self._unit}s", way, "text", read=nbytes // max(1, len(self)))
        facts = {"files": self.files.explain()} if self.files.is_remote else {}
        return Description([column], facts, len(self._texts), nbytes)


def _joined(lines: list[bytes]) -> tuple[bytes, IntArray]:
    return b"".join(lines), np.fromiter(map(len, lines), np.int64, len(lines))


def _without_ends(lines: list[bytes], newline: Newline) -> list[bytes]:
    if newline in (None, "\n") and not any(b"\r" in line for line in lines):
        return [line[:-1] if line[-1:] == b"\n" else line for line in lines]
    return [strip_end(line, newline) for line in lines]
