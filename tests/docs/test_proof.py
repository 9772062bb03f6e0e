"""docs/shuffling.md has the figures of benchmarks/results/, and they come out again."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS, RESULTS = ROOT / "benchmarks", ROOT / "benchmarks" / "results"


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    """Imports a script of benchmarks/, whose modules import each other by their bare names."""
    before = set(sys.modules)
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module
    sys.path.remove(str(BENCHMARKS))
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == BENCHMARKS:
            del sys.modules[name]


@pytest.mark.parametrize("name", ["shuffling"])
def test_a_page_has_the_figures_of_its_script(scripts: Any, name: str) -> None:
    data = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert scripts(name).page(page, data) == page, f"run: python benchmarks/{name}.py --page"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_chart_of_shuffling_is_drawn_of_them(scripts: Any, theme: str) -> None:
    data = json.loads((RESULTS / "shuffling.json").read_text(encoding="utf-8"))
    committed = (ROOT / "docs" / "assets" / f"shuffling-{theme}.svg").read_text(encoding="utf-8")
    assert committed == scripts("shuffling_chart").svg(data, theme), "run: python benchmarks/shuffling.py --page"


def test_entropies_come_out_again_and_are_predicted(scripts: Any) -> None:
    shuffling = scripts("shuffling")
    rows = json.loads((RESULTS / "shuffling.json").read_text(encoding="utf-8"))["entropy"]
    assert len(rows) == len(shuffling.BATCHES) * (len(shuffling.CHUNKS) * len(shuffling.INTERLEAVES) + 1)
    for row in rows:
        assert abs(row["measured"] - row["predicted"]) < 0.05, row
    row = next(row for row in rows if (row["batch"], row["chunk"], row.get("interleave")) == (64, 1024, 16))
    order = shuffling.order_of(shuffling.SAMPLES, 1024, 16, 64)
    assert shuffling.measured(order, 64) == pytest.approx(row["measured"], abs=1e-9)
    assert shuffling.predicted(16, shuffling.SAMPLES // 1024) == pytest.approx(row["predicted"], abs=1e-9)


def test_the_formula_is_exact_where_it_can_be_counted(scripts: Any) -> None:
    """Two chunks of each of two classes: of two that are drawn, one time in three both are of one class."""
    assert scripts("shuffling").predicted(2, 4, classes=2) == pytest.approx(2 / 3)
