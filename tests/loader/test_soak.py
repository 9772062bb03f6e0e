"""A short soak finds nothing wrong. (A long one: see soak.py.)"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parent / "soak.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_short_soak_finds_nothing() -> None:
    command = [sys.executable, str(SOAK), "--minutes", "0.3", "--seed", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=380)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["status"] == "ok" and said["seed"] == 1
    whatever_was_done = (
        "batches",
        "batches kept",
        "batches written",
        "early breaks",
        "iterators at once",
        "exceptions",
        "resumes",
    )
    assert all(said[name] > 0 for name in whatever_was_done), said
    assert said["SIGKILLs"] + said["exits"] > 0
    assert said["looks"] >= 6 and set(said["growth"]) >= {
        "memory",
        "fds",
        "threads",
        "children",
        "shm",
        "maps",
    }
