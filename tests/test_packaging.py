"""What a wheel and an sdist hold."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("folder", ["src", "tests", "tools", "examples", "benchmarks", "docs"])
def test_the_sdist_holds_what_tests_import_and_read(folder: str) -> None:
    assert (ROOT / folder).is_dir() and f"/{folder}" in PROJECT["tool"]["hatch"]["build"][
        "targets"
    ]["sdist"]["include"]


def test_a_wheel_brings_the_command() -> None:
    assert PROJECT["project"]["scripts"] == {"headrace": "headrace.cli.main:main"}


def test_the_sdist_builds_the_site() -> None:
    assert (ROOT / "mkdocs.yml").is_file() and "/mkdocs.yml" in PROJECT["tool"]["hatch"]["build"][
        "targets"
    ]["sdist"]["include"]
    pinned = {
        line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    names = {
        re.split(r"[\[>=]", one)[0] for one in PROJECT["project"]["optional-dependencies"]["docs"]
    }
    assert "mkdocs-material" in names and names <= pinned
