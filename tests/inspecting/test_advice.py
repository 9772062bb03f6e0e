"""What is advised, and what is not."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from headrace.cli.main import main
from headrace.inspecting import Access, inspect
from headrace.inspecting.advice import packed_name
from headrace.inspecting.costs import gain_of_packing, rounded_down


def access(**changed: Any) -> Access:
    given: dict[str, Any] = {
        "nbytes": 4096,
        "chunks": 1,
        "decoded": 4_096_000,
        "read": 2_000_000,
        "total": 10**9,
        "chunk_count": 244,
    }
    return Access("data", "a row", "pread + inflate", **{**given, **changed})


def test_gains_grow_with_what_is_decoded() -> None:
    gains = [gain_of_packing(access(decoded=decoded)) for decoded in (40_960, 409_600, 4_096_000)]
    assert gains == sorted(gains) and gains[0] >= 1.0 and gains[2] > 20
    assert gain_of_packing(access(), compressed=True) < gain_of_packing(access())
    assert gain_of_packing(access(chunks=0, decoded=0, read=4096)) == 1.0


def test_what_stays_in_the_cache_gains_nothing() -> None:
    assert gain_of_packing(access(total=50 << 20, chunk_count=12)) == 1.0
    assert gain_of_packing(access(by_library=True)) >= gain_of_packing(access())


def test_a_batch_shares_the_few_chunks_there_are() -> None:
    assert gain_of_packing(access(chunk_count=2, decoded=500_000_000)) < gain_of_packing(
        access(chunk_count=1000, decoded=500_000_000)
    )


@pytest.mark.parametrize(
    ("gain", "shown"), [(2.74, 2.5), (9.99, 9.5), (10.1, 10.0), (47.0, 40.0), (512.0, 500.0)]
)
def test_gains_are_rounded_down(gain: float, shown: float) -> None:
    assert rounded_down(gain) == shown


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("a/train.h5", "train-packed.h5"),
        ("photos/", "photos-packed.h5"),
        ("s3://b/x.zarr.zip?v=1", "x-packed.h5"),
        (".", "data-packed.h5"),
    ],
)
def test_names_of_packs(path: str, name: str) -> None:
    assert packed_name(path) == name


def test_well_laid_out_files_get_no_advice(tmp_path: Path) -> None:
    for number, options in enumerate(
        (
            {},
            {"chunks": (1, 256)},
            {"chunks": (64, 256)},
            {"chunks": (1, 256), "compression": "gzip"},
        )
    ):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file.create_dataset("data", (400_000, 256), "u1", **options)
        assert inspect(tmp_path / f"{number}.h5").advice == [], options


@pytest.mark.slow
def test_the_command_runs_as_it_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with h5py.File(tmp_path / "bad one.h5", "w") as file:
        data = file.create_dataset(
            "deep/x",
            (30_000, 64, 64),
            "u1",
            chunks=(5000, 64, 64),
            compression="gzip",
            compression_opts=1,
        )
        data[:5000] = np.random.default_rng(0).integers(0, 3, (5000, 64, 64), np.uint8)
        file["labels"] = np.arange(30_000) % 5
    report = inspect(tmp_path / "bad one.h5")
    commands = [advice.command for advice in report.advice if advice.command]
    assert len(commands) == 2 and all(
        advice.gain and advice.gain > 2 for advice in report.advice if advice.command
    )
    assert commands[1] == f"{commands[0]} --compression gzip --chunks 1" and any(
        "block" in advice.code for advice in report.advice
    )
    monkeypatch.chdir(tmp_path)
    assert main([*shlex.split(commands[1])[1:], "-q"]) == 0
    packed = inspect("bad one-packed.h5")
    assert (
        packed.samples == 30_000
        and packed.access[0].chunks == 1
        and packed.access[0].decoded == 64 * 64
    )
