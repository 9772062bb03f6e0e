"""What is advised, and what is not."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from headrace.cli.main import main
from headrace.inspecting import inspect
from headrace.inspecting.advice import packed_name


def test_names_of_packs() -> None:
    for path, name in {
        "a/train.h5": "train-packed.h5",
        "photos/": "photos-packed.h5",
        "s3://b/x.zarr.zip?v=1": "x-packed.h5",
        ".": "data-packed.h5",
    }.items():
        assert packed_name(path) == name


def test_well_laid_out_files_get_no_advice(tmp_path: Path) -> None:
    packed = {"chunks": (1, 256), "compression": "gzip"}
    for number, options in enumerate(({}, {"chunks": (64, 256)}, packed)):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file.create_dataset("data", (400_000, 256), "u1", **options)
        assert inspect(tmp_path / f"{number}.h5").advice == [], options


@pytest.mark.slow
def test_the_command_runs_as_it_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how: dict[str, Any] = {"chunks": (5000, 64, 64), "compression": "gzip", "compression_opts": 1}
    with h5py.File(tmp_path / "bad one.h5", "w") as file:
        data = file.create_dataset("deep/x", (30_000, 64, 64), "u1", **how)
        data[:5000] = np.random.default_rng(0).integers(0, 3, (5000, 64, 64), np.uint8)
        file["labels"] = np.arange(30_000) % 5
    advice = inspect(tmp_path / "bad one.h5").advice
    first, second = [one for one in advice if one.command]
    assert min(float(first.gain or 0), float(second.gain or 0)) > 2
    assert second.command == f"{first.command} --compression gzip --chunks 1"
    assert any("block" in one.code for one in advice)
    monkeypatch.chdir(tmp_path)
    assert main([*shlex.split(second.command)[1:], "-q"]) == 0
    packed = inspect("bad one-packed.h5")
    assert packed.samples == 30_000
    assert (packed.access[0].chunks, packed.access[0].decoded) == (1, 64 * 64)
