"""The `headrace` command: its verbs, exit codes and messages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

import headrace
from headrace import ImageDataset
from headrace.cli import pack
from headrace.cli.main import main
from headrace.datasets.text.options import UNITS


def test_python_m_headrace_runs_the_command() -> None:
    command = [sys.executable, "-m", "headrace", "--version"]
    done = subprocess.run(command, cwd=Path(headrace.__file__).parents[1], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"headrace {headrace.__version__}\n", "")


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["pack", "--help"], ["verify", "--help"], ["index", "--help"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"\n    {verb} " in shown for verb in ("pack", "verify", "index")) and "headrace pack photos/train train.h5" in shown


@pytest.mark.parametrize("arguments", [[], ["pck"], ["verify"], ["pack", "in"], ["index", "x", "--fast"]])
def test_wrong_use_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2 and "usage: headrace" in capsys.readouterr().err


def test_pack_then_verify(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = tmp_path / "out.h5"
    assert main(["pack", str(photos), str(packed), "--no-progress"]) == 0
    assert "24 samples in 3 classes" in capsys.readouterr().out
    assert main(["verify", str(packed)]) == 0
    assert capsys.readouterr().out == f"{packed}: 24 samples, all sound\n"
    assert len(ImageDataset(packed)) == 24


def test_a_damaged_sample_is_exit_code_1(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = tmp_path / "out.h5"
    assert main(["pack", str(photos), str(packed), "--store", "decoded", "--size", "8"]) == 0
    with h5py.File(packed, "r+") as file:
        file["data"][3] ^= 1
    capsys.readouterr()
    assert main(["verify", str(packed)]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{packed}: 24 samples, 1 damaged" and second.startswith("  sample 3, ")


def test_wrong_data_and_wrong_use_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with h5py.File(tmp_path / "plain.h5", "w") as file:
        file["data"] = np.zeros(3)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jpg").write_bytes(b"")
    expected = {
        ("verify", str(tmp_path / "plain.h5")): 1,
        ("pack", str(tmp_path / "in"), str(tmp_path / "out.h5")): 1,
        ("verify", str(tmp_path / "none.h5")): 2,
        ("pack", str(tmp_path / "plain.h5"), str(tmp_path / "none" / "out.h5")): 2,
        ("index", str(tmp_path / "none")): 2,
    }
    for arguments, code in expected.items():
        assert main(list(arguments)) == code, arguments
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "warning:" not in line]
        assert line.startswith(f"headrace {arguments[0]}: error: ")


def test_index_prints_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "the mill"}\n')
    assert main(["index", str(tmp_path / "a.jsonl")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'a.jsonl.index'}\n"


def test_an_interrupt_is_exit_code_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(pack, "run", interrupt)
    assert main(["pack", "in", "out.h5"]) == 130
    assert capsys.readouterr().err == "headrace pack: interrupted\n"


def test_units_are_those_of_text_dataset() -> None:
    assert pack.UNITS == UNITS
