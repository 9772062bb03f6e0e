"""The cache folder, with and without a home."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import ConfigError, HeadraceWarning
from headrace.io import paths
from headrace.io.paths import cache_folder

STRANGER = """
import gzip, os, sys, warnings
from headrace import TextDataset
with gzip.open("l.txt.gz", "wb") as file:
    file.write(b"one\\ntwo\\n")
first = TextDataset("l.txt.gz", unit="line", cache_dir="first")
assert len(first[0]["input_ids"]) == 3  # all is imported
os.setgroups([])
os.setgid(54321)
os.setuid(54321)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    assert [len(TextDataset("l.txt.gz", unit="line")[1]["input_ids"]) for _ in range(2)] == [3, 3]
print(len(said), said[0].message)
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that all users may write to."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="becomes another user")
def test_a_user_without_home_and_passwd_entry(open_folder: Path) -> None:
    environment = {
        **os.environ,
        "TMPDIR": str(open_folder),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    for name in ("HOME", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    job = subprocess.run(
        [sys.executable, "-c", STRANGER],
        cwd=open_folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert job.returncode == 0, job.stderr
    folder = open_folder / "headrace-54321"
    assert job.stdout.startswith("1 ") and str(folder) in job.stdout
    names = {path.name for path in open_folder.iterdir()}
    assert names == {"first", "headrace-54321", "l.txt.gz"}
    assert folder.stat().st_mode & 0o777 == 0o700 and any(folder.iterdir())


@pytest.mark.parametrize("home", ["/", "a/relative/one", "/etc/passwd/none"])
def test_a_home_that_is_none(tmp_path: Path, home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    paths._private_folder.cache_clear()
    try:
        with pytest.warns(HeadraceWarning, match="no home folder that can be written to"):
            assert cache_folder(None) == tmp_path / f"headrace-{os.geteuid()}"
        assert cache_folder(None).parent == tmp_path  # said once
    finally:
        paths._private_folder.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_folder(None) == tmp_path / "x" / "headrace"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder(None) == tmp_path / ".cache" / "headrace"


def test_a_home_of_nobody_in_cache_dir() -> None:
    with pytest.raises(ConfigError, match="no known home folder"):
        cache_folder("~nobody-at-all/cache")
