"""A real quota of CPU time, by a cgroup of the test's own, is what a job counts its cores by."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

V1, V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
JOB = """
import os, sys
with open(sys.argv[1], "w") as file:
    print(os.getpid(), file=file)
from headrace import create_dataloader
from headrace.memory.limits import cores
print(cores().number)
print(create_dataloader(list(range(99))).config.num_workers)
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A cgroup with a quota of one core."""
    is_v2 = (V2 / "cgroup.controllers").is_file()
    folder = (V2 if is_v2 else V1) / f"headrace-test-{os.getpid()}"
    if not folder.parent.is_dir():
        pytest.skip("there are no cgroups here")
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("no cgroup can be made here")
    try:
        try:
            if is_v2:
                (folder / "cpu.max").write_text("100000 100000")
            else:
                (folder / "cpu.cfs_period_us").write_text("100000")
                (folder / "cpu.cfs_quota_us").write_text("100000")
        except OSError:
            pytest.skip("no quota of CPU time can be set here")
        yield folder
    finally:
        folder.rmdir()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="cgroups are Linux's")
def test_a_job_in_a_cgroup_has_the_cores_of_its_quota(group: Path) -> None:
    command = [sys.executable, "-c", JOB, str(group / "cgroup.procs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    cores, workers = map(int, done.stdout.split())
    assert cores == 1 and workers <= 1
