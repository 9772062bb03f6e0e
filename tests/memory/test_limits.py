"""Fake trees of /proc and /sys/fs/cgroup, and the machine that the tests run on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.memory.limits import Cores, Limit, cgroup_limits, cpu_quota, tightest

MB = 10**6


class Machine:
    """A /proc and a /sys/fs/cgroup made of plain files."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.sys_fs = folder / "proc", folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.sys_fs.mkdir()
        self.notes: list[str] = []

    def inside(self, *lines: str) -> Machine:
        (self.proc / "self" / "cgroup").write_text("".join(f"{line}\n" for line in lines))
        return self

    def files(self, folder: str, **files: object) -> Machine:
        place = self.sys_fs / folder
        place.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (place / f"memory.{name}").write_text(f"{content}\n")
        return self

    def limits(self) -> dict[str, Limit]:
        self.notes.clear()
        return {limit.name: limit for limit in cgroup_limits(self.proc, self.sys_fs, self.notes)}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def v1(limit: object, usage: object, inactive: int | None = 0) -> dict[str, object]:
    files = {"limit_in_bytes": limit, "usage_in_bytes": usage}
    if inactive is not None:
        files["stat"] = (
            f"cache 7\ninactive_file 1\ntotal_cache 9\ntotal_inactive_file {inactive}\ntotal_rss 5"
        )
    return files


def v2(
    limit: object, current: object, inactive: int | None = 0, high: object = "max"
) -> dict[str, object]:
    files = {"max": limit, "high": high, "current": current}
    if inactive is not None:
        files["stat"] = f"anon 4\nfile 5\ninactive_anon 6\ninactive_file {inactive}\nactive_file 3"
    return files


def test_usage_excludes_inactive_file(machine: Machine) -> None:
    machine.inside("5:cpu,cpuacct:/x", "4:memory:/foo", "1:name=systemd:/foo", "0::/b")
    machine.files("memory/foo", **v1(500 * MB, 300 * MB, 120 * MB)).files(
        "memory", **v1(700 * MB, 0)
    )
    machine.files("unified/b", **v2(600 * MB, 300 * MB, 400 * MB, high=200 * MB))
    expected = [
        Limit("cgroup v1 /foo memory.limit_in_bytes", 500 * MB, 180 * MB),
        Limit("cgroup v1 / memory.limit_in_bytes", 700 * MB, 0),
        Limit("cgroup v2 /b memory.max", 600 * MB, 0),
        Limit("cgroup v2 /b memory.high", 200 * MB, 0),
    ]
    assert machine.limits() == {limit.name: limit for limit in expected}
    assert tightest(machine.limits().values()).headroom == 200 * MB
    assert Limit("exceeded", 100, 140).headroom == 0
    assert machine.notes == []


def test_a_parent_may_hold_the_tightest_limit(machine: Machine) -> None:
    for version in [1, 2]:
        machine.inside("4:memory:/pod/box/job" if version == 1 else "0::/pod/box/job")
        top, files = ("memory/", v1) if version == 1 else ("", v2)
        machine.files(f"{top}pod/box/job", **files(800 * MB, 100 * MB))
        machine.files(f"{top}pod/box", **files("max" if version == 2 else 2**63 - 4096, 100 * MB))
        machine.files(f"{top}pod", **files(900 * MB, 850 * MB))  # siblings use most of it
        limits = machine.limits()
        assert len(limits) == 2
        assert tightest(limits.values()).name.startswith(f"cgroup v{version} /pod memory.")
        assert tightest(limits.values()).headroom == 50 * MB
        assert machine.notes == []


def test_no_limit_is_no_limit_and_not_worth_a_note(machine: Machine) -> None:
    for none in ["max", "", 2**60, 2**64 - 1]:
        machine.inside("4:memory:/foo", "0::/foo")
        machine.files("memory/foo", **v1(none, 5)).files("unified/foo", **v2(none, 5, high=none))
        assert machine.limits() == {}
        assert machine.notes == []


GARBAGE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"max": "12 MB"}, {"memory.high": (90, 37)}, "memory.max"),
    ({"max": "-1"}, {"memory.high": (90, 37)}, "memory.max"),
    ({"max": "9" * 5000}, {"memory.high": (90, 37)}, "memory.max"),
    ({"max": b"\xff\xfe"}, {"memory.high": (90, 37)}, "memory.max"),
    ({"max": None}, {"memory.high": (90, 37)}, "memory.max"),
    ({"current": "garbage", "high": "max"}, {}, "memory.current"),
    ({"current": None, "high": "max"}, {}, "memory.current"),
    ({"stat": None, "high": "max"}, {"memory.max": (100, 40)}, "page cache"),
    ({"stat": "inactive_file garbage", "high": "max"}, {"memory.max": (100, 40)}, "page cache"),
    ({"stat": "anon 5", "high": "max"}, {"memory.max": (100, 40)}, "page cache"),
]


