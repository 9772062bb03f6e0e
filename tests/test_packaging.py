"""What a wheel and an sdist hold."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("folder", ["src", "tests", "tools", "examples", "benchmarks", "docs"])
def test_the_sdist_holds_what_tests_import_and_read(folder: str) -> None:
    assert (ROOT / folder).is_dir() and f"/{folder}" in PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]


def test_a_wheel_brings_the_command() -> None:
    assert PROJECT["project"]["scripts"] == {"headrace": "headrace.cli.main:main"}


def test_no_extra_brings_what_nothing_uses() -> None:
    assert "docs" not in set(PROJECT["project"]["optional-dependencies"])
