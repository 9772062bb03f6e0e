"""The result of a profile: stages, advice, and a one-sentence summary; as a table, an HTML page, or
a picture by matplotlib (extra `plot`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from headrace.display import Lines
from headrace.errors import ConfigError

WORTH = 1.08
"""A gain below this is within the variation between two runs of the same loader."""

_HEAD = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>headrace profile</title>
<style>
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { margin: 0 auto; max-width: 70rem; padding: 1.5rem 1rem; overflow-wrap: break-word; }
h1 { font-size: 1.35rem; } pre { overflow-x: auto; } table { width: 100%; text-align: left; }
.track { width: 60%; } i { display: block; height: 1.1rem; background: #3f6fb5; }
.limit i { background: #c4442e; }
</style>
"""


@dataclass(slots=True)
class Stage:
    """The speed of one stage.

    Attributes:
        name: "read", "decode", "transform", "sample" (all work of a dataset of another library),
            "collate", "workers", "transfer" or "step".
        samples_per_second: rate of one worker; for "workers" of all of them, for "step" with
            batches in memory.
        share: share of the workers' time on batches while the loader ran. None: the stage is not
            part of it.
        is_limit: True if this stage limits the loop.
    """

    name: str
    samples_per_second: float
    share: float | None = None
    is_limit: bool = False


@dataclass(slots=True)
class Advice:
    """A change, with its predicted gain and, if it was tried, the measured one.

    Attributes:
        name: an option, such as "num_workers", or the stage that would have to become faster.
        why: the reason.
        code: code to paste. "": no option achieves it.
        predicted: factor by which the rate of the loop is predicted to grow.
        measured: measured factor: the median of several rounds, each next to the unchanged loader.
            None: not measured.
        spread: smallest and largest factor of these rounds.
        not_measured: why it was not measured.
        options: options that the change sets.
    """

    name: str
    why: str
    code: str
    predicted: float
    measured: float | None = None
    spread: tuple[float, float] | None = None
    not_measured: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def result(self) -> str:
        """The measured factor with its spread, or why there is none."""
        if self.measured is None or self.spread is None:
            return self.not_measured
        least, most = self.spread
        return f"x{self.measured:.2f} (x{least:.2f} to x{most:.2f})"

    @property
    def is_confirmed(self) -> bool:
        """True if the measured gain is large enough, and each round gained."""
        if self.measured is None or self.spread is None:
            return False
        return self.measured >= WORTH and self.spread[0] > 1


