"""Targets of files: from folders, file names, tables and arrays."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.arguments import described
from headrace.datasets.cells import parsed
from headrace.datasets.core.checks import array_in
from headrace.datasets.core.views import ColumnTargets, TargetSequence
from headrace.datasets.image.coco import is_coco, read_coco
from headrace.datasets.image.matching import keys_for, refuse_unused_keys
from headrace.datasets.image.tables import (
    TABLE_ENDINGS,
    Table,
    as_mapping_table,
    from_frame,
    is_frame,
    is_missing,
    key_of,
    read_labels,
)
from headrace.dtypes import IntArray
from headrace.errors import ConfigError, MissingNameError, warn
from headrace.io.paths import composed, is_url, named_part, redact
from headrace.io.remote.options import RemoteOptions
from headrace.io.resolve.expressions import DataPath, entries_of
from headrace.io.resolve.file_set import FileSet
from headrace.storage.kinds import EXTENSIONS

Targets = npt.NDArray[Any] | list[Any] | TargetSequence | None
_WANTED = (
    "a folder of masks, labels by file name (a mapping, a table, or the path of one), a callable, "
    "one value a path, or None"
)
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


class _ByDefault:
    """Stands for `FOLDERS` where nobody said so."""

    def __repr__(self) -> str:
        return repr(FOLDERS)


FOLDERS_BY_DEFAULT: Any = _ByDefault()
_FILES = (*EXTENSIONS, ".npy", ".npz", ".json", ".xml", ".txt")
"""Endings of what no class is called."""
_FEW, _EXAMPLES = 20, 16


def checked_targets(targets: Any, data_path: DataPath) -> TargetsArgument | Table:
    """What was given as `targets`, before any file is looked for.

    A column of a table (of pandas, told by what it can do) whose index holds file names becomes a
    mapping, a DataFrame a `Table`. One value a path, beside a list of the paths of files, becomes a
    callable of the path, since files are sorted.

    Raises:
        ConfigError: it is something else; or values in an order, and which file each belongs to is
            not known.
    """
    if targets is None or isinstance(targets, (str, os.PathLike, Mapping)):
        return targets
    if isinstance(targets, type):
        raise ConfigError(f"targets must be {_WANTED}, not {described(targets)}")
    if callable(targets):
        by_path: Callable[[str], Any] = targets
        return by_path
    if is_frame(targets):
        return from_frame(targets)
    if hasattr(targets, "to_dict") and all(
        isinstance(key, str) for key in getattr(targets, "index", [None])
    ):
        return dict(targets.to_dict())
    values = array_in(targets)
    if not isinstance(values, (list, tuple, np.ndarray)) or np.ndim(values) == 0:
        raise ConfigError(f"targets must be {_WANTED}, not {described(targets)}")
    is_one = isinstance(data_path, (str, bytes, os.PathLike))
    paths = [
        os.path.normpath(os.path.expanduser(os.fsdecode(entry))) for entry in entries_of(data_path)
    ]
    if (
        is_one
        or any(map(is_url, entries_of(data_path)))
        or len(values) != len(paths)
        or len(set(paths)) < len(paths)
    ):
        raise ConfigError(
            f"targets holds {len(values):,} values and no names: files are found in sorted order, "
            "and whose value is whose can't be told. "
            "Pass a mapping, dict(zip(names, values)), or data_path=[...] with the path of one "
            "file for each value"
        )
    return _Paired(dict(zip(paths, values, strict=True)))


class _Paired:
    """The targets of single files, by path."""

    def __init__(self, by_path: dict[str, Any]) -> None:
        self._by_path = by_path

    def __call__(self, path: str) -> Any:
        try:
            return self._by_path[os.path.normpath(path)]
        except KeyError:
            raise ConfigError(
                f"targets: {redact(path)} has none: with one value a path, each path must be that "
                "of a file, not of a folder"
            ) from None


class Labels(NamedTuple):
    """The targets of files, and what is known of them.

    Attributes:
        targets: one a file; None: there are none.
        classes: what class numbers stand for.
        columns: those of a table of labels, for all files, but that of their names.
        column_classes: what the class numbers in its columns stand for.
        class_to_idx: the numbers of classes, where they don't count from 0.
    """

    targets: Targets
    classes: list[str]
    columns: Mapping[str, Any] = MappingProxyType({})
    column_classes: Mapping[str, list[str]] = MappingProxyType({})
    class_to_idx: dict[str, int] | None = None


def given_targets(
    targets: TargetsArgument | Table,
    files: FileSet,
    reach: RemoteOptions | None = None,
    *,
    target_name: str | Sequence[str] | None = None,
    label_separator: str | None = None,
    with_masks: bool = False,
    skips_unused: bool = False,
    delimiter: str | None = None,
) -> Labels:
    """Targets that the user gave: a mapping by relative path or file name, a table of such or the
    path of one, or a callable of the path.

    Texts become class numbers, in the sorted order of the texts, and lists of texts 1 for each
    class that is in them (`MultiHot`); other values stay as they are.

    Args:
        targets: see `ImageDataset`.
        files: that they belong to.
        reach: how URLs are read.
        target_name: of a table: the column that is the target, or those of a dict; None: all.
        label_separator: stands between the labels in texts of several.
        with_masks: keep the segmentations of annotated objects.
        skips_unused: leave out targets of files that are not among the data, with a warning.
        delimiter: of the cells of a CSV file; None: as its ending has it.

    Raises:
        ConfigError, DataNotFoundError: a file without a target, or a target without its file; there
            is no such file of labels, or it is a folder.
        AccessError, FormatError: the file of labels can't be read.
        MissingNameError: a table has no column of that name.
    """
    if isinstance(targets, (str, os.PathLike)):
        path = os.fspath(targets)
        found = read_labels(path, files, reach or RemoteOptions(), delimiter)
        if isinstance(found, dict) and is_coco(found):
            _refuse_columns("annotations of COCO have none", target_name, label_separator)
            boxes = read_coco(found, redact(path), files, with_masks, skips_unused)
            return Labels(boxes, boxes.classes, class_to_idx=boxes.class_to_idx)
        targets = (
            (as_mapping_table(found, redact(path)) or found) if isinstance(found, dict) else found
        )
    elif delimiter is not None:
        raise ConfigError(
            "delimiter is for a table of labels in CSV, and targets is none: leave it out"
        )
    if isinstance(targets, Table):
        return _of_table(targets, files, target_name, label_separator, skips_unused)
    _refuse_columns("targets is no table", target_name, None)
    if skips_unused and not isinstance(targets, Mapping):
        raise ConfigError(
            "unused_targets is for labels by file name, such as a table or a mapping: leave it out"
        )
    if targets is None:
        return Labels(None, [])
    if isinstance(targets, Mapping):
        keys = keys_for(targets, files)
        values = [targets[key] for key in keys]
        refuse_unused_keys(targets, keys, "targets", skips_unused)
    else:
        assert callable(targets)  # by `checked_targets`
        values = [targets(os.fsdecode(files.path(i))) for i in range(len(files.names))]
    made, classes = _encoded(_separated(values, label_separator))
    _check_range(made, "targets")
    _check_classes(classes, made, files)
    return Labels(made, classes)


def names_masks(targets: Any) -> bool:
    """True if targets name images, such as masks: a folder, a glob, images by their endings, or
    a URL that names no file of labels.
    """
    if not isinstance(targets, (str, os.PathLike)) or targets == FOLDERS:
        return False
    path = os.path.expanduser(os.fsdecode(targets))
    if is_url(path):
        return not named_part(path).lower().endswith(TABLE_ENDINGS)
    is_pattern = glob.has_magic(path) or "{" in path
    return (
        os.path.isdir(path)
        or path.lower().endswith((*EXTENSIONS, "/"))
        or (is_pattern and not os.path.exists(path))
    )


def _refuse_columns(why: str, target_name: Any, label_separator: str | None) -> None:
    for name, value in (("target_name", target_name), ("label_separator", label_separator)):
        if value is not None:
            raise ConfigError(
                f"{name} is for the columns of a table of labels, and {why}: leave it out"
            )


def _of_table(
    table: Table,
    files: FileSet,
    target_name: str | Sequence[str] | None,
    separator: str | None,
    skips_unused: bool,
) -> Labels:
    key = key_of(table, files)
    order = _rows_for(table, key, files, skips_unused)
    names = [name for name in table.columns if name != key]
    chosen = (
        names
        if target_name is None
        else [target_name]
        if isinstance(target_name, str)
        else list(target_name)
    )
    if missing := next((name for name in chosen if name not in names), None):
        raise MissingNameError(
            f"target_name: {table.where} has no column {missing!r} of labels; it has "
            f"{', '.join(map(repr, names))}"
        )
    if not chosen:
        raise ConfigError(
            f"targets: {table.where} has no column beside that of the files ({key!r}): add one of "
            "labels"
        )
    columns, classes = dict[str, Any](), dict[str, list[str]]()
    for name in names:
        values = [table.columns[name][row] for row in order]
        if (
            name in chosen
            and separator is not None
            and (len(chosen) == 1 or any(separator in str(value) for value in values))
        ):
            values = _separated(values, separator)
        elif table.is_text:
            values = _numbers_or_texts(table, name, name in chosen, order)
        gap = next((place for place, value in enumerate(values) if is_missing(value)), None)
        if gap is not None and name in chosen:
            raise ConfigError(
                f"targets: row {order[gap] + table.first_row} of {table.where} has no {name!r}: "
                "fill it in, remove row and file, or leave "
                "the column out by target_name="
            )
        if all(
            isinstance(value, (int, float)) and not isinstance(value, bool) for value in values
        ) and float in set(map(type, values)):
            columns[name], classes[name] = np.array(values, np.float64), []
        else:
            columns[name], classes[name] = (values, []) if gap is not None else _encoded(values)
        if name in chosen:
            _check_range(columns[name], f"targets: column {name!r} of {table.where}")
    named = {name: found for name, found in classes.items() if found}
    if len(chosen) > 1 or not (target_name is None or isinstance(target_name, str)):
        return Labels(ColumnTargets({name: columns[name] for name in chosen}), [], columns, named)
    target = columns[chosen[0]]
    _check_classes(classes[chosen[0]], target, files)
    return Labels(target, classes[chosen[0]], columns, named)


def _numbers_or_texts(table: Table, name: str, is_target: bool, order: list[int]) -> list[Any]:
    """The values of a column of text for some of its rows.

    Raises:
        ConfigError: two texts of a target are one number; an integer among floats is too large.
    """
    column = parsed(table.columns[name])
    if is_target and column.same is not None:
        first, second = column.same
        raise ConfigError(
            f"targets: column {name!r} of {table.where} holds {first!r} and {second!r}, which are "
            "one number and two texts: write each "
            "number in one way, or pass the table as targets=pandas.read_csv(path, "
            f"dtype={{{name!r}: float}}) for numbers, or with str in "
            "place of float for classes"
        )
    if is_target and column.rounded is not None:
        raise ConfigError(
            f"targets: column {name!r} of {table.where} has {column.rounded.strip()}, an integer "
            "among floats that float64 can't hold: round it yourself, or give strings"
        )
    return [column.values[row] for row in order]


def _rows_for(table: Table, key: str, files: FileSet, skips_unused: bool) -> list[int]:
    """The row of each file.

    Raises:
        ConfigError: a file has none, or several that contradict each other.
        DataNotFoundError: a row has no file, and may not be left out.
    """
    rows = dict[str, int]()
    for number, name in enumerate(map(str, table.columns.get(key, ()))):
        other = rows.setdefault(name, number)
        if other == number:
            continue
        for values in table.columns.values():
            if values[other] != values[number]:
                raise ConfigError(
                    f"targets: rows {other + table.first_row} and {number + table.first_row} of "
                    f"{table.where} give {redact(name)} "
                    f"different targets ({values[other]!r:.40} and {values[number]!r:.40}): keep "
                    "one of them"
                )
    keys = keys_for(rows, files, f"targets: {table.where}")
    refuse_unused_keys(rows, keys, f"targets: {table.where}", skips_unused)
    return [rows[name] for name in keys]


def _separated(values: list[Any], separator: str | None) -> list[Any]:
    """Texts of several labels as lists of these."""
    if separator is None or not all(isinstance(value, str) for value in values):
        return values
    return [
        [label for part in value.split(separator) if (label := part.strip())] for value in values
    ]


def _encoded(values: list[Any]) -> tuple[Any, list[str]]:
    """Values as targets, and the classes that texts among them are."""
    if all(isinstance(v, str) for v in values):
        names = list(map(composed, values))
        classes = sorted(set(names))
        number = {name: i for i, name in enumerate(classes)}
        return np.array([number[name] for name in names], np.int64), classes
    if all(
        isinstance(v, (list, tuple, set, frozenset)) and all(isinstance(label, str) for label in v)
        for v in values
    ) and any(values):
        several = MultiHot.of(values)
        return several, several.classes
    if all(
        isinstance(v, (int, np.integer)) and not isinstance(v, bool) for v in values
    ) and not any(map(_is_beyond, values)):
        return np.array(values, np.int64), []
    return list(values), []


def _is_beyond(value: Any) -> bool:
    """True if a value is an integer of more than 64 bits, which no tensor has."""
    return isinstance(value, (int, np.integer)) and not -(1 << 63) <= value < 1 << 63


def _check_range(values: Any, where: str) -> None:
    beyond = next(filter(_is_beyond, values), None) if isinstance(values, list) else None
    if beyond is not None:
        raise ConfigError(
            f"{where} has {beyond}, an integer of more than 64 bits: give numbers in the range of "
            "int64, or strings"
        )


class MultiHot(TargetSequence):
    """Several classes a sample: a target is float32 [classes], 1 for each of them and 0 for the
    others.

    Args:
        classes: their names.
        numbers: of the classes of all samples, one after the other.
        ends: [n + 1] int64, where those of each sample begin.
    """

    def __init__(self, classes: list[str], numbers: npt.NDArray[np.int32], ends: IntArray) -> None:
        self.classes, self._numbers, self._ends = classes, numbers, ends

    @classmethod
    def of(cls, labels: Sequence[Iterable[str]]) -> MultiHot:
        """Of the names of each sample's classes."""
        composed_labels = [dict.fromkeys(map(composed, names)) for names in labels]
        classes = sorted({name for names in composed_labels for name in names})
        number = {name: i for i, name in enumerate(classes)}
        each = [[number[name] for name in names] for names in composed_labels]
        ends = np.concatenate([[0], np.cumsum([len(numbers) for numbers in each])]).astype(np.int64)
        return cls(classes, np.array([one for numbers in each for one in numbers], np.int32), ends)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        at, target = range(len(self))[index], np.zeros(len(self.classes), np.float32)
        target[self._numbers[self._ends[at] : self._ends[at + 1]]] = 1
        return target

    def take(self, indices: IntArray) -> MultiHot:
        counts = np.diff(self._ends)[indices]
        picked = [self._numbers[self._ends[i] : self._ends[i + 1]] for i in indices.tolist()]
        numbers = np.concatenate(picked) if picked else self._numbers[:0]
        return MultiHot(
            self.classes, numbers, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        )


