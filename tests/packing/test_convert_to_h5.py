"""The command line says what it did, what is wrong, and how to go on."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import h5py
import numpy as np
import pytest
import torch

import headrace
from headrace.datasets import HDF5Dataset, ImageDataset
from headrace.packing.formats.hdf5 import PackedWriter

TOOL = Path(__file__).parents[2] / "tools" / "convert_to_h5.py"


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("convert_to_h5", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_as_a_program(photos: Path, tmp_path: Path) -> None:
    """From any folder, with headrace found as an installed package is."""
    source = os.path.dirname(os.path.dirname(headrace.__file__))
    environment = {**os.environ, "PYTHONPATH": source}
    command = [
        sys.executable,
        TOOL,
        photos,
        "out.h5",
        "--store",
        "decoded",
        "--size",
        "20x30",
        "--workers",
        "2",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, "")
    summary, how = done.stdout.splitlines()
    size = (tmp_path / "out.h5").stat().st_size
    assert re.fullmatch(
        rf".*out\.h5: 24 samples in 3 classes, {size / 1000:.1f} kB in \d+\.\d s \(\d+\.\d "
        r"MB/s\), store decoded",
        summary,
    )
    assert how == f"open it: headrace.ImageDataset({str(tmp_path / 'out.h5')!r})"
    assert eval(how.removeprefix("open it: "), {"headrace": headrace}).image_size == (20, 30)


def test_wrong_arguments_are_one_line(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        tool.main(["photos"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == (
        "convert_to_h5: error: the following arguments are required: DST (--help shows the "
        "arguments)\n"
    )


def test_a_folder_as_it_is(
    photos: Path, tmp_path: Path, tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main([str(photos), str(tmp_path / "out.h5"), "--no-progress"]) == 0
    out = capsys.readouterr()
    assert out.err == "" and "24 samples in 3 classes" in out.out and "store encoded" in out.out
    with ImageDataset(tmp_path / "out.h5") as packed, ImageDataset(photos) as source:
        assert all(torch.equal(packed[i][0], source[i][0]) for i in range(24))


def test_size_and_color(photos: Path, tmp_path: Path, tool: ModuleType) -> None:
    options = ["--store", "decoded", "--size", "16", "--color", "L"]
    assert tool.main([str(photos), str(tmp_path / "out.h5"), *options]) == 0
    with h5py.File(tmp_path / "out.h5") as file:
        assert file["data"].shape == (24, 16, 16, 1)


def test_targets_from_a_csv_file(photos: Path, tmp_path: Path, tool: ModuleType) -> None:
    names = [os.path.relpath(path, photos) for path, _ in ImageDataset(photos).samples]
    rows = [f"{name},{number * 10}" for number, name in enumerate(names)]
    (tmp_path / "targets.csv").write_text("\n".join(["file,target", *rows]))
    assert (
        tool.main(
            [str(photos), str(tmp_path / "out.h5"), "--targets", str(tmp_path / "targets.csv")]
        )
        == 0
    )
    assert ImageDataset(tmp_path / "out.h5").targets.tolist() == list(range(0, 240, 10))


def test_arrays(tmp_path: Path, tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file["data"] = np.arange(12.0).reshape(4, 3)
    assert tool.main([str(tmp_path / "in.h5"), str(tmp_path / "out.h5")]) == 0
    out = capsys.readouterr().out
    assert (
        "4 samples, " in out
        and "store decoded" in out
        and f"HDF5Dataset({str(tmp_path / 'out.h5')!r})" in out
    )
    assert HDF5Dataset(tmp_path / "out.h5")[3].tolist() == [9, 10, 11]


def test_help(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        tool.main(["--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    for word in (
        "SRC",
        "DST",
        "--store",
        "--size",
        "--color",
        "--targets",
        "--workers",
        "--overwrite",
        "--no-progress",
        "examples:",
    ):
        assert word in text
    assert 'ImageDataset("train.h5")' in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["none", "out.h5"], "none does not exist"),
        (["in", "none/out.h5"], "is no folder: make it first"),
        (["in", "there.h5"], r"there\.h5 is there already: pass --overwrite to"),
        (["in", "out.h5", "--size", "20"], "need --store decoded"),
        (["in", "out.h5", "--store", "encoded", "--color", "L"], "need --store decoded"),
        (["in", "out.h5", "--targets", "none.csv"], r"none\.csv does not exist"),
        (
            ["arrays.h5", "out.h5", "--store", "decoded", "--size", "20"],
            r"are for images, and .*arrays\.h5 holds arrays",
        ),
        (["arrays.h5", "out.h5", "--store", "encoded"], "pass --store decoded"),
        (["broken", "out.h5"], r"broken.a\.jpg: .*0 bytes"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(
    photos: Path,
    tmp_path: Path,
    tool: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(photos, "in")
    Path("broken").mkdir()
    Path("broken/a.jpg").write_bytes(b"")
    Path("there.h5").write_bytes(b"kept")
    with h5py.File("arrays.h5", "w") as file:
        file["data"] = np.zeros((4, 3))
    before = sorted(os.listdir())
    assert tool.main(options) == 2
    out = capsys.readouterr()
    lines = [line for line in out.err.splitlines() if "warning:" not in line]
    assert out.out == "" and len(lines) == 1 and re.search(rf"error: .*{message}", lines[0])
    assert sorted(os.listdir()) == before and Path("there.h5").read_bytes() == b"kept"


@pytest.mark.parametrize(
    "options",
    [
        ["--size", "0"],
        ["--size", "1x2x3"],
        ["--size", "big"],
        ["--workers", "0"],
        ["--store", "zip"],
    ],
)
def test_values_that_make_no_sense(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        tool.main(["in", "out.h5", *options])
    assert caught.value.code == 2 and f"argument {options[0]}" in capsys.readouterr().err


def test_what_is_left_out_is_told(
    photos: Path, tmp_path: Path, tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(photos, tmp_path / "in")
    (tmp_path / "in" / "circle" / "x.jpg").write_bytes(b"")
    command = [str(tmp_path / "in"), str(tmp_path / "out.h5")]
    assert tool.main(command) == 2
    assert tool.main([*command, "--skip-bad"]) == 0
    out = capsys.readouterr()
    assert "24 samples in 3 classes, 1 left out" in out.out
    assert re.search(
        r"warning: .*1 of 25 samples can't be read and were left out: .*x\.jpg", out.err
    )


def test_warnings_are_one_line_and_end_with_the_command(
    photos: Path, tmp_path: Path, tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = warnings.showwarning
    assert tool.main([str(photos / "circle"), str(tmp_path / "out.h5")]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("convert_to_h5: warning: ") and "lie flat in the folder" in line
    assert warnings.showwarning is shown


def test_an_interrupt(
    photos: Path,
    tmp_path: Path,
    tool: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PackedWriter, "append", interrupt)
    assert tool.main([str(photos), str(tmp_path / "out.h5")]) == 130
    assert (
        "interrupted, nothing was written" in capsys.readouterr().err and os.listdir(tmp_path) == []
    )


# --- texts ----------------------------------------------------------------------------------------


def write_texts(folder: Path) -> Path:
    (folder / "books" / "verse").mkdir(parents=True)
    (folder / "books" / "verse" / "a.txt").write_text("the mill\nturns\n")
    (folder / "books" / "verse" / "b.jsonl").write_text(
        '{"body": "a wheel", "score": 3}\n{"body": "water", "score": 4}\n'
    )
    return folder / "books"


def test_texts_by_characters(
    tmp_path: Path, tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    books, out = str(write_texts(tmp_path)), str(tmp_path / "out.h5")
    assert tool.main([books, out]) == 2
    assert (
        "1 files of records, such as verse/b.jsonl, and 1 other texts, such as verse/a.txt: pass "
        "--unit file or" in capsys.readouterr().err
    )
    assert tool.main([books, out, "--unit", "file", "--no-progress"]) == 0
    said = capsys.readouterr()
    assert "2 samples, " in said.out and "store tokens" in said.out and said.err == ""
    opened = eval(said.out.splitlines()[1].removeprefix("open it: "), {"headrace": headrace})
    assert opened.tokenizer.decode(opened[0]["input_ids"]) == "the mill\nturns\n"


def test_what_is_said_of_texts(tmp_path: Path, tool: ModuleType) -> None:
    records = str(write_texts(tmp_path) / "verse" / "b.jsonl")
    options = ["--unit", "record", "--text-field", "body", "--target-field", "score"]
    assert tool.main([records, str(tmp_path / "records.h5"), *options]) == 0
    with headrace.TextDataset(tmp_path / "records.h5") as packed:
        assert [packed[i]["labels"] for i in range(2)] == [3, 4] and packed.tokenizer.decode(
            packed[1]["input_ids"]
        ) == "water"
    options = [
        "--unit",
        "line",
        "--labels",
        "folders",
        "--end-token",
        "1",
        "--encoding",
        "ascii",
        "--cache-dir",
        str(tmp_path / "kept"),
    ]
    assert tool.main([str(tmp_path / "books"), str(tmp_path / "lines.h5"), *options]) == 0
    assert any(name.startswith("headrace-tokens-") for name in os.listdir(tmp_path / "kept"))
    with headrace.TextDataset(tmp_path / "lines.h5") as packed:
        assert (
            len(packed) == 4
            and packed.classes == ["verse"]
            and all(packed[i]["input_ids"][-1] == 1 for i in range(4))
        )


def test_a_tokenizers_file(
    tmp_path: Path,
    tool: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the package's place taken by one that has no more than is asked of it; and without
    the package.
    """

    class Tokenizer:
        fingerprint = "pieces"

        @staticmethod
        def from_file(path: str) -> Tokenizer:
            if not os.path.exists(path):
                raise Exception("No such file")
            return Tokenizer()

        def encode(self, text: str) -> list[int]:
            return [len(word) for word in text.split()]

    books, out = str(write_texts(tmp_path)), str(tmp_path / "out.h5")
    package = ModuleType("tokenizers")
    package.Tokenizer = Tokenizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tokenizers", package)
    assert tool.main([books, out, "--tokenizer", str(tmp_path / "none.json")]) == 2
    assert "error: --tokenizer" in capsys.readouterr().err
    assert tool.main([books, out, "--unit", "file", "--tokenizer", str(TOOL)]) == 0
    with headrace.TextDataset(out) as packed:
        assert (
            packed[0]["input_ids"].tolist() == [3, 4, 5]
            and packed.tokenizer is None
            and "Tokenizer:pieces" in packed.explain()
        )
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert tool.main([books, str(tmp_path / "other.h5"), "--tokenizer", str(TOOL)]) == 2
    assert "pip install tokenizers" in capsys.readouterr().err


def test_images_and_texts_at_once(
    tmp_path: Path, tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    books = str(write_texts(tmp_path))
    assert tool.main([books, str(tmp_path / "out.h5"), "--unit", "line", "--store", "encoded"]) == 2
    assert "are for images, and what else is said is for texts" in capsys.readouterr().err
    assert tool.main([books, str(tmp_path / "out.h5"), "--unit", "file"]) == 0
    assert tool.main([str(tmp_path / "out.h5"), str(tmp_path / "again.h5"), "--unit", "line"]) == 2
    assert "out.h5 is no text" in capsys.readouterr().err
