"""Inspects texts: whole files, lines and records."""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import itertools
import json
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from headrace.errors import ConfigError, DataNotFoundError, FormatError
from headrace.inspecting import advice
from headrace.inspecting.report import Access, Advice, Report
from headrace.inspecting.sizes import ASKED, evenly, sizes_of, spread_of, stored_in
from headrace.io.paths import cache_folder, redact, without_query
from headrace.io.ranges import ByteRanges
from headrace.io.remote.options import RemoteOptions
from headrace.io.resolve.file_set import FileSet
from headrace.storage.class_folders import folder_targets
from headrace.storage.files import FilesSource, fingerprint_names
from headrace.storage.kinds import TEXT_EXTENSIONS
from headrace.storage.text import records
from headrace.storage.text.chats import roles_of
from headrace.storage.text.files import local_texts
from headrace.storage.text.plain import is_compressed, pieces_of, without_compression
from headrace.storage.text.source import LinesSource

_SCANNED = 64 << 20  # bytes of text up to which all records are counted
_HEAD = 256 << 10  # bytes of a file that are looked at
_MANY = 10_000  # texts
_OTHERS = ("utf-16", "cp1252", "latin-1")
_MARKS = {
    codecs.BOM_UTF8: "utf-8 with a mark",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def inspect_texts(data_path: Any, reach: RemoteOptions) -> Report:
    """What text files there are, and how many records.

    Args:
        data_path: as `TextDataset` takes it.
        reach: how URLs are reached.

    Raises:
        DataNotFoundError, AccessError, FormatError, RemoteError: see `TextDataset`.
    """
    source = FilesSource(data_path, TEXT_EXTENSIONS, reach)
    files = source.listing
    try:
        report = Report(redact(data_path), "texts", files=len(files))
        sizes = sizes_of(source)
        report.stored, report.is_estimate = stored_in(len(files), sizes)
        names = [without_query(name.decode("utf-8", "replace")).lower() for name in files.names]
        report.details["endings"] = dict(Counter(map(_ending, names)).most_common(8))
        report.details["file sizes"] = spread_of(sizes)
        heads = [
            (name, head)
            for name, head in _heads(source, evenly(len(source), ASKED).tolist())
            if head
        ]
        _tell_encoding(report, heads)
        unit = _unit(report, files, lambda number: next(_heads(source, [number]))[1])
        if unit == "record":
            _tell_records(report, files, heads, reach)
        elif unit == "file":
            report.samples, report.samples_are = len(files), "one text a file"
            report.fingerprint = fingerprint_names(*files.names.arrays)
            way = "files fetched whole" if files.is_remote else "a file each"
            report.access = [
                Access("", "a file", way + _through_copy(names), read=int(np.median(sizes)))
            ]
            _tell_folders(report, files)
    finally:
        if files.server is not None:
            files.server.close()
    encoding = report.details.get("encoding")
    named = _naming_text(report) + (f", encoding={encoding!r}" if encoding in _OTHERS else "")
    of_chats = ", unit='chat', tokenizer=tokenizer" if "chats" in report.details else ""
    report.opens_as = f"headrace.TextDataset({report.path!r}{of_chats}{named})"
    if of_chats:
        report.notes.append(
            "chats need a HuggingFace tokenizer with a chat template: only the assistant's turns "
            "are labels"
        )
    report.advice = _advice(report, files, str(encoding) if encoding in _OTHERS else None)
    return report


def _ending(name: str) -> str:
    plain = without_compression(name)
    return PurePosixPath(plain).suffix + name[len(plain) :]


def _through_copy(names: list[str]) -> str:
    return ", decompressed" if any(map(is_compressed, names[:ASKED])) else ""


# -- what is in them


def _heads(source: FilesSource, some: list[int]) -> Iterator[tuple[str, bytes]]:
    """Names, and the first bytes of some files, decompressed."""
    files = source.listing
    if files.server is None:
        for number in some:
            path = os.fsdecode(files.path(number))
            yield path, _head(pieces_of(path))
        return
    urls = [files.url(number) for number in some]
    found = files.server.read(
        ByteRanges.of(
            (url, 0, min(_HEAD, size or 0))
            for url, size in zip(urls, files.server.sizes(urls), strict=True)
        )
    )
    for url, data in zip(urls, found, strict=True):
        yield url, _opened_head(bytes(data or b""), without_query(url))


def _head(pieces: Iterator[bytes]) -> bytes:
    found = bytearray()
    for piece in pieces:
        found += piece
        if len(found) >= _HEAD:
            break
    return bytes(found[:_HEAD])


def _opened_head(data: bytes, name: str) -> bytes:
    """The first bytes of a file that was not fetched to its end, decompressed."""
    return (
        _head(_until_cut(pieces_of(name, lambda: io.BytesIO(data))))
        if is_compressed(name)
        else data
    )


def _until_cut(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The pieces of what is cut short, up to there."""
    with contextlib.suppress(FormatError, OSError):
        yield from pieces


def _tell_encoding(report: Report, heads: list[tuple[str, bytes]]) -> None:
    """UTF-8, or what the bytes are instead, as far as that shows."""
    for name, head in heads:
        mark = next((told for mark, told in _MARKS.items() if head.startswith(mark)), None)
        if mark is not None:
            report.details["encoding"] = mark
            return
        try:
            codecs.getincrementaldecoder("utf-8")().decode(head)
        except UnicodeDecodeError as error:
            report.details["encoding"] = encoding = _other(head)
            where = (
                f"{redact(name)}: byte {head[error.start]:#04x} at offset {error.start:,} is no "
                "UTF-8"
            )
            report.notes.append(
                f"{where}: pass encoding={encoding!r}, if the words look right with it"
            )
            return
    report.details["encoding"] = "utf-8" if heads else None


def _other(head: bytes) -> str:
    if head[1::2].count(0) > len(head) // 8 or head[::2].count(0) > len(head) // 8:
        return "utf-16"
    try:
        head.decode("cp1252")
    except UnicodeDecodeError:
        return "latin-1"
    return "cp1252"


def _unit(report: Report, files: FileSet, head_of: Callable[[int], bytes]) -> str | None:
    try:
        return records.unit_of(files, head_of)
    except ConfigError as error:
        report.notes.append(" ".join(str(error).split()))
        return None


def _tell_folders(report: Report, files: FileSet) -> None:
    """Texts of each first-level folder, which are classes where labels="folders" says so."""
    with contextlib.suppress(ConfigError, DataNotFoundError):  # these folders are no classes
        targets, classes = folder_targets(files)
        if targets is not None:
            report.classes_are = "folders"
            report.classes = dict(
                zip(classes, np.bincount(targets, minlength=len(classes)).tolist(), strict=True)
            )
            report.notes.append('class folders count with labels="folders"')


def _tell_records(
    report: Report, files: FileSet, heads: list[tuple[str, bytes]], reach: RemoteOptions
) -> None:
    """How many records there are: counted, if that takes no time; else by those of the first
    bytes.
    """
    report.samples_are = "one record a sample"
    stored = report.stored or 0
    is_plain = not any(is_compressed(name) for name, _ in heads)
    encoding = str(report.details.get("encoding") or "utf-8").partition(" ")[0]
    if is_plain and not files.is_remote and stored <= _SCANNED:
        folder = cache_folder(reach.cache_dir)
        source = LinesSource(
            local_texts(files),
            "record",
            None,
            encoding,
            "strict",
            folder,
            is_kept=False,
            progress=False,
        )
        report.samples, report.fingerprint = len(source), source.fingerprint()
        source.close()
    elif any(
        without_compression(without_query(name)).lower().endswith(".json") for name, _ in heads
    ):
        pass  # the elements of a list can't be counted by lines
    elif not files.is_remote and stored <= _SCANNED // 8:
        report.samples, report.samples_estimated = _counted(files)
    elif heads:
        plain, lines = (
            sum(len(head) for _, head in heads),
            sum(head.count(b"\n") for _, head in heads),
        )
        ratio = 1.0 if is_plain else 4.0  # of texts that are compressed, about
        report.samples, report.samples_estimated = int(stored * ratio * lines / max(1, plain)), True
    if heads:
        report.details["fields"] = _fields(*heads[0], encoding)
        _tell_chats(report, heads, encoding)
    size = int(stored / report.samples) if report.samples else None
    way = "by a table of the places where lines begin"
    report.access = [
        Access("", "a record", way if is_plain else f"through a plain copy, {way}", read=size or 0)
    ]


def _tell_chats(report: Report, heads: list[tuple[str, bytes]], encoding: str) -> None:
    """Whose turns there are in the first chats, if these are such."""
    roles, count = Counter[str](), 0
    for name, head in heads:
        if not without_compression(without_query(name)).lower().endswith(records.JSON_LINES):
            return
        for line in (
            codecs.getincrementaldecoder(encoding)("replace")
            .decode(head)
            .removeprefix("\ufeff")
            .split("\n")
        ):
            # the last one of a head may be cut
            with contextlib.suppress(ValueError, RecursionError):
                found = roles_of(json.loads(line))
                count += bool(found)
                roles.update(found)
        if not count:
            return
    report.samples_are = "one chat a sample"
    report.details["chats"] = {"looked at": count, "turns": dict(roles.most_common(8))}


def _counted(files: FileSet) -> tuple[int, bool]:
    """Records of compressed files, without blank lines and first lines of tables; and whether
    quotes may hide the ends of some.
    """
    count, is_estimate = 0, False
    for number in range(len(files)):
        path, rest, seen = os.fsdecode(files.path(number)), b"", 0
        is_table = without_compression(path).lower().endswith((".csv", ".tsv"))
        for piece in itertools.chain(pieces_of(path), [b"\n"]):
            lines = (rest + piece).split(b"\n")
            rest = lines.pop()
            seen += sum(1 for line in lines if line.strip())
            is_estimate = is_estimate or (is_table and b'"' in piece)
        count += max(0, seen - is_table)
    return count, is_estimate


def _fields(name: str, head: bytes, encoding: str) -> dict[str, str] | None:
    """The fields of the first record, and what is in each."""
    text = codecs.getincrementaldecoder(encoding)("replace").decode(head).removeprefix("\ufeff")
    ending = os.path.splitext(without_compression(without_query(name)))[1].lower()
    if ending in records.DELIMITERS:
        names: list[str] = []
        with contextlib.suppress(csv.Error):  # a cell that is no name, since it is far too long
            reader = csv.reader(io.StringIO(text), delimiter=records.DELIMITERS[ending])
            names = next(reader, [])
        return dict.fromkeys(names, "str") or None
    line = next((line for line in text.splitlines() if line.strip()), "")
    try:
        record = json.loads(line) if ending != ".json" else _first_in_list(text)
    except (ValueError, RecursionError):
        return None
    return (
        {key: type(value).__name__ for key, value in record.items()}
        if isinstance(record, dict)
        else {"": type(record).__name__}
    )


def _first_in_list(text: str) -> Any:
    """The first element of a list in JSON that is cut somewhere.

    Raises:
        ValueError: there is none.
    """
    return json.JSONDecoder().raw_decode(text.partition("[")[2].lstrip())[0]


def _naming_text(report: Report) -> str:
    """The argument that names the field of the text, where none of the records' fields has the
    default name.
    """
    fields = report.details.get("fields") or {}
    texts = [name for name, kind in fields.items() if kind == "str" and name]
    if not texts or records.TEXT_FIELD in fields or "chats" in report.details:
        return ""
    report.notes.append(
        f"no field is called {records.TEXT_FIELD!r}: name that of the text by text_field=, one of "
        f"{', '.join(texts)}"
    )
    return f", text_field={texts[0]!r}"


def _advice(report: Report, files: FileSet, encoding: str | None) -> list[Advice]:
    """Tokens that are made once, where texts are many or must be decompressed."""
    if (report.samples or 0) < _MANY and not any(
        is_compressed(os.fsdecode(name)) for name in files.names[:ASKED]
    ):
        return []
    source, target = shlex.quote(report.path), shlex.quote(advice.packed_name(report.path))
    if "chats" in report.details:
        call = f"headrace.pack({report.opens_as}, {advice.packed_name(report.path)!r})"
        return [
            Advice("each chat is rendered and tokenised again each time that it is read", code=call)
        ]
    why = "each text is tokenised again each time that it is read"
    option = f" --encoding {encoding}" if encoding else ""
    return [Advice(why, f"headrace pack {source} {target} --tokenizer TOKENIZER.json{option}")]
