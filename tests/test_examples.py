"""The examples run."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import headrace

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
MODES = ("lazy", "eager", "cached", "streaming")
TINY = ["--image-size", "32", "--batch-size", "8", "--workers", "0"]


@pytest.fixture
def example(deterministic_torch: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module `train_images`; torch and Ctrl-C are as before afterwards."""
    monkeypatch.syspath_prepend(EXAMPLES)
    handler = signal.getsignal(signal.SIGINT)
    yield importlib.import_module("train_images")
    signal.signal(signal.SIGINT, handler)
    for name in ("train_images", "make_photos", "report_modes"):
        sys.modules.pop(name, None)


def rows_of(output: str) -> dict[str, list[str]]:
    """The lines of the table of modes: mode -> cells."""
    table = f"\n{output}".partition("\nmode ")[2].partition("\n\n")[0]
    return {
        cells[0]: cells
        for cells in (re.split(r"  +", line.strip()) for line in table.splitlines()[1:])
    }


def _shown(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        image.load()
        return image.size


# --- examples/train_images.py ---------------------------------------------------------------------


def test_all_modes_train_to_the_same_loss(tmp_path: Path) -> None:
    command = [
        sys.executable,
        EXAMPLES / "train_images.py",
        "--all-modes",
        "--epochs",
        "1",
        "--images",
        "24",
        *TINY,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "losses equal in all modes: yes" in done.stdout
    rows = rows_of(done.stdout)
    assert tuple(rows) == MODES
    assert {len(cells) for cells in rows.values()} == {4}
    assert len({cells[2] for cells in rows.values()}) == 1  # the loss, as repr has it
    assert repr(float(rows["lazy"][2])) == rows["lazy"][2]
    assert _shown(tmp_path / "out/training.png")[0] > 600


@pytest.fixture
def run(
    example: Any, photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """Trains on photographs with these options; the losses of the epochs that it printed."""

    def losses(*options: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["train_images.py", str(photos), *TINY, *options])
        assert example.main() == 0
        return re.findall(r"loss (\S+)", capsys.readouterr().out)

    return losses


def test_another_mode_goes_on_from_a_state(run: Callable[..., list[str]], tmp_path: Path) -> None:
    state = str(tmp_path / "state.pt")
    whole = run("--epochs", "2")
    assert run("--epochs", "1", "--state", state) == whole[:1] != whole[1:]
    assert run("--epochs", "2", "--mode", "cached", "--state", state) == whole[1:]
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]


# after the first, the second and the last of three batches
@pytest.mark.parametrize("images", [8, 16, 24])
def test_ctrl_c_saves_the_state_within_an_epoch(
    example: Any,
    run: Callable[..., list[str]],
    images: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    state, add = str(tmp_path / "state.pt"), example.Epoch.add

    def stop(epoch: Any, *batch: Any) -> None:
        add(epoch, *batch)
        if epoch.images == images:
            signal.raise_signal(signal.SIGINT)

    whole = run("--epochs", "2")
    monkeypatch.setattr(example.Epoch, "add", stop)
    with pytest.raises(SystemExit, match="130"):
        run("--epochs", "2", "--state", state)
    capsys.readouterr()
    monkeypatch.setattr(example.Epoch, "add", add)
    assert run("--epochs", "2", "--mode", "eager", "--state", state) == (
        whole[1:] if images == 24 else whole
    )


def test_losses_that_differ_are_said(
    example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    epochs = [[example.Epoch(8, 1.0, loss, 2)] for loss in (1.0, 1.0 + 1e-15)]
    plot = tmp_path / "speeds.png"
    assert example.report_modes({"lazy": epochs[0], "eager": epochs[1]}, plot) == 1
    assert "losses equal in all modes: no\n" in capsys.readouterr().out
    assert example.report_modes({"lazy": epochs[0], "eager": epochs[0]}, plot) == 0


def test_an_error_is_one_line(
    example: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_images.py", str(tmp_path / "nothing")])
    with pytest.raises(SystemExit, match="2"):
        example.main()
    output = capsys.readouterr().err
    assert output.startswith("error: ") and output.count("\n") == 1


def test_without_matplotlib_it_says_what_to_install(
    example: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"] + [
        "matplotlib"
    ]:
        monkeypatch.setitem(sys.modules, name, None)
    assert (
        example.report_modes({"lazy": [example.Epoch(8, 1.0, 1.0, 2)]}, tmp_path / "speeds.png")
        == 0
    )
    assert 'pip install "headrace[plot]"' in capsys.readouterr().out and not list(
        tmp_path.iterdir()
    )


def test_photographs_are_the_same_each_time(example: Any, tmp_path: Path) -> None:
    first, second = (
        example.make_photos(tmp_path / name, images=12, size=(32, 24)) for name in ("a", "b")
    )
    files = sorted(path.relative_to(first) for path in first.rglob("*.*"))
    assert len(files) == 12
    assert all((first / file).read_bytes() == (second / file).read_bytes() for file in files)


# --- examples/train_volume.py ---------------------------------------------------------------------


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(EXAMPLES)
    path: Path = importlib.import_module("make_volume").make_volume(
        tmp_path / "cells.zarr", (24, 64, 96)
    )
    sys.modules.pop("make_volume")
    return path


def test_training_on_patches_of_a_volume(volume: Path) -> None:
    command = [
        sys.executable,
        EXAMPLES / "train_volume.py",
        volume,
        "--patch",
        "8",
        "16",
        "16",
        "--epochs",
        "2",
        "--workers",
        "0",
    ]
    losses = set()
    for mode in ("lazy", "cached"):
        done = subprocess.run(
            [*command, "--mode", mode], capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stdout + done.stderr
        first, second = (float(loss) for loss in re.findall(r" loss ([\d.]+) ", done.stdout))
        assert second < first
        losses.add((first, second))
    assert len(losses) == 1
    wrong = subprocess.run(
        [*command, "--labels", "nuclei"], capture_output=True, text=True, timeout=100
    )
    assert (wrong.returncode, wrong.stderr) == (
        2,
        f"error: {volume} has no labels 'nuclei'; its image '/' lists: 'cells'\n",
    )


def test_labels_lie_where_the_volume_is_bright(volume: Path) -> None:
    """A threshold fits the labels, which have voxels of their own, better than labels that are
    shifted by a voxel.
    """
    with headrace.ZarrDataset(
        volume, target_name="cells", patch_shape=(24, 64, 96), dtype="float32"
    ) as dataset:
        image, labels = dataset[0]
    bright, inside = image > (image.min() + image.max()) / 2, (slice(1, -1),) * 3

    def fit(shift: tuple[int, ...]) -> float:
        cells = (labels > 0).roll(shift, (0, 1, 2))[inside]
        return int((bright[inside] & cells).sum()) / int((bright[inside] | cells).sum())

    shifts = [
        tuple(by if axis == along else 0 for along in range(3))
        for axis in range(3)
        for by in (-1, 1)
    ]
    assert fit((0, 0, 0)) > max(map(fit, shifts))


# --- examples/train_clone.py ----------------------------------------------------------------------


@pytest.mark.quick_every(1)
@pytest.mark.slow
def test_cloning_a_behaviour(tmp_path: Path) -> None:
    assert len((EXAMPLES / "train_clone.py").read_text().splitlines()) < 160
    command = [sys.executable, EXAMPLES / "train_clone.py", "--epochs", "3", "--workers", "0"]
    losses = set()
    for mode in ("lazy", "cached"):
        done = subprocess.run(
            [*command, "--mode", mode], capture_output=True, text=True, timeout=100, cwd=tmp_path
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found = re.findall(r"loss ([\d.]+)   of unseen episodes ([\d.]+)", done.stdout)
        assert (
            len(found) == 3
            and float(found[2][0]) < float(found[0][0])
            and float(found[2][1]) < float(found[0][1])
        )
        losses.add(tuple(found))
    assert len(losses) == 1


# --- examples/train_text.py -----------------------------------------------------------------------


def _train_text(folder: Path, *options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, EXAMPLES / "train_text.py", "--workers", "0", *map(str, options)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=folder, env=environment
    )


def _perplexities(done: subprocess.CompletedProcess[str]) -> list[float]:
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(value) for value in re.findall(r"perplexity of unseen blocks (\S+)", done.stdout)]


def test_training_on_texts_is_equal_in_all_modes(tmp_path: Path) -> None:
    """Beside class folders lies a file of another kind, as in many a data set."""
    books = tmp_path / "books"
    for number, name in enumerate(("prose", "verse")):
        (books / name).mkdir(parents=True)
        for part in range(4):
            (books / name / f"{part}.txt").write_text(
                "the mill wheel turns, and turns again\n" * (20 + number + part), encoding="utf-8"
            )
    (books / "LICENSE.md").write_text("Anybody may read these.")
    small = ["--steps", 16, "--length", 32, "--batch-size", 4]
    runs = [_perplexities(_train_text(tmp_path, books, *small, "--mode", mode)) for mode in MODES]
    assert runs == [runs[0]] * 4
    first, last = runs[0]
    assert last < first / 2


def test_training_on_a_text_of_its_own_and_on_a_packed_one(tmp_path: Path) -> None:
    small = ["--steps", 30, "--length", 64]
    first, last = _perplexities(_train_text(tmp_path, *small))
    assert last < first / 2
    with headrace.TextDataset(tmp_path / "out/mill.txt", cache_dir=tmp_path / "kept") as texts:
        packed = headrace.pack(texts, tmp_path / "tokens.h5")
    first, last = _perplexities(_train_text(tmp_path, packed, *small))
    assert last < first / 2
    few = _train_text(tmp_path, packed, "--length", 100_000)
    assert few.returncode == 2 and few.stderr.startswith("error: split([0.05, 0.95]) of 3 samples")
    wrong = _train_text(tmp_path, tmp_path / "nothing", *small)
    assert (
        wrong.returncode == 2
        and wrong.stderr.startswith("error: ")
        and wrong.stderr.count("\n") == 1
    )


# --- examples/train_masks.py, examples/train_boxes.py ---------------------------------------------


@pytest.mark.parametrize("name", ["train_masks", "train_boxes"])
def test_training_on_masks_and_on_boxes(name: str, tmp_path: Path) -> None:
    script = EXAMPLES / f"{name}.py"
    assert len(script.read_text().splitlines()) < 160
    command = [
        sys.executable,
        script,
        "--workers",
        "0",
        "--size",
        "32",
        "--epochs",
        "4",
        "--out",
        tmp_path / "shapes",
    ]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=one_thread)
    assert done.returncode == 0, done.stdout + done.stderr
    overlaps = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines()]
    assert len(overlaps) == 4 and max(overlaps[1:]) > overlaps[0] and overlaps[-1] > 0.2
    wrong = subprocess.run(
        [*command, tmp_path / "nothing", tmp_path / "nothing"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (
        wrong.returncode == 2
        and wrong.stderr.startswith("error: ")
        and wrong.stderr.count("\n") == 1
    )
