"""Targets of files: from folders, file names, tables and arrays."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.arguments import described
from headrace.datasets.core.checks import array_in
from headrace.errors import AccessError, ConfigError, DataNotFoundError, FormatError, warn
from headrace.io.paths import is_url, redact
from headrace.io.resolve.expressions import DataPath, entries_of
from headrace.io.resolve.file_set import FileSet

Targets = npt.NDArray[Any] | list[Any] | None
TargetsArgument = str | os.PathLike[Any] | Mapping[str, Any] | Callable[[str], Any] | Sequence[Any] | npt.NDArray[Any] | None
FOLDERS = "folders"
_FILES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp", ".gif", ".npy", ".npz", ".json", ".xml", ".txt")
"""Endings of what no class is called."""
_FEW, _EXAMPLES = 20, 16


def checked_targets(targets: Any, data_path: DataPath) -> TargetsArgument:
    """What was given as `targets`, before any file is looked for.

    A column of a table (of pandas, told by what it can do) whose index holds file names becomes a mapping. One value a path, beside a list
    of the paths of files, becomes a callable of the path, since files are sorted.

    Raises:
        ConfigError: it is something else; or values in an order, and which file each belongs to is not known.
    """
    if targets is None or isinstance(targets, (str, os.PathLike, Mapping)):
        return targets
    if isinstance(targets, type):
        raise ConfigError(f"targets must be a mapping, a CSV file, a callable, one value a path or None, not {described(targets)}")
    if callable(targets):
        by_path: Callable[[str], Any] = targets
        return by_path
    if hasattr(targets, "to_dict") and all(isinstance(key, str) for key in getattr(targets, "index", [None])):
        return dict(targets.to_dict())
    values = array_in(targets)
    if not isinstance(values, (list, tuple, np.ndarray)) or np.ndim(values) == 0:
        raise ConfigError(f"targets must be a mapping, a CSV file, a callable, one value a path or None, not {described(targets)}")
    is_one = isinstance(data_path, (str, bytes, os.PathLike))
    paths = [os.path.normpath(os.path.expanduser(os.fsdecode(entry))) for entry in entries_of(data_path)]
    if is_one or any(map(is_url, entries_of(data_path))) or len(values) != len(paths) or len(set(paths)) < len(paths):
        raise ConfigError(
            f"targets holds {len(values):,} values and no names: files are found in sorted order, and whose value is whose can't be told. "
            "Pass a mapping, dict(zip(names, values)), or data_path=[...] with the path of one file for each value"
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
                f"targets: {redact(path)} has none: with one value a path, each path must be that of a file, not of a folder"
            ) from None


def given_targets(targets: TargetsArgument, files: FileSet) -> tuple[Targets, list[str]]:
    """Targets that the user gave: a mapping by relative path or file name, a CSV file of such, or a callable of the path.

    Texts become class numbers, in the sorted order of the texts; other values stay as they are.

    Raises:
        ConfigError, DataNotFoundError: a file without a target; there is no such CSV file, or it is a folder.
        AccessError, FormatError: the CSV file can't be read.
    """
    if targets is None:
        return None, []
    if isinstance(targets, (str, os.PathLike)):
        targets = _read_csv(os.fspath(targets), files)
    if isinstance(targets, Mapping):
        values = _looked_up(targets, files)
    else:
        assert callable(targets)  # by `checked_targets`
        values = [targets(os.fsdecode(files.path(i))) for i in range(len(files.names))]
    if all(isinstance(v, str) for v in values):
        classes = sorted(set(values))
        _check_classes(classes, files)
        number = {name: i for i, name in enumerate(classes)}
        return np.array([number[v] for v in values], np.int64), classes
    if all(isinstance(v, (int, np.integer)) and not isinstance(v, bool) for v in values):
        return np.array(values, np.int64), []
    return list(values), []


def _check_classes(classes: list[str], files: FileSet) -> None:
    """Raises a ConfigError where texts are names of files, and warns where nearly each sample has a text of its own: neither is a class."""
    samples = len(files.names)
    examples = classes[:: max(1, len(classes) // _EXAMPLES)]
    if examples and all(_names_a_file(text, files) for text in examples):
        raise ConfigError(
            f"targets gives names of files ({redact(examples[0])}), which would become class numbers: masks and other files are no targets "
            "yet; load them in transforms= or in a dataset of your own, or give names of classes"
        )
    if samples >= _FEW and len(classes) > 0.9 * samples:
        warn(
            f"targets gives {len(classes):,} different texts for {samples:,} samples ({classes[0]!r:.40}, ...), so nearly each sample is "
            "a class of its own; if that is meant, pass numbers"
        )


def _names_a_file(text: str, files: FileSet) -> bool:
    if os.path.splitext(text)[1].lower() in _FILES:  # an ending alone is a class like any other
        return True
    folders = ["", *files.roots, os.path.dirname(os.fsdecode(files.path(0)))]
    return "." in text and not files.is_remote and any(os.path.isfile(os.path.join(folder, text)) for folder in folders)


def _looked_up(targets: Mapping[str, Any], files: FileSet) -> list[Any]:
    """By relative path, else by file name, which may then stand for one file only."""
    values, by_name = [], dict[str, str]()
    for name in map(os.fsdecode, files.names):
        if name in targets:
            values.append(targets[name])
            continue
        base = os.path.basename(name)
        if base not in targets:
            raise ConfigError(f"targets has no entry for {redact(name)} (neither by relative path nor by file name)")
        if by_name.setdefault(base, name) != name:
            raise ConfigError(
                f"targets: the file name {redact(base)} fits {redact(by_name[base])} and {redact(name)}: give relative paths instead"
            )
        values.append(targets[base])
    return values


def _read_csv(path: str, files: FileSet) -> dict[str, Any]:
    """First column: file; second: target. A first row that names no file of the data is a header."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if row]
    except FileNotFoundError as error:
        raise DataNotFoundError(f"targets: the CSV file {redact(path)} does not exist") from error
    except IsADirectoryError as error:
        raise ConfigError(f"targets: {redact(path)} is a folder; name a CSV file in it") from error
    except OSError as error:
        raise AccessError(f"targets: {redact(path)} can't be read as a CSV file: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise FormatError(f"targets: {redact(path)} is no CSV file in UTF-8: {error}; save it as UTF-8") from error
    short = next((number for number, row in enumerate(rows, 1) if len(row) < 2), None)
    if short is not None:
        raise ConfigError(f"targets: row {short} of {redact(path)} has no second column: write file,target")
    keys = [row[0].strip() for row in rows]
    first = 1
    if rows and not any(keys[0] in (name, os.path.basename(name)) for name in map(os.fsdecode, files.names)):
        keys, rows, first = keys[1:], rows[1:], 2
    values = [row[1].strip() for row in rows]
    met = dict[str, tuple[int, str]]()
    for number, (key, value) in enumerate(zip(keys, values, strict=True), first):
        row, other = met.setdefault(key, (number, value))
        if other != value:
            raise ConfigError(
                f"targets: rows {row} and {number} of {redact(path)} give {redact(key)} different targets ({other!r:.40} and "
                f"{value!r:.40}): keep one of them"
            )
    for kind in (int, float):
        try:
            return dict(zip(keys, map(kind, values), strict=True))
        except ValueError:
            continue
    return dict(zip(keys, values, strict=True))
