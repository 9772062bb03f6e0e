"""How the `headrace` command begins: without what it does not need."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import headrace
from headrace.cli.main import VERBS

SOURCE = Path(headrace.__file__)
HEAVY = {
    "torch",
    "h5py",
    "zarr",
    "numpy",
    "PIL",
    "fsspec",
    "tqdm",
    "aiohttp",
    "numcodecs",
    "dataclasses",
    "concurrent",
    "difflib",
}
LATER = {
    "zarr",
    "fsspec",
    "aiohttp",
    "numcodecs",
    "s3fs",
    "botocore",
    "pyarrow",
    "pandas",
    "pycocotools",
    "hdf5plugin",
    "matplotlib",
    "distributed",
}
"""What only some data, stores or commands need."""


def imported(*arguments: str) -> set[str]:
    """The packages that a Python process imports."""
    command = [sys.executable, "-X", "importtime", *arguments]
    done = subprocess.run(
        command, cwd=SOURCE.parents[1], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-500:]
    return {
        line.rpartition("|")[2].strip().partition(".")[0]
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }


@pytest.mark.parametrize(
    "arguments",
    [[], *([verb] for verb in VERBS)],
    ids=lambda given: given[0] if given else "headrace",
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    names = imported("-m", "headrace", *arguments, "--help")
    pythons = (
        imported("-c", "import argparse; argparse.ArgumentParser().format_help()")
        if names & HEAVY
        else set()
    )
    # Python 3.14's argparse imports dataclasses, for its colours
    assert "headrace" in names and not (names & HEAVY) - pythons


def test_the_package_is_imported_by_name() -> None:
    assert not imported("-c", "import headrace") & HEAVY


def test_images_import_no_other_formats_and_stores() -> None:
    names = imported("-c", "from headrace import ImageDataset, create_dataloader")
    assert {"torch", "PIL"} <= names and not names & LATER


def test_lazy_names_are_those_of_the_checkers() -> None:
    tree = ast.parse(SOURCE.read_text())
    (block,) = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    told = {
        (alias.asname or alias.name): (node.module, alias.name)
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    lazy = {
        name: f"headrace.{module}" for module, names in headrace._MODULES.items() for name in names
    }
    assert lazy == {name: module for name, (module, _) in told.items()}
    for name, (module, real) in told.items():
        assert getattr(headrace, name) is getattr(importlib.import_module(module), real), name
    errors = {name for name in headrace.__all__ if name not in lazy}
    assert errors == {name for name in dir(headrace.errors) if name in headrace.__all__} and set(
        headrace.__all__
    ) <= set(dir(headrace))


def test_completion_names_verbs_and_options() -> None:
    pytest.importorskip("argcomplete")
    read, write = os.pipe()
    for line, wanted in (("headrace ve", "verify"), ("headrace pack --shard", "--shard-size")):
        read, write = os.pipe()
        given = {
            **os.environ,
            "_ARGCOMPLETE": "1",
            "_ARGCOMPLETE_IFS": "\n",
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
        }
        with os.fdopen(read) as answers:
            command = [
                "bash",
                "-c",
                f"exec 8>&{write} 9>/dev/null; exec {sys.executable} -m headrace",
            ]
            subprocess.run(
                command, env=given, pass_fds=[write], cwd=SOURCE.parents[1], timeout=100, check=True
            )
            os.close(write)
            assert wanted in answers.read().split()
