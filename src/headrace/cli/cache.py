"""Shows what lies in the cache folder, and removes what is old.

Show what headrace keeps in a cache folder, how old it is and whose. All of it is made again when it
is needed. With --prune what was not used for long is removed, and what killed processes left
behind.

examples:
  %(prog)s                                 what is in the user's cache folder
  %(prog)s --dir /scratch/kept --prune     remove what was not used for 30 days
  %(prog)s --prune --older 0d              remove all that no running job shares
"""

from __future__ import annotations

import argparse
import re
import shlex
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from headrace.cli.flags import add_options
from headrace.cli.output import Output, visible
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.io.cache.contents import CacheEntry

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the verb."""
    options = {
        "dir": (str, "the cache_dir of a dataset (default: the user's cache folder)"),
        "prune": (bool, "remove what was not used for long, and what killed processes left"),
        "older": (_age, "with --prune: unused for so long, such as 12h, 30d (default: 30d)"),
    }
    add_options(parser, options)


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
    removed = []
    if given.prune:
        removed = remove_entries(entries, 30 * 86400 if given.older is None else given.older)
    gone = {entry.path for entry in removed}
    told = {"folder": folder, **_total([one for one in entries if one.path not in gone])}
    if given.prune:
        told["removed"] = _total(removed)
    command = "headrace cache"
    if given.dir is not None:
        command += f" --dir {shlex.quote(given.dir)}"
    output.show(told, _lines(told, command, output))
    return 0


def _total(entries: Sequence[CacheEntry]) -> dict[str, Any]:
    """Number, bytes and ages of all files, and of those of one kind and one user, largest first."""
    by_kind: dict[tuple[str, int], list[CacheEntry]] = defaultdict(list)
    for entry in entries:
        by_kind[entry.what, entry.user].append(entry)
    now = time.time()
    kinds: list[dict[str, Any]] = []
    for (what, user), some in by_kind.items():
        ages = [max(0, int(now - entry.used)) for entry in some]
        nbytes = sum(entry.nbytes for entry in some)
        kind = {"what": what, "user": user, "files": len(some), "nbytes": nbytes}
        kinds.append({**kind, "newest_s": min(ages), "oldest_s": max(ages)})
    nbytes = sum(entry.nbytes for entry in entries)
    kinds.sort(key=lambda kind: -kind["nbytes"])
    return {"files": len(entries), "nbytes": nbytes, "kinds": kinds}


def _lines(told: dict[str, Any], command: str, output: Output) -> Iterator[str]:
    from headrace.memory.budget import format_size

    whole = "nothing is kept here"
    if told["kinds"]:
        whole = format_size(told["nbytes"])
    yield f"{output.paint(visible(told['folder']), 'bold')}: {whole}"
    for kind in told["kinds"]:
        ages = f"used {_age_of(kind['newest_s'])} to {_age_of(kind['oldest_s'])} ago"
        size = format_size(kind["nbytes"])
        whose = f"{kind['what']}, of user {kind['user']}"
        yield f"  {size:>9}  {kind['files']:>6,} files  {whose}, {ages}"
    if "removed" in told:
        removed = told["removed"]
        yield f"removed: {removed['files']:,} files, {format_size(removed['nbytes'])}"
    elif told["kinds"]:
        advice = f"{visible(command)} --prune removes what was not used for 30 days"
        yield output.paint(advice, "dim")


def _age_of(seconds: int) -> str:
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds // unit:,} {name}"
    return f"{seconds} seconds"
