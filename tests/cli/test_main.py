"""The `headrace` command: exit codes and messages of its verbs; and pack's options."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

import headrace
from headrace import HDF5Dataset, ImageDataset, TextDataset
from headrace.cli.main import VERBS, main
from headrace.packing.hdf5 import PackedWriter

pytestmark = pytest.mark.usefixtures("own_cache")

TOOL = Path(__file__).parents[2] / "tools" / "convert_to_h5.py"


@pytest.fixture
def here(tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder: photos, arrays, texts, and what can't be packed."""
    monkeypatch.chdir(tmp_path)
    Path("in").symlink_to(photos)
    with h5py.File("arrays.h5", "w") as file:
        file["images"] = np.zeros((20, 4), "u1")
        file["labels"] = np.arange(20) % 3
    with h5py.File("plain.h5", "w") as file:
        file["data"] = np.arange(12.0).reshape(4, 3)
    Path("broken").mkdir()
    Path("broken/a.jpg").write_bytes(b"")
    Path("there.h5").write_bytes(b"kept")
    Path("books/verse").mkdir(parents=True)
    Path("books/verse/a.txt").write_text("the mill\nturns\n")
    rows = [{"body": "a wheel", "score": 3}, {"body": "water", "score": 4}]
    Path("books/verse/b.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def test_as_programs() -> None:
    """`python -m headrace`, and the script beside it, whose errors are one line."""
    root = Path(headrace.__file__).parents[1]
    command = [sys.executable, "-m", "headrace", "--version"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100)
    version = f"headrace {headrace.__version__}\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, version, "")
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, str(TOOL), "photos"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and done.stderr.startswith("convert_to_h5: error: ")
    assert done.stderr.count("\n") == 1


def test_the_script_says_all_errors_by_one_code(here: Path, scripts: Any) -> None:
    tool = scripts("convert_to_h5")
    assert tool.main(["broken", "out.h5"]) == 2 and main(["pack", "broken", "out.h5"]) == 1
    assert tool.main(["in", "out.h5"]) == 0


def test_wrong_use_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        ([], "usage: headrace"),
        (["pakc"], "did you mean pack?"),
        (["verify"], "usage: headrace verify"),
        (["pack", "in"], "DST"),
        (["index", "x", "--fast"], "--fast"),
        (["pack", "a", "b", "--image-size", "3"], "--image-size 3 (use --size)"),
        (["info", "a", "--key", "x"], "(use --dataset-name)"),
        (["verify", "a", "--worker", "3"], "(did you mean --workers?)"),
        (["pack", "a", "b", "--size", "1x2x3"], "argument --size"),
        (["pack", "a", "b", "--size", "0"], "argument --size"),
        (["pack", "a", "b", "--workers", "0"], "argument --workers"),
        (["pack", "a", "b", "--store", "zip"], "argument --store"),
    ]
    for arguments, said in rows:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2 and said in capsys.readouterr().err


ERRORS: list[tuple[list[str], int, str]] = [
    (["verify", "plain.h5"], 1, "plain.h5"),
    (["verify", "none.h5"], 2, "none.h5"),
    (["index", "none"], 2, "none"),
    (["status", "there.h5"], 2, "there.h5 is a file"),
    (["join", "there.h5"], 2, "there.h5 is a file"),
    (["pack", "broken", "out.h5"], 1, "a.jpg"),
    (["pack", "none", "out.h5"], 2, "none does not exist"),
    (["pack", "in", "none/out.h5"], 2, "none, where out.h5 should go"),
    (["pack", "in", "there.h5"], 2, "--overwrite"),
    (["pack", "in", "books"], 2, "books is a folder"),
    (["pack", "in", "s3://bucket/x.h5"], 2, "s3://bucket/x.h5: .*shard.size"),
    (["pack", "in", "memory://x.h5"], 2, "memory://x.h5: .*shard.size"),
    (["pack", "in", "out.h5", "--part", "0/2"], 2, "shard.size"),
    (["pack", "in", "out.h5", "--size", "20"], 2, "--store decoded"),
    (["pack", "in", "out.h5", "--compression", "gzip"], 2, "--store decoded"),
    (["pack", "in", "out.h5", "--masks"], 2, "masks does not apply"),
    (["pack", "in", "out.h5", "--targets", "none.csv"], 2, "none.csv does not exist"),
    (["pack", "in", "out.h5", "--unit", "line", "--targets", "a"], 2, "--unit is an option for"),
    (["pack", "arrays.h5", "out.h5"], 2, "dataset_name: images .*, labels"),
    (["pack", "plain.h5", "out.h5", "--size", "20", "--store", "decoded"], 2, "--size is"),
    (["pack", "plain.h5", "out.h5", "--store", "encoded"], 2, "--store decoded"),
    (["pack", "plain.h5", "out.h5", "--unit", "line"], 2, "--unit is an option for texts"),
    (["pack", "books", "out.h5"], 2, r"1 .*b\.jsonl, .*1 .*a\.txt: .*--unit file"),
]


