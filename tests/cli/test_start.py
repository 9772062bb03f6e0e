"""How the `headrace` command begins: without what it does not need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import headrace
from headrace.cli.main import VERBS

SOURCE = Path(headrace.__file__)
HEAVY = {
    *("torch", "h5py", "zarr", "numpy", "PIL", "fsspec", "tqdm", "aiohttp", "numcodecs"),
    *("dataclasses", "concurrent", "difflib"),
}
LATER = {
    *("zarr", "fsspec", "aiohttp", "numcodecs", "s3fs", "botocore", "pyarrow", "pandas"),
    *("h5py", "pycocotools", "hdf5plugin", "matplotlib", "distributed", "PIL", "simplejpeg"),
    "zstandard",
}
"""What only some data, stores or commands need."""


def imported(program: str, *arguments: str) -> list[set[str]]:
    """The packages that a program has imported, at each line that it prints with names."""
    command = [sys.executable, "-c", f"import sys\n{program}", *arguments]
    environment = {name: value for name, value in os.environ.items() if "COV" not in name}
    done = subprocess.run(
        command, cwd=SOURCE.parents[1], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-500:]
    return [
        {name.partition(".")[0] for name in line.split()[1:]}
        for line in done.stdout.splitlines()
        if line.startswith("imported: ")
    ]


HELP = """
import argparse
argparse.ArgumentParser().format_help()
print("imported:", *sys.modules)
from headrace.cli.main import main
for arguments in (["--help"], *([verb, "--help"] for verb in sys.argv[1:])):
    try:
        main(arguments)
    except SystemExit:
        print("\\nimported:", *sys.modules)
"""


def test_help_imports_nothing_heavy() -> None:
    # Python 3.14's argparse imports dataclasses, for its colours
    pythons, *of_verbs = imported(HELP, *VERBS)
    assert len(of_verbs) == len(VERBS) + 1
    for verb, names in zip(("headrace", *VERBS), of_verbs, strict=True):
        assert not (names & HEAVY) - pythons, verb


def test_images_import_no_other_formats_and_stores() -> None:
    (first, then) = imported(
        "import headrace; print('imported:', *sys.modules)\n"
        "from headrace import ImageDataset, create_dataloader; print('imported:', *sys.modules)"
    )
    assert "headrace" in first and not first & HEAVY
    assert {"torch", "numpy"} <= then and not then & LATER


def test_each_public_name_can_be_imported() -> None:
    for name in headrace.__all__:
        assert getattr(headrace, name) is not None, name
    assert set(headrace.__all__) <= set(dir(headrace))
