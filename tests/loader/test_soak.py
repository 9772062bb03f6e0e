"""A short soak finds nothing wrong. (A long one: see soak.py.)"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parent / "soak.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_short_soak_finds_nothing() -> None:
    command = [sys.executable, str(SOAK), "--minutes", "0.3", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["status"] == "ok" and summary["looks"] >= 6
    for name in ("batches kept", "batches written", "early", "twins", "exceptions", "resumed"):
        assert summary[name] > 0, summary
    assert summary["growth"]["memory"][0] > 0
