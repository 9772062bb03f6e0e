"""A job that streams shards and loses a node sees every sample once
(examples/stream_multinode.py).
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent.parent / "examples" / "stream_multinode.py"


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_streaming_job_that_loses_a_node_is_exactly_once(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--demo", "--images", "400", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    said = (
        done.stdout
        + done.stderr
        + "".join(log.read_text() for log in (tmp_path / "demo").glob("*.log"))
    )
    assert done.returncode == 0, said
    assert "life 1: 4 ranks" in done.stdout and re.search(
        r"node 1: SIGKILL to its \d+ processes", done.stdout
    ), said
    assert re.search(r"node 0: ended by itself with status [1-9]", done.stdout), said
    begin = re.search(r"life 2: 2 ranks, \d+ steps, from epoch 0 step (\d+)", done.stdout)
    assert begin and int(begin[1]) > 0, said  # it went on, and did not begin anew
    assert "all epochs: missing 0, duplicated 0" in done.stdout
    sent = re.search(r"the server sent ([\d.]+) MB .* for 2 epochs of ([\d.]+) MB", done.stdout)
    assert sent and float(sent[1]) >= float(sent[2]) > 0  # through the server, and not around it


def test_without_shards_it_says_what_it_wants() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 2 and "name the shards, or take --demo" in done.stderr
