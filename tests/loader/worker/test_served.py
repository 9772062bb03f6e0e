"""The fork server of a process that is killed removes its socket."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

SCRIPT = """
import os, signal
from headrace.loader.worker.start import choose_context

def nothing(): ...

if __name__ == "__main__":
    process = choose_context("forkserver", [], [])[0].Process(target=nothing)
    process.start()
    process.join()
    print(os.listdir(os.environ["TMPDIR"]), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_nothing_is_left_of_a_fork_server(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with tempfile.TemporaryDirectory() as folder:  # tmp_path may be longer than the path of a socket may be
        environment = {**os.environ, "TMPDIR": folder, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, env=environment, timeout=100)
        assert "pymp-" in done.stdout, done.stderr
        deadline = time.monotonic() + 30
        while os.listdir(folder) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert os.listdir(folder) == []
