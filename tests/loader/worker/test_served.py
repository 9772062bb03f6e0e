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


IMPORTED = """
import os
from pathlib import Path
from headrace.loader.worker.start import MAIN_SCRIPT, choose_context

with Path("imported.txt").open("a") as file:
    print(__name__, file=file)
if __name__ == "__mp_main__" and FAILS:
    raise ImportError("not twice")

def write_down(number):
    Path(f"worker{number}.txt").write_text(str(MAIN_SCRIPT in os.environ))

if __name__ == "__main__":
    for number in range(3):
        process = choose_context("forkserver", [], [])[0].Process(target=write_down, args=(number,))
        process.start()
        process.join()
        print(process.exitcode)
"""


def run_imported(folder: Path, fails: bool) -> tuple[list[str], list[str], str]:
    """The names under which the script was imported, the exit codes of its workers, and what
    went wrong.
    """
    (folder / "script.py").write_text(IMPORTED.replace("FAILS", str(fails)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment,
        timeout=100,
    )
    return (folder / "imported.txt").read_text().split(), done.stdout.split(), done.stderr


@pytest.mark.slow
def test_the_server_imports_the_main_script_once(tmp_path: Path) -> None:
    imported, codes, said = run_imported(tmp_path, fails=False)
    assert imported == ["__main__", "__mp_main__"] and codes == ["0"] * 3, said
    assert [(tmp_path / f"worker{number}.txt").read_text() for number in range(3)] == ["False"] * 3


@pytest.mark.slow
@pytest.mark.skipif(
    _PYTHON_SERVES_MAIN, reason="Python imports the script here, and its server ends with it"
)
def test_a_script_that_can_not_be_imported_fails_in_workers(tmp_path: Path) -> None:
    imported, codes, said = run_imported(tmp_path, fails=True)
    assert (
        imported == ["__main__"] + 4 * ["__mp_main__"]
        and codes == ["1"] * 3
        and said.count("ImportError: not twice") == 3
    ), said


@pytest.mark.slow
def test_nothing_is_left_of_a_fork_server(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    # tmp_path may be longer than the path of a socket may be
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "TMPDIR": folder,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        done = subprocess.run(
            [sys.executable, str(tmp_path / "script.py")],
            capture_output=True,
            text=True,
            env=environment,
            timeout=100,
        )
        assert "pymp-" in done.stdout, done.stderr
        deadline = time.monotonic() + 30
        while os.listdir(folder) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert os.listdir(folder) == []
