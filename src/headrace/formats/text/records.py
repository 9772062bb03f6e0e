"""Finds and parses the records of CSV, TSV, JSON and JSON Lines files."""

from __future__ import annotations

import array
import contextlib
import csv
import io
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from headrace.dtypes import IntArray
from headrace.errors import ConfigError, FormatError
from headrace.formats.resolve.file_set import FileSet
from headrace.formats.text.plain import COMPRESSED, without_compression
from headrace.io.paths import redact
from headrace.memory.processes import PerProcess

TEXT_FIELD = "text"
"""The field that holds a record's text, where none is named."""
DELIMITERS = {".csv": ",", ".tsv": "\t"}
JSON_LINES = (".jsonl", ".ndjson")
"""Two names of one format."""
FORMATS = (*DELIMITERS, ".json", *JSON_LINES)
BY_RECORD = tuple(
    ending + packed for ending in (*JSON_LINES, *DELIMITERS) for packed in ("", *COMPRESSED)
)
"""Endings of files whose samples are records by default. For .json the content decides."""
_JSON = tuple(".json" + packed for packed in ("", *COMPRESSED))
_field_limit = PerProcess(threading.Lock)
# how a list of objects or texts begins, in UTF-8 or, but for zeros, in UTF-16
_LIST = re.compile(rb"(?:\xef\xbb\xbf|\xff\xfe|\xfe\xff)?\s*\[\s*[{\"]")
_SPACE = re.compile(r"[ \t\n\r]*")


def format_of(path: str) -> str:
    """The ending that defines the records of a file, one of `FORMATS`.

    Raises:
        FormatError: the file has another one.
    """
    ending = os.path.splitext(without_compression(path))[1].lower()
    if ending not in FORMATS:
        known = ", ".join(FORMATS)
        raise FormatError(
            f"{redact(path)}: records are read from {known} (also .gz and .zst), not from this "
            "one; pass unit='line' or unit='file', "
            "and no text_field= or target_field="
        )
    return ".jsonl" if ending in JSON_LINES else ending


def unit_of(files: FileSet, head_of: Callable[[int], bytes]) -> str:
    """The unit that files have by default: "record" for .jsonl, .ndjson, .csv and .tsv, and for
    .json if the first file is a list of records; else "file".

    Args:
        files: of the data.
        head_of: the first bytes of a file by its number, decompressed.

    Raises:
        ConfigError: there are files of both kinds.
    """
    names = files.names
    are_of_records = names.end_in(*BY_RECORD)
    are_json = names.end_in(*_JSON)
    if are_json.any() and (are_json | are_of_records).all():
        head = head_of(int(are_json.argmax()))
        if _LIST.match(head.replace(b"\0", b"")):
            return "record"
    count = int(are_of_records.sum())
    if 0 < count < len(names):
        row = names[int(are_of_records.argmax())]
        other = names[int(are_of_records.argmin())]
        raise ConfigError(
            f"the files are of two kinds: {count:,} with records, such as {redact(row)}, and "
            f"{len(names) - count:,} without, such as {redact(other)}: pass unit='file' or "
            "unit='record', or name the files of one kind by a glob, such as 'data/*.jsonl'"
        )
    return "record" if count else "file"


def delimiters_of(delimiter: str | None) -> Mapping[str, str]:
    """The delimiter of the fields for each ending of a table: the usual one, or the user's.

    Raises:
        ConfigError: it can't be a delimiter.
    """
    if delimiter is None:
        return DELIMITERS
    if (
        not isinstance(delimiter, str)
        or len(delimiter) != 1
        or not delimiter.isascii()
        or delimiter in '"\r\n\0'
    ):
        raise ConfigError(
            f"delimiter must be one ASCII character, such as ';', or None, not {delimiter!r}"
        )
    return dict.fromkeys(DELIMITERS, delimiter)


def another_delimiter(line: str, delimiter: str) -> str:
    """A hint for a message if the fields of a line seem to have another delimiter; else ""."""
    if delimiter in line:
        return ""
    likely = max(",;|\t", key=line.count)
    if likely not in line:
        return ""
    return f"; its fields seem to be separated by {likely!r}: pass delimiter={likely!r}"


