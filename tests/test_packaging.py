"""What a wheel and an sdist hold."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_sdist_holds_what_tests_import_and_read() -> None:
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    for name in ("src", "tests", "tools", "examples", "benchmarks", "docs", "mkdocs.yml"):
        assert (ROOT / name).exists() and f"/{name}" in included


def test_a_wheel_brings_the_command() -> None:
    assert PROJECT["project"]["scripts"] == {"headrace": "headrace.cli.main:main"}


def test_what_builds_the_site_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    needed = PROJECT["project"]["optional-dependencies"]["docs"]
    names = {re.split(r"[\[>=]", one)[0] for one in needed}
    assert "mkdocs-material" in names <= {line.partition("==")[0] for line in lines}
