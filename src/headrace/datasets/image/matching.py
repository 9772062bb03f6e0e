"""Matches masks and labels with images, by their names."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from headrace.dtypes import IntArray
from headrace.errors import ConfigError, DataNotFoundError, warn
from headrace.io.paths import composed, in_ascii, redact
from headrace.io.resolve.file_set import FileSet

_SHOWN = 3
_WORDS = re.compile(rb"[-_. ].*$", re.DOTALL)


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
    by_stem, stems = _by_composed_names(_by_stem(masks, "masks"), _by_stem(images, "images"))
    if by_stem.keys().isdisjoint(stems):
        shorter = _without_last_words(by_stem), _without_last_words(stems)
        fit = shorter[0].keys() == shorter[1].keys() or (
            skips_unused and shorter[0].keys() > shorter[1].keys()
        )
        by_stem, stems = shorter if fit else (by_stem, stems)
    missing = [number for stem, number in stems.items() if stem not in by_stem]
    surplus = [number for stem, number in by_stem.items() if stem not in stems]
    if missing:
        extra = (
            f", and {_named(masks, surplus)} of {len(masks):,} masks belong to none of them"
            if surplus
            else ""
        )
        raise DataNotFoundError(
            f"targets: {_named(images, missing)} of {len(images):,} images have no mask in "
            f"{_root(masks)}{extra}: a mask has the relative "
            "name of its image, with any ending (or one word more in all); add them, or open only "
            "the images that have one"
        )
    if surplus:
        refuse_unused(
            f"targets: {_named(masks, surplus)} of {len(masks):,} masks belong to no image in "
            f"{_root(images)} (a mask has the relative "
            "name of its image, with any ending, or one word more in all)",
            skips_unused,
        )
    _warn_of_jpegs(masks)
    return np.fromiter((by_stem[stem] for stem in stems), np.int64, len(images))


def _check_apart(images: FileSet, masks: FileSet) -> None:
    if images.is_remote != masks.is_remote:
        return
    for root in masks.roots:
        for other in images.searched:
            if _is_below(root, other):
                raise ConfigError(
                    f"targets: the masks lie in {redact(root)}, which is in the folder of the "
                    f"images ({redact(other)}), so that they would "
                    "be images too: pass the images' own folder as data_path"
                )


def _is_below(path: str, folder: str) -> bool:
    path, folder = (os.path.normpath(one).rstrip("/") + "/" for one in (path, folder))
    return path.startswith(folder)


def _by_stem(files: FileSet, what: str) -> dict[bytes, int]:
    numbers: dict[bytes, int] = {}
    for number, name in enumerate(files.names):
        stem = os.path.splitext(name)[0]
        if numbers.setdefault(stem, number) != number:
            first = os.fsdecode(files.path(numbers[stem]))
            raise ConfigError(
                f"targets: the {what} {redact(first)} and {redact(files.path(number))} have the "
                "same name but for their endings, and "
                "masks are matched with images by that: rename or remove one of them"
            )
    return numbers


def _by_composed_names(*each: dict[bytes, int]) -> list[dict[bytes, int]]:
    """The same by composed names. Names that look the same in one of the dicts stay as they are in
    all, and match exactly."""
    if all(name.isascii() for numbers in each for name in numbers):
        return list(each)
    alike = set[bytes]()
    for numbers in each:
        counts = Counter(map(_composed, numbers))
        alike |= {name for name, count in counts.items() if count > 1}
    made = list[dict[bytes, int]]()
    for numbers in each:
        keys = [name if _composed(name) in alike else _composed(name) for name in numbers]
        made.append(dict(zip(keys, numbers.values(), strict=True)))
    return made


def _composed(name: bytes) -> bytes:
    return os.fsencode(composed(os.fsdecode(name)))


def _without_last_words(numbers: dict[bytes, int]) -> dict[bytes, int]:
    """The same by names without the words that all of them end with: what follows the first
    separator in their common end.
    """
    ends = [name[::-1] for name in numbers]
    # what these have in common, all have
    first, last = min(ends, default=b""), max(ends, default=b"")
    if first == last:  # one name: what its last word is nobody knows
        return numbers
    count = next(
        (at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other),
        len(first),
    )
    words = _WORDS.search(first[:count][::-1].rpartition(b"/")[2])
    return (
        numbers
        if words is None
        else {name[: -len(words[0])]: number for name, number in numbers.items()}
    )


def _named(files: FileSet, numbers: Sequence[int]) -> str:
    return named_few((files.names[number] for number in numbers[:_SHOWN]), len(numbers))


def named_few(names: Iterable[Any], count: int) -> str:
    """Some names out of many, and how many there are: "2 (a.jpg, b.jpg)"."""
    shown = [redact(name) for _, name in zip(range(_SHOWN), names, strict=False)]
    return f"{count:,} ({', '.join(shown)}{', ...' if count > len(shown) else ''})"


def _root(files: FileSet) -> str:
    return ", ".join(redact(root) for root in files.roots[:_SHOWN])


def _warn_of_jpegs(masks: FileSet) -> None:
    """Warns of masks that are JPEGs: compressing has changed their class numbers."""
    first = next((name for name in masks.names if name.lower().endswith((b".jpg", b".jpeg"))), None)
    if first is not None:
        warn(
            f"targets: masks such as {redact(first)} are JPEGs, whose compression changes class "
            "numbers near edges: save masks as PNG, or "
            "round them in target_transform"
        )


def names_of(name: str) -> list[str]:
    """What labels may call a file: its relative name, its file name, and these without their
    ending.
    """
    base = os.path.basename(name)
    return [name, base, os.path.splitext(name)[0], os.path.splitext(base)[0]]


def keys_for(keys: Mapping[str, Any], files: FileSet, where: str = "targets") -> list[str]:
    """The key of each file: its relative name or, where that stands for one file only, its file
    name, or one of these without ending. Where no key is the same to the byte, one that looks the
    same counts (`composed`).

    Raises:
        ConfigError: there is none, or it fits several files, or several fit it.
    """
    found, by_name, missing = list[str](), dict[str, str](), list[str]()
    alike = _keys_by_composed_name(keys)
    for name in map(os.fsdecode, files.names):
        key = next((key for key in names_of(name) if key in keys), None)
        if key is None:
            key = _key_that_looks_like(name, alike, where)
        if key is None:
            missing.append(name)
        elif by_name.setdefault(key, name) != name:
            other = by_name[key]
            show = in_ascii if composed(other) == composed(name) else redact
            raise ConfigError(
                f"targets: the file name {show(key)} fits {show(other)} and {show(name)}: give "
                "relative paths instead"
            )
        else:
            found.append(key)
    if missing:
        others = (
            f", nor for {len(missing) - 1:,} others of {len(files):,} files"
            if len(missing) > 1
            else ""
        )
        raise ConfigError(
            f"{where} has no entry for {redact(missing[0])} (neither by relative path nor by file "
            f"name){others}: add the entries, or move "
            "the files"
        )
    return found


def _keys_by_composed_name(keys: Iterable[str]) -> dict[str, list[str]]:
    """The keys of which some file may have one that looks the same."""
    alike = dict[str, list[str]]()
    for key in keys:
        if isinstance(key, str) and not key.isascii():
            alike.setdefault(composed(key), []).append(key)
    return alike


def _key_that_looks_like(name: str, alike: Mapping[str, list[str]], where: str) -> str | None:
    """The key that looks the same as one of the names of a file.

    Raises:
        ConfigError: several do.
    """
    if not alike:
        return None
    fitting = next((alike[own] for own in map(composed, names_of(name)) if own in alike), [])
    if len(fitting) > 1:
        first, second = map(in_ascii, fitting[:2])
        raise ConfigError(
            f"{where}: {first} and {second} look the same, and none is {in_ascii(name)} to the "
            "byte: keep the one that is meant"
        )
    return fitting[0] if fitting else None


def unused_among(keys: Collection[str], used: Sequence[str]) -> list[str]:
    """The keys that are not used."""
    met = set(used)
    return [key for key in keys if key not in met] if len(met) < len(keys) else []


def refuse_unused(message: str, skips: bool) -> None:
    """Says that there are targets of files that are not among the data: by an error or, where they
    may be left out, a warning.

    Raises:
        DataNotFoundError: they may not.
    """
    if not skips:
        raise DataNotFoundError(
            f"{message}: is the download complete? Add the files, remove these, or pass "
            "unused_targets='skip'"
        )
    warn(f"{message}: left out")


def refuse_unused_keys(keys: Collection[str], used: Sequence[str], where: str, skips: bool) -> None:
    """`refuse_unused` of labels by file name."""
    if unused := unused_among(keys, used):
        refuse_unused(
            f"{where}: {named_few(unused, len(unused))} of {len(keys):,} labels are of files that "
            "are not among the data",
            skips,
        )