@dataclass(slots=True)
class Profile:
    """The result of `profile_dataloader`. It prints as a table; `as_dict()` is for JSON,
    `save_html()` and `save_plot()` are for viewing.

    Attributes:
        loader: repr of the loader.
        verdict: one-sentence summary.
        limit: what limits the loop: "step" (faster loading gains nothing), "workers" (too few), or
            the stage.
        samples_per_second: rate of the loop, with the step if there is one.
        loading_per_second: rate of the loader alone.
        free_per_second: rate of the step with batches in memory. None without a step.
        most_gain: factor by which the rate would grow if loading cost nothing. None without a step.
        wait_fraction: share of the loop's time in which it was blocked in the loader.
        workers, cores: number of workers of the loader, and of cores of the machine for this rank.
        stages: the stages, in processing order.
        advice: all advice, largest gain first.
        config: resolved options of the loader.
        seconds: duration of the profile.
    """

    loader: str
    verdict: str
    limit: str
    samples_per_second: float
    loading_per_second: float
    free_per_second: float | None
    most_gain: float | None
    wait_fraction: float
    workers: int
    cores: int
    stages: list[Stage] = field(default_factory=list)
    advice: list[Advice] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def best(self) -> Advice | None:
        """The measured advice, if its gain is confirmed. None: no such advice."""
        return next((advice for advice in self.advice if advice.is_confirmed), None)

    def config_to_paste(self) -> str:
        """The call that creates the loader with the measured option. "": nothing was better."""
        if self.best:
            return self.best.code
        return ""

    def as_dict(self) -> dict[str, Any]:
        """Returns the whole profile as JSON-compatible values."""
        return asdict(self)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes one HTML page that loads nothing from elsewhere: the stages as bars, the table,
        and the options of the loader.
        """
        rates = [max(stage.samples_per_second, 1e-9) for stage in self.stages]
        given = {name: value for name, value in self.config.items() if value is not None}
        options = ", ".join(f"{name}={value!r}" for name, value in given.items())
        with open(path, "w", encoding="utf-8") as file:
            file.write(
                f"{_HEAD}<h1>{escape(self.verdict)}</h1>\n<p>{escape(self.loader)}</p>\n"
                "<p>Samples a second on a logarithmic scale: of one worker; of "
                '"workers", all of them. Red: the limit.</p>\n<table>\n'
            )
            for stage, rate in zip(self.stages, rates, strict=True):
                scale = math.log(3 * rate / min(rates)) / math.log(3 * max(rates) / min(rates))
                kind = "limit" if stage.is_limit else "stage"
                file.write(
                    f'<tr class="{kind}"><th>{escape(stage.name)}</th><td class="track">'
                    f'<i style="width:{scale:.1%}"></i></td><td>{rate:,.0f}/s</td></tr>\n'
                )
            file.write(
                f"</table>\n<pre>{escape(str(self))}</pre>\n"
                f"<p>Options of the loader: <code>{escape(options)}</code></p>\n</html>\n"
            )

    def save_plot(self, path: str | os.PathLike[str]) -> None:
        """Writes a picture of the stages (PNG, SVG or PDF, by extension). Needs the extra `plot`.

        Raises:
            ConfigError: matplotlib is not installed, or it does not know the extension.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ConfigError(
                "save_plot needs matplotlib: pip install 'headrace[plot]', or use save_html"
            ) from error
        stages = list(reversed(self.stages))
        figure = Figure(figsize=(9, 2 + 0.4 * len(stages)), layout="constrained")
        bars = figure.subplots()
        colors = ["#c4442e" if stage.is_limit else "#3f6fb5" for stage in stages]
        rates = [stage.samples_per_second for stage in stages]
        bars.barh([stage.name for stage in stages], rates, color=colors)
        if stages:
            bars.set_xscale("log")
        bars.set_xlabel("samples/s of one worker (red: the limit)")
        figure.suptitle(self.verdict, fontsize=10, wrap=True)
        try:
            figure.savefig(path)
        except ValueError as error:
            raise ConfigError(f"save_plot: {os.fspath(path)}: {error}") from error

    def __str__(self) -> str:
        return Lines("\n".join(self.lines()))

    def lines(self) -> Iterator[str]:
        """The lines of the table."""
        yield self.verdict
        yield ""
        yield (
            f"the loop                {self.samples_per_second:,.1f} samples/s, "
            f"{self.wait_fraction:.0%} of it waiting for data"
        )
        yield (
            f"the loader alone        {self.loading_per_second:,.1f} samples/s, "
            f"num_workers={self.workers} on {self.cores} cores"
        )
        if self.free_per_second is not None:
            yield (
                f"data from memory        {self.free_per_second:,.1f} samples/s: "
                f"x{self.most_gain:.2f} is the most that data can gain"
            )
        yield ""
        yield f"{'stage':<13}{'samples/s':>12}  {'of work':>8}"
        for stage in self.stages:
            share = ""
            if stage.share is not None:
                share = f"{stage.share:.0%}"
            mark = "  <-- limit" if stage.is_limit else ""
            yield f"{stage.name:<13}{stage.samples_per_second:>12,.1f}  {share:>8}{mark}"
        if self.advice:
            yield ""
            yield f"{'advice':<20}{'predicted':>10}   measured"
        for advice in self.advice:
            predicted = f"x{advice.predicted:.2f}"
            yield f"{advice.name:<20}{predicted:>10}   {advice.result}".rstrip()
            yield f"  {advice.why}"
            if advice.code:
                yield f"  {advice.code}"
