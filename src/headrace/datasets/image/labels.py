"""Targets of files by name: from mappings, callables and tables (CSV, JSON, Parquet, DataFrames).
Each of these has names and values; `keys_for` matches the names with files.
"""

from __future__ import annotations

import copy
import csv
import io
import json
import os
import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from headrace.arguments import described
from headrace.core.views import ColumnTargets, TargetSequence
from headrace.datasets.cells import parsed
from headrace.dtypes import IntArray
from headrace.errors import (
    AccessError,
    ConfigError,
    DataNotFoundError,
    FormatError,
    MissingNameError,
    warn,
)
from headrace.formats.resolve.file_set import EXTENSIONS, FileSet
from headrace.formats.resolve.manifests import read_whole
from headrace.formats.resolve.resolver import DataPath, entries_of
from headrace.formats.table.columns import pyarrow
from headrace.formats.text.records import JSON_LINES, another_delimiter, delimiters_of
from headrace.io.paths import check_regular, composed, in_ascii, is_url, named_part, redact
from headrace.io.remote.options import RemoteOptions

Targets = npt.NDArray[Any] | list[Any] | TargetSequence | None
TargetsArgument = (
    str
    | os.PathLike[Any]
    | Mapping[str, Any]
    | Callable[[str], Any]
    | Sequence[Any]
    | npt.NDArray[Any]
    | None
)
UNSET: Any = "default"
"""An argument that was not given, such as `image_size`."""
FOLDERS = "folders"
BY_FOLDERS = (FOLDERS, UNSET)
"""The `targets` that mean class folders."""
TABLE_ENDINGS = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet", ".pq", ".txt")
"""Endings of files of labels. A local file may have any other."""
_METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
_FILE_NAME = "file_name"
_SHOWN = 3
_WORDS = re.compile(r"[-_. ].*$", re.DOTALL)
_INT64 = range(-(1 << 63), 1 << 63)


class Wanted(NamedTuple):
    """The `targets` of a dataset and their options, as the user gave them."""

    targets: Any
    target_name: str | Sequence[str] | None = None
    label_separator: str | None = None
    delimiter: str | None = None
    masks: bool = False
    unused_targets: Literal["raise", "skip"] = "raise"

    def refuse_options(self, *allowed: str) -> None:
        """Raises a ConfigError if an option was given that is not `allowed`."""
        for name, default in self._field_defaults.items():
            if name not in allowed and getattr(self, name) != default:
                raise ConfigError(f"{name} does not apply to these targets: leave it out")


class Labels(NamedTuple):
    """The targets of files.

    Attributes:
        targets: one per file. None: there are no targets.
        classes: the class names.
        columns: the columns of a table of labels, one value per file, without the names.
        column_classes: the class names of its text columns.
    """

    targets: Targets
    classes: list[str]
    columns: Mapping[str, Any] = MappingProxyType({})
    column_classes: Mapping[str, list[str]] = MappingProxyType({})


