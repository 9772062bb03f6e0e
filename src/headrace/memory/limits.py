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
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil

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


class _Mount(NamedTuple):
    root: str  # the cgroup that stands at `point`; not "/" where a container sees only its own part
    point: Path


# version -> limits, usage, and the row of memory.stat that counts page cache which the kernel
# reclaims first
_FILES = {
    1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    2: (("memory.max", "memory.high"), "memory.current", "inactive_file"),
}


def memory_limits(
    proc: str | os.PathLike[str] = "/proc",
    sys_fs: str | os.PathLike[str] = "/sys/fs/cgroup",
    notes: list[str] | None = None,
) -> list[Limit]:
    """List every limit on the memory of this process, the machine's own memory first.

    Args:
        proc: where procfs is mounted; its `self/cgroup` and `self/mountinfo` are read.
        sys_fs: where cgroups usually are, for the case that `mountinfo` does not say.
        notes: gets a line for everything that could not be read or made no sense, and was therefore
            left out.

    Returns:
        At least one limit. Without cgroups (macOS, Windows) it is psutil's, and RLIMIT's where
        there is one.
    """
    return [*common_limits(proc, sys_fs, notes), *process_limits()]


def common_limits(
    proc: str | os.PathLike[str] = "/proc",
    sys_fs: str | os.PathLike[str] = "/sys/fs/cgroup",
    notes: list[str] | None = None,
) -> list[Limit]:
    """List the limits that this process shares with others: `memory_limits` without its own."""
    memory = psutil.virtual_memory()
    machine = Limit(
        "the machine's available memory (psutil)", memory.total, memory.total - memory.available
    )
    return [machine, *cgroup_limits(Path(proc), Path(sys_fs), [] if notes is None else notes)]


def tightest(limits: Iterable[Limit]) -> Limit:
    """Return the limit with the least headroom, the first of equals.

    Raises:
        ValueError: `limits` is empty.
    """
    return min(limits, key=lambda limit: limit.headroom)


def process_limits() -> list[Limit]:
    """List the soft RLIMIT_AS and RLIMIT_DATA of this process, where they are set."""
    if sys.platform == "win32":
        return []
    memory = psutil.Process().memory_info()
    limits = []
    for name, field in (("RLIMIT_AS", "vms"), ("RLIMIT_DATA", "data")):
        if not hasattr(resource, name) or not hasattr(memory, field):
            continue  # "data" is Linux's; elsewhere RLIMIT_DATA does not count what malloc maps
        soft, _ = resource.getrlimit(getattr(resource, name))
        if soft != resource.RLIM_INFINITY and 0 <= soft < _UNLIMITED:
            limits.append(Limit(name, soft, getattr(memory, field)))
    return limits


def cgroup_limits(proc: Path, sys_fs: Path, notes: list[str]) -> list[Limit]:
    """List the limits of each memory cgroup from this process up to the root, v1 and v2; see
    `memory_limits`.
    """
    limits = []
    for version, name, folder in _levels("memory", proc, sys_fs, notes):
        limits += _limits_of(version, name, folder, notes)
    return limits


def _levels(
    controller: str, proc: Path, sys_fs: Path, notes: list[str]
) -> Iterator[tuple[int, str, Path]]:
    """Yield version, name and folder of each cgroup from this process up to the root, of v1's
    controller and of v2.
    """
    for version, path in _own_cgroups(controller, proc, sys_fs, notes).items():
        mount = _find_mount(controller, version, path, proc, sys_fs)
        if not os.path.isdir(mount.point):
            notes.append(
                f"cgroup v{version} {path} is not mounted at {mount.point}: its limits can't be "
                "seen"
            )
            continue
        inside = _inside(path, mount)
        if inside is None:
            notes.append(
                f"cgroup v{version} {path} is not visible under {mount.point}: only the limits at "
                "its root are known"
            )
            inside = PurePosixPath()
        for level in (inside, *inside.parents):
            yield (
                version,
                f"cgroup v{version} {PurePosixPath(mount.root) / level}",
                mount.point / level,
            )


def _own_cgroups(controller: str, proc: Path, sys_fs: Path, notes: list[str]) -> dict[int, str]:
    """Return {version: path} of the cgroups that may limit this process: in a hybrid system both
    versions.
    """
    text = _read(proc / "self" / "cgroup", notes)
    if text is None:
        if not sys_fs.is_dir():
            return {}  # no cgroups here: macOS, Windows
        notes.append(
            f"{proc / 'self' / 'cgroup'} can't be read: only the limits at the root of {sys_fs} "
            "are known"
        )
        return {1: "/", 2: "/"} if (sys_fs / controller).is_dir() else {2: "/"}
    paths = {}
    for line in text.splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, separator, path = rest.partition(":")
        if not separator:
            notes.append(f"{proc / 'self' / 'cgroup'} has a line that is not understood: {line!r}")
        elif controller in controllers.split(","):
            paths[1] = path
        elif hierarchy == "0" and not controllers:
            paths[2] = path
    return paths


