"""The fork server imports the main script once for all workers, and removes its socket when its
process was killed.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from headrace.loader.worker.start import _PYTHON_SERVES_MAIN

pytestmark = pytest.mark.slow

KILLED = """
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


IMPORTED = """
import os
from pathlib import Path
from headrace.loader.worker.start import MAIN_SCRIPT, choose_context

with Path("imported.txt").open("a") as file:
    print(__name__, file=file)
if __name__ == "__mp_main__" and FAILS:
    raise ImportError("not twice")

def write_down(number):
    opened = Path(f"/proc/{os.getppid()}/fd")  # of the server
    outputs = [path for path in opened.iterdir() if os.path.samefile(path, opened / "1")]
    Path(f"worker{number}.txt").write_text(f"{MAIN_SCRIPT in os.environ} {len(outputs)}")

if __name__ == "__main__":
    for number in range(3):
        process = choose_context("forkserver", [], [])[0].Process(target=write_down, args=(number,))
        process.start()
        process.join()
        print(process.exitcode)
"""


def run(folder: Path, text: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in a folder."""
    (folder / "script.py").write_text(text)
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **variables},
        timeout=100,
    )


def test_the_server_imports_the_main_script_once(tmp_path: Path) -> None:
    done = run(tmp_path, IMPORTED.replace("FAILS", "False"))
    assert done.stdout.split() == ["0"] * 3, done.stderr
    assert (tmp_path / "imported.txt").read_text().split() == ["__main__", "__mp_main__"]
    told = [(tmp_path / f"worker{number}.txt").read_text() for number in range(3)]
    assert told == ["False 1"] * 3


@pytest.mark.skipif(
    _PYTHON_SERVES_MAIN, reason="Python imports the script here, and its server ends with it"
)
def test_a_script_that_can_not_be_imported_fails_in_workers(tmp_path: Path) -> None:
    done = run(tmp_path, IMPORTED.replace("FAILS", "True"))
    assert done.stdout.split() == ["1"] * 3
    assert done.stderr.count("ImportError: not twice") == 3
    assert (tmp_path / "imported.txt").read_text().split() == ["__main__", *["__mp_main__"] * 4]


def test_nothing_is_left_of_a_fork_server(tmp_path: Path) -> None:
    # tmp_path may be longer than the path of a socket may be
    with tempfile.TemporaryDirectory() as folder:
        done = run(tmp_path, KILLED, TMPDIR=folder)
        assert "pymp-" in done.stdout, done.stderr
        deadline = time.monotonic() + 30
        while os.listdir(folder) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert os.listdir(folder) == []
