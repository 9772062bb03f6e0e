"""What a release says of itself agrees, is prepared for its repository, and works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import headrace

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"
REPOSITORY = "https://git.example/somebody/headrace"
pytestmark = pytest.mark.skipif(not GITHUB.is_dir(), reason="an sdist has no workflows")


def _project(folder: Path) -> Any:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that a release touches, as they are."""
    named = ("pyproject.toml", "CITATION.cff", "CHANGELOG.md", "README.md")
    for name in (*named, "src/headrace/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def release(scripts: Any) -> Any:
    return scripts("prepare_release")


def test_versions_agree() -> None:
    project = _project(ROOT)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert project["version"] == headrace.__version__ == citation["version"]
    assert project["license"] == citation["license"]
    assert project["authors"][0]["name"] == citation["authors"][0]["name"]


def test_ci_runs_the_pythons_of_the_classifiers() -> None:
    project = _project(ROOT)
    told = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    workflow = yaml.safe_load((GITHUB / "workflows/tests.yml").read_text(encoding="utf-8"))
    matrix = workflow["jobs"]["quick"]["strategy"]["matrix"]
    assert told == matrix["python"] and project["requires-python"] == f">={told[0]}"
    unsupported = {one["os"].partition("-")[0] for one in matrix["include"] if one["unsupported"]}
    assert unsupported == {"macos", "windows"}


def test_a_version_that_differs_is_named(release: Any, checkout: Path) -> None:
    found = release.mismatches("v9.9.9", checkout)
    wrong = ("CITATION.cff", "pyproject.toml", "src/headrace/__init__.py", "CHANGELOG.md")
    assert {line.partition(":")[0] for line in found} >= set(wrong)


def test_a_release_has_the_urls_of_its_repository(release: Any, checkout: Path) -> None:
    release.prepare("v1.2.3", REPOSITORY, checkout)
    project = _project(checkout)
    assert project["urls"]["Source"] == REPOSITORY and project["scripts"]
    readme = (checkout / "README.md").read_text(encoding="utf-8")
    links = re.findall(r'\]\(([^)#]+)|(?:src|srcset)="([^"]+)"', readme)
    assert len(links) > 20
    for pair in links:
        assert all(link.startswith(f"{REPOSITORY}/") for link in pair if link), pair
    assert f"]({REPOSITORY}/blob/v1.2.3/docs/start.md)" in readme
    assert f'src="{REPOSITORY}/raw/v1.2.3/docs/assets/' in readme
    release.prepare("v1.2.3", REPOSITORY, checkout)  # a second time changes nothing
    assert (checkout / "README.md").read_text(encoding="utf-8") == readme


@pytest.mark.slow
def test_the_smoke_script_passes(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, ROOT / "tools" / "smoke.py"]
    how: Any = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(command, timeout=110, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok    ") >= 10 and "FAILS" not in done.stdout