def checked_targets(targets: Any, data_path: DataPath = "") -> Any:
    """Checks `targets` before any file is listed, and returns a path, a mapping, a callable, a
    `Table` or None.

    A Series with file names as its index becomes a mapping, and so do as many values as
    `data_path` lists files. A DataFrame becomes a `Table`.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(targets, type):
        if hasattr(targets, "columns"):
            return from_frame(targets)
        if targets is None or callable(targets) or isinstance(targets, (str, os.PathLike, Mapping)):
            return targets
    if hasattr(targets, "to_dict") and all(
        isinstance(key, str) for key in getattr(targets, "index", [None])
    ):
        return dict(targets.to_dict())
    values = targets if isinstance(targets, (list, tuple)) else np.asarray(targets)
    is_listed = not isinstance(data_path, (str, bytes, os.PathLike))
    if is_listed and (isinstance(values, (list, tuple)) or values.ndim):
        entries = list(map(os.fsdecode, entries_of(data_path)))
        paths = [os.path.abspath(os.path.expanduser(path)) for path in entries]
        value_of = dict(zip(paths, values, strict=False))
        if len(values) == len(paths) == len(value_of) and not any(map(is_url, entries)):
            return value_of
    raise ConfigError(
        "targets must be labels by file name (a mapping, a table, or the path of one), a callable, "
        f"a folder of masks, or None, not {described(targets)}: pass dict(zip(names, values))"
    )


# -- names


def spellings_of(name: str) -> list[str]:
    """The names that labels may use for a file: its relative path and its file name, each with and
    without its extension.
    """
    base = os.path.basename(name)
    return [name, base, _stem(name), _stem(base)]


def _keys_of(
    files: FileSet,
    keys: Collection[str],
    spellings: Callable[[str], list[str]] = spellings_of,
) -> Iterator[list[str]]:
    """For each file the key that is one of its `spellings`, or else its path (as given, absolute,
    or a URL). If none is equal, the keys that look the same (`composed`).
    """
    alike = dict[str, list[str]]()
    for key in keys:
        if isinstance(key, str) and not key.isascii():
            alike.setdefault(composed(key), []).append(key)
    may_be_paths = any(os.path.dirname(key) for key in keys if isinstance(key, str))

    def among(names: list[str]) -> list[str]:
        for name in names:
            if name in keys:
                return [name]
        for name in map(composed, names):
            if name in alike:
                return alike[name]
        return []

    for number, name in enumerate(map(os.fsdecode, files.names)):
        found = among(spellings(name))
        if may_be_paths and not found:
            url = files.url(number)
            found = among([url] if files.is_remote else [url, os.path.abspath(url)])
        yield found


def keys_for(
    keys: Collection[str],
    files: FileSet,
    where: str = "targets",
    unused: str = "raise",
    spellings: Callable[[str], list[str]] = spellings_of,
    are_files: bool = False,
) -> list[str]:
    """The key of each file; see `_keys_of`.

    Args:
        keys: the names in the labels.
        files: the files of the data.
        where: the source of the labels, for messages.
        unused: "skip": ignore keys without a file, with a warning.
        are_files: True if keys are files too, so that a missing one is a DataNotFoundError.

    Raises:
        ConfigError: a file has no key; a key fits several files, or several keys fit one.
        DataNotFoundError: a key has no file.
    """
    owners = dict[str, str]()
    missing = list[str]()
    for name, fitting in zip(
        map(os.fsdecode, files.names), _keys_of(files, keys, spellings), strict=True
    ):
        if not fitting:
            missing.append(name)
            continue
        if len(fitting) > 1:
            first, second = map(in_ascii, fitting[:2])
            raise ConfigError(
                f"targets: {first} and {second} both look like {in_ascii(name)}: keep one of them"
            )
        owner = owners.setdefault(fitting[0], name)
        if owner != name:
            raise ConfigError(
                f"targets: the name {in_ascii(fitting[0])} fits {in_ascii(owner)} and "
                f"{in_ascii(name)}: give relative paths, or rename one of the files"
            )
    others = [key for key in keys if key not in owners]
    surplus = f"{named_few(others)} of {len(keys):,} targets belong to no file"
    if missing:
        besides = ""
        if others:
            besides = f", and {surplus}"
        message = (
            f"{where}: {named_few(missing)} of {len(files):,} files have no target{besides}: add "
            "the targets, or pass a list of the files that have one"
        )
        if are_files:
            raise DataNotFoundError(f"{message}; masks must not be inside the images' folder")
        raise ConfigError(message)
    if others and unused != "skip":
        raise DataNotFoundError(
            f"{where}: {surplus}: add the missing files to the {len(files):,}, remove these "
            "targets, or pass unused_targets='skip'"
        )
    if others:
        warn(f"{where}: {surplus}, and are ignored")
    return list(owners)


def named_few(names: Sequence[Any]) -> str:
    """The number of names, and the first ones: "2 (a.jpg, b.jpg)"."""
    shown = list(map(redact, names[:_SHOWN]))
    if len(names) > _SHOWN:
        shown.append("...")
    return f"{len(names):,} ({', '.join(shown)})"


def _stem(name: str) -> str:
    return os.path.splitext(name)[0]


def names_masks(targets: Any) -> bool:
    """True if targets name masks: a folder, a glob, files of images, or a URL that does not name a
    file of labels.
    """
    if not isinstance(targets, (str, os.PathLike)):
        return False
    path = os.path.expanduser(os.fsdecode(targets))
    name = named_part(path).lower()
    if os.path.isfile(path):
        return name.endswith(EXTENSIONS)
    return os.path.isdir(path) or not name.endswith(TABLE_ENDINGS)


def mask_numbers(images: FileSet, masks: FileSet, unused: str = "raise") -> IntArray:
    """For each image the number of the mask with its relative name, extensions apart ([n] int64).
    If no image has one, names are compared without the words at the end of all images and of all
    masks: ``7_leftImg8bit.png`` and ``7_labelIds.png``.

    Args:
        images, masks: their files.
        unused: "skip": ignore masks without an image, with a warning.

    Raises:
        DataNotFoundError: an image has no mask, or a mask no image.
        ConfigError: two images or two masks have the same name.
    """
    where = f"targets: masks in {', '.join(map(redact, masks.roots[:_SHOWN]))}"
    jpeg = ""
    numbers = dict[str, int]()
    for number, name in enumerate(map(os.fsdecode, masks.names)):
        other_number = numbers.setdefault(_stem(name), number)
        if other_number != number:
            raise ConfigError(
                f"targets: the masks {redact(masks.path(other_number))} and "
                f"{redact(masks.path(number))} differ in their extension only: remove one of them"
            )
        if not jpeg and name.lower().endswith((".jpg", ".jpeg")):
            jpeg = name
    if jpeg:
        warn(
            f"targets: masks such as {redact(jpeg)} are JPEGs, whose compression changes class "
            "numbers: save masks as PNG"
        )
    stems = [_stem(os.fsdecode(name)) for name in images.names]
    end = ""
    if set(map(composed, stems)).isdisjoint(map(composed, numbers)):
        end = _common_end(stems)
        of_masks = _common_end(numbers)
        numbers = {stem.removesuffix(of_masks): number for stem, number in numbers.items()}
    keys = keys_for(
        numbers,
        images,
        where,
        unused,
        lambda name: [_stem(name).removesuffix(end)],
        are_files=True,
    )
    return np.array([numbers[key] for key in keys], np.int64)


def _common_end(names: Iterable[str]) -> str:
    """The words at the end of all names: what follows the first separator in their common end."""
    ends = {name[::-1] for name in names}
    if len(ends) < 2:
        return ""
    common = os.path.commonprefix(list(ends))[::-1]  # noqa: RUF071 (of characters)
    words = _WORDS.search(common.rpartition("/")[2])
    if words is None:
        return ""
    return words[0]


# -- values


@dataclass(eq=False)
class FlatTargets(TargetSequence):
    """Targets of any number of items each. Items are concatenated in arrays, which views share.

    Args:
        counts: number of items of each target ([n]).
    """

    counts: InitVar[Iterable[int]]

    def __post_init__(self, counts: Iterable[int]) -> None:
        self._ends = np.cumsum([0, *counts], dtype=np.int64)
        self._chosen: IntArray = np.arange(len(self._ends) - 1)

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        return self._target(index)

    def take(self, indices: IntArray) -> Self:
        taken = copy.copy(self)
        taken._chosen = self._chosen[indices]
        return taken

    def _items(self, index: int) -> slice:
        """The range of a target's items."""
        number = self._chosen[index]
        return slice(self._ends[number], self._ends[number + 1])

    @abstractmethod
    def _target(self, index: int) -> Any:
        """The target of a sample."""


