"""Draws a profile as one HTML page, which needs nothing from elsewhere."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from typing import Any

from headrace.monitor.stats import STAGES

_KINDS = (*STAGES, "other", "wait", "step")
_SPAN = 60  # batches of the time line: the last ones
_STYLE = """
:root { --ink: #1d2430; --dim: #5d6775; --back: #ffffff; --line: #dfe3e9; --bar: #3f6fb5;
  --limit: #c4442e; --ceiling: #b9c2cf;
  --read: #4c78a8; --decode: #f58518; --transform: #54a24b; --sample: #9d755d; --collate: #b279a2;
  --other: #9aa3ad; --wait: #e45756;
  --step: #72b7b2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --dim: #9aa5b4; --back: #14181f;
  --line: #2c343f; --bar: #6b9be0;
  --limit: #ef7a66; --ceiling: #465162; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 70rem; padding: 1.5rem 1rem 3rem;
  font: 16px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--back); }
h1 { font-size: 1.35rem; line-height: 1.35; margin: 0 0 .5rem; }
h2 { font-size: 1rem; margin: 2rem 0 .5rem; }
p, figcaption { color: var(--dim); margin: .25rem 0; font-size: .9rem; overflow-wrap: anywhere; }
.facts { display: flex; flex-wrap: wrap; gap: .5rem 2rem; margin: 1rem 0; padding: 0; }
.facts div { min-width: 8rem; }
.facts b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.facts span { color: var(--dim); font-size: .85rem; }
.stage { display: grid; grid-template-columns: 7rem 1fr 8.5rem; gap: .75rem; align-items: center;
  padding: .2rem 0; }
.stage.limit .name, .stage.limit .rate { color: var(--limit); font-weight: 600; }
.track { position: relative; height: 1.1rem; }
.track i { position: absolute; inset: 0 auto 0 0; border-radius: 2px; }
.ceiling { background: var(--ceiling); opacity: .6; }
.value { background: var(--bar); top: .2rem !important; bottom: .2rem !important; }
.limit .value { background: var(--limit); }
.rate { text-align: right; font-variant-numeric: tabular-nums; font-size: .9rem; }
.note { grid-column: 2 / 4; margin: -.3rem 0 .2rem; font-size: .8rem; }
figure { margin: 0; }
svg { display: block; width: 100%; border: 1px solid var(--line); border-radius: 3px; }
.lane { display: grid; grid-template-columns: 6rem 1fr; gap: .5rem; align-items: center;
  margin: .15rem 0; font-size: .8rem;
  color: var(--dim); }
.lane svg { height: 1.6rem; }
.axis { display: flex; justify-content: space-between; margin-left: 6.5rem; font-size: .8rem;
  color: var(--dim); }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1rem; font-size: .85rem;
  margin: .25rem 0 .5rem; padding: 0; list-style: none; }
