"""The results in benchmarks/results/shuffling.json come out again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def test_the_chart_of_shuffling_is_drawn_of_them(scripts: Any) -> None:
    data = json.loads((RESULTS / "shuffling.json").read_text(encoding="utf-8"))
    for theme in ("light", "dark"):
        committed = ROOT / "docs" / "assets" / f"shuffling-{theme}.svg"
        drawn = scripts("shuffling_chart").svg(data, theme)
        assert committed.read_text(encoding="utf-8") == drawn, theme


def test_entropies_come_out_again_and_are_predicted(scripts: Any) -> None:
    shuffling = scripts("shuffling")
    rows = json.loads((RESULTS / "shuffling.json").read_text(encoding="utf-8"))["entropy"]
    for row in rows:
        missed = row["measured"] - row["predicted"]
        is_wide = row["chunk"] * row.get("interleave", 1) > 8 * row["batch"]
        assert -0.4 < missed < (0.05 if is_wide else 0.7), row
    at = {"batch": 64, "chunk": 1024, "interleave": 16}
    (row,) = [row for row in rows if at.items() <= row.items()]
    order = shuffling.order_of(shuffling.SAMPLES, 1024, 16, 64)
    assert shuffling.measured(order, 64) == pytest.approx(row["measured"], abs=1e-9)
    predicted = shuffling.predicted(16, shuffling.SAMPLES // 1024)
    assert predicted == pytest.approx(row["predicted"], abs=1e-9)
    # two chunks of each of two classes: of two drawn, one time in three both are of one class
    assert shuffling.predicted(2, 4, classes=2) == pytest.approx(2 / 3)
