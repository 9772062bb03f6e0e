"""Draws a profile as a picture, with matplotlib (extra `plot`)."""

from __future__ import annotations

import os
from typing import Any

from headrace.errors import ConfigError

_COLORS = {"value": "#3f6fb5", "limit": "#c4442e", "ceiling": "#c6cdd8"}


def save_plot(profile: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes the stages with their ceilings, and the throughput over time; by the ending a PNG, SVG
    or PDF.

    Args:
        profile: as `Profile.as_dict` gives it.
        path: of the picture.

    Raises:
        ConfigError: matplotlib is not installed, or it knows no such ending.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "save_plot needs matplotlib: pip install 'headrace[plot]', or use save_html"
        ) from error
    stages = list(reversed(profile["stages"]))
    figure = Figure(figsize=(9, 2.2 + 0.4 * len(stages) + 2), layout="constrained")
    bars, curve = figure.subplots(2, 1, height_ratios=[max(1, len(stages)), 4])
    names = [stage["name"] for stage in stages]
    colors = [_COLORS["limit" if stage["is_limit"] else "value"] for stage in stages]
    bars.barh(
        names, [stage["ceiling"] or 0.0 for stage in stages], color=_COLORS["ceiling"], height=0.8
    )
    bars.barh(names, [stage["samples_per_second"] for stage in stages], color=colors, height=0.5)
    if stages:
        bars.set_xscale("log")
    bars.set_xlabel("samples/s by itself (grey: ceiling; red: the limit)")
    curve.plot(
        [one[0] for one in profile["series"]],
        [one[1] for one in profile["series"]],
        color=_COLORS["value"],
    )
    curve.set_ylim(bottom=0)
    curve.set_xlabel("s")
    curve.set_ylabel("samples/s")
    figure.suptitle(profile["verdict"], fontsize=10, wrap=True)
    try:
        figure.savefig(path)
    except ValueError as error:
        raise ConfigError(f"save_plot: {os.fspath(path)}: {error}") from error