@contextlib.contextmanager
def _any_field() -> Iterator[None]:
    """Fields of any length; the limit is the whole process's."""
    with _field_limit.get():
        before = csv.field_size_limit(2**31 - 1)
        try:
            yield
        finally:
            csv.field_size_limit(before)


def csv_row(text: str, delimiter: str) -> list[str]:
    """The fields of a record.

    Raises:
        FormatError: it is no record.
    """
    try:
        try:
            rows = _csv_rows(text, delimiter)
        except csv.Error:
            with _any_field():
                rows = _csv_rows(text, delimiter)
    except csv.Error as error:
        raise FormatError(f"not a CSV record: {error}") from None
    if len(rows) != 1:
        raise FormatError(f"{len(rows)} records where there should be one")
    return rows[0]


def _csv_rows(text: str, delimiter: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True))


def json_places(data: bytes | bytearray) -> IntArray:
    """The offsets where the elements of a JSON list begin, and where the last one ends.

    Raises:
        FormatError: the data is not a list, or not JSON; the message names the offset.
    """
    text = data.decode("latin-1")  # a character is a byte: structure is ASCII
    decoder = json.JSONDecoder()
    places = array.array("q")
    at = _space(text, 0)
    if text[at : at + 1] != "[":
        raise FormatError(
            "it holds no list of records: a .json file must be one list, [{...}, {...}]; "
            "name a file with one record per line .jsonl"
        )
    end = 0
    at = _space(text, at + 1)
    while places or text[at : at + 1] != "]":
        try:
            _, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            # without line and column, which are those of the list as one text
            cause = getattr(error, "msg", error)
            raise FormatError(
                f"record {len(places) + 1:,} at byte {at:,} is not JSON: {cause}"
            ) from None
        places.append(at)
        at = _space(text, end)
        if text[at : at + 1] == "]":
            break
        if text[at : at + 1] != ",":
            raise FormatError(f"the list breaks off at byte {at:,}, after {len(places):,} records")
        at = _space(text, at + 1)
    rest = _space(text, at + 1)
    if rest < len(text):
        raise FormatError(f"there is more after the end of the list, at byte {rest:,}")
    places.append(end)
    return np.array(places, np.int64)


def _space(text: str, at: int) -> int:
    """The place behind white space."""
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def csv_fields(text: str, delimiter: str, names: list[str]) -> dict[str, str]:
    """The fields of a record by their names.

    Raises:
        FormatError: it is no record, or has another number of fields.
    """
    row = csv_row(text, delimiter)
    if len(row) != len(names):
        raise FormatError(
            f"it has {len(row)} fields, and the first line of its file names {len(names)}"
        )
    return dict(zip(names, row, strict=True))


def json_record(text: str) -> Any:
    """The value of a record.

    Raises:
        FormatError: it is no JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        if not text.strip():
            raise FormatError("it is blank: remove the line") from None
        raise FormatError(f"not JSON: {error}") from None


def text_of(record: Any, field: str | Callable[[Any], Any]) -> str:
    """The text of a record, from a field or by a callable. A record that is itself a text needs no
    field.

    Raises:
        FormatError: there is no text.
    """
    if isinstance(record, str) and field == TEXT_FIELD:
        return record
    what = "text_field returned"
    if callable(field):
        found = made_by(field, record)
    else:
        found = field_of(record, field)
        what = f"its field {field!r} is"
    if not isinstance(found, str):
        raise FormatError(f"{what} a {type(found).__name__}, not a text")
    return found


def made_by(text_field: Callable[[Any], Any], record: Any) -> Any:
    """What a callable makes of a record.

    Raises:
        FormatError: it raises something else than a MemoryError.
    """
    try:
        return text_field(record)
    except MemoryError:
        raise
    except Exception as error:
        raise FormatError(f"text_field raised {type(error).__name__}: {error}") from error


def field_of(record: Any, name: str) -> Any:
    """A field of a record.

    Raises:
        FormatError: there is none.
    """
    if not isinstance(record, dict):
        raise FormatError(
            f'it is a {type(record).__name__}, not an object with fields, such as {{"text": ...}}'
        )
    if name not in record:
        raise FormatError(
            f"it has no field {name!r}; it has {', '.join(map(repr, record)) or 'none'}: pass "
            "text_field= or target_field="
        )
    return record[name]
