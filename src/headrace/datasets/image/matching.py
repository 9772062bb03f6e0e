"""Matches masks and labels with images, by their names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from headrace.dtypes import IntArray
from headrace.errors import ConfigError, DataNotFoundError, warn
from headrace.formats.resolve.file_set import FileSet
from headrace.io.paths import composed, in_ascii, redact

_SHOWN = 3
_WORDS = re.compile(r"[-_. ].*$", re.DOTALL)


def spellings_of(name: str) -> list[str]:
    """What labels may call a file: its relative name, its file name, and these without their
    ending.
    """
    base = os.path.basename(name)
    return [name, base, os.path.splitext(name)[0], os.path.splitext(base)[0]]


def keys_for(
    keys: Collection[str], files: FileSet, where: str = "targets", skips_unused: bool = False
) -> list[str]:
    """The key of each file, which is one of its `spellings_of`. Where none is the same to the byte,
    one that looks the same counts (`composed`).

    Args:
        keys: names that labels have.
        files: of the data.
        where: the labels are from, for messages.
        skips_unused: leave out keys that no file has, with a warning.

    Raises:
        ConfigError: a file has no key; or a key fits several files, or several fit one.
        DataNotFoundError: a key has no file, and may not be left out.
    """
    names = [os.fsdecode(name) for name in files.names]
    found = _matched(names, keys, spellings_of)
    return _checked(found, names, keys, where, False, skips_unused)


def _matched(
    names: Iterable[str], keys: Collection[str], spellings: Callable[[str], list[str]]
) -> list[str | None]:
    """The key of each name; None: it has none."""
    alike = dict[str, list[str]]()
    for one in keys:
        if isinstance(one, str) and not one.isascii():
            alike.setdefault(composed(one), []).append(one)
    owners = dict[str, str]()
    found = list[str | None]()
    for name in names:
        own = spellings(name)
        key = next((one for one in own if one in keys), None)
        if key is None and alike:
            fitting = next((alike[one] for one in map(composed, own) if one in alike), [])
            if len(fitting) > 1:
                first, second = map(in_ascii, fitting[:2])
                raise ConfigError(
                    f"targets: {first} and {second} look the same, and none is {in_ascii(name)} to "
                    "the byte: keep the one that is meant"
                )
            if fitting:
                key = fitting[0]
        if key is not None:
            owner = owners.setdefault(key, name)
            if owner != name:
                show = in_ascii if composed(owner) == composed(name) else redact
                raise ConfigError(
                    f"targets: the name {show(key)} fits {show(owner)} and {show(name)}: give "
                    "relative paths, or rename one of the files"
                )
        found.append(key)
    return found


def _checked(
    found: Sequence[str | None],
    names: Sequence[str],
    keys: Collection[str],
    where: str,
    are_files: bool,
    skips_unused: bool,
) -> list[str]:
    """The keys that were found, none of which is missing. `are_files`: the targets are."""
    missing = [name for name, key in zip(names, found, strict=True) if key is None]
    used = set(found)
    unused = [key for key in keys if key not in used]
    surplus = f"{named_few(unused)} of {len(keys):,} targets belong to no file"
    if missing:
        lack = f"{named_few(missing)} of {len(names):,} files have no target by their name"
        if unused:
            lack += f", and {surplus}"
        remedy = "add the targets, or open only the files that have one"
        if are_files:
            raise DataNotFoundError(f"{where}: {lack}: {remedy}")
        raise ConfigError(f"{where}: {lack}: {remedy}")
    if unused and not skips_unused:
        raise DataNotFoundError(
            f"{where}: {surplus} of the data ({len(names):,} files): is the download complete? "
            "Add the files, remove these targets, or pass unused_targets='skip'"
        )
    if unused:
        warn(f"{where}: {surplus} of the data: left out")
    return [key for key in found if key is not None]


def named_few(names: Sequence[Any]) -> str:
    """Some names out of many, and how many there are: "2 (a.jpg, b.jpg)"."""
    shown = ", ".join(map(redact, names[:_SHOWN]))
    return f"{len(names):,} ({shown}{', ...' if len(names) > _SHOWN else ''})"


# -- masks


def mask_numbers(images: FileSet, masks: FileSet, skips_unused: bool = False) -> IntArray:
    """For each image the number of its mask: that of the same relative name, whatever the endings
    ([n] int64). Where no image has one, names count without the words that all images, and all
    masks, have at their ends: ``7_leftImg8bit.png`` and ``7_labelIds.png``.

    Args:
        images, masks: their files.
        skips_unused: leave out masks that have no image, with a warning.

    Raises:
        DataNotFoundError: an image has no mask; or a mask no image.
        ConfigError: two images or two masks have one name; the masks are among the images.
    """
    _check_apart(images, masks)
    numbers: Mapping[str, int] = _by_stem(masks)
    names = [os.fsdecode(name) for name in images.names]
    found = _matched(names, numbers, lambda name: [_stem(name)])
    if not any(found):
        own = _common_end(map(_stem, names))
        other = _common_end(numbers)
        shorter = {stem.removesuffix(other): number for stem, number in numbers.items()}
        again = _matched(names, shorter, lambda name: [_stem(name).removesuffix(own)])
        if all(again) and (skips_unused or len(set(again)) == len(shorter)):
            found = again
            numbers = shorter
    where = f"targets: masks in {', '.join(map(redact, masks.roots[:_SHOWN]))}"
    keys = _checked(found, names, numbers, where, True, skips_unused)
    jpeg = next((name for name in masks.names if name.lower().endswith((b".jpg", b".jpeg"))), None)
    if jpeg is not None:
        warn(
            f"targets: masks such as {redact(jpeg)} are JPEGs, whose compression changes class "
            "numbers near edges: save masks as PNG, or round them in target_transform"
        )
    return np.fromiter((numbers[key] for key in keys), np.int64, len(images))


def _check_apart(images: FileSet, masks: FileSet) -> None:
    if images.is_remote != masks.is_remote:
        return
    for root in masks.roots:
        for other in images.searched:
            folder = os.path.normpath(other).rstrip("/") + "/"
            if (os.path.normpath(root).rstrip("/") + "/").startswith(folder):
                raise ConfigError(
                    f"targets: the masks lie in {redact(root)}, which is in the folder of the "
                    f"images ({redact(other)}), so that they would be images too: pass the images' "
                    "own folder as data_path"
                )


def _by_stem(masks: FileSet) -> dict[str, int]:
    numbers = dict[str, int]()
    for number, name in enumerate(masks.names):
        other = numbers.setdefault(_stem(os.fsdecode(name)), number)
        if other != number:
            raise ConfigError(
                f"targets: the masks {redact(masks.path(other))} and {redact(masks.path(number))} "
                "have the same name but for their endings, and masks are matched with images by "
                "that: rename or remove one of them"
            )
    return numbers


def _stem(name: str) -> str:
    return os.path.splitext(name)[0]


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
