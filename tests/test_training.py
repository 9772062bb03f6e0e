"""`benchmarks/training.py` trains in all modes, and says which batch or loss differs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.test_examples import MODES, TINY

pytestmark = pytest.mark.slow


@pytest.fixture
def script(deterministic_torch: None, scripts: Any) -> Any:
    return scripts("training")


def test_training_in_all_modes(
    script: Any, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main([str(photos), "--epochs", "1", *TINY]) == 0
    output = capsys.readouterr().out
    lines = f"\n{output}".partition("\nmode ")[2].partition("\n\n")[0].splitlines()[1:]
    rows = [re.split(r"  +", line.strip()) for line in lines]
    assert tuple(row[0] for row in rows) == MODES and len({row[6] for row in rows}) == 1
    assert "losses equal in all modes: yes" in output


def test_batches_and_losses_that_differ_are_said(script: Any) -> None:
    def run(mode: str, loss: float, checksum: int) -> Any:
        first = script.Epoch(1, loss=2.0, checksums=[3, 4])
        second = script.Epoch(1, loss=loss, checksums=[5, checksum])
        return script.Run(mode, epochs=[first, second])

    other = 1.0 + 1e-15
    runs = [run("lazy", 1.0, 6), run("eager", other, 7), run("cached", other, 6)]
    batch, loss = script.differences(runs)
    assert batch.startswith("eager against lazy: batch 1 of epoch 2 differs")
    assert loss.startswith("cached against lazy: the losses of epoch 2 differ")


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
    assert capsys.readouterr().out.count("batch 1 of epoch 1 differs") == len(MODES) - 1


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
