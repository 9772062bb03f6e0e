"""Loading modes side by side."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from headrace import open_dataset
from headrace.cli.main import main
from headrace.errors import ConfigError
from headrace.profiling.compare import ModeRate, compare_modes


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    zarr.create_array(tmp_path / "a.zarr", shape=(300, 16), chunks=(10, 16), dtype="u1")[:] = (
        np.ones((300, 16), "u1")
    )
    return tmp_path / "a.zarr"


@pytest.mark.slow
def test_each_mode_is_timed(rows: Path) -> None:
    told: list[ModeRate] = []
    found = compare_modes(rows, seconds=0.4, batch_size=50, num_workers=0, on_mode=told.append)
    assert [rate.mode for rate in found.modes] == [
        "lazy",
        "cached",
        "eager",
        "streaming",
    ] and told == found.modes
    for rate in found.modes:
        assert (
            rate.samples_per_second
            and rate.mb_per_second
            and rate.first_batch_s
            and rate.samples >= 150
        )
        assert rate.mb_per_second == pytest.approx(rate.samples_per_second * 16e-6)
    assert (
        (found.samples, found.num_workers, found.sample_mb) == (300, 0, 16e-6)
        and found.read_mb_per_second
        and found.limit
    )
    assert found.fastest in found.modes


@pytest.mark.slow
def test_a_path_is_opened_once_for_each_mode(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def counting(path: Any, **options: Any) -> Any:
        opened.append(options.get("loading_mode", ""))
        return open_dataset(path, **options)

    monkeypatch.setattr("headrace.profiling.compare.open_dataset", counting)
    compare_modes(rows, seconds=0.2, batch_size=50, num_workers=0, modes=["lazy", "cached"])
    assert opened == ["", "lazy", "cached"]


def test_a_mode_that_does_not_fit_is_a_note(rows: Path) -> None:
    found = compare_modes(
        rows, seconds=0.2, batch_size=50, num_workers=0, modes=["eager"], max_memory_usage="1kB"
    )
    (rate,) = found.modes
    assert rate.samples_per_second is None and "eager" in rate.note and found.fastest is None


def test_shards_have_one_mode(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in range(20):
            member = tarfile.TarInfo(f"{number:02}.cls")
            member.size = 1
            tar.addfile(member, io.BytesIO(b"3"))
    found = compare_modes(
        tmp_path / "a.tar", seconds=0.2, batch_size=2, num_workers=0, modes=["lazy", "streaming"]
    )
    assert found.modes[0].note == "shards are streamed" and found.modes[1].samples_per_second


def test_what_can_not_be_timed(rows: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="seconds must be above 0"):
        compare_modes(rows, seconds=0)
    zarr.create_array(tmp_path / "b.zarr", shape=(0, 4), dtype="u1")
    with pytest.raises(ConfigError, match="no samples to time"):
        compare_modes(tmp_path / "b.zarr", seconds=0.1, num_workers=0)


@pytest.mark.slow
def test_the_command_prints_a_line_a_mode(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "bench",
        str(rows),
        "--seconds",
        "0.2",
        "--workers",
        "0",
        "--mode",
        "lazy",
        "--mode",
        "eager",
        "--batch-size",
        "20",
    ]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert shown.count("samples/s") == 3 and "the files alone" in shown and "fastest: " in shown
    assert main([*arguments, "--json"]) == 0
    assert [rate["mode"] for rate in json.loads(capsys.readouterr().out)["modes"]] == [
        "lazy",
        "eager",
    ]
