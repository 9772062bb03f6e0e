"""Lists the limits on this process's memory and cores, and detects memory pressure under them.

psutil sees the host, even from inside a container. What really stops a process is the tightest of:
the machine's available memory, every cgroup limit between the process and the root (a parent's
limit is shared with its other children, so it may be the tighter one), and the limits of the
process itself (RLIMIT). This file lists all of them as `Limit`s. It holds no state: each call reads
anew.
"""

from __future__ import annotations

import functools
import math
import operator
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

if sys.platform != "win32":  # which has no such limits
    import resource

_UNLIMITED = 1 << 60
"""Kernels write "no limit" as a number near 2**63; nothing that large is a limit."""


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit on memory, and how much of it is used already."""

    name: str
    """Who sets it, e.g. `cgroup v1 /foo memory.limit_in_bytes`."""

    total: int
    """The limit in bytes."""

    used: int
    """Bytes in use under it that can't be reclaimed at once."""

    @property
    def headroom(self) -> int:
        """Bytes that are left under the limit, at least 0."""
        return max(0, self.total - self.used)


_PROC, _SYS_FS = Path("/proc"), Path("/sys/fs/cgroup")  # where they usually are

# version -> limits, usage, and the row of memory.stat that counts page cache which the kernel
# reclaims first
_FILES = {
    1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    2: (("memory.max", "memory.high"), "memory.current", "inactive_file"),
}


def memory_limits(notes: list[str] | None = None) -> list[Limit]:
    """List every limit on the memory of this process, the machine's own memory first.

    Args:
        notes: gets a line for everything that could not be read or made no sense, and was therefore
            left out.

    Returns:
        At least one limit. Without cgroups (macOS, Windows) it is psutil's, and RLIMIT's where
        there is one.
    """
    limits = common_limits(notes)
    if sys.platform == "win32":
        return limits
    import psutil  # which takes a while, as wherever it is imported late

    memory = psutil.Process().memory_info()
    for name, field in (("RLIMIT_AS", "vms"), ("RLIMIT_DATA", "data")):
        if not hasattr(resource, name) or not hasattr(memory, field):
            continue  # "data" is Linux's; elsewhere RLIMIT_DATA does not count what malloc maps
        soft, _ = resource.getrlimit(getattr(resource, name))
        if soft != resource.RLIM_INFINITY and 0 <= soft < _UNLIMITED:
            limits.append(Limit(name, soft, getattr(memory, field)))
    return limits


def common_limits(notes: list[str] | None = None) -> list[Limit]:
    """List the limits that this process shares with others: `memory_limits` without its own."""
    import psutil

    memory = psutil.virtual_memory()
    machine = Limit(
        "the machine's available memory (psutil)", memory.total, memory.total - memory.available
    )
    return [machine, *cgroup_limits(_PROC, _SYS_FS, [] if notes is None else notes)]


def tightest(limits: Iterable[Limit]) -> Limit:
    """Return the limit with the least headroom, the first of equals.

    Raises:
        ValueError: `limits` is empty.
    """
    return min(limits, key=operator.attrgetter("headroom"))


def cgroup_limits(proc: Path, sys_fs: Path, notes: list[str]) -> list[Limit]:
    """List the limits of each memory cgroup from this process up to the root, v1 and v2.

    Args:
        proc: where procfs is mounted; its `self/cgroup` is read.
        sys_fs: where cgroups are.
        notes: as for `memory_limits`.
    """
    limits = []
    for version, name, folder in _levels("memory", proc, sys_fs, notes):
        files, usage, cache_row = _FILES[version]
        totals = {}
        for file in files:
            text = _read(folder / file, notes)
            if not text or text == "max":
                continue  # a root cgroup of v2, or one without the controller, has no such file
            total = _number(text)
            if total is None:
                notes.append(f"{name} {file} is ignored: it holds {text[:40]!r}, which is no size")
            elif total < _UNLIMITED:
                totals[file] = total
        if not totals:
            continue
        current = _number(_read(folder / usage, notes))
        if current is None:
            notes.append(f"{name} {' and '.join(totals)} is ignored: {usage} says nothing usable")
            continue
        stat = _read(folder / "memory.stat", notes)
        row = re.search(rf"^{cache_row} (\d{{1,20}})$", stat, re.MULTILINE | re.ASCII)
        if row is not None:
            current = max(0, current - int(row[1]))
        else:
            # The limit itself is certain, and so is an upper bound of what is used: leaving it out
            # would risk being killed.
            notes.append(f"{name}: no {cache_row} in memory.stat, so page cache counts as used")
        limits += [Limit(f"{name} {file}", total, current) for file, total in totals.items()]
    return limits


