"""The chart of README.md is what benchmarks/chart.py draws, and its figures are those of
docs/benchmark_tables.md.
"""

from __future__ import annotations

import itertools
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DATA = json.loads((ROOT / "benchmarks" / "results" / "chart.json").read_text(encoding="utf-8"))
BARS = [(panel["section"], bar) for panel in DATA["panels"] for bar in panel["bars"]]


def _cells(section: str, row: str, column: str) -> list[str]:
    """What the tables of a section have in a row and a column."""
    page = (ROOT / DATA["page"]).read_text(encoding="utf-8")
    text = page.split(f"\n## {section}\n")[1].split("\n## ")[0].replace("**", "")
    cells = []
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = [line.strip("|").split("|") for line in table.splitlines()]
        head, _, *rows = [[cell.strip() for cell in line] for line in lines]
        cells += [line[head.index(column)] for line in rows if line[0] == row and column in head]
    return cells


def test_each_figure_stands_in_the_benchmarks() -> None:
    for section, bar in BARS:
        figure = rf"{re.escape(bar['label'])}(?!\d)"
        cells = _cells(section, bar["row"], bar["column"])
        assert any(re.match(figure, cell) for cell in cells), bar["name"]
        number, _, unit = bar["label"].replace(",", "").partition(" ")
        assert bar["value"] == float(number) * {"": 1, "kB": 1e-3, "MB": 1, "GB": 1000}[unit]


def test_the_committed_charts_are_what_the_script_draws(scripts: Any) -> None:
    chart = scripts("chart")
    for theme, ending in itertools.product(("light", "dark"), ("", "-narrow")):
        path = ROOT / "docs" / "assets" / f"chart-{theme}{ending}.svg"
        committed = path.read_text(encoding="utf-8")
        drawn = chart.svg(DATA, theme, chart.COLUMNS[ending])
        assert committed == drawn, "run: python benchmarks/chart.py"
        texts = list(ET.fromstring(committed).iter("{http://www.w3.org/2000/svg}text"))
        assert len(texts) == 2 * len(DATA["panels"]) + 2 * len(BARS)