.legend i { display: inline-block; width: .8rem; height: .8rem; margin-right: .35rem;
  vertical-align: -.05rem; border-radius: 2px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; padding: .35rem .75rem .35rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
td.n { white-space: nowrap; font-variant-numeric: tabular-nums; }
code { font: .85rem ui-monospace, monospace; overflow-wrap: anywhere; }
@media (max-width: 40rem) { .stage { grid-template-columns: 5.5rem 1fr; } .rate { grid-column: 2;
  text-align: left; margin-top: -.4rem; }
  table, tbody, tr, th, td { display: block; width: auto; border: 0; padding: 0; }
  tr { border-bottom: 1px solid var(--line); padding: .4rem 0; }
  tr:first-child { display: none; } td[data-is]:not(:empty)::before { content: attr(data-is) " ";
  color: var(--dim); }
  td.name { font-weight: 600; }
  .note { grid-column: 2; margin: 0; } .lane { grid-template-columns: 4rem 1fr; } .axis {
  margin-left: 4.5rem; } }
"""


def page_of(profile: dict[str, Any]) -> str:
    """The page of a profile, given as `Profile.as_dict` gives it."""
    return "".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src '
            "'unsafe-inline'\">\n",
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link '
            'rel="icon" href="data:,">\n',
            f"<title>headrace profile</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n",
            *_head(profile),
            *_stages(profile["stages"]),
            *_advice(profile["advice"]),
            *_time_line(profile["batches"]),
            *_series(profile["series"]),
            *_config(profile["config"]),
            "</body>\n</html>\n",
        ]
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _head(profile: dict[str, Any]) -> Iterator[str]:
    yield (
        "<h1 "
        f'id="verdict">{_text(profile["verdict"])}</h1>\n<p>{_text(profile["loader"])}</p>\n<div '
        'class="facts">\n'
    )
    facts = [
        (
            "the loop" if profile["has_step"] else "the loader",
            f"{profile['samples_per_second']:,.1f}",
            "samples/s",
        )
    ]
    facts.append(("waiting for data", f"{profile['wait_fraction']:.0%}", "of the loop's time"))
    if profile["has_step"]:
        facts.append(("the loader alone", f"{profile['loading_per_second']:,.1f}", "samples/s"))
    if profile["free_per_second"] is not None:
        facts.append(("with data from memory", f"{profile['free_per_second']:,.1f}", "samples/s"))
        facts.append(("most that data can gain", f"x{profile['most_gain']:.2f}", ""))
    facts.append(("workers", f"{profile['workers']}", f"on {profile['cores']} cores"))
    if profile["gil_fraction"] is not None:
        facts.append(
            (
                f"the {profile['own_code']} holds the interpreter's lock",
                f"{profile['gil_fraction']:.0%}",
                "of its time",
            )
        )
    for name, value, unit in facts:
        yield f"<div><span>{_text(name)}</span><b>{_text(value)}</b>"
        yield f"<span>{_text(unit)}</span></div>\n"
    yield "</div>\n"


def _stages(stages: Sequence[dict[str, Any]]) -> Iterator[str]:
    if not stages:
        return
    yield (
        "<h2>Stages, each by itself</h2>\n<p>Samples a second on a logarithmic scale: of one "
        'process; of "workers", all of them. '
    )
    yield "Grey: the ceiling, the same work with nothing around it.</p>\n"
    rates = [
        rate for stage in stages for rate in (stage["samples_per_second"], stage["ceiling"]) if rate
    ]
    least, most = min(rates) / 3, max(rates)
    for stage in stages:
        rate, ceiling = stage["samples_per_second"], stage["ceiling"]
        yield (
            f'<div class="stage{" limit" * stage["is_limit"]}"><span '
            f'class="name">{_text(stage["name"])}</span><span class="track">'
        )
        if ceiling:
            yield (
                '<i class="ceiling" '
                f'style="width:{100 * _on_scale(ceiling, least, most):.1f}%"></i>'
            )
        yield (
            f'<i class="value" style="width:{100 * _on_scale(rate, least, most):.1f}%"></i></span>'
        )
        of_ceiling = f" ({rate / ceiling:.0%})" if ceiling else ""
        yield f'<span class="rate">{rate:,.0f}/s{of_ceiling}</span>'
        notes = [f"{stage['share']:.0%} of the workers' time"] if stage["share"] is not None else []
        notes += [f"ceiling: {stage['ceiling_is']}"] if stage["ceiling_is"] else []
        notes = [*(["this is the limit"] if stage["is_limit"] else []), *notes]
        yield f'<p class="note">{_text("; ".join(notes))}</p></div>\n' if notes else "</div>\n"


def _on_scale(rate: float, least: float, most: float) -> float:
    if most <= least or rate <= 0:
        return 1.0
    return min(1.0, max(0.01, math.log(rate / least) / math.log(most / least)))


def _advice(advice: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "<h2>Advice</h2>\n"
    if not advice:
        yield "<p>Nothing that headrace knows of would make this loop faster.</p>\n"
        return
    yield (
        "<div "
        'class="scroll"><table>\n<tr><th>change</th><th>predicted</th><th>measured</th><th>spread</th><th>why</th></tr>\n'
    )
    for one in advice:
        measured = "" if one["measured"] is None else f"x{one['measured']:.2f}"
        spread = (
            f"x{one['spread'][0]:.2f} to x{one['spread'][1]:.2f}"
            if one["spread"]
            else one["not_measured"]
        )
        code = f"<br><code>{_text(one['code'])}</code>" if one["code"] else ""
        predicted = f'<td class="n" data-is="predicted">x{one["predicted"]:.2f}</td>'
        yield (
            f'<tr><td class="name">{_text(one["name"])}</td>{predicted}<td class="n" '
            f'data-is="measured">{measured}</td>'
        )
        yield f'<td data-is="spread">{_text(spread)}</td><td>{_text(one["why"])}{code}</td></tr>\n'
    yield "</table></div>\n"


def _time_line(batches: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A lane for each worker and one for the loop, over the same seconds."""
    batches = batches[-_SPAN:]
    if not batches:
        return
    lanes: dict[int, list[dict[str, Any]]] = {}
    for one in batches:
        lanes.setdefault(one["worker_pid"], []).append(one)
    start = min(one["received"] - one["wait_seconds"] - one["step_seconds"] for one in batches)
    end = max(one["received"] for one in batches)
    span = max(end - start, 1e-9)
    yield f"<h2>Time line of the last {len(batches)} batches</h2>\n<ul class='legend'>"
    kinds = {
        kind
        for one in batches
        for kind, _, seconds, _ in (*_of_worker(one), *_of_loop(one))
        if seconds > 0.001 * span / len(batches)
    }
    for kind in filter(kinds.__contains__, _KINDS):
        yield f'<li><i style="background:var(--{kind})"></i>{kind}</li>'
    yield "</ul>\n<figure>\n"
    for number, pid in enumerate(sorted(lanes)):
        yield _lane(
            f"worker {number}", (bar for one in lanes[pid] for bar in _of_worker(one)), start, span
        )
    yield _lane("the loop", (bar for one in batches for bar in _of_loop(one)), start, span)
    yield (
        f'<div class="axis"><span>0 s</span><span>{span / 2:.2f} s</span><span>{span:.2f} '
        "s</span></div>\n</figure>\n"
    )


_Bar = tuple[str, float, float, str]  # kind, when it begins, seconds, and what a pointer is told


def _of_worker(one: dict[str, Any]) -> Iterator[_Bar]:
    """The stages of a batch, one after the other: of stages that take turns, each in one piece."""
    at, left = one["began"], one["work_seconds"]
    title = f"batch {one['step']} of epoch {one['epoch']}"
    for kind in STAGES:
        seconds = min(one[f"{kind}_seconds"], left)
        if seconds > 0:
            yield kind, at, seconds, f"{title}: {kind} {1000 * seconds:.2f} ms"
        at, left = at + seconds, left - seconds
    if left > 1e-9:
        yield "other", at, left, f"{title}: other {1000 * left:.2f} ms"


def _of_loop(one: dict[str, Any]) -> Iterator[_Bar]:
    asked = one["received"] - one["wait_seconds"]
    title = f"batch {one['step']} of epoch {one['epoch']}"
    yield (
        "step",
        asked - one["step_seconds"],
        one["step_seconds"],
        f"before {title}: step {1000 * one['step_seconds']:.2f} ms",
    )
    yield "wait", asked, one["wait_seconds"], f"{title}: wait {1000 * one['wait_seconds']:.2f} ms"


def _lane(name: str, bars: Iterator[_Bar], start: float, span: float) -> str:
    drawn = []
    for kind, at, seconds, title in bars:
        left, right = max(at - start, 0.0), min(at + seconds - start, span)
        if right > left:
            x, width = 1000 * left / span, max(1000 * (right - left) / span, 0.4)
            drawn.append(
                f'<rect x="{x:.2f}" y="0" width="{width:.2f}" height="10" '
                f'fill="var(--{kind})"><title>{_text(title)}</title></rect>'
            )
    shapes = "".join(drawn)
    image = (
        '<svg viewBox="0 0 1000 10" preserveAspectRatio="none" role="img" '
        f'aria-label="{name}">{shapes}</svg>'
    )
    return f'<div class="lane"><span>{name}</span>{image}</div>\n'


def _series(series: Sequence[Sequence[float]]) -> Iterator[str]:
    if len(series) < 2:
        return
    times = [one[0] for one in series]
    memory = [one[2] / 1e9 for one in series]
    yield _curve("Throughput", "samples/s", times, [one[1] for one in series], "bar")
    yield _curve("Memory of this process and its workers", "GB", times, memory, "step")


def _curve(
    title: str, unit: str, times: Sequence[float], values: Sequence[float], color: str
) -> str:
    most, end = max(values) * 1.1 or 1.0, max(times) or 1.0
    points = " ".join(
        f"{1000 * time / end:.1f},{100 - 100 * value / most:.2f}"
        for time, value in zip(times, values, strict=True)
    )
    last = f"{values[-1]:,.1f}" if values[-1] >= 10 else f"{values[-1]:,.2f}"
    peak = f"{max(values):,.1f}" if max(values) >= 10 else f"{max(values):,.2f}"
    shape = (
        f'<polyline points="{points}" fill="none" stroke="var(--{color})" stroke-width="2" '
        'vector-effect="non-scaling-stroke"/>'
    )
    return (
        f'<h2>{title}</h2>\n<figure><svg viewBox="0 0 1000 100" preserveAspectRatio="none" '
        'style="height:7rem" role="img" '
        f'aria-label="{title}">{shape}</svg><figcaption>{unit}, from 0 to {peak} at most; {last} '
        f"at the end of {end:.1f} s"
        "</figcaption></figure>\n"
    )


def _config(config: dict[str, Any]) -> Iterator[str]:
    shown = ", ".join(f"{name}={value!r}" for name, value in config.items() if value is not None)
    yield f"<h2>Options of the loader</h2>\n<p><code>{_text(shown)}</code></p>\n"
