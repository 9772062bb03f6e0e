"""Reads tables of labels by file name: CSV, JSON, Parquet, and DataFrames."""

from __future__ import annotations

import csv
import io
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from headrace.arguments import described
from headrace.datasets.cells import parsed
from headrace.datasets.image.coco import is_coco
from headrace.datasets.image.matching import spellings_of
from headrace.errors import AccessError, ConfigError, DataNotFoundError, FormatError
from headrace.io.paths import check_regular, composed, is_url, named_part, redact
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import read_whole
from headrace.io.resolve.file_set import FileSet
from headrace.storage.table.library import pyarrow
from headrace.storage.text.records import JSON_LINES, another_delimiter, delimiters_of

TABLE_ENDINGS = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet", ".pq", ".txt")
"""Of files of labels. Local ones may have any other."""


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
    """A table of labels; or the object of a JSON file, of labels by file name or of COCO.

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
    where = redact(path)
    data = _bytes_of(path, reach)
    ending = os.path.splitext(named_part(path))[1].lower()
    is_parquet = data[:4] == b"PAR1"
    is_json = ending not in delimiters and data.lstrip()[:1] in (b"{", b"[")
    if not (is_parquet or is_json):
        return _from_csv(data, where, delimiters.get(ending, delimiters[".csv"]), files)
    if delimiter is not None:
        raise ConfigError(
            f"delimiter={delimiter!r} is for tables in CSV, and {where} is none: leave it out"
        )
    return _from_parquet(data, where) if is_parquet else _from_json(data, where, ending)


def _bytes_of(path: str, reach: RemoteOptions) -> bytes:
    local = os.path.expanduser(path)
    if is_url(path):
        data = read_whole(path, reach)
    elif not os.path.exists(local):
        data = None
    else:
        try:
            check_regular(local)
            with open(local, "rb") as file:
                data = file.read()
        except OSError as error:
            raise AccessError(f"targets: {redact(path)} can't be read: {error.strerror}") from error
    if data is None:
        raise DataNotFoundError(
            f"targets: {redact(path)} does not exist (working folder: {os.getcwd()})"
        )
    return data


def _from_csv(data: bytes, where: str, delimiter: str, files: FileSet) -> Table:
    """A first row that names no file of the data is a header. A first column without a name that
    counts the rows is left out.
    """
    try:
        text = io.StringIO(data.decode("utf-8-sig"), newline="")
        rows = [row for row in csv.reader(text, delimiter=delimiter) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise FormatError(
            f"targets: {where} is no CSV file in UTF-8: {error}; save it as UTF-8"
        ) from error
    if rows and len(rows[0]) < 2:
        hint = another_delimiter(rows[0][0], delimiter) or ": write file,target"
        raise ConfigError(f"targets: row 1 of {where} has no second column{hint}")
    names = ["file", "target"]
    first_row = 1
    if rows and not _names_among(rows[0], files):
        names = [cell.strip() for cell in rows.pop(0)]
        first_row = 2
    for number, row in enumerate(rows, first_row):
        if len(row) < len(names) or any(cell.strip() for cell in row[len(names) :]):
            raise ConfigError(
                f"targets: row {number} of {where} has {len(row)} cells, and there are "
                f"{len(names)} columns: quote cells with commas, and name more than two columns in "
                "a first row, such as file,label,patient"
            )
    columns: dict[str, Sequence[Any]] = {
        name: _column([row[place] for row in rows]) for place, name in enumerate(names)
    }
    if len(names) > 2 and columns.get("") == [str(row) for row in range(len(rows))]:
        names.remove("")
        del columns[""]  # the index that pandas writes by default
    if len(columns) < len(names) or "" in columns:
        raise ConfigError(
            f"targets: a column of {where} has no name in the header, or that of another one "
            f"({', '.join(map(repr, names))}): give each a name of its own (pandas: index=False)"
        )
    key = "file" if first_row == 1 else None
    return Table(where, columns, first_row, key, is_text=True)


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


def _from_json(data: bytes, where: str, ending: str) -> Table | dict[str, Any]:
    try:
        if ending in JSON_LINES:
            lines = [line for line in data.splitlines() if line.strip()]
            found = [json.loads(line, object_pairs_hook=_fields) for line in lines]
        else:
            found = json.loads(data, object_pairs_hook=_fields)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"targets: {where} is no JSON file: {error}") from error
    if isinstance(found, list):
        return Table(where, _columns_of(found, where))
    assert isinstance(found, dict)  # it begins with a brace
    values = list(found.values())
    if not values or not all(isinstance(value, dict) for value in values) or is_coco(found):
        return found
    return Table(where, {"": list(found), **_columns_of(values, where)}, key="")


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The fields of an object, of which none comes twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {name!r} comes several times in one object")
    return fields


def _columns_of(records: Sequence[Any], where: str) -> dict[str, Sequence[Any]]:
    """The columns of objects that all have the same fields."""
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict):
            raise ConfigError(
                f"targets: row {number} of {where} is no object with fields, but "
                f"{described(record)}: give file and labels"
            )
        if record.keys() != records[0].keys():
            raise ConfigError(
                f"targets: row {number} of {where} has the fields {', '.join(record)}, and the "
                f"first has {', '.join(records[0])}: give all the same"
            )
    return {name: [record[name] for record in records] for name in (records[0] if records else ())}


def _from_parquet(data: bytes, where: str) -> Table:
    arrow = pyarrow()
    try:
        table = arrow.parquet.read_table(io.BytesIO(data))
    except (arrow.ArrowException, OSError) as error:
        raise FormatError(f"targets: {where} is a damaged Parquet table: {error}") from error
    return from_frame(table, where)


def from_frame(frame: Any, where: str = "the DataFrame") -> Table:
    """The table of a DataFrame (of pandas, polars) or of Arrow's; an index that holds texts is the
    column of file names.
    """
    if hasattr(frame, "column_names"):
        return Table(where, {name: frame.column(name).to_pylist() for name in frame.column_names})
    columns: dict[str, Sequence[Any]] = {
        str(name): frame[name].to_numpy().tolist() for name in frame.columns
    }
    index = list(getattr(frame, "index", ()))
    if not index or not all(isinstance(name, str) for name in index):
        return Table(where, columns)
    return Table(where, {"": index, **columns}, key="")


def key_of(table: Table, files: FileSet) -> str:
    """The column of file names: the first one that names files of the data.

    Raises:
        ConfigError: there is none.
    """
    columns = {name: set(map(str, values)) for name, values in table.columns.items()}
    if table.key is not None:
        return table.key
    if not any(columns.values()):
        return next(iter(columns), "")
    found = _names_among(set().union(*columns.values()), files)
    # a class may be called as a file is without its ending
    found = {name for name in found if os.path.splitext(name)[1]} or found
    for name, values in columns.items():
        if not found.isdisjoint(values):
            return name
    example = redact(files.names[0]) if len(files) else "1.jpg"
    raise ConfigError(
        f"targets: no column of {table.where} ({', '.join(columns)}) holds names of the files, "
        f"such as {example!r}: add one, and call it file"
    )


def _names_among(cells: Iterable[str], files: FileSet) -> set[str]:
    """Those of some cells that name files."""
    cell_of = {composed(cell.strip()): cell for cell in cells}
    found = set[str]()
    for name in map(os.fsdecode, files.names):
        for spelling in map(composed, spellings_of(name)):
            if spelling in cell_of:
                found.add(cell_of[spelling])
        if len(found) == len(cell_of):
            break
    return found
