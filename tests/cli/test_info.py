"""What `headrace info` prints."""

from __future__ import annotations

import io
import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr

from headrace.cli.info import _branches, _Page, _sizes_of
from headrace.cli.main import main
from headrace.cli.output import Output
from headrace.inspecting import inspect
from headrace.inspecting.report import Node


def badly_laid_out(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset(
            "deep/images", (20_000, 64, 64), "u1", chunks=(4000, 64, 64), compression="gzip"
        )
        file["deep/labels"] = np.arange(20_000) % 30
        file["names\x1b[2J"] = np.arange(3)


def test_a_page_says_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    badly_laid_out(tmp_path / "a.h5")
    assert main(["info", str(tmp_path / "a.h5")]) == 0
    shown = capsys.readouterr().out
    for wanted in (
        f"{tmp_path / 'a.h5'}: HDF5, ",
        "samples     20,000 (rows of 'deep/images', uint8 [64, 64])",
        "│   ├── images",
        "chunked [4000, 64, 64]  deflate 4  nothing written",
        "a row at random of deep/images",
        "read by     pread + inflate",
        "1 chunk decoded, 16.4 MB for 4.1 kB (4,000 times as much)",
        f"headrace pack {tmp_path / 'a.h5'} a-packed.h5 --dataset-name deep/images",
        'create_dataloader(dataset, shuffle="block")',
        "there are 3 arrays",
    ):
        assert wanted in shown, wanted
    assert "\x1b" not in shown and "names\\x1b[2J" in shown


def test_json_holds_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    badly_laid_out(tmp_path / "a.h5")
    assert main(["info", "--json", str(tmp_path / "a.h5"), "--dataset-name", "deep/labels"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (
        told["samples"] == 20_000
        and told["samples_are"] == "rows of 'deep/labels', int64 []"
        and len(told["nodes"]) == 5
    )
    assert {"format", "access", "advice", "classes", "fingerprint", "opens_as"} <= told.keys()


@pytest.mark.parametrize("kind", ["photos", "hdf5", "zarr"])
def test_it_fits_forty_columns(
    kind: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.chdir(tmp_path)
    badly_laid_out(tmp_path / "hdf5")
    zarr.create_array("zarr", shape=(100, 90, 80), chunks=(32, 32, 32), dtype="u2")
    (tmp_path / "photos").symlink_to(photos)
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    output = Output(stream=terminal)
    lines = list(_Page(inspect(kind), output, False).lines())
    # a long word stays as it is
    long = [line for line in lines if len(line) > 40 and " " in line[14:]]
    assert all(
        line.startswith(("  headrace pack ", "  create_dataloader(", "  ZarrDataset("))
        for line in long
    ), long


def test_an_empty_folder_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(tmp_path)]) == 1 and "an empty folder" in capsys.readouterr().out
    (tmp_path / "a.h5").write_bytes(b"")
    assert main(["info", "-q", str(tmp_path / "a.h5")]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("headrace info: error: ")


def test_classes_and_arrays_are_cut_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number in range(70):
            file[f"a{number:02}"] = np.zeros(2)
        file["data"], file["labels"] = np.zeros((30, 2)), np.arange(30)
    assert main(["info", str(tmp_path / "a.h5")]) == 0
    shown = capsys.readouterr().out
    assert (
        "... and 13 more: --all shows them" in shown
        and "... and 18 more with 18 samples: --all shows them" in shown
    )
    assert main(["info", "--all", str(tmp_path / "a.h5")]) == 0
    assert "more" not in capsys.readouterr().out.replace("there are", "")


def test_a_tree_has_branches_and_sums() -> None:
    paths = ["", "a", "a/x", "a/y", "b", "b/c", "b/c/z"]
    nodes = [
        Node(path, "array" if path[-1:] in ("x", "y", "z") else "group", stored=10)
        for path in paths
    ]
    assert list(_branches(nodes)) == [
        "",
        "├── ",
        "│   ├── ",
        "│   └── ",
        "└── ",
        "    └── ",
        "        └── ",
    ]
    assert _sizes_of(nodes) == {
        "": 30,
        "a": 20,
        "a/x": 10,
        "a/y": 10,
        "b": 10,
        "b/c": 10,
        "b/c/z": 10,
    }


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan"])
def test_a_timeout_is_a_number(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["info", "x", f"--timeout={value}"])
    assert caught.value.code == 2 and "is no number of seconds" in capsys.readouterr().err
