"""`headrace cache`: what lies in the cache folder, and how to be rid of it."""

from __future__ import annotations

import argparse
import re
import shlex
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from headrace.cli.output import Output, visible
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.io.cache.contents import CacheEntry

SUMMARY = "show what lies in the cache folder, and remove what is old"
DESCRIPTION = (
    "Show what headrace keeps in a cache folder, how old it is and whose. All of it is made again "
    "when it is needed. With --prune what "
    "was not used for long is removed, and what killed processes left behind."
)
EXAMPLES = """\
examples:
  %(prog)s                                 what is in the user's cache folder
  %(prog)s --dir /scratch/kept --prune     remove what was not used for 30 days
  %(prog)s --prune --older 0d              remove all that no running job shares
"""
_OLDER = 30 * 86400
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the verb."""
    parser.add_argument(
        "--dir",
        metavar="FOLDER",
        help="the cache_dir of a dataset (default: the user's cache folder)",
    )
    parser.add_argument(
        "--prune",
        action="store_true",
        help="remove what was not used for long, and what killed processes left",
    )
    parser.add_argument(
        "--older",
        type=_age,
        metavar="AGE",
        help="with --prune: unused for AGE, such as 12h, 30d (default: 30d)",
    )


def _age(text: str) -> int:
    match = re.fullmatch(r"(\d{1,6})([smhdw])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no age: write 12h, 30d or 8w")
    return int(match[1]) * _UNITS[match[2]]


def run(given: argparse.Namespace, output: Output) -> int:
    """Lists the files by kind, and removes some if asked to."""
    from headrace.io.cache.contents import cache_entries, remove_entries
    from headrace.io.paths import cache_folder

    if given.older is not None and not given.prune:
        raise ConfigError("--older says what --prune removes: pass both")
    folder = str(cache_folder(given.dir))
    entries = cache_entries(folder)
    older = _OLDER if given.older is None else given.older
    removed = remove_entries(entries, older) if given.prune else []
    gone = {entry.path for entry in removed}
    left = [entry for entry in entries if entry.path not in gone]
    told: dict[str, Any] = {
        "folder": folder,
        "nbytes": sum(entry.nbytes for entry in left),
        "kinds": _kinds(left),
    }
    if given.prune:
        told["removed"] = {
            "files": len(removed),
            "nbytes": sum(entry.nbytes for entry in removed),
            "kinds": _kinds(removed),
        }
    command = (
        "headrace cache --prune"
        if given.dir is None
        else f"headrace cache --dir {shlex.quote(given.dir)} --prune"
    )
    output.show(told, _lines(told, command, output))
    return 0


def _kinds(entries: Sequence[CacheEntry]) -> list[dict[str, Any]]:
    """Number, bytes and ages of what is of one kind and one user; the largest first."""
    by_kind: dict[tuple[str, int], list[CacheEntry]] = defaultdict(list)
    for entry in entries:
        by_kind[entry.what, entry.user].append(entry)
    now = time.time()
    found = [
        {
            "what": what,
            "user": _name_of(user),
            "files": len(some),
            "nbytes": sum(entry.nbytes for entry in some),
            "newest_s": max(0, int(now - max(entry.used for entry in some))),
            "oldest_s": max(0, int(now - min(entry.used for entry in some))),
        }
        for (what, user), some in by_kind.items()
    ]
    return sorted(found, key=lambda kind: -kind["nbytes"])


def _name_of(user: int) -> str:
    try:
        import pwd

        return pwd.getpwuid(user).pw_name
    except (ImportError, KeyError):
        return str(user)


def _lines(told: dict[str, Any], pruning: str, output: Output) -> Iterator[str]:
    from headrace.memory.budget import format_size

    yield (
        f"{output.paint(visible(told['folder']), 'bold')}: "
        f"{format_size(told['nbytes']) if told['kinds'] else 'nothing is kept here'}"
    )
    for kind in told["kinds"]:
        ages = f"used {_shown(kind['newest_s'])} to {_shown(kind['oldest_s'])} ago"
        yield (
            f"  {format_size(kind['nbytes']):>9}  {kind['files']:>6,} files  {kind['what']}, of "
            f"{kind['user']}, {ages}"
        )
    if "removed" in told:
        removed = told["removed"]
        yield f"removed: {removed['files']:,} files, {format_size(removed['nbytes'])}"
    elif told["kinds"]:
        yield output.paint(f"{visible(pruning)} removes what was not used for 30 days", "dim")


def _shown(seconds: int) -> str:
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds // unit:,} {name}"
    return f"{seconds} seconds"