def _levels(
    controller: str, proc: Path, sys_fs: Path, notes: list[str]
) -> Iterator[tuple[int, str, Path]]:
    """Yield version, name and folder of each cgroup from this process up to the root, of v1's
    controller and of v2.
    """
    file = proc / "self" / "cgroup"
    text = _read(file, notes)
    paths = {}  # by version: in a hybrid system both
    if not text and sys_fs.is_dir():  # else there are none here: macOS, Windows
        notes.append(f"{file} can't be read: only the limits at the root of {sys_fs} are known")
        paths = {2: "/"}
        if (sys_fs / controller).is_dir():
            paths[1] = "/"
    for line in text.splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, separator, path = rest.partition(":")
        if not separator:
            notes.append(f"{file} has a line that is not understood: {line!r}")
        elif controller in controllers.split(","):
            paths[1] = path
        elif hierarchy == "0" and not controllers:
            paths[2] = path
    for version, path in paths.items():
        mount = sys_fs / {1: controller, 2: "unified"}[version]
        if version == 2 and not os.path.isdir(mount):
            mount = sys_fs
        if not os.path.isdir(mount):
            notes.append(f"cgroup v{version} {path}: its limits can't be seen at {mount}")
            continue
        # A container without a cgroup namespace sees its own part of the tree alone, at the root;
        # outside of a namespace paths have "..", which would leave the mount.
        inside = PurePosixPath(path.lstrip("/"))
        while ".." in inside.parts or not os.path.isdir(mount / inside):
            inside = PurePosixPath(*inside.parts[1:])
        if not inside.parts and path != "/":
            notes.append(
                f"cgroup v{version} {path} is not visible under {mount}: only the limits at its "
                "root are known"
            )
        for level in (inside, *inside.parents):
            yield version, f"cgroup v{version} {PurePosixPath('/') / level}", mount / level


def _number(text: str) -> int | None:
    """Return a byte count as the kernel writes it, None for anything else (20 digits hold
    2**64).
    """
    if re.fullmatch(r"\d{1,20}", text, re.ASCII):
        return int(text)
    return None


def _read(path: Path, notes: list[str]) -> str:
    """Return the stripped text of a small file; "" where it is missing or, with a note, can't be
    read.
    """
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        notes.append(f"{path} can't be read ({error.strerror or error})")
        return ""


class Cores(NamedTuple):
    """How many cores this process may use, and the cgroup whose quota says so; "" if none does."""

    number: int
    quota: str = ""


def usable_cpus() -> int:
    """The number of cores that this process may use; see `cores`."""
    return cores().number


def cores() -> Cores:
    """The cores that this process may use: those that it may run on, or fewer where a cgroup has
    a quota of CPU time.
    """
    allowed = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    quota = cpu_quota(_PROC, _SYS_FS)
    if quota is not None and quota.number < allowed:
        return quota
    return Cores(allowed)


@functools.cache
def cpu_quota(proc: Path, sys_fs: Path) -> Cores | None:
    """The tightest quota of CPU time of the cgroups from this process up to the root, v1 and v2,
    in cores (rounded up).
    """
    quotas = []
    for version, name, folder in _levels("cpu", proc, sys_fs, []):
        files = {1: ("cpu.cfs_quota_us", "cpu.cfs_period_us"), 2: ("cpu.max",)}[version]
        words = " ".join(_read(folder / file, []) for file in files).split()
        numbers = [_number(word) for word in words]
        if len(numbers) == 2 and numbers[0] and numbers[1]:  # no quota is "max" or -1
            quotas.append(Cores(math.ceil(numbers[0] / numbers[1]), f"{name} {files[0]}"))
    return min(quotas, default=None)


PERIOD = 1.0
"""Seconds between two looks, which cost a tenth of a millisecond or more."""
_LOW = 0.05
_LOW_BYTES = 1 << 30
_LOW_OF_HEADROOM = 0.1


class PressureWatch:
    """Computes how much memory to release when the system runs short.

    A budget is measured once, and others allocate later: a neighbour in the same container, the
    training itself. So what can be read again is released while the headroom is small: the job gets
    slower, and is not killed (law 5).

    Memory is short when the headroom under the tightest limit is below `low`: 5 % of the limit, at
    most 1 GiB, and at most a tenth of the headroom that was there when this was made.
    """

    def __init__(self) -> None:
        start = tightest(common_limits())
        self.low: int = int(min(_LOW * start.total, _LOW_BYTES, _LOW_OF_HEADROOM * start.headroom))

    def excess(self) -> int:
        """Bytes that are to be given back, so that twice `low` is free; if negative, bytes that
        may be taken; 0 between.
        """
        headroom = tightest(common_limits()).headroom
        if headroom < self.low:
            return 2 * self.low - headroom
        return min(0, 2 * self.low - headroom)
