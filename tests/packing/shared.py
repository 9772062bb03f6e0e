"""What tests of packs of several parts share: their contents, and jobs that are killed. (Kills
at length: kill_rounds.py.)
"""

from __future__ import annotations

import hashlib
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path


def contents(folder: Path) -> dict[str, str]:
    """A checksum of each file, by its path below the folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def kill_four_times(
    script: str, arguments: list[object], out: Path, choose: random.Random, *, removes: bool = False
) -> None:
    """Starts a job and kills it soon after it has begun to write, four times; then it runs to its
    end.

    Args:
        script: Python code that packs.
        arguments: its ``sys.argv[1:]``.
        out: where it packs to.
        choose: the moments.
        removes: True: what is there is removed after some of the kills.
    """
    command = [sys.executable, "-c", script, *map(str, arguments)]
    for _ in range(4):
        job = subprocess.Popen(command)
        end = time.monotonic() + 60
        while not out.exists() and job.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(choose.uniform(0, 0.4))
        job.kill()
        job.wait()
        if removes and choose.random() < 0.5 and out.exists():
            shutil.rmtree(out)
    subprocess.run(command, check=True)