def _find_mount(controller: str, version: int, path: str, proc: Path, sys_fs: Path) -> _Mount:
    """Return the mount that shows `path`; else any of that version; else the usual place."""
    mounts: dict[str, _Mount] = {}
    # What can't be read here has a fallback, so it is not worth a note.
    for line in (_read(proc / "self" / "mountinfo", []) or "").splitlines():
        fields, _, tail = (part.split() for part in line.partition(" - "))
        if len(fields) < 5 or len(tail) < 3:
            continue
        root, point = _unescape(fields[3]), _unescape(fields[4])
        mounts.pop(point, None)  # a later mount hides an earlier one at the same point
        kind = controller if tail[0] == "cgroup" and controller in tail[2].split(",") else tail[0]
        if kind == {1: controller, 2: "cgroup2"}[version]:
            mounts[point] = _Mount(root, Path(point))
    for mount in mounts.values():
        if _inside(path, mount) is not None:
            return mount
    if mounts:
        return next(iter(mounts.values()))
    if version == 1:
        return _Mount("/", sys_fs / controller)
    unified = sys_fs / "unified"
    return _Mount("/", unified if os.path.isdir(unified) else sys_fs)


def _inside(path: str, mount: _Mount) -> PurePosixPath | None:
    """Return `path` relative to the mount's root; None where the mount does not show it."""
    try:
        inside = PurePosixPath(path).relative_to(mount.root)
    except ValueError:
        return None
    # A cgroup outside our cgroup namespace is written with "..": following it would leave the
    # mount.
    return inside if ".." not in inside.parts and os.path.isdir(mount.point / inside) else None


def _limits_of(version: int, name: str, folder: Path, notes: list[str]) -> list[Limit]:
    """Read the limits of one cgroup."""
    files, usage, cache_row = _FILES[version]
    totals = {}
    for file in files:
        text = _read(folder / file, notes)
        if text is None or text in ("", "max"):
            continue  # a root cgroup of v2, or one without the memory controller, has no such file
        total = _number(text)
        if total is None:
            notes.append(f"{name} {file} is ignored: it holds {text[:40]!r} instead of a number")
        elif total < _UNLIMITED:
            totals[file] = total
    if not totals:
        return []
    current = _number(_read(folder / usage, notes) or "")
    if current is None:
        notes.append(f"{name} {' and '.join(totals)} is ignored: {usage} says nothing usable")
        return []
    row = re.search(
        rf"^{cache_row} (\d+)$", _read(folder / "memory.stat", notes) or "", re.MULTILINE | re.ASCII
    )
    if row is None:
        # The limit itself is certain, and so is an upper bound of what is used: leaving it out
        # would risk being killed.
        notes.append(f"{name}: no {cache_row} in memory.stat, so page cache counts as used")
    inactive = _number(row[1]) or 0 if row else 0
    return [
        Limit(f"{name} {file}", total, max(0, current - inactive)) for file, total in totals.items()
    ]


def _number(text: str) -> int | None:
    """Return a byte count as the kernel writes it, None for anything else (20 digits hold
    2**64).
    """
    return int(text) if re.fullmatch(r"\d{1,20}", text, re.ASCII) else None


def _read(path: Path, notes: list[str]) -> str | None:
    """Return the stripped text of a small file; None where it is missing or, with a note, can't
    be read.
    """
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        notes.append(f"{path} can't be read ({error.strerror or error})")
        return None


def _unescape(field: str) -> str:
    """Undo mountinfo's octal escapes (space, tab, newline and backslash)."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


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
    quota = _own_quota()
    allowed = Cores(os.cpu_count() or 1)
    if hasattr(os, "sched_getaffinity"):
        allowed = Cores(len(os.sched_getaffinity(0)))
    if quota is not None and quota.number < allowed.number:
        return quota
    return allowed


@functools.cache
def _own_quota() -> Cores | None:
    return cpu_quota(Path("/proc"), Path("/sys/fs/cgroup"))


def cpu_quota(proc: Path, sys_fs: Path) -> Cores | None:
    """The tightest quota of CPU time of the cgroups from this process up to the root, v1 and v2,
    in cores (rounded up).
    """
    quotas = []
    for version, name, folder in _levels("cpu", proc, sys_fs, []):
        if version == 2:
            file = "cpu.max"
            words = (_read(folder / file, []) or "").split()
        else:
            file = "cpu.cfs_quota_us"
            words = [_read(folder / file, []) or "", _read(folder / "cpu.cfs_period_us", []) or ""]
        numbers = [_number(word) for word in words]
        if len(numbers) == 2 and numbers[0] and numbers[1]:  # no quota is "max" or -1
            quotas.append(Cores(math.ceil(numbers[0] / numbers[1]), f"{name} {file}"))
    return min(quotas, default=None)


PERIOD = 1.0
"""Seconds between two looks, which cost a tenth of a millisecond or more."""
_LOW, _LOW_BYTES, _LOW_OF_HEADROOM = 0.05, 1 << 30, 0.1


class PressureWatch:
    """Says how much memory to release although everybody keeps to their budget.

    A budget is measured once, and others allocate later: a neighbour in the same container, the
    training itself. So what can be read again is released while the headroom is small, and things
    get slower instead of killed (law 5).

    Memory is short when the headroom under the tightest limit is below `low`: 5 % of the limit, at
    most 1 GiB, and at most a tenth of the headroom that was there when this was made.

    Args:
        limits: those at the start; None: they are measured now.
    """

    def __init__(self, limits: Sequence[Limit] | None = None) -> None:
        start = tightest(common_limits() if limits is None else limits)
        self.low: int = int(min(_LOW * start.total, _LOW_BYTES, _LOW_OF_HEADROOM * start.headroom))

    def excess(self) -> int:
        """Bytes that are to be given back, so that twice `low` is free; if negative, bytes that
        may be taken; 0 between.
        """
        headroom = tightest(common_limits()).headroom
        if headroom < self.low:
            return 2 * self.low - headroom
        return min(0, 2 * self.low - headroom)
