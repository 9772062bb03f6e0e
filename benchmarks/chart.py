"""Draws the chart of README.md from `results/chart.json`, for light and for dark pages.

    # writes docs/assets/chart-light.svg, chart-dark.svg, and both for narrow screens
    python benchmarks/chart.py

The figures are those of docs/benchmark_tables.md: of each bar the JSON names section, row and
column. The same JSON gives the same bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "benchmarks" / "results" / "chart.json"
THEMES = {
    "light": {"text": "#1f2328", "muted": "#59636e", "headrace": "#0b6e99", "other": "#8c959f"},
    "dark": {"text": "#f0f6fc", "muted": "#9198a1", "headrace": "#58b9e5", "other": "#6e7681"},
}
FONT = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
COLUMN, MARGIN, GAP = 384, 8, 36  # px: a panel, the edges of the chart, between panels of a row
COLUMNS = {"": 2, "-narrow": 1}  # panels of a row, by the ending of the file's name
NAMES, LABELS = 160, 62  # px: the names of bars, before them; their figures, behind them
# px: a bar, from bar to bar, the titles of a panel, below it
BAR, PITCH, HEAD, FOOT = 15, 22, 48, 24


def svg(data: dict[str, Any], theme: str, columns: int = 2) -> str:
    """The chart as an SVG on a transparent ground, `columns` panels a row; each panel has a
    linear scale of its own, from zero.
    """
    colours, panels = THEMES[theme], data["panels"]
    width = 2 * MARGIN + columns * COLUMN + (columns - 1) * GAP
    parts, top = [], float(MARGIN)
    for first in range(0, len(panels), columns):
        row = panels[first : first + columns]
        for column, panel in enumerate(row):
            parts += _panel(panel, MARGIN + column * (COLUMN + GAP), top, colours)
        top += HEAD + PITCH * max(len(panel["bars"]) for panel in row) + FOOT
    height = round(top - FOOT + MARGIN)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img"'
    )
    return "\n".join(
        [
            f'{head} font-family="{FONT}">',
            f"<title>{escape(description(data))}</title>",
            *parts,
            "</svg>",
            "",
        ]
    )


def description(data: dict[str, Any]) -> str:
    """The figures in words, for those who don't see the chart."""
    panels = []
    for panel in data["panels"]:
        bars = ", ".join(f"{bar['name']} {bar['label']}" for bar in panel["bars"])
        panels.append(f"{panel['title']}, {panel['detail']}: {bars}")
    return "; ".join(panels)


def _panel(panel: dict[str, Any], left: float, top: float, colours: dict[str, str]) -> list[str]:
    parts = [
        svg_text(
            left, top + 16, panel["title"], colours["text"], 'font-size="15" font-weight="600"'
        ),
        svg_text(left, top + 35, panel["detail"], colours["muted"], 'font-size="12.5"'),
    ]
    most = max(bar["value"] for bar in panel["bars"])
    for number, bar in enumerate(panel["bars"]):
        ours, y = bar["name"] == "headrace", top + HEAD + PITCH * number
        # a bar that nobody saw would look like a missing one
        length = max(2.0, (COLUMN - NAMES - LABELS) * bar["value"] / most)
        weight = 'font-size="13" font-weight="600"' if ours else 'font-size="13"'
        size = f'x="{left + NAMES:g}" y="{y:g}" width="{length:.1f}" height="{BAR}"'
        parts += [
            svg_text(left, y + 12, bar["name"], colours["text"], weight),
            f'<rect {size} rx="2" fill="{colours["headrace" if ours else "other"]}"/>',
            svg_text(left + NAMES + length + 6, y + 12, bar["label"], colours["text"], weight),
        ]
    return parts


def svg_text(x: float, y: float, text: str, colour: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:g}" fill="{colour}" {style}>{escape(text)}</text>'


def main() -> None:
    data = json.loads(DATA.read_text(encoding="utf-8"))
    for theme in THEMES:
        for ending, columns in COLUMNS.items():
            (ROOT / "docs" / "assets" / f"chart-{theme}{ending}.svg").write_text(
                svg(data, theme, columns), encoding="utf-8"
            )


if __name__ == "__main__":
    main()
