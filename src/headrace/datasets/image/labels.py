"""Targets of files by their names: from mappings, callables and tables (CSV, JSON, Parquet,
DataFrames). Each of these gives names and values, and `keys_for` matches names with files.
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
from headrace.formats.resolve.resolver import DataPath, entries_of
from headrace.formats.table.columns import pyarrow
from headrace.formats.text.records import JSON_LINES, another_delimiter, delimiters_of
from headrace.io.paths import check_regular, composed, in_ascii, is_url, named_part, redact
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import read_whole

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
FOLDERS = "folders"
TABLE_ENDINGS = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet", ".pq", ".txt")
"""Of files of labels. Local ones may have any other."""
_SHOWN = 3
_WORDS = re.compile(r"[-_. ].*$", re.DOTALL)
_INT64 = range(-(1 << 63), 1 << 63)


class Wanted(NamedTuple):
    """Which targets are wanted, as the user gave it."""

    targets: Any
    target_name: str | Sequence[str] | None = None
    label_separator: str | None = None
    delimiter: str | None = None
    masks: bool = False
    unused_targets: Literal["raise", "skip"] = "raise"
    is_outright: bool = True
    """True if the user gave `targets`; False: they are the default."""

    def refuse_options(self, *allowed: str) -> None:
        """Raises a ConfigError where an option of labels was given that is not `allowed`."""
        for name, default in self._field_defaults.items():
            if name not in (*allowed, "is_outright") and getattr(self, name) != default:
                raise ConfigError(
                    f"{name} is for other targets, in files such as labels.csv or instances.json: "
                    "leave it out"
                )


class Labels(NamedTuple):
    """The targets of files, and what is known of them.

    Attributes:
        targets: one a file; None: there are none.
        classes: what class numbers stand for.
        columns: those of a table of labels, for all files, but that of their names.
        column_classes: what the class numbers in its columns stand for.
    """

    targets: Targets
    classes: list[str]
    columns: Mapping[str, Any] = MappingProxyType({})
    column_classes: Mapping[str, list[str]] = MappingProxyType({})


def checked_targets(targets: Any, data_path: DataPath = "") -> Any:
    """What was given as `targets`, before any file is looked for: a path, a mapping, a callable, a
    `Table`, or None.

    A column of a table (of pandas, told by what it can do) whose index holds file names becomes a
    mapping, and so do values beside a list of as many files. A DataFrame becomes a `Table`.

    Raises:
        ConfigError: it is something else.
    """
    is_class = isinstance(targets, type)
    if hasattr(targets, "columns") and not is_class:
        return from_frame(targets)
    is_named = isinstance(targets, (str, os.PathLike, Mapping)) or callable(targets)
    if targets is None or (is_named and not is_class):
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
        "targets must be a folder of masks, labels by file name (a mapping, a table, or the path "
        f"of one), a callable, or None, not {described(targets)}; for values in an order pass a "
        "mapping, dict(zip(names, values))"
    )


def given_targets(wanted: Wanted, files: FileSet) -> Labels:
    """Targets that the user gave: a mapping by relative path or file name, a table of such, or a
    callable of the path.

    Texts become class numbers, in the sorted order of the texts, and lists of texts 1 for each
    class that is in them (`MultiHot`); other values stay as they are.

    Args:
        wanted: the targets and their options: see `ImageDataset`.
        files: that they belong to.

    Raises:
        ConfigError, DataNotFoundError: a file without a target, or a target without its file.
        MissingNameError: a table has no column of that name.
    """
    targets = wanted.targets
    if isinstance(targets, Table):
        wanted.refuse_options("target_name", "label_separator", "unused_targets")
        return _of_table(targets, files, wanted)
    if isinstance(targets, Mapping):
        wanted.refuse_options("label_separator", "unused_targets")
        keys = keys_for(targets, files, unused=wanted.unused_targets)
        values = [targets[key] for key in keys]
    else:
        wanted.refuse_options("label_separator")
        if targets is None:
            return Labels(None, [])
        values = [targets(os.fsdecode(files.path(i))) for i in range(len(files.names))]
    return Labels(*encoded(_separated(values, wanted.label_separator), "targets"))


# -- names


def spellings_of(name: str) -> list[str]:
    """What labels may call a file: its relative name, its file name, and these without their
    ending.
    """
    base = os.path.basename(name)
    return [name, base, _stem(name), _stem(base)]


def _keys_of(
    files: FileSet,
    keys: Collection[str],
    spellings: Callable[[str], list[str]] = spellings_of,
) -> Iterator[list[str]]:
    """For each file the key that is one of its `spellings`, or else its path: as it was given, or
    absolute, or a URL. Where none is the same to the byte, those that look the same (`composed`).
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
    """The key of each file: see `_keys_of`.

    Args:
        keys: names that labels have.
        files: of the data.
        where: the labels are from, for messages.
        unused: "skip": leave out keys that no file has, with a warning.
        are_files: keys are of files too, so that one that is missing is a DataNotFoundError.

    Raises:
        ConfigError: a file has no key; or a key fits several files, or several fit one.
        DataNotFoundError: a key has no file, and may not be left out.
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
                f"targets: {first} and {second} look the same, and none is {in_ascii(name)} to "
                "the byte: keep the one that is meant"
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
        said = f"{named_few(missing)} of {len(files):,} files have no target by their name"
        if others:
            said += f", and {surplus}"
        message = f"{where}: {said}: add the targets, or pass a list of the files that have one"
        if are_files:
            raise DataNotFoundError(f"{message}; masks must lie outside of the images' folder")
        raise ConfigError(message)
    if others and unused != "skip":
        raise DataNotFoundError(
            f"{where}: {surplus} of the data ({len(files):,} files): is the download complete? "
            "Add the files, remove these targets, or pass unused_targets='skip'"
        )
    if others:
        warn(f"{where}: {surplus} of the data: left out")
    return list(owners)


def named_few(names: Sequence[Any]) -> str:
    """Some names out of many, and how many there are: "2 (a.jpg, b.jpg)"."""
    shown = list(map(redact, names[:_SHOWN]))
    if len(names) > _SHOWN:
        shown.append("...")
    return f"{len(names):,} ({', '.join(shown)})"


def _stem(name: str) -> str:
    return os.path.splitext(name)[0]


def names_masks(targets: Any) -> bool:
    """True if targets name images, such as masks: a folder, a glob, images by their endings, or
    a URL that names no file of labels.
    """
    if not isinstance(targets, (str, os.PathLike)):
        return False
    path = os.path.expanduser(os.fsdecode(targets))
    name = named_part(path).lower()
    if os.path.isfile(path):
        return name.endswith(EXTENSIONS)
    return os.path.isdir(path) or not name.endswith(TABLE_ENDINGS)


def mask_numbers(images: FileSet, masks: FileSet, unused: str = "raise") -> IntArray:
    """For each image the number of its mask: that of the same relative name, whatever the endings
    ([n] int64). Where no image has one, names count without the words that all images, and all
    masks, have at their ends: ``7_leftImg8bit.png`` and ``7_labelIds.png``.

    Args:
        images, masks: their files.
        unused: "skip": leave out masks that have no image, with a warning.

    Raises:
        DataNotFoundError: an image has no mask; or a mask no image.
        ConfigError: two images or two masks have one name.
    """
    where = f"targets: masks in {', '.join(map(redact, masks.roots[:_SHOWN]))}"
    jpeg = ""
    numbers = dict[str, int]()
    for number, name in enumerate(map(os.fsdecode, masks.names)):
        other_number = numbers.setdefault(_stem(name), number)
        if other_number != number:
            raise ConfigError(
                f"targets: the masks {redact(masks.path(other_number))} and "
                f"{redact(masks.path(number))} have the same name but for their endings, and masks "
                "are matched with images by that: rename or remove one of them"
            )
        if not jpeg and name.lower().endswith((".jpg", ".jpeg")):
            jpeg = name
    if jpeg:
        warn(
            f"targets: masks such as {redact(jpeg)} are JPEGs, whose compression changes class "
            "numbers near edges: save masks as PNG, or round them in target_transform"
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
    """The words that all names end with: what follows the first separator in their common end."""
    ends = {name[::-1] for name in names}
    if len(ends) < 2:  # of one name nobody knows what its last word is
        return ""
    common = os.path.commonprefix(list(ends))[::-1]  # noqa: RUF071 (of characters)
    words = _WORDS.search(common.rpartition("/")[2])
    if words is None:
        return ""
    return words[0]


# -- values


class FlatTargets(TargetSequence):
    """Targets of which each is made of any number of items. These lie one behind the other in
    arrays, which views share.

    Args:
        counts: [n] numbers of items.
    """

    def __init__(self, counts: Iterable[int]) -> None:
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
        """Where the items of a target lie."""
        number = self._chosen[index]
        return slice(self._ends[number], self._ends[number + 1])

    @abstractmethod
    def _target(self, index: int) -> Any:
        """The target of a sample."""


class MultiHot(FlatTargets):
    """Several classes a sample: a target is float32 [classes], 1 for each of them and 0 for the
    others.

    Args:
        labels: the names of each sample's classes.

    Attributes:
        classes: all names, sorted.
        numbers: of the classes of all samples, one after the other.
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
    """Values as targets, and the classes that texts among them are.

    Raises:
        ConfigError: an integer is too large, and the message is to say `where`.
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
    if all(_is_integer(value) and int(value) in _INT64 for value in values):
        return np.array(values, np.int64), []
    for value in values if where else ():
        if _is_integer(value) and int(value) not in _INT64:
            raise ConfigError(
                f"{where} has {value}, an integer of more than 64 bits: give numbers in the range "
                "of int64, or strings"
            )
    return list(values), []


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _separated(values: list[Any], separator: str | None) -> list[Any]:
    """Texts of several labels as lists of these."""
    if separator is None or not all(isinstance(value, str) for value in values):
        return values
    return [[part.strip() for part in text.split(separator) if part.strip()] for text in values]


# -- tables


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

    def key_for(self, files: FileSet) -> str:
        """The column of file names: the first one that names files of the data.

        Raises:
            ConfigError: there is none.
        """
        if self.key is not None:
            return self.key
        columns = {name: set(map(str, values)) for name, values in self.columns.items()}
        # a class may be called as a file is without its ending
        ended = {
            name: {cell for cell in cells if os.path.splitext(cell)[1]}
            for name, cells in columns.items()
        }
        for name, cells in [*ended.items(), *columns.items()]:
            if any(_keys_of(files, cells)):
                return name
        raise ConfigError(
            f"targets: no column of {self.where} ({', '.join(columns)}) holds names of the files "
            f"relative to the data, such as {redact(files.names[0])!r}: write them so, in a column "
            "called file"
        )

    def rows_for(self, key: str, files: FileSet, unused: str) -> list[int]:
        """The row of each file.

        Raises:
            ConfigError: a file has none, or several that contradict each other.
            DataNotFoundError: a row has no file, and may not be left out.
        """
        rows = dict[str, int]()
        for number, name in enumerate(map(str, self.columns.get(key, ()))):
            other = rows.setdefault(name, number)
            for values in self.columns.values() if other != number else ():
                both_miss = _is_missing(values[other]) and _is_missing(values[number])
                if values[other] != values[number] and not both_miss:
                    raise ConfigError(
                        f"targets: rows {other + self.first_row} and {number + self.first_row} of "
                        f"{self.where} give {redact(name)} different targets "
                        f"({values[other]!r:.40} and {values[number]!r:.40}): keep one of them"
                    )
        keys = keys_for(rows, files, f"targets: {self.where}", unused)
        return [rows[name] for name in keys]

    def column(
        self, name: str, rows: list[int], is_target: bool, separator: str | None
    ) -> tuple[Any, list[str]]:
        """Some rows of a column as targets, and the classes that texts in it are.

        Raises:
            ConfigError: a target is missing; two texts of it are one number; an integer is too
                large.
        """
        where = f"targets: column {name!r} of {self.where}"
        values = [self.columns[name][row] for row in rows]
        if separator is not None:
            values = _separated(values, separator)
        elif self.is_text:
            column = parsed(self.columns[name])
            unclear = column.rounded or " and ".join(map(repr, column.same or ()))
            if is_target and unclear:
                raise ConfigError(
                    f"{where} has {unclear}: two texts of one number, or an integer among floats "
                    "that float64 can't hold. Write numbers in one way, or pass the table as "
                    f"targets=pandas.read_csv(path, dtype={{{name!r}: float}}) for numbers, or "
                    "with str in place of float for classes"
                )
            values = [column.values[row] for row in rows]
        gaps = [row for row, value in zip(rows, values, strict=True) if _is_missing(value)]
        if gaps and is_target:
            raise ConfigError(
                f"{where} has nothing in row {gaps[0] + self.first_row}: fill it in, leave out "
                "the row and its file, or leave the column out by target_name="
            )
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
    """True for None, NaN and an empty text."""
    return value is None or bool(value != value) or value == ""


def _of_table(table: Table, files: FileSet, wanted: Wanted) -> Labels:
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
            raise MissingNameError(
                f"target_name: {table.where} has no column {name!r} of labels; it has "
                f"{', '.join(map(repr, names))}"
            )
    if not chosen:
        raise ConfigError(
            f"targets: {table.where} has no column beside that of the files ({key!r}): add one of "
            "labels"
        )
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
    """True if a JSON object holds annotations of images."""
    return isinstance(found.get("images"), list) and isinstance(found.get("annotations"), list)


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
    local = os.path.expanduser(path)
    data = None
    if is_url(path):
        data = read_whole(path, reach)
    elif os.path.exists(local):
        check_regular(local)
        try:
            data = Path(local).read_bytes()
        except OSError as error:
            raise AccessError(f"targets: {where} can't be read: {error.strerror}") from error
    if data is None:
        raise DataNotFoundError(f"targets: {where} does not exist (working folder: {os.getcwd()})")
    ending = os.path.splitext(named_part(path))[1].lower()
    is_parquet = data[:4] == b"PAR1"
    is_json = ending not in delimiters and data.lstrip()[:1] in (b"{", b"[")
    if not (is_parquet or is_json):
        return _from_csv(data, where, delimiters.get(ending, delimiters[".csv"]), files)
    if delimiter is not None:
        raise ConfigError(
            f"delimiter={delimiter!r} is for tables in CSV, and {where} is none: leave it out"
        )
    if is_json:
        return _from_json(data, where, ending)
    arrow = pyarrow()
    try:
        return from_frame(arrow.parquet.read_table(io.BytesIO(data)), where)
    except (arrow.ArrowException, OSError) as error:
        raise FormatError(f"targets: {where} is a damaged Parquet table: {error}") from error


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
    key: str | None = "file"
    first_row = 1
    if rows and not any(_keys_of(files, {cell.strip() for cell in rows[0]})):
        names = [cell.strip() for cell in rows.pop(0)]
        key = None
        first_row = 2
    for number, row in enumerate(rows, first_row):
        if len(row) < len(names) or any(cell.strip() for cell in row[len(names) :]):
            raise ConfigError(
                f"targets: row {number} of {where} has {len(row)} cells, and there are "
                f"{len(names)} columns: quote cells with commas, and name more than two columns in "
                "a first row, such as file,label,patient"
            )
    columns: dict[str, Sequence[Any]] = {
        name: _cells([row[place] for row in rows]) for place, name in enumerate(names)
    }
    if len(names) > 2 and columns.get("") == [str(row) for row in range(len(rows))]:
        names.remove("")
        del columns[""]  # the index that pandas writes by default
    if len(columns) < len(names) or "" in columns:
        raise ConfigError(
            f"targets: a column of {where} has no name in the header, or that of another one "
            f"({', '.join(map(repr, names))}): give each a name of its own (pandas: index=False)"
        )
    return Table(where, columns, first_row, key, is_text=True)


def _cells(raw: list[str]) -> list[str]:
    """Cells without the spaces around them. Where spaces alone tell two numbers apart, these are
    names, and keep their spaces.
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
        raise FormatError(f"targets: {where} is no JSON file: {error}") from error
    if isinstance(found, list):
        return Table(where, _columns_of(found, where))
    values = list(found.values())
    if not values or not all(isinstance(value, dict) for value in values) or is_coco(found):
        return dict(found)
    return Table(where, {"": list(found), **_columns_of(values, where)}, key="")


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The fields of an object, of which none comes twice."""
    fields = dict[str, Any]()
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"the key {name!r} comes several times in one object")
        fields[name] = value
    return fields


def _columns_of(records: Sequence[Any], where: str) -> dict[str, Sequence[Any]]:
    """The columns of objects that all have the same fields."""
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict) or record.keys() != records[0].keys():
            raise ConfigError(
                f"targets: row {number} of {where} is no object with the fields of the first one, "
                f"but {record!r:.60}: give file and labels, all the same"
            )
    return {name: [record[name] for record in records] for one in records[:1] for name in one}


def from_frame(frame: Any, where: str = "the DataFrame") -> Table:
    """The table of a DataFrame (of pandas, polars) or of Arrow's; an index that holds texts is the
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
    """A value of a DataFrame that compares as one: an array as a list, and pandas.NA as None."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if type(value).__name__ == "NAType":
        return None
    return value