class MultiHot(FlatTargets):
    """Multi-hot targets: float32 [classes], 1 for each class of the sample.

    Args:
        labels: the class names of each sample.

    Attributes:
        classes: all class names, sorted.
        numbers: the concatenated class numbers of all samples.
    """

    def __init__(self, labels: Sequence[Iterable[str]]) -> None:
        each = [dict.fromkeys(map(composed, names)) for names in labels]
        super().__init__([len(names) for names in each])
        self.classes: list[str] = sorted(set().union(*each))
        number = {name: i for i, name in enumerate(self.classes)}
        flat = [number[name] for names in each for name in names]
        self.numbers: npt.NDArray[np.int32] = np.array(flat, np.int32)

    def _target(self, index: int) -> Any:
        target = np.zeros(len(self.classes), np.float32)
        target[self.numbers[self._items(index)]] = 1
        return target


def encoded(values: list[Any], where: str = "") -> tuple[Any, list[str]]:
    """Targets made of values, and the class names if these are strings.

    Raises:
        ConfigError: an integer is too large, and `where` (its place) is given.
    """
    if all(isinstance(value, str) for value in values):
        several = MultiHot([[value] for value in values])
        return several.numbers.astype(np.int64), several.classes
    are_labels = all(
        isinstance(value, (list, tuple, set, frozenset))
        and all(isinstance(label, str) for label in value)
        for value in values
    )
    if are_labels and any(values):
        several = MultiHot(values)
        return several, several.classes
    integers = [
        value
        for value in values
        if isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    ]
    too_large = [value for value in integers if int(value) not in _INT64]
    if too_large and where:
        raise ConfigError(f"{where} has {too_large[0]}, which does not fit int64: use a string")
    if len(integers) == len(values) and not too_large:
        return np.array(values, np.int64), []
    return list(values), []


def separated(values: list[Any], separator: str | None) -> list[Any]:
    """Strings of several labels as lists of labels."""
    if separator is None or not all(isinstance(value, str) for value in values):
        return values
    return [[part.strip() for part in text.split(separator) if part.strip()] for text in values]


# -- tables


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
            if any(_keys_of(files, cells)):
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


def labels_in(table: Table, files: FileSet, wanted: Wanted) -> Labels:
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


def is_coco(found: Mapping[str, Any]) -> bool:
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


def metadata_beside(files: FileSet, reach: RemoteOptions, delimiter: str | None) -> Table | None:
    """The metadata table in the folder of the files, where HuggingFace's imagefolder has it.

    Raises:
        Exception: as `read_labels`.
    """
    if len(files.roots) != 1 or files.roots[0] not in files.searched:
        return None
    paths = list(map(os.path.join(files.roots[0], "").__add__, _METADATA))
    found: Table | dict[str, Any] | None = None
    if files.server is not None:
        urls = list(map(files.server.url_of, paths))
        for url, data in zip(urls, files.server.find_metadata(urls), strict=True):
            if data is not None:
                found = _labels_in(data, url, files, delimiter)
                break
    else:
        path = next(filter(os.path.isfile, paths), None)
        if path is not None:
            found = read_labels(path, files, reach, delimiter)
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
    if rows and not any(_keys_of(files, {cell.strip() for cell in rows[0]})):
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
    if not values or not all(isinstance(value, dict) for value in values) or is_coco(found):
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
