"""Targets of files by folder and by name: `keys_for` matches the names in labels with files."""

from __future__ import annotations

import copy
import os
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from headrace.core.options import UNSET
from headrace.core.views import TargetSequence
from headrace.dtypes import IntArray
from headrace.errors import (
    ConfigError,
    DataNotFoundError,
    warn,
)
from headrace.formats.resolve.file_set import EXTENSIONS, FileSet
from headrace.io.paths import composed, in_ascii, named_part, redact

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
BY_FOLDERS = (FOLDERS, UNSET)
"""The `targets` that mean class folders."""
TABLE_ENDINGS = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet", ".pq", ".txt")
"""Endings of files of labels. A local file may have any other."""
_METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
SHOWN = 3
"""Names in a message."""
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
        are_objects: True if `targets` are the `CocoTargets` of images.
    """

    targets: Targets
    classes: list[str]
    columns: Mapping[str, Any] = MappingProxyType({})
    column_classes: Mapping[str, list[str]] = MappingProxyType({})
    are_objects: bool = False


# -- names


def spellings_of(name: str) -> list[str]:
    """The names that labels may use for a file: its relative path and its file name, each with and
    without its extension.
    """
    base = os.path.basename(name)
    return [name, base, stem(name), stem(base)]


def keys_of(
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
    """The key of each file; see `keys_of`.

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
        map(os.fsdecode, files.names), keys_of(files, keys, spellings), strict=True
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
    shown = list(map(redact, names[:SHOWN]))
    if len(names) > SHOWN:
        shown.append("...")
    return f"{len(names):,} ({', '.join(shown)})"


def stem(name: str) -> str:
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


# -- targets


def labels_by_name(targets: Mapping[str, Any], files: FileSet, wanted: Wanted) -> Labels:
    """The targets of files in a mapping.

    Raises:
        ConfigError, DataNotFoundError: a file has no target, or a target no file.
    """
    wanted.refuse_options("label_separator", "unused_targets")
    keys = keys_for(targets, files, unused=wanted.unused_targets)
    values = [targets[key] for key in keys]
    return Labels(*encoded(separated(values, wanted.label_separator), "targets"))


def metadata_paths(files: FileSet) -> list[str]:
    """Paths of tables of labels in the folder of the files, where HuggingFace's imagefolder has
    them: local ones that exist, or URLs.
    """
    if len(files.roots) != 1 or files.roots[0] not in files.searched:
        return []
    paths = list(map(os.path.join(files.roots[0], "").__add__, _METADATA))
    if files.server is not None:
        return list(map(files.server.url_of, paths))
    return list(filter(os.path.isfile, paths))
