"""The classes of files that lie in class folders."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError, DataNotFoundError
from headrace.io.packed_strings import PackedNames
from headrace.io.paths import redact
from headrace.io.resolve.contents import MOST, names_below, summary_of
from headrace.io.resolve.file_set import FileSet

_PIECE = 1 << 16  # names that are looked at together: what is made of them is small
_OF_MASKS = ("mask", "label", "annot", "target", "truth", "segm")
"""What folders of masks are called."""


def folder_targets(files: FileSet) -> tuple[npt.NDArray[np.int64] | None, list[str]]:
    """Targets from the first-level folders, as torchvision's ImageFolder has them: ([n] int64, class names sorted).

    (None, []) where all files lie flat in the folder.

    Raises:
        ConfigError: some files lie beside the class folders: nobody can say which class they have.
        DataNotFoundError: a class folder is empty (as torchvision has it).
    """
    names = files.names
    targets, number = np.empty(len(names), np.int64), dict[bytes, int]()
    for folder, start, stop in _runs(names):
        if folder is None:
            return _beside_the_folders(files)
        targets[start:stop] = number.setdefault(folder, len(number))
    classes = sorted(number)
    empty = [f for f in files.folders if os.fsencode(f) not in number and not f.startswith(".")]
    if empty:
        others = [] if files.is_remote else _others_in(files.roots, empty[0])
        holds = f", in which {summary_of(others).partition(': use ImageDataset')[0]}" if others else ""
        raise DataNotFoundError(
            f"{len(empty)} class folders hold no image, the first is {redact(empty[0])!r}{holds}; else remove them, for they would be "
            "classes on one machine and not on another, or pass targets= (targets=None: no targets)"
        )
    if classes != list(number):
        targets = np.argsort([number[c] for c in classes])[targets]
    return targets, [os.fsdecode(c) for c in classes]


def mask_folders(files: FileSet) -> tuple[str, str] | None:
    """The folders of images and of their masks, where these are all first-level folders, hold files of the same names but for the endings,
    and one of them is called so."""
    folders = [name for name in files.folders if not name.startswith(".")]
    masks = [name for name in folders if any(word in name.lower() for word in _OF_MASKS)]
    if len(folders) != 2 or len(masks) != 1 or not 0 < len(files) <= _PIECE or len(files) % 2:
        return None
    stems: dict[str, set[str]] = {name: set() for name in folders}
    for name in map(os.fsdecode, files.names):
        folder, _, rest = name.partition("/")
        stems.get(folder, set()).add(os.path.splitext(rest)[0])
    images = next(name for name in folders if name not in masks)
    return (images, masks[0]) if stems[images] == stems[masks[0]] else None


def _others_in(roots: Sequence[str], folder: str) -> list[str]:
    """Names of files in a first-level folder, as many as a message is made of."""
    return [name for root in roots for name in itertools.islice(names_below(os.path.join(root, folder)), MOST)]


def _runs(names: PackedNames) -> Iterator[tuple[bytes | None, int, int]]:
    """First-level folders (None: no folder) and where their names begin and end; a folder may come again.

    In the order of parts the names below a folder follow each other, so that only the ends of each such run are looked at; unless
    a name holds b"\\0", which sorts like b"/".
    """
    data, _ = names.arrays
    in_runs, start = not len(data) or data.min() > 0, 0
    while start < len(names):
        folder, slash, _ = names[start].partition(b"/")
        stop = _end_of_run(names, start, folder + slash) if slash and in_runs else start + 1
        yield folder if slash else None, start, stop
        start = stop


def _end_of_run(names: PackedNames, start: int, prefix: bytes) -> int:
    """The first position after `start` whose name does not begin with `prefix`, found in as many steps as its distance has bits."""
    step = 1
    while start + step < len(names) and names[start + step].startswith(prefix):
        start += step
        step *= 2
    low, high = start, min(start + step, len(names))  # `low` begins with it, `high` does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if names[middle].startswith(prefix) else (low, middle)
    return high


def _beside_the_folders(files: FileSet) -> tuple[None, list[str]]:
    """The answer where some files lie in no class folder: perhaps all do so."""
    (data, offsets), total = files.names.arrays, len(files.names)
    flat = first = 0
    for start in range(0, total, _PIECE):
        ends = offsets[start : start + _PIECE + 1]
        slashes = np.flatnonzero(data[ends[0] : ends[-1]] == ord("/")) + ends[0]
        beside = np.flatnonzero(np.diff(np.searchsorted(slashes, ends)) == 0)
        if len(beside) and not flat:
            first = start + int(beside[0])
        flat += len(beside)
    if flat == total:
        return None, []
    raise ConfigError(
        f"{flat:,} of {total:,} files lie beside the class folders, the first is "
        f"{redact(files.path(first))}: move them into a class folder, or pass targets= (targets=None: no targets)"
    )
