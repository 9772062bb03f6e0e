"""Reads what a user passes as `data_path`: a path, a glob, braces, a URL, or a list of these."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from headrace.arguments import described
from headrace.errors import ConfigError, DataNotFoundError
from headrace.io.paths import is_url, redact

DataPath = str | os.PathLike[Any] | Sequence[str | os.PathLike[Any]]
_MOST = 1_000_000  # names that one pattern in braces may stand for
_BRACES = re.compile(r"\{(\d+\.\.\d+(?:\.\.\d+)?|[^{}]*,[^{}]*)\}")


def entries_of(data_path: DataPath, name: str = "data_path") -> list[Any]:
    """The paths that `data_path` names, patterns in braces expanded; globs stay as they are.

    Args:
        data_path: as the user gave it.
        name: the argument's, for messages.

    Raises:
        ConfigError: it is no path and no list of paths; or a pattern stands for too many names.
        DataNotFoundError: it is an empty one.
    """
    wanted = f"{name} must be a path, a glob, a URL or a list of these"
    if isinstance(data_path, (str, bytes, os.PathLike)):
        entries: list[Any] = [data_path]
    elif hasattr(data_path, "filename") or hasattr(data_path, "read"):
        raise ConfigError(f"{wanted}, not {described(data_path)} that is open: pass its path")
    elif isinstance(data_path, Mapping) or not isinstance(data_path, Iterable):
        raise ConfigError(f"{wanted}, not {described(data_path)}")
    elif isinstance(data_path, Iterator):
        raise ConfigError(
            f"{wanted}, not {described(data_path)}, which gives its paths once: pass list(...) of "
            "it"
        )
    else:
        entries = list(data_path)
    for number, entry in enumerate(entries):
        if not isinstance(entry, (str, bytes, os.PathLike)):
            raise ConfigError(
                f"{wanted}, and entry {number} of the {len(entries):,} given is {described(entry)}"
            )
    if not entries or not all(map(os.fspath, entries)):
        empty = next((number for number, entry in enumerate(entries) if not os.fspath(entry)), 0)
        what = (
            f"{name} is empty ({data_path!r})"
            if len(entries) < 2
            else f"{name}: entry {empty} of the {len(entries):,} given is empty"
        )
        raise DataNotFoundError(f"{what}: name at least one folder or file")
    # in a list of millions, at once
    if all(type(entry) is str for entry in entries) and "{" not in "".join(entries):
        return entries
    return [path for entry in entries for path in expand_braces(entry)]


def urls_among(entries: Sequence[Any], name: str = "data_path") -> list[str]:
    """The entries, if they are URLs; none, if they are paths of this machine.

    Raises:
        ConfigError: some are, and some are not.
    """
    urls = [entry for entry in entries if is_url(entry)]
    if urls and len(urls) < len(entries):
        raise ConfigError(f"{name} mixes URLs and local paths: make one dataset of each")
    return urls


def expand_braces(entry: Any) -> list[Any]:
    """``a-{000..003}.tar`` and ``{train,val}.tar`` as shells, and WebDataset, write them: all
    names. What is there as it stands, and what has no such braces, stays as it is.

    Raises:
        ConfigError: they stand for too many names.
    """
    text = os.fspath(entry)
    if (
        not isinstance(text, str)
        or "{" not in text
        or (not is_url(text) and os.path.exists(os.path.expanduser(text)))
    ):
        return [entry]
    expanded = [text]
    while True:
        matches = [_BRACES.search(name) for name in expanded]
        if not any(matches):
            return list(dict.fromkeys(expanded))  # braces in braces give some twice
        of = {
            inside: _parts(inside)
            for inside in {match[1] for match in matches if match is not None}
        }
        parts = [[""] if match is None else of[match[1]] for match in matches]
        if sum(map(len, parts)) > _MOST:
            raise ConfigError(f"{redact(entry)} stands for more than {_MOST:,} names")
        made = []
        for name, match, some in zip(expanded, matches, parts, strict=True):
            made += (
                [name]
                if match is None
                else [name[: match.start()] + part + name[match.end() :] for part in some]
            )
        expanded = made


def _parts(inside: str) -> Sequence[str]:
    if ".." not in inside or "," in inside:
        return inside.split(",")
    first, last, *by = inside.split("..")
    is_padded = any(len(end) > 1 and end.startswith("0") for end in (first, last))
    width = 0
    if is_padded:
        width = max(len(first), len(last))
    step = 1
    if by:
        step = max(1, int(by[0]))
    if abs(int(last) - int(first)) // step > _MOST:
        raise ConfigError(f"{{{inside}}} stands for more than {_MOST:,} names")
    sign = -1
    if int(first) <= int(last):
        sign = 1
    return [f"{number:0{width}d}" for number in range(int(first), int(last) + sign, sign * step)]
