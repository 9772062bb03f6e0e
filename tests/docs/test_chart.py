"""The chart of README.md is what benchmarks/chart.py draws, and its figures are those of
docs/benchmarks.md.
"""

from __future__ import annotations

import importlib.util
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DATA = json.loads((ROOT / "benchmarks" / "results" / "chart.json").read_text(encoding="utf-8"))
BARS = [(panel["section"], bar) for panel in DATA["panels"] for bar in panel["bars"]]


@pytest.fixture(scope="module")
def chart() -> Any:
    spec = importlib.util.spec_from_file_location("chart", ROOT / "benchmarks" / "chart.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _plain(cell: str) -> str:
    return cell.replace("**", "").strip()


def _cells(section: str, row: str, column: str) -> list[str]:
    """What the tables of a section have in a row and a column."""
    text = (
        (ROOT / DATA["page"])
        .read_text(encoding="utf-8")
        .split(f"\n## {section}\n")[1]
        .split("\n## ")[0]
    )
    cells = []
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *rows = (
            [_plain(cell) for cell in line.strip("|").split("|")] for line in table.splitlines()
        )
        cells += [line[head.index(column)] for line in rows if line[0] == row and column in head]
    return cells


def test_each_figure_stands_in_the_benchmarks() -> None:
    for section, bar in BARS:
        figure = rf"{re.escape(bar['label'])}(?!\d)"
        cells = _cells(section, bar["row"], bar["column"])
        assert any(re.match(figure, cell) for cell in cells), bar["name"]
        number, _, unit = bar["label"].replace(",", "").partition(" ")
        assert bar["value"] == float(number) * {"": 1, "MB": 1, "GB": 1000}[unit]


@pytest.mark.parametrize("ending", ["", "-narrow"])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_committed_chart_is_what_the_script_draws(chart: Any, theme: str, ending: str) -> None:
    committed = (ROOT / "docs" / "assets" / f"chart-{theme}{ending}.svg").read_text(
        encoding="utf-8"
    )
    assert committed == chart.svg(DATA, theme, chart.COLUMNS[ending]), (
        "run: python benchmarks/chart.py"
    )
    texts = [
        element.text
        for element in ET.fromstring(committed).iter("{http://www.w3.org/2000/svg}text")
    ]
    assert len(texts) == 2 * len(DATA["panels"]) + 2 * len(BARS)


@pytest.mark.parametrize(
    ("theme", "ground"), [("light", "#ffffff"), ("dark", "#0d1117"), ("dark", "#1e2129")]
)
def test_the_chart_has_contrast_on_its_page(chart: Any, theme: str, ground: str) -> None:
    """As WCAG 2.2 asks: 4.5 for text, 3 for bars; on GitHub and, if dark, on the site."""

    def luminance(colour: str) -> float:
        parts = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for name, colour in chart.THEMES[theme].items():
        darker, lighter = sorted((luminance(colour), luminance(ground)))
        assert (lighter + 0.05) / (darker + 0.05) >= (4.5 if name in ("text", "muted") else 3), name