def test_garbage_is_ignored_with_a_note(tmp_path: Path) -> None:
    for number, (files, limits, noted) in enumerate(GARBAGE):
        machine = Machine(tmp_path / str(number)).inside("0::/foo")
        machine.files("foo", max=100, high=90, current=40, stat="inactive_file 3")
        for name, content in files.items():
            path = machine.sys_fs / "foo" / f"memory.{name}"
            path.unlink()
            if isinstance(content, bytes):
                path.write_bytes(content)
            elif content is not None:
                path.write_text(content)
            else:
                path.mkdir()  # reading a folder fails for root, too
        found = machine.limits().items()
        assert {name.split()[-1]: (limit.total, limit.used) for name, limit in found} == limits
        assert noted in machine.notes[-1]


def test_malformed_lines_are_noted_and_the_rest_is_read(machine: Machine) -> None:
    machine.inside("garbage", "", "4:memory:/a:b").files("memory/a:b", **v1(500, 100))
    assert [limit.headroom for limit in machine.limits().values()] == [400]
    assert any("'garbage'" in note for note in machine.notes)
    machine.inside("4:memory:/away", "0::/foo").files("unified", **v2(500, 100))
    (machine.sys_fs / "memory").rename(machine.sys_fs / "gone")
    assert [limit.headroom for limit in machine.limits().values()] == [400]
    assert any("/away" in note for note in machine.notes)


def test_a_mount_that_shows_only_a_part(machine: Machine) -> None:
    """As in a container without a cgroup namespace: the mount's root is the container's cgroup."""
    machine.inside("4:memory:/docker/abc/job")
    machine.files("memory", **v1(500, 1)).files("memory/job", **v1(700, 1))
    assert set(machine.limits()) == {
        "cgroup v1 / memory.limit_in_bytes",
        "cgroup v1 /job memory.limit_in_bytes",
    }
    assert machine.notes == []


def test_invisible_path_falls_back_to_the_mount_root(machine: Machine) -> None:
    machine.files("", **v2(500, 100)).files("../sibling", **v2(3, 1)).files("foo", **v2(2, 1))
    for path in ("/not/visible/here", "/../sibling"):
        (limit,) = machine.inside(f"0::{path}").limits().values()
        assert limit == Limit("cgroup v2 / memory.max", 500, 100)
        (note,) = machine.notes
        assert path in note


@pytest.mark.parametrize("layout", ["memory", "."])
def test_without_proc_the_root_of_the_usual_place_is_read(machine: Machine, layout: str) -> None:
    machine.files(layout, **(v1(500, 100) if layout == "memory" else v2(500, 100)))
    assert [limit.headroom for limit in machine.limits().values()] == [400]
    assert any("proc/self/cgroup" in note.replace(os.sep, "/") for note in machine.notes)


def test_cpu_quota_is_the_tightest_up_to_the_root(machine: Machine) -> None:
    def write(path: str, text: str) -> None:
        (machine.sys_fs / path).parent.mkdir(parents=True, exist_ok=True)
        (machine.sys_fs / path).write_text(f"{text}\n")

    def quota() -> Cores | None:
        return cpu_quota.__wrapped__(machine.proc, machine.sys_fs)

    machine.inside("4:cpu,cpuacct:/a/b", "0::/pod/c")
    for folder in ("cpu/a/b", "unified/pod/c"):
        (machine.sys_fs / folder).mkdir(parents=True)
    assert quota() is None
    write("unified/pod/c/cpu.max", "max 100000")
    write("cpu/a/b/cpu.cfs_quota_us", "-1")
    write("cpu/a/b/cpu.cfs_period_us", "100000")
    assert quota() is None
    write("unified/pod/cpu.max", "350000 100000")  # a parent's
    assert quota() == (4, "cgroup v2 /pod cpu.max")
    write("cpu/a/cpu.cfs_quota_us", "110000")
    write("cpu/a/cpu.cfs_period_us", "100000")
    assert quota() == (2, "cgroup v1 /a cpu.cfs_quota_us")
    write("unified/pod/c/cpu.max", "rubbish")
    assert quota() == (2, "cgroup v1 /a cpu.cfs_quota_us")


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux",
    reason="elsewhere RLIMIT_AS and RLIMIT_DATA mean other things, or nothing",
)
@pytest.mark.parametrize(("name", "field"), [("RLIMIT_AS", "vms"), ("RLIMIT_DATA", "data")])
def test_rlimit(name: str, field: str) -> None:
    script = f"""
import psutil, resource
from headrace.memory.limits import Cores, Limit, cgroup_limits, cpu_quota, memory_limits, tightest
assert not any(limit.name == "{name}" for limit in memory_limits())
total = psutil.Process().memory_info().{field} + 64 * 10**6
resource.setrlimit(resource.{name}, (total, resource.RLIM_INFINITY))
(limit,) = [limit for limit in memory_limits() if limit.name == "{name}"]
assert limit.total == total
assert 0 < limit.headroom <= 64 * 10**6, limit
print(tightest(memory_limits()).name)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == name
