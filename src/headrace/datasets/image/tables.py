"""Tables and files of labels: CSV, JSON, Parquet and DataFrames."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headrace.core.options import UNSET
from headrace.core.views import ColumnTargets
from headrace.datasets.cells import parsed
from headrace.datasets.image.coco import read_coco
from headrace.datasets.image.labels import (
    Labels,
    Wanted,
    encoded,
    keys_for,
    keys_of,
    labels_by_name,
    metadata_paths,
    separated,
)
from headrace.errors import (
    AccessError,
    ConfigError,
    DataNotFoundError,
    FormatError,
    MissingNameError,
)
from headrace.formats.resolve.file_set import FileSet
from headrace.formats.resolve.manifests import read_whole
from headrace.formats.table.columns import pyarrow
from headrace.formats.text.records import JSON_LINES, another_delimiter, delimiters_of
from headrace.io.paths import check_regular, is_url, named_part, redact
from headrace.io.remote.options import RemoteOptions

_FILE_NAME = "file_name"


class Table(NamedTuple):
    """Columns of labels.

    Attributes:
        where: the source of the table, for messages.
        columns: values by column name, all of one length.
        first_row: number of the first row in its file, from 1.
        key: the column of file names, if it is known.
        is_text: True if all values are strings, which may stand for numbers.
    """

    where: str
    columns: dict[str, Sequence[Any]]
    first_row: int = 1
    key: str | None = None
    is_text: bool = False

    def key_for(self, files: FileSet) -> str:
        """The column of file names: the first one with names of files of the data.

        Raises:
            ConfigError: there is no such column.
        """
        if self.key is not None:
            return self.key
        columns = {name: set(map(str, values)) for name, values in self.columns.items()}
        # a class may have the name of a file without its extension
        ended = {
            name: {cell for cell in cells if os.path.splitext(cell)[1]}
            for name, cells in columns.items()
        }
        for name, cells in [*ended.items(), *columns.items()]:
            if any(keys_of(files, cells)):
                return name
        raise ConfigError(
            f"targets: no column of {self.where} ({', '.join(columns)}) contains file names such "
            f"as {redact(files.names[0])!r}: add one"
        )

    def rows_for(self, key: str, files: FileSet, unused: str) -> list[int]:
        """The row of each file.

        Raises:
            ConfigError: a file has no row, or several that differ.
            DataNotFoundError: a row has no file.
        """
        rows = dict[str, int]()
        for number, name in enumerate(map(str, self.columns.get(key, ()))):
            other = rows.setdefault(name, number)
            for values in self.columns.values() if other != number else ():
                both_miss = _is_missing(values[other]) and _is_missing(values[number])
                if values[other] != values[number] and not both_miss:
                    raise ConfigError(
                        f"targets: rows {other + self.first_row} and {number + self.first_row} of "
                        f"{self.where} differ for {redact(name)} ({values[other]!r:.40} and "
                        f"{values[number]!r:.40}): keep one of them"
                    )
        keys = keys_for(rows, files, f"targets: {self.where}", unused)
        return [rows[name] for name in keys]

    def column(
        self, name: str, rows: list[int], is_target: bool, separator: str | None
    ) -> tuple[Any, list[str]]:
        """Some rows of a column as targets, and the class names if it contains strings.

        Raises:
            ConfigError: a target is missing, two strings are one number, or an integer is too
                large.
        """
        where = f"targets: column {name!r} of {self.where}"
        values = [self.columns[name][row] for row in rows]
        if separator is not None:
            values = separated(values, separator)
        elif self.is_text:
            column = parsed(self.columns[name])
            unclear = column.rounded or " and ".join(map(repr, column.same or ()))
            if is_target and unclear:
                raise ConfigError(
                    f"{where} has {unclear}: two strings of one number, or an integer that does "
                    "not fit float64. Write numbers in one way, or pass targets=pandas.read_csv("
                    f"path, dtype={{{name!r}: float}}), with str in place of float for classes"
                )
            values = [column.values[row] for row in rows]
        gaps = [row for row, value in zip(rows, values, strict=True) if _is_missing(value)]
        if gaps and is_target:
            row = gaps[0] + self.first_row
            raise ConfigError(f"{where} has no value in row {row}: add it, or pass target_name=")
        kinds = set(map(type, values))
        if float in kinds and kinds <= {float, int}:
            return np.array(values, np.float64), []
        if gaps:
            filled = ["" if _is_missing(value) else value for value in values]
            if str not in kinds or not all(isinstance(one, str) for one in filled):
                return values, []
            values = filled
        return encoded(values, where if is_target else "")


def _is_missing(value: Any) -> bool:
    """True for None, NaN and an empty string."""
    return value is None or bool(value != value) or value == ""


def _labels_of_table(table: Table, files: FileSet, wanted: Wanted) -> Labels:
    """The targets of files in a table.

    Raises:
        ConfigError, DataNotFoundError: a file has no target, or a target no file.
        MissingNameError: the table has no column of that name.
    """
    key = table.key_for(files)
    rows = table.rows_for(key, files, wanted.unused_targets)
    names = [name for name in table.columns if name != key]
    chosen = names
    if isinstance(wanted.target_name, str):
        chosen = [wanted.target_name]
    elif wanted.target_name is not None:
        chosen = list(wanted.target_name)
    for name in chosen:
        if name not in names:
            has = ", ".join(map(repr, names))
            raise MissingNameError(f"target_name: {table.where} has no {name!r}; it has {has}")
    if not chosen:
        raise ConfigError(f"targets: {table.where} has no column but {key!r}: add one of labels")
    columns = dict[str, Any]()
    classes = dict[str, list[str]]()
    for name in names:
        separator = None
        if wanted.label_separator is not None and name in chosen:
            cells = (str(table.columns[name][row]) for row in rows)
            if len(chosen) == 1 or any(wanted.label_separator in cell for cell in cells):
                separator = wanted.label_separator
        columns[name], found = table.column(name, rows, name in chosen, separator)
        if found:
            classes[name] = found
    if len(chosen) == 1 and not isinstance(wanted.target_name, (list, tuple)):
        return Labels(columns[chosen[0]], classes.get(chosen[0], []), columns, classes)
    return Labels(ColumnTargets({name: columns[name] for name in chosen}), [], columns, classes)


def _is_coco(found: Mapping[str, Any]) -> bool:
    """True if a JSON object has the form of COCO annotations."""
    return isinstance(found.get("images"), list) and isinstance(found.get("annotations"), list)


def read_labels(
    path: str, files: FileSet, reach: RemoteOptions, delimiter: str | None = None
) -> Table | dict[str, Any]:
    """A table of labels; or the object of a JSON file: labels by file name, or COCO annotations.

    Args:
        path: a local path or a URL.
        files: the files of the data.
        reach: how URLs are read.
        delimiter: character between the cells of a CSV file. None: a tab in .tsv, else a comma.

    Raises:
        DataNotFoundError, AccessError, RemoteError: it does not exist; it can't be read.
        ConfigError: pyarrow is missing; or rows differ in their number of cells.
        FormatError: it is damaged, or not a table.
    """
    where = redact(path)
    local = os.path.expanduser(path)
    data = None
    if is_url(path):
        data = read_whole(path, reach)
    elif os.path.isdir(local):
        raise ConfigError(
            f"targets: {where} is a folder, not a table of labels: pass targets='folders' for "
            "classes by the folders of the data, or the path of a table"
        )
    elif os.path.exists(local):
        check_regular(local)
        try:
            data = Path(local).read_bytes()
        except OSError as error:
            raise AccessError(f"targets: {where} can't be read: {error.strerror}") from error
    if data is None:
        raise DataNotFoundError(f"targets: {where} does not exist (working folder: {os.getcwd()})")
    return _labels_in(data, path, files, delimiter)


def _labels_in(
    data: bytes, path: str, files: FileSet, delimiter: str | None
) -> Table | dict[str, Any]:
    """What a file of labels holds; see `read_labels`."""
    where = redact(path)
    delimiters = delimiters_of(delimiter)
    ending = os.path.splitext(named_part(path))[1].lower()
    is_parquet = data[:4] == b"PAR1"
    is_json = ending not in delimiters and data.lstrip()[:1] in (b"{", b"[")
    if not (is_parquet or is_json):
        return _from_csv(data, where, delimiters.get(ending, delimiters[".csv"]), files)
    if delimiter is not None:
        raise ConfigError(f"delimiter={delimiter!r}: {where} is not a CSV table: leave it out")
    if is_json:
        return _from_json(data, where, ending)
    arrow = pyarrow()
    try:
        return from_frame(arrow.parquet.read_table(io.BytesIO(data)), where)
    except (arrow.ArrowException, OSError) as error:
        raise FormatError(f"targets: {where} is a damaged Parquet table: {error}") from error


def _metadata_in(
    paths: list[str], files: FileSet, reach: RemoteOptions, delimiter: str | None
) -> Table | None:
    """The first table of `metadata_paths`, if it has the column `_FILE_NAME` and others.

    Raises:
        Exception: as `read_labels`.
    """
    found: Table | dict[str, Any] | None = None
    if files.server is None:
        found = read_labels(paths[0], files, reach, delimiter)
    else:
        for url, data in zip(paths, files.server.find_metadata(paths), strict=True):
            if data is not None:
                found = _labels_in(data, url, files, delimiter)
                break
    if isinstance(found, Table) and _FILE_NAME in found.columns and len(found.columns) > 1:
        return found._replace(key=_FILE_NAME)
    return None


def _from_csv(data: bytes, where: str, delimiter: str, files: FileSet) -> Table:
    """Reads CSV. A first row without a name of a file is a header. A first column without a name
    that counts the rows is ignored.
    """
    try:
        text = io.StringIO(data.decode("utf-8-sig"), newline="")
        rows = [row for row in csv.reader(text, delimiter=delimiter) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise FormatError(f"targets: {where} is not CSV in UTF-8: {error}: convert it") from error
    if rows and len(rows[0]) < 2:
        hint = another_delimiter(rows[0][0], delimiter) or ": write file,target"
        raise ConfigError(f"targets: row 1 of {where} has no second column{hint}")
    names = ["file", "target"]
    key: str | None = "file"
    first_row = 1
    if rows and not any(keys_of(files, {cell.strip() for cell in rows[0]})):
        names = [cell.strip() for cell in rows.pop(0)]
        key = None
        first_row = 2
    for number, row in enumerate(rows, first_row):
        if len(row) < len(names) or any(cell.strip() for cell in row[len(names) :]):
            raise ConfigError(
                f"targets: row {number} of {where} has {len(row)} cells for {len(names)} columns: "
                "quote cells with commas, and name more than two columns in a header"
            )
    columns: dict[str, Sequence[Any]] = {
        name: _cells([row[place] for row in rows]) for place, name in enumerate(names)
    }
    if len(names) > 2 and columns.get("") == [str(row) for row in range(len(rows))]:
        names.remove("")
        del columns[""]  # the index that pandas writes by default
    if len(columns) < len(names) or "" in columns:
        raise ConfigError(
            f"targets: a column of {where} has no name in the header, or a second one its name "
            f"({', '.join(map(repr, names))}): rename it (pandas: index=False)"
        )
    return Table(where, columns, first_row, key, is_text=True)


def _cells(raw: list[str]) -> list[str]:
    """Cells without surrounding spaces. If two numbers differ in their spaces only, the cells are
    names and keep them.
    """
    cells = [cell.strip() for cell in raw]
    if len(set(raw)) > len(set(cells)) and parsed(cells).values != cells:
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
        raise FormatError(f"targets: {where} is not JSON: {error}") from error
    if isinstance(found, list):
        return Table(where, _columns_of(found, where))
    values = list(found.values())
    if not values or not all(isinstance(value, dict) for value in values) or _is_coco(found):
        return dict(found)
    return Table(where, {"": list(found), **_columns_of(values, where)}, key="")


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The fields of an object; a key may occur once."""
    fields = dict[str, Any]()
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"the key {name!r} occurs twice in one object")
        fields[name] = value
    return fields


