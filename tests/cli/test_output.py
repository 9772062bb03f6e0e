"""What verbs print, and where: terminals, files, pipes, JSON."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.cli.main import VERBS, main, run_verb
from headrace.cli.output import Output, shortened, visible
from headrace.errors import DataNotFoundError, FormatError, MissingNameError

ROOT = Path(headrace.__file__).parents[1]


def test_help_has_examples_and_fits_forty_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    for verb in VERBS:
        with pytest.raises(SystemExit) as caught:
            main([verb, "--help"])
        shown = capsys.readouterr().out
        assert caught.value.code == 0 and shown.count(f"\n  headrace {verb} ") >= 2
        assert "--json" in shown and "-q, --quiet" in shown
        # options that have many choices are long in a usage
        told = shown.partition("\n\n")[2].partition("examples:")[0]
        assert max(map(len, told.splitlines())) <= 40, verb
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(f"\n    {verb} " in shown for verb in VERBS)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has it")
def test_a_full_disk_is_one_line() -> None:
    for options in ([], ["--json"]):
        command = [sys.executable, "-m", "headrace", "env", "--no-gpu", *options]
        with open("/dev/full", "w") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 2 and "No space left" in done.stderr, options
        assert "Traceback" not in done.stderr


def test_json_is_one_document(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed, parts = str(tmp_path / "out.h5"), str(tmp_path / "out")
    commands = [
        (["pack", str(photos), packed], {"path": packed, "samples": 24, "classes": 3}),
        (["verify", packed], {"ok": True}),
        (["pack", str(photos), parts, "--shard-size", "16kB"], {"joined": True, "missing": []}),
        (["status", parts], {"parts": 4, "done": [0, 1, 2, 3]}),
        (["join", parts], {"manifest": f"{parts}/manifest.json"}),
    ]
    for arguments, wanted in commands:
        assert main([*arguments, "--json"]) == 0
        assert wanted.items() <= json.loads(capsys.readouterr().out).items(), arguments
    assert main(["verify", str(tmp_path / "none.h5"), "--json"]) == 2
    out, err = capsys.readouterr()
    told = json.loads(out)["error"]
    assert (told["type"], told["exit_code"]) == ("DataNotFoundError", 2) and "error: " in err


def test_quiet_prints_errors_only(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = str(tmp_path / "out.h5")
    assert main(["pack", "-q", str(photos), packed]) == 0 and main(["verify", "-q", packed]) == 0
    assert capsys.readouterr() == ("", "")
    assert main(["verify", "-q", str(tmp_path / "none.h5")]) == 2
    assert "error: " in capsys.readouterr().err


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m headrace pack --help | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.stdout.splitlines()[-1] == "0" and done.stderr == ""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream:
        output = Output(stream=stream)
        output.show_lines(["x" * 100_000])
        output.show_lines(["dropped"])


def test_other_encodings_lose_nothing() -> None:
    for encoding in ("ascii", "latin-1", "utf-8"):
        raw = io.BytesIO()
        stream = io.TextIOWrapper(raw, encoding)
        Output(stream=stream).show_lines(["├── caf\xe9 \u4e2d \udcff"])
        shown = raw.getvalue().decode(encoding)
        assert (
            "├── ".encode(encoding, "backslashreplace").decode(encoding) in shown
            and "\\udcff" in shown
        )
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, "ascii")
    output = Output(as_json=True, stream=stream)
    output.show_json({"caf\xe9": np.float32(np.nan), "n": np.int64(3), "p": Path("a")})
    assert json.loads(raw.getvalue()) == {"caf\xe9": None, "n": 3, "p": "a"}


def test_names_do_not_steer_the_terminal() -> None:
    assert visible("a\x1b[2Jb\nc\udc80é") == "a\\x1b[2Jb\\nc\\udc80é"
    assert shortened("abcdefghij", 10) == "abcdefghij"
    assert shortened("abcdefghijk", 10) == "abcde…hijk"


def test_errors_name_the_next_command(capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[tuple[Exception, dict[str, Any], int, str]] = [
        (FormatError("x"), {"verb": "verify", "paths": ["a b.h5"]}, 1, "headrace info 'a b.h5'"),
        (MissingNameError("x"), {"verb": "pack", "src": "a.h5"}, 2, "headrace info a.h5"),
        (DataNotFoundError("x"), {"verb": "info", "path": "/none/at/all"}, 2, "headrace info /"),
        (ValueError("x"), {"verb": "info", "path": "/"}, 2, "headrace env"),
    ]
    for error, given, code, wanted in rows:

        def fail(*_: object, error: Exception = error) -> int:
            raise error

        assert run_verb(fail, argparse.Namespace(**given), "headrace x") == code
        assert capsys.readouterr().err.endswith(f"\nnext: {wanted}\n")
