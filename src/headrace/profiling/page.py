"""Shows a profile, as `Profile.as_dict` gives it: an HTML page that needs nothing from elsewhere,
and a picture by matplotlib (extra `plot`).
"""

from __future__ import annotations

import html
import math
import os
from collections.abc import Iterator
from typing import Any

from headrace.errors import ConfigError

_STYLE = """
:root { --ink: #1d2430; --dim: #5d6775; --back: #fff; --line: #dfe3e9; --bar: #3f6fb5;
  --limit: #c4442e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --dim: #9aa5b4; --back: #14181f;
  --line: #2c343f; --bar: #6b9be0; --limit: #ef7a66; } }
body { margin: 0 auto; max-width: 70rem; padding: 1.5rem 1rem; color: var(--ink);
  background: var(--back); font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.35rem; } h2 { font-size: 1rem; margin-top: 2rem; } p { color: var(--dim); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .35rem .75rem .35rem 0; vertical-align: top;
  border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; }
.track { width: 50%; } .track i { display: block; height: 1.1rem; background: var(--bar); }
.limit { color: var(--limit); } .limit .track i { background: var(--limit); }
"""


def page_of(profile: dict[str, Any]) -> str:
    """The HTML page of a profile."""
    return "".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src ',
            "'unsafe-inline'\">\n",
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            '<link rel="icon" href="data:,">\n<title>headrace profile</title>\n',
            f"<style>{_STYLE}</style>\n</head>\n<body>\n",
            f"<h1>{_text(profile['verdict'])}</h1>\n<p>{_text(profile['loader'])}</p>\n",
            *_facts(profile),
            *_stages(profile["stages"]),
            *_advice(profile["advice"]),
            *_config(profile["config"]),
            "</body>\n</html>\n",
        ]
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _facts(profile: dict[str, Any]) -> Iterator[str]:
    facts = {
        "the loop": f"{profile['samples_per_second']:,.1f} samples/s",
        "waiting for data": f"{profile['wait_fraction']:.0%} of the loop's time",
        "the loader alone": f"{profile['loading_per_second']:,.1f} samples/s",
        "workers": f"{profile['workers']} on {profile['cores']} cores",
    }
    if profile["free_per_second"] is not None:
        facts["with data from memory"] = f"{profile['free_per_second']:,.1f} samples/s"
        facts["most that data can gain"] = f"x{profile['most_gain']:.2f}"
    yield "<table>\n"
    for name, value in facts.items():
        yield f"<tr><th>{name}</th><td>{value}</td></tr>\n"
    yield "</table>\n"


def _stages(stages: list[dict[str, Any]]) -> Iterator[str]:
    if not stages:
        return
    yield (
        '<h2>Stages</h2>\n<p>Samples a second on a logarithmic scale: of one worker; of "workers", '
        "all of them. Red: the limit.</p>\n<table>\n"
    )
    rates = [max(stage["samples_per_second"], 1e-9) for stage in stages]
    least = min(rates) / 3
    for stage, rate in zip(stages, rates, strict=True):
        width = 100 * math.log(rate / least) / math.log(max(rates) / least)
        share = ""
        if stage["share"] is not None:
            share = f"{stage['share']:.0%} of the workers' time"
        kind = "limit" if stage["is_limit"] else "stage"
        yield (
            f'<tr class="{kind}"><th>{_text(stage["name"])}</th><td class="track">'
            f'<i style="width:{width:.1f}%"></i></td><td>{rate:,.0f}/s</td><td>{share}</td></tr>\n'
        )
    yield "</table>\n"


def _advice(advice: list[dict[str, Any]]) -> Iterator[str]:
    yield "<h2>Advice</h2>\n"
    if not advice:
        yield "<p>No change that headrace knows of would make this loop faster.</p>\n"
        return
    yield '<div class="scroll"><table>\n<tr><th>change</th><th>predicted</th><th>measured</th>'
    yield "<th>why</th></tr>\n"
    for one in advice:
        measured = _text(one["not_measured"])
        if one["measured"] is not None:
            least, most = one["spread"]
            measured = f"x{one['measured']:.2f} (x{least:.2f} to x{most:.2f})"
        code = ""
        if one["code"]:
            code = f"<br><code>{_text(one['code'])}</code>"
        yield (
            f"<tr><td>{_text(one['name'])}</td><td>x{one['predicted']:.2f}</td>"
            f"<td>{measured}</td><td>{_text(one['why'])}{code}</td></tr>\n"
        )
    yield "</table></div>\n"


def _config(config: dict[str, Any]) -> Iterator[str]:
    options = ", ".join(f"{name}={value!r}" for name, value in config.items() if value is not None)
    yield f"<h2>Options of the loader</h2>\n<p><code>{_text(options)}</code></p>\n"


def save_plot(profile: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes the rates of the stages as a picture: PNG, SVG or PDF, by the ending."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "save_plot needs matplotlib: pip install 'headrace[plot]', or use save_html"
        ) from error
    stages = list(reversed(profile["stages"]))
    figure = Figure(figsize=(9, 2 + 0.4 * len(stages)), layout="constrained")
    bars = figure.subplots()
    colors = ["#c4442e" if stage["is_limit"] else "#3f6fb5" for stage in stages]
    rates = [stage["samples_per_second"] for stage in stages]
    bars.barh([stage["name"] for stage in stages], rates, color=colors)
    if stages:
        bars.set_xscale("log")
    bars.set_xlabel("samples/s of one worker (red: the limit)")
    figure.suptitle(profile["verdict"], fontsize=10, wrap=True)
    try:
        figure.savefig(path)
    except ValueError as error:
        raise ConfigError(f"save_plot: {os.fspath(path)}: {error}") from error
