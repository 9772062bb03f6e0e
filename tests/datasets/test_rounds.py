"""Workers start on arrays by every start method, whatever the parent has read before, and never
hang.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "rounds.py"


def run(*arguments: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, PROGRAM, *arguments], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_fork() -> None:
    assert len(run("--methods", "fork", "--rounds", "2")) == 12


@pytest.mark.slow
def test_many_rounds_of_fork() -> None:
    assert len(run("--methods", "fork", "--rounds", "20")) == 12


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_other_start_methods(method: str) -> None:
    """A round of each; `python tests/datasets/rounds.py` runs fifty, which takes an hour."""
    assert len(run("--methods", method, "--rounds", "1")) == 12
