"""Writes the report of `run_all.py`: a section each benchmark, with its tables and plots, the
machine and the versions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from doc_forms import FORMS, table_a_section

NAME_LENGTH = 40  # of a bar in a plot


def write_report(kept: Sequence[Mapping[str, Any]], folder: Path) -> Path:
    """Writes `report.md` and its plots into the folder.

    Args:
        kept: what `run_all.py` keeps of each benchmark, in the order of the report.
        folder: where to.

    Returns:
        The path of the report.
    """
    quick = any(one["quick"] for one in kept)
    lines = ["# Benchmarks", ""]
    if quick:
        lines += [
            "**A quick run: small data, two rounds. It shows that everything runs; its figures "
            "say nothing.**",
            "",
        ]
    lines += [
        *_machines(kept),
        "",
        "| benchmark | command | | load at the start |",
        "|---|---|---|--:|",
    ]
    for one in kept:
        load = f"{one['load']:.1f}" if "load" in one else ""
        lines.append(
            f"| [{one['question']}](#{_anchor(one['question'])}) | `{one['command']}` | "
            f"{_outcome(one)} | {load} |"
        )
    plot = _plotter()
    if plot is None:
        lines += ["", 'No plots: matplotlib is missing (`pip install "headrace[plot]"`).']
    for one in kept:
        lines += ["", f"## {one['question']}", "", *_section(one, folder, plot)]
    path = folder / "report.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _anchor(heading: str) -> str:
    return heading.lower().replace(" ", "-")


def _outcome(one: Mapping[str, Any]) -> str:
    for how in ("skipped", "failed"):
        if how in one:
            return f"{how}: {one[how]}".replace("|", "\\|")
    return f"{one['seconds']:,.0f} s"


def _machines(kept: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The machine and versions, each that there is once, with the days."""
    said: dict[str, list[str]] = {}
    for one in kept:
        said.setdefault(
            ", ".join(f"{key} {value}" for key, value in one["machine"].items()), []
        ).append(one["date"])
    for machine, dates in said.items():
        days = sorted(set(dates))
        yield f"{machine}. {days[0] if len(days) == 1 else f'{days[0]} to {days[-1]}'}."


def _section(one: Mapping[str, Any], folder: Path, plot: Any) -> Iterator[str]:
    yield f"`{one['command']}`: {_outcome(one)}"
    if "result" not in one:
        return
    result = one["result"]
    # of `common.run_sections`
    if isinstance(result, dict) and isinstance(result.get("sections"), dict):
        for number, (title, section) in enumerate(result["sections"].items()):
            yield from ("", f"### {title}", "", *table_a_section({"sections": {title: section}}))
            if plot is not None:
                picture = folder / f"{one['name']}-{number}.svg"
                speeds = {
                    name: row["median"]
                    for name, row in section["contestants"].items()
                    if "median" in row
                }
                if speeds:
                    plot(picture, speeds, section["unit"])
                    yield from ("", f"![{title}: {section['unit']}]({picture.name})")
    elif one["name"] in FORMS:
        yield from ("", *FORMS[one["name"]](result))
    else:
        yield from _any(result)


def _any(value: Any, title: str = "") -> Iterator[str]:
    """Tables, but of the machine, of whatever a script of its own form gives.

    A list of objects is a table, an object of numbers a table of two columns.
    """
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        rows = [{key: _cell(cell) for key, cell in row.items()} for row in value]
        columns = [
            key
            for key in dict.fromkeys(key for row in rows for key in row)
            if any(row.get(key) for row in rows)
        ]
        yield from _heading(title)
        yield from ("| " + " | ".join(columns) + " |", "|" + "---|" * len(columns))
        yield from ("| " + " | ".join(row.get(key) or "" for key in columns) + " |" for row in rows)
    elif isinstance(value, dict):
        plain = {key: _cell(cell) for key, cell in value.items() if _cell(cell)}
        if plain:
            yield from _heading(title)
            yield from (
                "| | |",
                "|---|---|",
                *(f"| {key} | {cell} |" for key, cell in plain.items()),
            )
        for key, inner in value.items():
            if not _cell(inner) and key != "machine":
                yield from _any(inner, f"{title}, {key}" if title else str(key))


def _heading(title: str) -> Iterator[str]:
    yield from ("", f"### {title}", "") if title else ("",)


def _cell(value: Any) -> str:
    """A plain value, or a short list of such, as text; "" for everything else."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, float):
        return (
            "-" if math.isnan(value) else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
        )
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, str):
        return " ".join(value.split()).replace("|", "\\|")[:200] or "-"
    if (
        isinstance(value, list)
        and 0 < len(value) <= 12
        and all(isinstance(one, int | float | str) for one in value)
    ):
        return ", ".join(map(_cell, value))
    return ""


def _plotter() -> Any:
    """A function that draws bars into a file; None without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return None

    def bars(path: Path, speeds: Mapping[str, float], unit: str) -> None:
        figure, axes = pyplot.subplots(figsize=(7, 0.6 + 0.3 * len(speeds)), layout="constrained")
        names = [
            name if len(name) <= NAME_LENGTH else name[: NAME_LENGTH - 1] + "…" for name in speeds
        ]
        colours = ["#2a6f97" if "headrace" in name else "#b8b8b8" for name in speeds]
        drawn = axes.barh(range(len(speeds)), list(speeds.values()), color=colours)
        axes.bar_label(drawn, [f"{speed:,.0f}" for speed in speeds.values()], padding=3, fontsize=8)
        axes.set_yticks(range(len(speeds)), names, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel(unit, fontsize=8)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        axes.tick_params(axis="x", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.12)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)

    return bars