def _check_classes(classes: list[str], targets: Any, files: FileSet) -> None:
    """Raises a ConfigError where texts are names of files, and warns where nearly each sample
    has a text of its own: neither is a class.
    """
    if isinstance(targets, TargetSequence):
        return
    samples = len(files.names)
    examples = classes[:: max(1, len(classes) // _EXAMPLES)]
    if examples and all(_names_a_file(text, files) for text in examples):
        raise ConfigError(
            f"targets gives names of files ({redact(examples[0])}), which would become class "
            "numbers: for masks pass their folder, "
            "targets='masks/'; load other files in transforms= or in a dataset of your own, or "
            "give names of classes"
        )
    if samples >= _FEW and len(classes) > 0.9 * samples:
        warn(
            f"targets gives {len(classes):,} different texts for {samples:,} samples "
            f"({classes[0]!r:.40}, ...), so nearly each sample is "
            "a class of its own; if that is meant, pass numbers"
        )


def _names_a_file(text: str, files: FileSet) -> bool:
    if os.path.splitext(text)[1].lower() in _FILES:  # an ending alone is a class like any other
        return True
    folders = ["", *files.roots, os.path.dirname(os.fsdecode(files.path(0)))]
    return (
        "." in text
        and not files.is_remote
        and any(os.path.isfile(os.path.join(folder, text)) for folder in folders)
    )


class Wanted(NamedTuple):
    """Which targets are wanted, as the user gave it."""

    targets: TargetsArgument | Table
    target_name: str | Sequence[str] | None
    label_separator: str | None
    masks: bool
    skips_unused: bool = False
    """True if targets of files that are not among the data are left out."""
    is_outright: bool = True
    """True if the user gave `targets`; False: they are the default."""
    delimiter: str | None = None
    """What stands between the cells of a CSV of labels, where that is not its ending's own."""

    @property
    def are_folders(self) -> bool:
        """True if they are those of class folders."""
        return isinstance(self.targets, str) and self.targets == FOLDERS

    @property
    def is_bare(self) -> bool:
        """True if no option of labels was given."""
        given = (self.target_name, self.label_separator, self.delimiter)
        return given == (None, None, None) and not (self.masks or self.skips_unused)
