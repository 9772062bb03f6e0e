"""Reads tables of labels by file name: CSV, JSON, Parquet, and DataFrames."""

from __future__ import annotations

import csv
import io
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from headrace.arguments import described
from headrace.datasets.cells import parsed
from headrace.datasets.image.matching import names_of
from headrace.errors import AccessError, ConfigError, DataNotFoundError, FormatError
from headrace.io.paths import check_regular, composed, is_url, named_part, redact
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import read_whole
from headrace.io.resolve.file_set import FileSet
from headrace.storage.text.records import JSON_LINES, another_delimiter, delimiters_of

TABLE_ENDINGS = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet", ".pq", ".txt")
"""Of files of labels. Local ones may have any other."""
_LOOKED_AT = 100  # rows of which one should name a file
_NAMED = ("file", "file_name", "filename", "path", "name", "image", "image_id", "id")


class Table(NamedTuple):
    """Columns of labels.

    Attributes:
        where: they are from, for messages.
        columns: values by name, all of one length.
        first_row: the number of the first row where it was read, from 1.
        key: the column of file names, if that is known.
        is_text: True if all values are texts, of which some may stand for numbers.
    """

    where: str
    columns: dict[str, Sequence[Any]]
    first_row: int = 1
    key: str | None = None
    is_text: bool = False


def read_labels(
    path: str, files: FileSet, reach: RemoteOptions, delimiter: str | None = None
) -> Table | dict[str, Any]:
    """A table of labels, or the object of a JSON file, which its reader has to tell from others.

    Args:
        path: of this machine, or a URL.
        files: of the data.
        reach: how URLs are read.
        delimiter: of the cells of a CSV file; None: a tab in .tsv, else a comma.

    Raises:
        DataNotFoundError, AccessError, RemoteError: it is not there; it can't be read.
        ConfigError: it is a folder; pyarrow is missing; rows have another number of cells than the
            others.
        FormatError: it is damaged, or no table.
    """
    delimiters = delimiters_of(delimiter)
    data, ending = _bytes_of(path, reach), os.path.splitext(named_part(path))[1].lower()
    where = redact(path)
    is_parquet = data[:4] == b"PAR1"
    is_json = ending not in delimiters and data.lstrip()[:1] in (b"{", b"[")
    if delimiter is not None and (is_parquet or is_json):
        raise ConfigError(
            f"delimiter={delimiter!r} is for tables in CSV, and {where} is none: leave it out"
        )
    if is_parquet:
        return _from_parquet(data, where)
    if is_json:
        return _from_json(data, where, ending in JSON_LINES)
    return _from_csv(data, where, delimiters.get(ending, delimiters[".csv"]), files)


def _bytes_of(path: str, reach: RemoteOptions) -> bytes:
    if is_url(path):
        data = read_whole(path, reach)
        if data is None:
            raise DataNotFoundError(f"targets: {redact(path)} does not exist")
        return data
    try:
        local = os.path.expanduser(path)
        check_regular(local)
        with open(local, "rb") as file:
            return file.read()
    except FileNotFoundError as error:
        raise DataNotFoundError(
            f"targets: {redact(path)} does not exist (working folder: {os.getcwd()})"
        ) from error
    except IsADirectoryError as error:
        raise ConfigError(
            f"targets: {redact(path)} is a folder; name a file of labels in it"
        ) from error
    except OSError as error:
        raise AccessError(
            f"targets: {redact(path)} can't be read: {error.strerror or error}"
        ) from error


# -- CSV


def _from_csv(data: bytes, where: str, delimiter: str, files: FileSet) -> Table:
    """A first row that names no file of the data is a header. A first column without a name that
    counts the rows is left out.
    """
    try:
        rows = [
            row
            for row in csv.reader(
                io.StringIO(data.decode("utf-8-sig"), newline=""), delimiter=delimiter
            )
            if row
        ]
    except (UnicodeDecodeError, csv.Error) as error:
        raise FormatError(
            f"targets: {where} is no CSV file in UTF-8: {error}; save it as UTF-8"
        ) from error
    raw = rows
    rows = [[cell.strip() for cell in row] for row in raw]
    short = next((number for number, row in enumerate(rows, 1) if len(row) < 2), None)
    if short is not None:
        hint = another_delimiter(rows[short - 1][0], delimiter) if rows[short - 1] else ""
        raise ConfigError(
            f"targets: row {short} of {where} has no second column{hint or ': write file,target'}"
        )
    has_header = bool(rows) and not _names_among(rows[0], files)
    names = rows[0] if has_header else ["file", "target"]
    if not has_header and len(rows[0] if rows else names) > 2:
        raise ConfigError(
            f"targets: {where} has {len(rows[0])} columns and no header: name them in a first "
            "row, such as file,label,patient"
        )
    if len(set(names)) < len(names):
        raise ConfigError(
            f"targets: the header of {where} has a name twice ({', '.join(names)}): give each "
            "column a name of its own"
        )
    first = 2 if has_header else 1
    width, rows = len(names), rows[1:] if has_header else rows
    for number, row in enumerate(rows, first):
        if len(row) < width or any(row[width:]):
            raise ConfigError(
                f"targets: row {number} of {where} has {len(row)} cells, and there are {width} "
                "columns: quote cells with commas"
            )
    columns: dict[str, Sequence[Any]] = {
        name: _column([row[place] for row in raw[first - 1 :]]) for place, name in enumerate(names)
    }
    if (
        width > 2
        and names[0] == ""
        and list(columns[""]) == [str(number) for number in range(len(rows))]
    ):
        del columns[""]  # the index that pandas writes by default
    if "" in columns:
        place = names.index("") + 1
        raise ConfigError(
            f"targets: column {place} of {where} has no name in the header: name it, or leave it "
            "out (pandas: index=False)"
        )
    return Table(where, columns, first, None if has_header else names[0], is_text=True)


