"""Draws the charts of docs/shuffling.md from `results/shuffling.json`, for light and for dark
pages.

`python benchmarks/shuffling_chart.py` writes docs/assets/shuffling-light.svg and
shuffling-dark.svg. The same JSON gives the same bytes.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from typing import Any
from xml.sax.saxutils import escape

from chart import FONT, ROOT, THEMES, svg_text

WIDTH, HEIGHT, LEFT, TOP, PANEL, TALL, GAP = 804, 300, 48, 58, 330, 190, 66
"""px: the chart, the place of the first panel, a panel, between the two."""
TICKS = (1, 4, 16, 32, 64)
BATCH = 64


def svg(data: dict[str, Any], theme: str) -> str:
    """Two panels over `interleave`: the entropy of a batch of 64, and the test loss."""
    colours = THEMES[theme]
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{FONT}">'
    parts = [*_entropy(data, colours), *_loss(data, colours)]
    return "\n".join([head, f"<title>{escape(description(data))}</title>", *parts, "</svg>", ""])


def description(data: dict[str, Any]) -> str:
    """What the chart shows, in words."""
    full = next(row for row in data["entropy"] if row["batch"] == BATCH and row["chunk"] == 1)
    rows = [row for row in data["entropy"] if row["batch"] == BATCH and row["chunk"] == 64]
    mixed = ", ".join(f"{row['measured']:.2f} with interleave {row['interleave']}" for row in rows)
    losses = ", ".join(
        f"{row['order']} {statistics.median(row['loss']):.3f}" for row in data["training"]
    )
    return (
        f"Entropy of a batch of 64, bits: {mixed}; full shuffle {full['measured']:.2f}. Test "
        f"loss: {losses}"
    )


def _entropy(data: dict[str, Any], colours: dict[str, str]) -> list[str]:
    rows = [row for row in data["entropy"] if row["batch"] == BATCH]
    full = next(row["measured"] for row in rows if row["chunk"] == 1)
    y = _scale(0, 6)
    parts = _frame(
        LEFT,
        "Entropy of a batch of 64",
        "bits; 100 classes, sorted; line: formula",
        [0, 2, 4, 6],
        "{:g}",
        y,
        colours,
    )
    line = sorted((row["interleave"], row["predicted"]) for row in rows if row["chunk"] == 64)
    path = " ".join(f"{LEFT + _x(interleave):.1f},{y(bits):.1f}" for interleave, bits in line)
    parts += [_across(LEFT, y(full), colours, "full shuffle")]
    parts += [
        f'<polyline points="{path}" fill="none" stroke="{colours["headrace"]}" stroke-width="2"/>'
    ]
    parts += [
        _dot(LEFT + _x(row["interleave"]), y(row["measured"]), colours)
        for row in rows
        if row["chunk"] >= 64
    ]
    return parts


def _loss(data: dict[str, Any], colours: dict[str, str]) -> list[str]:
    left = LEFT + PANEL + GAP
    rows = [row for row in data["training"] if row["interleave"]]
    full = data["training"][0]["loss"]
    values = [loss for row in rows for loss in row["loss"]] + full
    low, high = math.floor(min(values) * 20) / 20, math.ceil(max(values) * 20) / 20
    y = _scale(low, high)
    ticks = [low + part / 20 for part in range(round((high - low) * 20) + 1)]
    parts = _frame(
        left,
        "Test loss after training",
        f"median of {len(full)} seeds, lowest to highest",
        ticks,
        "{:.2f}",
        y,
        colours,
    )
    parts += [_across(left, y(statistics.median(full)), colours, "full shuffle")]
    for row in rows:
        x = left + _x(row["interleave"])
        ends = (
            f'x1="{x:.1f}" x2="{x:.1f}" y1="{y(min(row["loss"])):.1f}" '
            f'y2="{y(max(row["loss"])):.1f}"'
        )
        parts += [
            f'<line {ends} stroke="{colours["headrace"]}" stroke-width="2"/>',
            _dot(x, y(statistics.median(row["loss"])), colours),
        ]
    return parts


def _x(interleave: int) -> float:
    return 14 + math.log2(interleave) / 6 * (PANEL - 28)


def _scale(low: float, high: float) -> Callable[[float], float]:
    return lambda value: TOP + TALL * (high - value) / (high - low)


def _frame(
    left: int,
    title: str,
    detail: str,
    ticks: list[float],
    form: str,
    y: Callable[[float], float],
    colours: dict[str, str],
) -> list[str]:
    small = 'font-size="12"'
    parts = [
        svg_text(left - 30, 20, title, colours["text"], 'font-size="15" font-weight="600"'),
        svg_text(left - 30, 40, detail, colours["muted"], 'font-size="12.5"'),
        svg_text(
            left + PANEL / 2,
            TOP + TALL + 42,
            "interleave",
            colours["muted"],
            f'{small} text-anchor="middle"',
        ),
    ]
    for tick in ticks:
        edge = f'x1="{left}" x2="{left + PANEL}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"'
        parts.append(f'<line {edge} stroke="{colours["muted"]}" stroke-opacity="0.25"/>')
        parts.append(
            svg_text(
                left - 6,
                round(y(tick) + 4, 1),
                form.format(tick),
                colours["muted"],
                f'{small} text-anchor="end"',
            )
        )
    for tick in TICKS:
        parts.append(
            svg_text(
                left + _x(tick),
                TOP + TALL + 20,
                str(tick),
                colours["muted"],
                f'{small} text-anchor="middle"',
            )
        )
    return parts


def _across(left: int, y: float, colours: dict[str, str], name: str) -> str:
    line = (
        f'<line x1="{left}" x2="{left + PANEL}" y1="{y:.1f}" y2="{y:.1f}" '
        f'stroke="{colours["other"]}" stroke-dasharray="5 4"/>'
    )
    return line + svg_text(left + 6, round(y - 6, 1), name, colours["muted"], 'font-size="12"')


def _dot(x: float, y: float, colours: dict[str, str]) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colours["headrace"]}"/>'


def draw(data: dict[str, Any]) -> None:
    """Writes the charts."""
    for theme in THEMES:
        (ROOT / "docs" / "assets" / f"shuffling-{theme}.svg").write_text(
            svg(data, theme), encoding="utf-8"
        )


if __name__ == "__main__":
    results = ROOT / "benchmarks" / "results" / "shuffling.json"
    draw(json.loads(results.read_text(encoding="utf-8")))
