"""`benchmarks/training.py` trains in all modes, and says which batch or loss differs."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.test_examples import MODES, TINY, rows_of

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def script(deterministic_torch: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module `training`."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    yield importlib.import_module("training")
    for name in ("training", "common", "folders", "train_images", "make_photos", "report_modes"):
        sys.modules.pop(name, None)


def test_training_in_all_modes(
    script: Any, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main([str(photos), "--epochs", "1", *TINY]) == 0
    output = capsys.readouterr().out
    rows = rows_of(output)
    assert tuple(rows) == MODES and {len(cells) for cells in rows.values()} == {8}
    assert (
        len({cells[6] for cells in rows.values()}) == 1
        and repr(float(rows["lazy"][6])) == rows["lazy"][6]
    )
    assert rows["eager"][4] == "100%" and rows["lazy"][4] == "0%"  # hits
    assert "losses equal in all modes: yes" in output


def test_loading_alone_as_json(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--no-train",
        "--images",
        "24",
        "--modes",
        "lazy",
        "cached",
        "--epochs",
        "2",
        "--json",
    ]
    assert script.main([*options, *TINY]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["mode"] for row in found["modes"]] == ["lazy", "cached"] and "loss" not in found[
        "modes"
    ][0]
    assert [row["hits"] for row in found["modes"]] == [0, 1] and min(
        found["modes"][0]["img_per_s"]
    ) > 0


def test_losses_that_differ_are_said(script: Any) -> None:
    def run(mode: str, loss: float, checksum: int) -> Any:
        epochs = [
            script.Epoch(1, loss=2.0, checksums=[3, 4]),
            script.Epoch(1, loss=loss, checksums=[5, checksum]),
        ]
        return script.Run(mode, epochs=epochs)

    assert script.differences(
        [run("lazy", 1.0, 6), run("eager", 1.0 + 1e-15, 7), run("cached", 1.0 + 1e-15, 6)]
    ) == [
        "eager against lazy: batch 1 of epoch 2 differs, please report it",
        "cached against lazy: the losses of epoch 2 differ, and its batches are equal: torch "
        "calculated in another way",
    ]


def test_a_batch_that_is_overwritten_is_said(
    script: Any, photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step, steps = script.Learner.step, []

    def overwrite_one(learner: Any, images: Any, targets: Any, sums: Any) -> None:
        step(learner, images, targets, sums)
        steps.append(sums)
        if len(steps) == 2:  # of the first mode
            images[3, 0, 7, 9] += 1e-6
            sums.loss += 1e-9

    monkeypatch.setattr(script.Learner, "step", overwrite_one)
    assert script.main([str(photos), "--epochs", "1", *TINY]) == 1
    output = capsys.readouterr().out
    assert all(
        f"  {mode} against lazy: batch 1 of epoch 1 differs, please report it\n" in output
        for mode in MODES[1:]
    )


# the latter of an odd number of values
@pytest.mark.parametrize("shape", [(4, 3, 2, 2), (3, 3, 5, 5)])
def test_a_checksum_sees_every_value(script: Any, shape: tuple[int, ...]) -> None:
    images, targets = torch.rand(shape), torch.arange(shape[0])
    sums = {script.checksum(images, targets), script.checksum(images, targets.flip(0))}
    flat = images.view(-1)
    for number in range(len(flat)):
        flat[number] = torch.nextafter(flat[number], torch.tensor(2.0))
        sums.add(script.checksum(images, targets))
    assert len(sums) == len(flat) + 2


def test_a_wrong_path_is_one_line(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main([str(tmp_path / "nothing")]) == 2
    output = capsys.readouterr().err
    assert output.startswith("error: ") and output.count("\n") == 1
