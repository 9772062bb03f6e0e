"""What `headrace info` prints."""

from __future__ import annotations

import io
import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr

from headrace.cli.info import _Page
from headrace.cli.main import main
from headrace.cli.output import Output
from headrace.inspecting import inspect


@pytest.fixture
def badly_laid_out(tmp_path: Path) -> str:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        layout = {"chunks": (4000, 64, 64), "compression": "gzip"}
        file.create_dataset("deep/images", (20_000, 64, 64), "u1", **layout)
        file["deep/labels"] = np.arange(20_000) % 30
        file["names\x1b[2J"] = np.arange(3)
    return str(tmp_path / "a.h5")


def test_a_page_says_what_there_is(badly_laid_out: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", badly_laid_out]) == 0
    shown = capsys.readouterr().out
    for wanted in (
        f"{badly_laid_out}: HDF5, ",
        "20,000 (rows of 'deep/images', uint8 [64, 64])",
        "│   ├── images",
        "chunked [4000, 64, 64]  deflate 4  nothing written",
        "pread + inflate",
        "1 chunk decoded, 16.4 MB for 4.1 kB (4,000 times as much)",
        f"headrace pack {badly_laid_out} a-packed.h5 --dataset-name deep/images",
        'create_dataloader(dataset, shuffle="block")',
    ):
        assert wanted in shown, wanted
    assert "\x1b" not in shown and "names\\x1b[2J" in shown


def test_json_holds_all_of_it(badly_laid_out: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json", badly_laid_out, "--dataset-name", "deep/labels"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["samples"] == 20_000 and len(told["nodes"]) == 5
    assert told["samples_are"] == "rows of 'deep/labels', int64 []"
    assert {"format", "access", "advice", "classes", "fingerprint", "opens_as"} <= told.keys()


def test_it_fits_forty_columns(
    photos: Path, tmp_path: Path, badly_laid_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)
    zarr.create_array("zarr", shape=(100, 90, 80), chunks=(32, 32, 32), dtype="u2")
    Path("photos").symlink_to(photos)
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    for path in ("photos", "a.h5", "zarr"):
        lines = list(_Page(inspect(path), Output(stream=terminal), False).lines())
        # a long word stays as it is
        for line in lines:
            if len(line) > 40 and " " in line[14:]:
                commands = ("  headrace pack ", "  create_dataloader(", "  ZarrDataset(")
                assert line.startswith(commands), line


def test_nothing_to_tell_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(tmp_path)]) == 1 and "empty folder" in capsys.readouterr().out
    (tmp_path / "a.h5").write_bytes(b"")
    assert main(["info", "-q", str(tmp_path / "a.h5")]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("headrace info: error: ")
    for value in ("0", "-1", "soon", "nan"):
        with pytest.raises(SystemExit) as caught:
            main(["info", "x", f"--timeout={value}"])
        assert caught.value.code == 2 and value in capsys.readouterr().err


def test_classes_and_arrays_are_cut_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number in range(70):
            file[f"a{number:02}"] = np.zeros(2)
        file["data"] = np.zeros((30, 2))
        file["labels"] = np.arange(30)
    assert main(["info", str(tmp_path / "a.h5")]) == 0
    shown = capsys.readouterr().out
    assert "and 13 more: --all" in shown and "and 18 more with 18 samples: --all" in shown
    assert main(["info", "--all", str(tmp_path / "a.h5")]) == 0
    assert "more" not in capsys.readouterr().out.replace("there are", "")