def test_errors_are_one_line_and_a_code(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And perhaps the next command."""
    before = sorted(os.listdir())
    for arguments, code, said in ERRORS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert main(arguments) == code, arguments
        out, err = capsys.readouterr()
        line, *following = [line for line in err.splitlines() if "warning:" not in line]
        assert out == "" and line.startswith(f"headrace {arguments[0]}: error: ")
        assert re.search(said, line), line
        assert len(following) <= 1 and all(one.startswith("next: headrace ") for one in following)
    assert sorted({*os.listdir()} - {"out"}) == before, "but for the folder of a store"
    assert Path("there.h5").read_bytes() == b"kept"


# --- pack -----------------------------------------------------------------------------------------


def test_pack_then_verify(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", "in", "out.h5", "--no-progress"]) == 0
    out, err = capsys.readouterr()
    summary, how = out.splitlines()
    assert "24 samples in 3 classes" in summary and "store encoded" in summary and err == ""
    with eval(how.removeprefix("open it: "), {"headrace": headrace}) as packed:
        assert isinstance(packed, ImageDataset) and len(packed) == 24
    assert main(["verify", "out.h5"]) == 0
    assert capsys.readouterr().out == f"{here}/out.h5: 24 samples, all sound\n"


def test_jobs_share_the_parts(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = str(tmp_path / "out")
    job = ["pack", str(photos), packed, "--no-progress", "--shard-size"]
    assert main([*job, "16kB", "--part", "1/2"]) == 0 and main(["status", packed]) == 1
    assert capsys.readouterr().out.endswith(f"{packed}: 2 of 4 parts done\nmissing: 0, 2\n")
    assert main(["join", packed]) == 2 and "missing: 0, 2" in capsys.readouterr().err
    assert main([*job, "16kB", "--part", "0/2"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{packed}: 4 of 4 parts done, joined\nopen it: headrace.open_dataset(")
    Path(packed, "manifest.json").unlink()
    assert [main([verb, packed]) for verb in ("status", "join", "status", "verify")] == [1, 0, 0, 0]
    assert capsys.readouterr().out.endswith(f"{packed}: 24 samples, all sound\n")
    assert main([*job, "1MB"]) == 2
    assert "shard-size: 16000 there, 1000000 now" in capsys.readouterr().err.replace("_", "-")


def test_options_of_images(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [os.path.relpath(path, "in") for path, _ in ImageDataset("in").samples]
    rows = [f"{name},{number * 10}" for number, name in enumerate(names)]
    Path("targets.csv").write_text("\n".join(["file,target", *rows]))
    options = ["--store", "decoded", "--size", "16", "--color", "L", "--targets", "targets.csv"]
    options += ["--compression", "gzip", "--chunks", "4"]
    assert main(["pack", "in", "out.h5", *options]) == 0
    with h5py.File("out.h5") as file:
        assert file["data"].shape == (24, 16, 16, 1)
        assert file["data"].chunks == (4, 16, 16, 1) and file["data"].compression == "gzip"
        assert file["targets"][:].tolist() == list(range(0, 240, 10))
    assert main(["pack", "in", "none.h5", "--targets", "none"]) == 0
    assert ImageDataset("none.h5").targets is None
    with h5py.File("out.h5", "r+") as file:
        file["data"][3] ^= 1
    capsys.readouterr()
    assert main(["verify", "out.h5"]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{here}/out.h5: 24 samples, 1 damaged" and second.startswith("  sample 3, ")


def test_options_of_arrays(here: Path) -> None:
    options = ["--dataset-name", "images", "--target-name", "labels"]
    assert main(["pack", "arrays.h5", "out.h5", *options]) == 0
    with HDF5Dataset("out.h5", target_name="targets") as packed:
        assert [int(target) for _, target in packed] == [number % 3 for number in range(20)]
    assert main(["pack", "plain.h5", "plain-out.h5"]) == 0
    assert HDF5Dataset("plain-out.h5")[3].tolist() == [9, 10, 11]


def test_options_of_texts(here: Path) -> None:
    options = ["--unit", "record", "--text-field", "body", "--target-field", "score"]
    assert main(["pack", "books/verse/b.jsonl", "records.h5", *options]) == 0
    with TextDataset("records.h5") as packed:
        assert [packed[number]["labels"] for number in range(2)] == [3, 4]
        assert packed.tokenizer.decode(packed[1]["input_ids"]) == "water"
    options = ["--unit", "line", "--labels", "folders", "--end-token", "1", "--encoding", "ascii"]
    assert main(["pack", "books", "lines.h5", *options, "--cache-dir", "kept"]) == 0
    assert any(name.startswith("headrace-tokens-") for name in os.listdir("kept"))
    with TextDataset("lines.h5") as packed:
        assert len(packed) == 4 and packed.classes == ["verse"]
        assert all(packed[number]["input_ids"][-1] == 1 for number in range(4))


def test_a_tokenizers_file(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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

    package: Any = ModuleType("tokenizers")
    package.Tokenizer = Tokenizer
    monkeypatch.setitem(sys.modules, "tokenizers", package)
    command = ["pack", "books", "out.h5", "--unit", "file", "--tokenizer"]
    assert main([*command, "none.json"]) == 2 and "none.json" in capsys.readouterr().err
    assert main([*command, "there.h5"]) == 0
    with TextDataset("out.h5") as packed:
        assert packed[0]["input_ids"].tolist() == [3, 4, 5] and packed.tokenizer is None
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert main([*command, "there.h5", "--overwrite"]) == 2
    assert "pip install tokenizers" in capsys.readouterr().err


def test_warnings_and_what_is_left_out(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Warnings are a line each, and end with the command."""
    shown = warnings.showwarning
    Image.new("RGB", (8, 8)).save("broken/b.png")
    assert main(["pack", "broken", "out.h5", "--on-error", "skip"]) == 0
    out, err = capsys.readouterr()
    assert "1 samples" in out and "1 of 2 samples can't be read" in err
    assert "lie flat" in err and "a.jpg" in err
    assert all(line.startswith("headrace pack: warning: ") for line in err.splitlines())
    assert warnings.showwarning is shown


def test_an_interrupt_is_exit_code_130(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    before = sorted(os.listdir())
    monkeypatch.setattr(PackedWriter, "append", interrupt)
    assert main(["pack", "in", "out.h5"]) == 130 and sorted(os.listdir()) == before
    assert capsys.readouterr().err == "headrace pack: interrupted, nothing was written\n"
    monkeypatch.setitem(VERBS, "pack", VERBS["pack"]._replace(run=interrupt))
    assert main(["pack", "in", "out.h5"]) == 130
    assert capsys.readouterr().err == "headrace pack: interrupted\n"


def test_verify_goes_on_after_a_file_that_can_t_be_read(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pack", "in", "sound.h5"]) == 0
    Path("cut.h5").write_bytes(Path("sound.h5").read_bytes()[:3000])
    capsys.readouterr()
    assert main(["verify", "gone.h5", "sound.h5"]) == 2
    out, err = capsys.readouterr()
    assert out.splitlines()[0].startswith("gone.h5: not verified: ") and not err
    assert out.splitlines()[1] == f"{here}/sound.h5: 24 samples, all sound"
    assert main(["verify", "gone.h5", "cut.h5", "sound.h5"]) == 1
    assert "cut.h5: not verified: " in capsys.readouterr().out
    assert main(["verify", "gone.h5", "sound.h5", "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert not told["ok"] and told["files"][1]["samples"] == 24
    assert told["files"][0]["error"]["type"] == "DataNotFoundError"
    assert main(["verify", "memory://gone.h5?token=secret", "sound.h5", "--json"]) == 2
    assert "secret" not in capsys.readouterr().out


def test_index_prints_what_it_wrote(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index", "arrays.h5"]) == 0
    assert capsys.readouterr().out == f"{here}/arrays.h5.index\n"


FOLDER = {"a/x.png": None, "y.png": None}
HINTS: list[tuple[dict[str, bytes | None], list[str], str]] = [
    (FOLDER, [], "pass --targets (--targets None"),
    ({"x.png": None}, [], "such as a CSV of labels (--targets None"),
    ({"x.png": None}, ["--unit", "line"], "but --unit is an option for texts"),
    ({"a/x.png": None, "b/1.json": b"{}"}, [], "'b' holds no files that"),
    ({"x.csv": b"text;label\nx;1\n"}, [], "pass --delimiter ';'"),
    ({"x.txt": b"caf\xe9"}, [], "pass --encoding or "),
    ({"x.jsonl": b'{"body": "a"}\n'}, [], "pass --text-field or --target-field; "),
    ({"x.jsonl": b'{"text": "a", "y": [1]}\n'}, ["--target-field", "y"], "no --target-field)"),
]


def test_hints_name_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, (files, options, wanted) in enumerate(HINTS):
        folder = tmp_path / str(number)
        for path, data in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            if data is None:
                Image.new("RGB", (8, 8)).save(folder / path)
            else:
                (folder / path).write_bytes(data)
        main(["pack", str(folder), str(tmp_path / f"{number}.h5"), "--no-progress", *options])
        told = capsys.readouterr().err
        assert wanted in told
