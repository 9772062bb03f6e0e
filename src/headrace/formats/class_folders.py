"""The classes of files that lie in class folders."""

from __future__ import annotations

import bisect
import glob
import os
import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError, DataNotFoundError, warn
from headrace.formats.resolve.contents import is_hidden_part
from headrace.formats.resolve.file_set import FileSet
from headrace.io.packed_strings import PackedNames
from headrace.io.paths import composed, redact

_PIECE = 1 << 16  # names that are looked at together: what is made of them is small
_OF_TARGETS = ("mask", "label", "annot", "target", "truth", "segm")
"""What names of folders of masks or annotations hold."""
_OF_IMAGES = ("images", "image", "imgs", "img", "jpegimages")
_SPLIT = re.compile(
    r"(training|train|validation|valid|val|dev|testing|test|unlabell?ed)[-_]?[0-9]*", re.IGNORECASE
)


def folder_targets(files: FileSet) -> tuple[npt.NDArray[np.int64] | None, list[str]]:
    """Targets from the first-level folders, as torchvision's ImageFolder has them: ([n] int64,
    class names sorted).

    (None, []) where all files lie flat in the folder. Folders whose names look the same
    (`composed`) are one class, and classes have the order of their composed names, which is the
    same on all systems.

    Raises:
        ConfigError: some files lie beside the class folders: nobody can say which class they have.
        DataNotFoundError: a class folder is empty (as torchvision has it).
    """
    names = files.names
    targets = np.empty(len(names), np.int64)
    number = dict[bytes, int]()
    first = dict[bytes, bytes]()
    for folder, start, stop in _runs(names):
        if folder is None:
            data, _ = names.arrays
            if not (data == ord("/")).any():
                return None, []
            raise ConfigError(
                f"{redact(files.path(start))} lies beside the class folders: move such files into "
                "a class folder, or pass targets= (targets=None: no targets)"
            )
        name = folder
        if not folder.isascii():
            name = os.fsencode(composed(os.fsdecode(folder)))
        first.setdefault(name, folder)
        targets[start:stop] = number.setdefault(name, len(number))
    classes = sorted(number)
    empty = []
    for one in files.folders:
        name = os.fsencode(composed(one))
        if name not in number and not is_hidden_part(name):
            empty.append(one)
    if empty:
        raise DataNotFoundError(
            f"{len(empty):,} class folders hold no file that is read, such as "
            f"{redact(empty[0])!r}: remove the empty folders, which would be classes on one "
            "machine and not on another, or pass targets= (targets=None: no targets)"
        )
    if classes != list(number):
        targets = np.argsort([number[c] for c in classes])[targets]
    return targets, [os.fsdecode(first[c]) for c in classes]


def refuse_other_folders(files: FileSet) -> None:
    """Refuses first-level folders that are hardly classes: the splits of a data set, and images
    beside their targets.

    Raises:
        ConfigError: there are such; the message says what to pass.
    """
    filled = _filled_folders(files)
    if not filled:
        return
    root = redact(files.roots[0])
    outright = "; if these folders are classes, pass targets='folders' (targets=None: no targets)"
    if all(map(is_split, filled)):
        paths = " or ".join(repr(redact(os.path.join(files.roots[0], name))) for name in filled)
        raise ConfigError(
            f"{root} holds {', '.join(filled)}: parts of a data set, and no classes. Pass the "
            f"path of one, {paths}{outright}"
        )
    images = [name for name in filled if name.lower() in _OF_IMAGES]
    others = [name for name in files.folders if _is_of_targets(name)]
    if len(images) != 1 or not set(filled).issubset([*images, *others]):
        return
    beside = [os.path.join(files.roots[0], name) for name in others]
    if not files.is_remote:
        beside += sorted(glob.glob(os.path.join(glob.escape(files.roots[0]), "*.json")))
    if not beside:
        return
    example = redact(beside[0])
    path = redact(os.path.join(files.roots[0], images[0]))
    raise ConfigError(
        f"{root} holds the images of {images[0]} and their targets, and no classes: pass {path!r} "
        "and masks, annotations of COCO or a table of labels as targets=, such as "
        f"targets={example!r}{outright}"
    )


def is_split(folder: str) -> bool:
    """True if a folder is called as a part of a data set is, such as "train" or "val2017"."""
    return _SPLIT.fullmatch(folder) is not None


def warn_of_splits(files: FileSet) -> None:
    """Warns where all files of a folder belong to parts of a data set, by their first-level folder
    or the first word of their name, and to several of them.
    """
    if len(files.roots) != 1 or files.roots[0] not in files.searched:
        return
    found = dict[str, str]()
    for folder, start, _ in _runs(files.names):
        if folder is None and start >= _PIECE:  # a million flat files are no parts
            return
        name = os.fsdecode(files.names[start] if folder is None else folder)
        split = _SPLIT.match(name)
        if split is None or name[split.end() : split.end() + 1] not in ("", "-", "_", "."):
            return
        found.setdefault(split[1].lower(), name)
    if len(found) > 1:
        first, second = list(found.values())[:2]
        warn(
            f"{redact(files.roots[0])}: {redact(first)} and {redact(second)} are called as parts "
            "of a data set, and are read as one: pass "
            "the path of one part, or a list of paths to say that this is meant"
        )


def _is_of_targets(name: str) -> bool:
    return not is_hidden_part(os.fsencode(name)) and any(
        word in name.lower() for word in _OF_TARGETS
    )


def _filled_folders(files: FileSet) -> list[str]:
    """The first-level folders that hold files of the set, sorted; [] where some files lie beside
    them.
    """
    found = set[bytes]()
    for folder, _, _ in _runs(files.names):
        if folder is None:
            return []
        found.add(folder)
    return sorted(map(os.fsdecode, found))


def mask_folders(files: FileSet) -> tuple[str, str] | None:
    """The folders of images and of their masks, where these are all first-level folders, hold files
    of the same names but for the endings, and one of them is called so.
    """
    folders = [name for name in files.folders if not is_hidden_part(os.fsencode(name))]
    masks = [name for name in folders if _is_of_targets(name)]
    if len(folders) != 2 or len(masks) != 1 or not 0 < len(files) <= _PIECE or len(files) % 2:
        return None
    stems: dict[str, set[str]] = {name: set() for name in folders}
    for name in map(os.fsdecode, files.names):
        folder, _, rest = name.partition("/")
        stems.get(folder, set()).add(os.path.splitext(rest)[0])
    images = next(name for name in folders if name not in masks)
    if stems[images] == stems[masks[0]]:
        return (images, masks[0])
    return None


def _runs(names: PackedNames) -> Iterator[tuple[bytes | None, int, int]]:
    """First-level folders (None: no folder) and where their names begin and end; a folder may come
    again.

    In the order of parts the names below a folder follow each other, so that only the ends of each
    such run are looked at; unless a name holds b"\\0", which sorts like b"/".
    """
    data, _ = names.arrays
    in_runs = not len(data) or data.min() > 0
    start = 0
    while start < len(names):
        folder, slash, _ = names[start].partition(b"/")
        prefix = folder + slash
        stop = start + 1
        if slash and in_runs:
            step = 1  # doubled: as many steps as the run's length has bits
            while start + step < len(names) and names[start + step].startswith(prefix):
                step *= 2
            stop = bisect.bisect_left(
                range(len(names)),
                True,
                start + step // 2 + 1,
                min(start + step, len(names)),
                key=lambda number: not names[number].startswith(prefix),
            )
        yield folder if slash else None, start, stop
        start = stop
