"""Draws how fast each loading mode was, epoch by epoch. Needs matplotlib: pip install "headrace[plot]"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

LOOKS = {"lazy": ("#0072b2", "o", "-"), "eager": ("#d55e00", "s", "-"), "cached": ("#009e73", "^", "-"), "streaming": ("#aa4499", "D", ":")}
LOG_FROM = 8.0  # times the slowest: from there on, a linear axis would hide what is slow


def draw_speed(speeds: Mapping[str, Sequence[float]], start_up: Mapping[str, float], path: Path, title: str, subtitle: str) -> None:
    """Writes a PNG.

    Args:
        speeds: of each mode, the images a second of its epochs.
        start_up: of each mode, the seconds before its first epoch.
        path: the file to write.
        title, subtitle: one line each.
    """
    figure = Figure(figsize=(9, 4.8), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for mode in sorted(speeds, key=lambda mode: -speeds[mode][-1]):  # the legend in the order in which the lines end
        colour, marker, line = LOOKS[mode]
        before = f" (start-up {start_up[mode]:.1f} s)" if start_up[mode] >= 0.1 else ""
        label = f"{mode}{before}\n{speeds[mode][-1]:,.0f} img/s at the end"
        epochs = range(1, len(speeds[mode]) + 1)
        axes.plot(epochs, speeds[mode], color=colour, marker=marker, linestyle=line, markersize=7, linewidth=2, label=label)
    _scale(axes, [speed for of_mode in speeds.values() for speed in of_mode])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(0.8, max(map(len, speeds.values())) + 0.2)
    axes.set_xlabel("epoch")
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", pad=22)
    axes.annotate(subtitle, (0, 1), (0, 8), xycoords="axes fraction", textcoords="offset points", color="#555555")
    axes.grid(axis="y", color="#dddddd")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, labelspacing=1.2)
    figure.savefig(path)


def _scale(axes: Axes, speeds: Sequence[float]) -> None:
    axes.set_ylabel("images per second")
    if max(speeds) > LOG_FROM * min(speeds):
        axes.set_yscale("log")
        axes.set_ylim(0.8 * min(speeds), 1.25 * max(speeds))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylabel("images per second (logarithmic)")
    else:
        axes.set_ylim(0, 1.1 * max(speeds))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
