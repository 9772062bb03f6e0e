"""`benchmarks/training.py` trains in all modes, and says which batch or loss differs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

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