def _columns_of(records: Sequence[Any], where: str) -> dict[str, Sequence[Any]]:
    """The columns of objects with equal fields."""
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict) or record.keys() != records[0].keys():
            raise ConfigError(
                f"targets: row {number} of {where} needs the fields of row 1, not {record!r:.50}"
            )
    return {name: [record[name] for record in records] for one in records[:1] for name in one}


def from_frame(frame: Any, where: str = "the DataFrame") -> Table:
    """The table of a DataFrame (pandas, polars) or an Arrow table. An index of strings becomes the
    column of file names.
    """
    if hasattr(frame, "column_names"):
        return Table(where, frame.to_pydict())
    columns: dict[str, Sequence[Any]] = {
        str(name): list(map(_plain, frame[name].to_numpy().tolist())) for name in frame.columns
    }
    index = list(getattr(frame, "index", ()))
    if not index or not all(isinstance(name, str) for name in index):
        return Table(where, columns)
    return Table(where, {"": index, **columns}, key="")


def _plain(value: Any) -> Any:
    """A comparable value of a DataFrame: an array becomes a list, pandas.NA None."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if type(value).__name__ == "NAType":
        return None
    return value


def labels_from_files(wanted: Wanted, files: FileSet, reach: RemoteOptions) -> Labels | None:
    """The targets of files in a table, in a file of labels, or in the metadata beside them. None:
    the metadata are not such a table.

    Raises:
        Exception: see `labels_of`.
    """
    targets = wanted.targets
    if targets is UNSET:
        targets = _metadata_in(metadata_paths(files), files, reach, wanted.delimiter)
        if targets is None:
            return None
        names = [repr(name) for name in targets.columns if name != targets.key]
        if len(names) > 1 and wanted.target_name is None:
            raise ConfigError(
                f"{targets.where} has the columns {', '.join(names)}: name one, or a list, by "
                "target_name= (targets=None: no targets; targets='folders': class folders)"
            )
        wanted = wanted._replace(delimiter=None)
    elif not isinstance(targets, Table):
        path = os.fspath(targets)
        targets = read_labels(path, files, reach, wanted.delimiter)
        wanted = wanted._replace(delimiter=None)
        if isinstance(targets, dict) and _is_coco(targets):
            wanted.refuse_options("masks", "unused_targets")
            boxes = read_coco(targets, redact(path), files, wanted.masks, wanted.unused_targets)
            return Labels(boxes, list(boxes.class_to_idx), are_objects=True)
        if isinstance(targets, dict):
            return labels_by_name(targets, files, wanted)
    wanted.refuse_options("target_name", "label_separator", "unused_targets")
    return _labels_of_table(targets, files, wanted)
