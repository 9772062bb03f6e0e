"""The examples run."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import headrace

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
MODES = ("lazy", "eager", "cached", "streaming")
TINY = ["--images", "24", "--image-size", "32", "--batch-size", "8", "--workers", "0"]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module `train_images`, and torch as it was afterwards."""
    for name, value in (("OMP_WAIT_POLICY", "passive"), ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")):  # what it would set itself
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(EXAMPLES)
    strict = torch.are_deterministic_algorithms_enabled()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    yield importlib.import_module("train_images")
    torch.use_deterministic_algorithms(strict)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
    for name in ("train_images", "make_photos", "draw_speed"):
        sys.modules.pop(name, None)


def _rows(output: str) -> dict[str, list[str]]:
    """The lines of the table: mode -> cells."""
    table = output.partition("\nmode ")[2].partition("\n\n")[0]
    return {cells[0]: cells for cells in (re.split(r"  +", line.strip()) for line in table.splitlines()[1:])}


def _shown(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        image.load()
        return image.size


# --- examples/train_images.py -----------------------------------------------------------------------------------------


def test_all_modes_train_to_the_same_loss(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "train_images.py", "--all-modes", "--epochs", "1", *TINY, "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "losses equal in all modes: yes" in done.stdout
    rows = _rows(done.stdout)
    assert tuple(rows) == MODES
    assert {len(cells) for cells in rows.values()} == {8}
    assert len({cells[6] for cells in rows.values()}) == 1  # the loss, as repr has it
    assert repr(float(rows["lazy"][6])) == rows["lazy"][6]
    assert rows["eager"][4] == "100%" and rows["lazy"][4] == "0%"  # hits
    assert _shown(tmp_path / "training.png")[0] > 600


def test_loading_alone(example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--no-train", "--all-modes", "--epochs", "2", *TINY, "--out", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert tuple(_rows(output)) == MODES
    assert re.search(r"^epoch 2 against lazy: eager [\d.]+ x, cached [\d.]+ x$", output, re.MULTILINE)
    assert _shown(tmp_path / "loading.png")[0] > 600


def test_another_mode_goes_on_from_a_state(example: Any, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def last_loss(*options: str) -> str:
        assert example.main([str(photos), *TINY, "--out", str(tmp_path), *options]) == 0
        return re.findall(r"loss (\S+)", capsys.readouterr().out)[-2]  # the last one is the table's head

    state = str(tmp_path / "state.pt")
    whole = last_loss("--epochs", "2")
    half = last_loss("--epochs", "1", "--save-state", state)
    assert half != whole
    assert last_loss("--epochs", "2", "--mode", "cached", "--resume", state) == whole


def test_ctrl_c_saves_the_state_within_an_epoch(example: Any, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [str(photos), *TINY, "--epochs", "1", "--out", str(tmp_path)]
    state, step, losses = str(tmp_path / "state.pt"), example.Learner.step, []

    def stop_after_two(learner: Any, images: Any, targets: Any, sums: Any) -> None:
        step(learner, images, targets, sums)
        if sums.images == 8:  # in the second of three batches
            example.signal.raise_signal(example.signal.SIGINT)

    monkeypatch.setattr(example.Learner, "step", stop_after_two)
    assert example.main([*options, "--save-state", state]) == 130
    monkeypatch.setattr(example.Learner, "step", step)
    monkeypatch.setattr(example, "table", lambda runs, train: losses.append(runs[0].epochs[0].mean_loss))
    assert example.main([*options, "--resume", state, "--mode", "eager"]) == 0
    assert example.main(options) == 0
    assert losses[0] == losses[1]


def test_losses_that_differ_are_said(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def run(mode: str, loss: float, checksum: int) -> Any:
        epochs = [example.Epoch(1, loss=2.0, checksums=[3, 4]), example.Epoch(1, loss=loss, checksums=[5, checksum])]
        return example.Run(mode, epochs=epochs)

    assert not example.compare([run("lazy", 1.0, 6), run("eager", 1.0 + 1e-15, 7), run("cached", 1.0 + 1e-15, 6)], train=True)
    assert capsys.readouterr().out.splitlines() == [
        "losses equal in all modes: no",
        "  eager against lazy: batch 1 of epoch 2 differs, please report it",
        "  cached against lazy: the losses of epoch 2 differ, and its batches are equal: torch calculated in another way",
    ]


def test_a_batch_that_is_overwritten_is_said(
    example: Any, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step, steps = example.Learner.step, []

    def overwrite_one(learner: Any, images: Any, targets: Any, sums: Any) -> None:
        step(learner, images, targets, sums)
        steps.append(sums)
        if len(steps) == 2:  # of the first mode
            images[3, 0, 7, 9] += 1e-6
            sums.loss += 1e-9

    monkeypatch.setattr(example.Learner, "step", overwrite_one)
    assert example.main([str(photos), "--all-modes", "--epochs", "1", *TINY, "--out", str(tmp_path)]) == 1
    output = capsys.readouterr().out
    assert all(f"  {mode} against lazy: batch 1 of epoch 1 differs, please report it\n" in output for mode in MODES[1:])


@pytest.mark.parametrize("shape", [(4, 3, 2, 2), (3, 3, 5, 5)])  # the latter of an odd number of values
def test_a_checksum_sees_every_value(example: Any, shape: tuple[int, ...]) -> None:
    images, targets = torch.rand(shape), torch.arange(shape[0])
    sums = {example.checksum(images, targets), example.checksum(images, targets.flip(0))}
    flat = images.view(-1)
    for number in range(len(flat)):
        flat[number] = torch.nextafter(flat[number], torch.tensor(2.0))
        sums.add(example.checksum(images, targets))
    assert len(sums) == len(flat) + 2


def test_an_error_is_one_line(example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main([str(tmp_path / "nothing"), "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1


def test_without_matplotlib_it_says_what_to_install(
    example: Any, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "draw_speed", None)
    assert example.main([str(photos), "--no-train", "--epochs", "1", *TINY, "--out", str(tmp_path)]) == 0
    assert 'pip install "headrace[plot]"' in capsys.readouterr().out


def test_photographs_are_the_same_each_time(example: Any, tmp_path: Path) -> None:
    first, second = (example.make_photos(tmp_path / name, images=12, size=(32, 24)) for name in ("a", "b"))
    files = sorted(path.relative_to(first) for path in first.rglob("*.*"))
    assert len(files) == 12
    assert all((first / file).read_bytes() == (second / file).read_bytes() for file in files)


# --- examples/train_volume.py -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_training_on_patches_of_a_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    volume = importlib.import_module("make_volume").make_volume(tmp_path / "cells.zarr", (24, 64, 96))
    sys.modules.pop("make_volume")
    command = [sys.executable, EXAMPLES / "train_volume.py", volume, "--patch", "8", "16", "16", "--epochs", "2", "--workers", "0"]
    losses = set()
    for mode in ("lazy", "cached"):
        done = subprocess.run([*command, "--mode", mode], capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        first, second = (float(loss) for loss in re.findall(r" loss ([\d.]+) ", done.stdout))
        assert second < first
        losses.add((first, second))
    assert len(losses) == 1
    wrong = subprocess.run([*command, "--labels", "nuclei"], capture_output=True, text=True, timeout=100)
    assert (wrong.returncode, wrong.stderr) == (
        2,
        f"error: {volume} has no labels 'nuclei'; its image '/' lists: 'cells'\n",
    )


# --- examples/train_clone.py ------------------------------------------------------------------------------------------


@pytest.mark.quick_every(1)
@pytest.mark.slow
def test_cloning_a_behaviour(tmp_path: Path) -> None:
    assert len((EXAMPLES / "train_clone.py").read_text().splitlines()) < 80
    command = [sys.executable, EXAMPLES / "train_clone.py", "--epochs", "3", "--workers", "0"]
    losses = set()
    for mode in ("lazy", "cached"):
        done = subprocess.run([*command, "--mode", mode], capture_output=True, text=True, timeout=100, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        found = re.findall(r"loss ([\d.]+)   of unseen episodes ([\d.]+)", done.stdout)
        assert len(found) == 3 and float(found[2][0]) < float(found[0][0]) and float(found[2][1]) < float(found[0][1])
        losses.add(tuple(found))
    assert len(losses) == 1


# --- examples/train_text.py -------------------------------------------------------------------------------------------


def _train_text(*options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, EXAMPLES / "train_text.py", *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_training_on_texts_is_equal_in_all_modes(tmp_path: Path) -> None:
    """Beside class folders lies a file of another kind, as in many a data set."""
    books = tmp_path / "books"
    for number, name in enumerate(("prose", "verse")):
        (books / name).mkdir(parents=True)
        for part in range(4):
            (books / name / f"{part}.txt").write_text("the mill wheel turns, and turns again\n" * (20 + number + part), encoding="utf-8")
    (books / "LICENSE.md").write_text("Anybody may read these.")
    small = ["--steps", 16, "--every", 8, "--length", 32, "--batch-size", 4, "--measured", 8, "--workers", 0]
    done = _train_text(books, *small, "--cache-dir", tmp_path / "kept")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "perplexities equal in all modes: yes" in done.stdout
    lines = re.findall(r"^  (\w+) +step +(\d+)   perplexity (\S+)", done.stdout, re.MULTILINE)
    assert [mode for mode, _, _ in lines[::3]] == list(MODES)
    first, _, last = (float(value) for _, _, value in lines[:3])
    assert last < first / 2


@pytest.mark.slow
def test_training_on_a_text_of_its_own_and_on_a_packed_one(tmp_path: Path) -> None:
    small = [
        "--steps",
        30,
        "--length",
        64,
        "--workers",
        0,
        "--measured",
        8,
        "--mode",
        "lazy",
        "--out",
        tmp_path,
        "--cache-dir",
        tmp_path / "kept",
    ]
    done = _train_text(*small)
    assert done.returncode == 0, done.stdout + done.stderr
    times = float(re.findall(r"\(([\d.]+) times less\)", done.stdout)[0])
    assert times > 2
    packed = headrace.pack(headrace.TextDataset(tmp_path / "mill.txt", cache_dir=tmp_path / "kept"), tmp_path / "tokens.h5")
    done = _train_text(packed, *small)
    assert done.returncode == 0, done.stdout + done.stderr
    wrong = _train_text(tmp_path / "nothing", *small)
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: ") and wrong.stderr.count("\n") == 1


# --- examples/train_masks.py, examples/train_boxes.py -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["train_masks", "train_boxes"])
def test_training_on_masks_and_on_boxes(name: str, tmp_path: Path) -> None:
    script = EXAMPLES / f"{name}.py"
    assert len(script.read_text().splitlines()) < 80
    command = [sys.executable, script, "--workers", "0", "--size", "32", "--epochs", "4", "--out", tmp_path / "shapes"]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=one_thread)
    assert done.returncode == 0, done.stdout + done.stderr
    overlaps = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines()]
    assert len(overlaps) == 4 and max(overlaps[1:]) > overlaps[0] and overlaps[-1] > 0.2
    wrong = subprocess.run([*command, tmp_path / "nothing", tmp_path / "nothing"], capture_output=True, text=True, timeout=100)
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: ") and wrong.stderr.count("\n") == 1
