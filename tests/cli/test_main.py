"""The `headrace` command: its verbs, exit codes and messages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

import headrace
from headrace import HDF5Dataset, ImageDataset
from headrace.cli import data as data_options
from headrace.cli import pack
from headrace.cli.main import main
from headrace.datasets.text.options import CHAT, UNITS


def test_python_m_headrace_runs_the_command() -> None:
    command = [sys.executable, "-m", "headrace", "--version"]
    done = subprocess.run(
        command, cwd=Path(headrace.__file__).parents[1], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        f"headrace {headrace.__version__}\n",
        "",
    )


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["--help"],
        *([verb, "--help"] for verb in ("pack", "status", "join", "verify", "index")),
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert (
        all(f"\n    {verb} " in shown for verb in ("pack", "status", "join", "verify", "index"))
        and "headrace pack photos/train train.h5" in shown
    )


@pytest.mark.parametrize(
    "arguments", [[], ["pck"], ["verify"], ["pack", "in"], ["index", "x", "--fast"]]
)
def test_wrong_use_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2 and "usage: headrace" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pakc"], "did you mean pack?"),
        (
            ["pack", "a", "b", "--image-size", "3"],
            "headrace pack: error: unrecognized arguments: --image-size 3 (use --size)",
        ),
        (["info", "a", "--key", "x"], "(use --dataset-name)"),
        (["verify", "a", "--worker", "3"], "(did you mean --workers?)"),
    ],
)
def test_a_wrong_flag_says_which_was_meant(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert said in capsys.readouterr().err


def test_zarr(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = tmp_path / "out"
    job = ["pack", str(photos), str(packed), "--format", "zarr", "--no-progress"]
    assert (
        main([*job, "--shard-size", "16kB", "--part", "1/2"]) == 0
        and main(["status", str(packed)]) == 1
    )
    assert main([*job, "--shard-size", "16kB"]) == 0 and main(["verify", str(packed)]) == 0
    shown = capsys.readouterr().out
    assert (
        shown.endswith(f"{packed}: 24 samples, all sound\n")
        and "open it: headrace.open_dataset(" in shown
    )
    assert main(
        job
    ) == 2 and "shard_size: 16000 there, 256000000 now" in capsys.readouterr().err.replace(
        "--shard-size", "shard_size"
    )
    lines = tmp_path / "a.txt"
    lines.write_text("words")
    assert main(["pack", str(lines), str(tmp_path / "no"), "--format", "zarr"]) == 2
    assert (
        "--format zarr holds" in (shown := capsys.readouterr().err)
        and "leave out --format" in shown
    )


def test_pack_then_verify(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = tmp_path / "out.h5"
    assert main(["pack", str(photos), str(packed), "--no-progress"]) == 0
    assert "24 samples in 3 classes" in capsys.readouterr().out
    assert main(["verify", str(packed)]) == 0
    assert capsys.readouterr().out == f"{packed}: 24 samples, all sound\n"
    assert len(ImageDataset(packed)) == 24


def test_jobs_share_the_parts(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = tmp_path / "out"
    job = ["pack", str(photos), str(packed), "--shard-size", "16kB", "--no-progress", "--part"]
    assert main([*job, "1/2"]) == 0 and main(["status", str(packed)]) == 1
    assert capsys.readouterr().out.endswith(f"{packed}: 2 of 4 parts done\nmissing: 0, 2\n")
    assert main(["join", str(packed)]) == 2 and "missing: 0, 2" in capsys.readouterr().err
    assert main([*job, "0/2"]) == 0
    assert capsys.readouterr().out == (
        f"{packed}: 4 of 4 parts done, joined\nopen it: "
        f"headrace.open_dataset('{packed}/manifest.json')\n"
    )
    (packed / "manifest.json").unlink()
    assert (
        main(["status", str(packed)]) == 1
        and main(["join", str(packed)]) == 0
        and main(["status", str(packed)]) == 0
    )
    capsys.readouterr()
    assert (
        main(["verify", str(packed)]) == 0
        and capsys.readouterr().out == f"{packed}: 24 samples, all sound\n"
    )
    assert main(["pack", str(photos), str(packed), "--shard-size", "1MB"]) == 2
    assert "shard_size: 16000 there, 1000000 now" in capsys.readouterr().err


def test_a_damaged_sample_is_exit_code_1(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = tmp_path / "out.h5"
    assert main(["pack", str(photos), str(packed), "--store", "decoded", "--size", "8"]) == 0
    with h5py.File(packed, "r+") as file:
        file["data"][3] ^= 1
    capsys.readouterr()
    assert main(["verify", str(packed)]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{packed}: 24 samples, 1 damaged" and second.startswith("  sample 3, ")


def test_wrong_data_and_wrong_use_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
        line, *following = [
            line for line in capsys.readouterr().err.splitlines() if "warning:" not in line
        ]
        assert line.startswith(f"headrace {arguments[0]}: error: ")
        assert all(line.startswith("next: headrace ") for line in following) and len(following) <= 1


def test_index_prints_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "the mill"}\n')
    assert main(["index", str(tmp_path / "a.jsonl")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'a.jsonl.index'}\n"


def test_an_interrupt_is_exit_code_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(pack, "run", interrupt)
    assert main(["pack", "in", "out.h5"]) == 130
    assert capsys.readouterr().err == "headrace pack: interrupted\n"


def test_units_are_those_of_text_dataset() -> None:
    """But for chats, whose tokenizer no file of the package `tokenizers` is."""
    assert (*data_options.UNITS, CHAT) == UNITS


FOLDER = {"a/x.png": None, "y.png": None}
HINTS: dict[str, tuple[dict[str, bytes | None], list[str], str]] = {
    "beside": (FOLDER, [], "or pass --targets FILE.csv (--targets none: no targets)"),
    "empty": ({"a/x.png": None, "b/1.json": b"{}"}, [], "there is 1 .json: pass --unit file"),
    "delimiter": ({"x.csv": b"text;label\nx;1\n"}, [], "pass --delimiter ';'"),
    "flat": ({"x.png": None}, ["--targets", "x"], "targets: x does not exist"),
    "warning": (
        {"x.png": None},
        [],
        "or pass --targets FILE.csv (--targets none to say that this is meant)",
    ),
    "encoding": ({"x.txt": b"caf\xe9"}, [], "pass --encoding; "),
    "fields": (
        {"x.jsonl": b'{"body": "a"}\n'},
        [],
        "pass --text-field or --target-field; fix or remove it, or pass --skip-bad",
    ),
    "columns": (
        {"x.jsonl": b'{"text": "a", "y": [1, 2]}\n'},
        ["--target-field", "y"],
        "(images: --targets none; texts: no --target-field)",
    ),
    "images": (
        {"x.png": None},
        ["--unit", "line"],
        "there is 1 .png: leave out the options for texts",
    ),
    "there": (
        {"x.png": None},
        ["--targets", "none"],
        "is there already: pass --overwrite to replace it",
    ),
}


@pytest.mark.parametrize("name", HINTS)
def test_hints_name_flags(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, options, wanted = HINTS[name]
    for path, data in files.items():
        (tmp_path / "in" / path).parent.mkdir(parents=True, exist_ok=True)
        if data is None:
            Image.new("RGB", (8, 8)).save(tmp_path / "in" / path)
        else:
            (tmp_path / "in" / path).write_bytes(data)
    arguments = ["pack", str(tmp_path / "in"), str(tmp_path / "out.h5"), "--no-progress", *options]
    main(arguments)
    if name == "there":
        main(arguments)
    told = capsys.readouterr().err
    assert wanted in told and "=" not in told


def test_an_array_is_named_by_a_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file["a"], file["b"] = np.zeros((4, 3)), np.ones((5, 2))
    arguments = ["pack", str(tmp_path / "in.h5"), str(tmp_path / "out.h5"), "--no-progress"]
    assert main(arguments) == 2
    assert (
        "in.h5 has 2 datasets: name one of them by --dataset-name: a [4, 3] float64, b"
        in capsys.readouterr().err
    )
    for verb in ("pack", "bench"):
        assert main([verb, *arguments[1 : 3 if verb == "pack" else 2], "--json"]) == 2
        told = json.loads(capsys.readouterr().out)["error"]
        assert (
            "name one of them by --dataset-name: " in told["message"]
            and told["type"] == "MissingNameError"
        )
    assert main([*arguments, "--dataset-name", "b"]) == 0
    assert len(headrace.HDF5Dataset(tmp_path / "out.h5")) == 5


def test_verify_goes_on_after_a_file_that_can_t_be_read(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sound, cut, gone = (str(tmp_path / f"{name}.h5") for name in ("sound", "cut", "gone"))
    assert main(["pack", str(photos), sound]) == 0
    Path(cut).write_bytes(Path(sound).read_bytes()[:3000])
    capsys.readouterr()
    assert main(["verify", gone, sound]) == 2
    said = capsys.readouterr()
    assert (
        said.out.splitlines()[0].startswith(f"{gone}: not verified: {gone} does not exist")
        and not said.err
    )
    assert said.out.splitlines()[1] == f"{sound}: 24 samples, all sound"
    assert (
        main(["verify", gone, cut, sound]) == 1
        and f"{cut}: not verified: {cut} is no HDF5 file" in capsys.readouterr().out
    )
    assert main(["verify", gone, sound, "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert (
        not told["ok"]
        and told["files"][0]["error"]["type"] == "DataNotFoundError"
        and told["files"][1]["samples"] == 24
    )
    assert main(["verify", gone]) == 2 and "error: " in capsys.readouterr().err


@pytest.mark.parametrize("end", ["s3://bucket/x.h5", "file:///data/x.h5", "memory://x.h5"])
def test_single_file_is_no_url(
    end: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["pack", str(photos), end]) == 2
    assert (
        f"{end}: a single file is written on this machine: pass --shard-size 1GB, to pack into a "
        "store" in capsys.readouterr().err
    )
    assert not list(tmp_path.iterdir())


def test_no_command_helps_where_the_folder_of_dst_is_missing(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pack", str(photos), str(tmp_path / "none" / "x.h5")]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"headrace pack: error: {tmp_path / 'none'}, where x.h5 should go, is no folder: make it "
        "first"
    ]


@pytest.mark.parametrize("verb", ["status", "join"])
def test_parts_are_no_file(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.h5").touch()
    assert main([verb, str(tmp_path / "a.h5")]) == 2
    assert (
        f"{tmp_path / 'a.h5'} is a file, and a pack of parts is a folder: name that"
        in capsys.readouterr().err
    )


def test_arrays_are_packed_with_their_targets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["images"], file["labels"] = np.zeros((20, 4), "u1"), np.arange(20) % 3
    source, out = str(tmp_path / "a.h5"), str(tmp_path / "out.h5")
    assert main(["pack", source, out, "--dataset-name", "images", "--target-name", "labels"]) == 0
    with HDF5Dataset(out, target_name="targets") as packed:
        assert [int(packed[i][1]) for i in range(20)] == [i % 3 for i in range(20)]
    assert (
        main(["pack", source, out, "--dataset-name", "images", "--targets", "x", "--overwrite"])
        == 2
    )
    assert "--size, --color, --targets and --masks are for images" in capsys.readouterr().err


def test_flags_with_points(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pack", str(photos), str(tmp_path / "x.h5"), "--masks"]) == 2
    assert "pass --targets labels.csv or 'instances.json'" in capsys.readouterr().err
