"""The verbs about this machine: its cache folder, and facts for a bug report."""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import shutil
import sys
import textwrap
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from headrace.cli.flags import Verb
from headrace.cli.output import Output, visible
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.io.disk_cache import CacheEntry

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_VARIABLES = ("HDF5_USE_FILE_LOCKING", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "SLURM_NTASKS")
_PACKAGES = (
    "torch numpy h5py zarr numcodecs isal zstandard google-crc32c fsspec pillow simplejpeg psutil "
    "tqdm aiohttp s3fs hdf5plugin distributed tokenizers lightning accelerate transformers"
)


def _age(text: str) -> int:
    match = re.fullmatch(r"(\d{1,6})([smhdw])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an age: use 12h, 30d or 8w")
    return int(match[1]) * _UNITS[match[2]]


def cache_verb(given: argparse.Namespace, output: Output) -> int:
    """Lists the cache folder, and removes old entries.

    List what headrace keeps in a cache folder, with age and owner. headrace rebuilds entries when
    it needs them. --prune removes entries unused for long, and leftovers of killed processes.

    examples:
      %(prog)s                                 list the user's cache folder
      %(prog)s --dir /scratch/cache --prune    remove what was not used for 30 days
      %(prog)s --prune --older 0d              remove all that no running job uses
    """
    from headrace.io.disk_cache import cache_entries, remove_entries
    from headrace.io.paths import cache_folder

    if given.older is not None and not given.prune:
        raise ConfigError("--older needs --prune")
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
    output.show(told, _cache_lines(told, command, output))
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


def _cache_lines(told: dict[str, Any], command: str, output: Output) -> Iterator[str]:
    from headrace.memory.budget import format_size

    whole = "the cache is empty"
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


def env_verb(given: argparse.Namespace, output: Output) -> int:
    """Shows versions, cores, the memory limit and GPUs, for a bug report.

    Show what a bug report needs: versions, cores, the memory limit and where it comes from, GPUs.

    examples:
      %(prog)s                 paste this into a report
      %(prog)s --json > env.json
    """
    facts = _facts()
    if not given.no_gpu:
        import torch

        facts["packages"]["torch"] = torch.__version__  # with its build, such as +cu130
        facts["gpus"] = []
        for device in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(device)
            memory = properties.total_memory
            facts["gpus"].append({properties.name: memory, "CUDA": torch.version.cuda})
    lines = []
    for name, value in facts.items():
        head = name
        for part in textwrap.wrap(_text(value), max(26, output.columns - 14)):
            lines.append(f"{output.paint(f'{head:<13}', 'dim')} {visible(part)}")
            head = ""
    output.show(facts, lines)
    return 0


def _facts() -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    import h5py

    import headrace
    from headrace.io.paths import cache_folder
    from headrace.memory.limits import cores, memory_limits, tightest

    versions = {}
    for name in _PACKAGES.split():
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    notes: list[str] = []
    limits = memory_limits(notes=notes)
    limit = tightest(limits)
    usable = cores()
    folder = cache_folder(None)
    there = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(there).free
    facts = {
        "headrace": headrace.__version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": platform.platform(),
        "packages": {**versions, "HDF5": str(h5py.version.hdf5_version)},
        "cores": {"usable": usable.number, "machine": os.cpu_count(), "quota": usable.quota},
        "memory": {"limit": limit.total, "free": limit.headroom, "from": limit.name},
        "limits": [{one.name: one.total, "used": one.used} for one in limits],
        "notes": notes,
        "cache folder": {"path": str(folder), "free": free},
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "encoding": {"output": sys.stdout.encoding, "file names": sys.getfilesystemencoding()},
    }
    if os.path.isdir("/dev/shm"):
        facts["/dev/shm"] = {"free": shutil.disk_usage("/dev/shm").free}
    return facts


def _text(value: Any) -> str:
    from headrace.memory.budget import format_size

    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(one)}" for name, one in value.items() if one)
    if isinstance(value, list):
        return "; ".join(map(_text, value))
    if isinstance(value, int) and value > 10_000:
        return format_size(value)
    return str(value)


VERBS = {
    "cache": Verb(
        cache_verb,
        {
            "dir": (str, "cache folder, the cache_dir of a dataset (default: the user's)"),
            "prune": (bool, "remove entries unused for long, and leftovers of killed processes"),
            "older": (_age, "with --prune: age to remove, such as 12h or 30d (default: 30d)"),
        },
    ),
    "env": Verb(env_verb, {"no_gpu": (bool, "don't look for GPUs, which imports torch")}),
}
