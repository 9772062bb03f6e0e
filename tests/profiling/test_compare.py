"""Loading modes side by side."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from headrace import open_dataset
from headrace.cli.main import main
from headrace.errors import ConfigError
from headrace.profiling.compare import ModeRate, _files_below, compare_modes
from tests.data.make import make_tar

compare = partial(compare_modes, seconds=0.2, batch_size=50, num_workers=0)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    array = zarr.create_array(tmp_path / "a.zarr", shape=(300, 16), chunks=(10, 16), dtype="u1")
    array[:] = np.ones((300, 16), "u1")
    return tmp_path / "a.zarr"


@pytest.mark.slow
def test_each_mode_is_timed(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a dataset that is opened once for each."""
    told: list[ModeRate] = []
    opened: list[str] = []

    def counting(path: Any, **options: Any) -> Any:
        opened.append(options.get("loading_mode", ""))
        return open_dataset(path, **options)

    monkeypatch.setattr("headrace.profiling.compare.open_dataset", counting)
    found = compare(rows, seconds=0.4, on_mode=told.append)
    modes = ["lazy", "cached", "eager", "streaming"]
    assert [rate.mode for rate in found.modes] == modes and told == found.modes
    assert opened == ["", *modes]
    for rate in found.modes:
        assert rate.samples_per_second and rate.first_batch_s and rate.samples >= 150
        assert rate.mb_per_second == pytest.approx(rate.samples_per_second * 16e-6)
    assert (found.samples, found.num_workers, found.sample_mb) == (300, 0, 16e-6)
    assert found.read_mb_per_second and found.fastest in found.modes


@pytest.mark.slow
def test_modes_that_can_not_be_timed_are_notes(rows: Path, tmp_path: Path) -> None:
    found = compare(rows, modes=["eager"], max_memory_usage="1kB")
    assert found.modes[0].samples_per_second is None and "eager" in found.modes[0].note
    assert found.fastest is None
    make_tar(tmp_path / "a.tar", [(f"{number:02}.cls", b"3") for number in range(20)])
    found = compare(tmp_path / "a.tar", batch_size=2, modes=["lazy", "streaming"])
    assert found.modes[0].note == "shards are streamed" and found.modes[1].samples_per_second


def test_what_can_not_be_timed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert str(tmp_path / "pipe") not in _files_below(str(tmp_path))
    zarr.create_array(tmp_path / "b.zarr", shape=(0, 4), dtype="u1")
    with pytest.raises(ConfigError, match="no samples"):
        compare(tmp_path / "b.zarr")


@pytest.mark.slow
def test_the_command_prints_a_line_a_mode(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    modes = ["--mode", "lazy", "--mode", "eager"]
    command = ["bench", str(rows), "--seconds", "0.2", "--workers", "0", "--batch-size", "20"]
    assert main([*command, *modes]) == 0
    shown = capsys.readouterr().out
    assert shown.count("samples/s") == 2 and "the files alone" in shown and "fastest: " in shown
    assert main([*command, *modes, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["modes"]
    assert [rate["mode"] for rate in told] == ["lazy", "eager"]
