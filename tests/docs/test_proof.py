"""The results of headrace in benchmarks/results/elastic.json and shuffling.json come out again."""

from __future__ import annotations

import contextlib
import itertools
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


def same(found: dict[str, Any]) -> None:
    """These results of headrace are those of the page."""
    said = json.loads((RESULTS / "elastic.json").read_text(encoding="utf-8"))["peers"]["headrace"][
        "results"
    ]
    for key, row in found.items():
        for name in ("missing", "doubled", "batches", "error"):
            assert row.get(name) == said[key].get(name), (key, name)


def in_turn(scripts: Any, change: Any, folder: Path) -> dict[str, Any]:
    """What `elastic_run.run` finds with processes: here one rank after the other, and none is
    killed.
    """
    run, peer = scripts("elastic_run"), scripts("elastic_peers").Headrace()
    lives, dealt = [], [None] * change.lives[0].ranks
    for number, life in enumerate(change.lives):
        lived, states = run.Lived(), []
        for rank in range(life.ranks):
            try:
                opened = peer.open(folder, life, rank, dealt[rank])
            except Exception as error:
                return {"error": run.said(error)}
            with contextlib.closing(iter(opened.batches)) as batches:
                lived.batches.append(list(itertools.islice(batches, life.stop)))
                states.append(opened.state())
        lives.append(lived)
        if number + 1 < len(change.lives):
            assert all(state == states[0] for state in states)
            dealt = peer.deal(states, change.lives[number + 1].ranks)
    if change.lives[-1].stop is not None:
        return {}
    result: dict[str, Any] = run.count(lives, change.lives[0].samples)
    return {**result, "missing": result["missing"] - change.lives[0].skips}


@pytest.mark.slow
def test_headrace_comes_through_all_changes_in_turn(scripts: Any, tmp_path: Path) -> None:
    found = {
        change.key: in_turn(scripts, change, tmp_path) for change in scripts("elastic_run").CHANGES
    }
    assert len(found) == 8
    same(found)