def _column(raw: list[str]) -> list[str]:
    """Cells without the spaces around them. Where spaces alone tell two numbers apart, these are
    names, and keep their spaces.
    """
    cells = [cell.strip() for cell in raw]
    if len(set(raw)) > len(set(cells)) and not all(
        isinstance(value, str) for value in parsed(cells).values
    ):
        return raw
    return cells


def _names_among(cells: Sequence[str], files: FileSet) -> set[str]:
    """Those of some cells that name files."""
    wanted, found = set(map(composed, cells)), set[str]()
    for name in map(os.fsdecode, files.names):
        found |= wanted.intersection(map(composed, names_of(name)))
        if len(found) == len(wanted):
            break
    return {cell for cell in cells if composed(cell) in found}


# -- JSON and Parquet


def _from_json(data: bytes, where: str, is_lines: bool) -> Table | dict[str, Any]:
    try:
        if is_lines:
            lines = [line for line in data.splitlines() if line.strip()]
            found = [json.loads(line, object_pairs_hook=_fields) for line in lines]
        else:
            found = json.loads(data, object_pairs_hook=_fields)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"targets: {where} is no JSON file: {error}") from error
    if isinstance(found, list):
        return from_records(found, where)
    assert isinstance(found, dict)  # it begins with a brace
    return found


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The fields of an object, of which none comes twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = Counter(name for name, _ in pairs)
        raise ValueError(
            f"the key {names.most_common(1)[0][0]!r} comes several times in one object"
        )
    return fields


def from_records(records: Sequence[Any], where: str, keys: Sequence[str] | None = None) -> Table:
    """The table of objects that all have the same fields.

    Raises:
        ConfigError: one is no object, or has other fields.
    """
    first = records[0] if records else {}
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict):
            raise ConfigError(
                f"targets: row {number} of {where} is no object with fields, but "
                f"{described(record)}: give file and labels"
            )
        if record.keys() != first.keys():
            raise ConfigError(
                f"targets: row {number} of {where} has the fields {', '.join(map(str, record))}, "
                "and the first has "
                f"{', '.join(map(str, first))}: give all the same"
            )
    columns: dict[str, Sequence[Any]] = {} if keys is None else {"file": list(keys)}
    columns.update({str(name): [record[name] for record in records] for name in first})
    return Table(where, columns, key=None if keys is None else "file")


def _from_parquet(data: bytes, where: str) -> Table:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(
            f"targets: {where} is a Parquet table, which needs the package pyarrow: pip install "
            "'headrace[arrow]'"
        ) from None
    try:
        table = parquet.read_table(io.BytesIO(data))
    except (pyarrow.ArrowException, OSError) as error:
        raise FormatError(f"targets: {where} is a damaged Parquet table: {error}") from error
    return Table(where, {name: table.column(name).to_pylist() for name in table.column_names})


# -- objects in memory


def is_frame(value: Any) -> bool:
    """True for a table of pandas, polars or Arrow, told by what it can do."""
    return hasattr(value, "columns") and (
        hasattr(value, "column_names") or hasattr(value, "iloc") or hasattr(value, "get_column")
    )


def from_frame(frame: Any) -> Table:
    """The table of a DataFrame; an index that holds texts is its first column."""
    if hasattr(frame, "column_names"):
        return Table(
            "the table", {name: frame.column(name).to_pylist() for name in frame.column_names}
        )
    columns: dict[str, Sequence[Any]] = {}
    index = [*getattr(frame, "index", ())]
    is_keyed = bool(index) and all(isinstance(key, str) for key in index)
    if is_keyed:
        name = "file"
        while name in frame.columns:
            name += "_"
        columns[name] = index
    columns.update({str(name): frame[name].to_numpy().tolist() for name in frame.columns})
    return Table("the DataFrame", columns, key=next(iter(columns)) if is_keyed else None)


def key_of(table: Table, files: FileSet) -> str:
    """The column of file names: the first one that names files of the data in its first rows; else
    one that is called so, or that names files further down.

    Raises:
        ConfigError: there is none.
    """
    if table.key is not None:
        return table.key
    some = {
        name: [str(value) for value in values[:_LOOKED_AT] if isinstance(value, (str, int))]
        for name, values in table.columns.items()
    }
    met = _names_among([value for values in some.values() for value in values], files)
    # a class may be called as a file is without its ending
    met = {name for name in met if os.path.splitext(name)[1]} or met
    found = next((name for name, values in some.items() if not met.isdisjoint(values)), None)
    if found is None:
        found = next((name for name in table.columns if name.lower() in _NAMED), None)
    if found is None:
        found = next(
            (
                name
                for name, values in table.columns.items()
                if _names_among([*map(str, values)], files)
            ),
            None,
        )
    if found is None and len(files.names) and any(map(len, table.columns.values())):
        example = names_of(os.fsdecode(files.names[0]))[0]
        raise ConfigError(
            f"targets: no column of {table.where} ({', '.join(table.columns)}) holds names of the "
            f"files, such as {example!r}: add one, and "
            "call it file"
        )
    return next(iter(table.columns), "") if found is None else found


def is_missing(value: Any) -> bool:
    """True for an empty cell: None, NaN, or an empty text."""
    return (
        value is None
        or (isinstance(value, str) and not value)
        or (isinstance(value, (float, np.floating)) and bool(np.isnan(value)))
    )


def as_mapping_table(found: Mapping[str, Any], where: str) -> Table | None:
    """The table of a JSON object whose values are objects with the same fields; None: its values
    are labels themselves.
    """
    values = list(found.values())
    if values and all(isinstance(value, dict) for value in values):
        return from_records(values, where, list(found))
    return None
