"""The result of a profile: stages, advice, and a one-sentence summary."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from headrace.display import Lines
from headrace.profiling.report.page import page_of
from headrace.profiling.report.plot import save_plot

WORTH = 1.08
"""A gain below this is within the variation between two runs of the same loader."""


@dataclass(slots=True)
class Stage:
    """One stage, measured separately.

    Attributes:
        name: "read (cold)", "read (warm)", "decode", "transform", "sample", "collate", "workers",
            "device" or "step".
        samples_per_second: rate of one process; for "workers" of all of them, for "step" with
            batches in memory.
        ceiling: samples per second of the same work without overhead. None: unknown.
        ceiling_is: what the ceiling was measured with.
        share: share of the workers' time on batches while the loader ran. None: the stage is not
            part of it.
        is_limit: True if this stage limits the loop.
    """

    name: str
    samples_per_second: float
    ceiling: float | None = None
    ceiling_is: str = ""
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
        options: options of the loader that the change sets.
    """

    name: str
    why: str
    code: str
    predicted: float
    measured: float | None = None
    spread: tuple[float, float] | None = None
    not_measured: str = ""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Profile:
    """The result of `profile_dataloader`. It prints as a table; `as_dict()` is for JSON,
    `save_html()` and `save_plot()` are for viewing.

    Attributes:
        loader: repr of the loader.
        verdict: one-sentence summary.
        limit: what limits the loop: "step" (faster loading gains nothing), "workers" (too few), or
            the stage.
        has_step: False if the loader was measured alone.
        samples_per_second: rate of the loop, with the step if there is one.
        loading_per_second: rate of the loader alone.
        free_per_second: rate of the step with batches in memory. None without a step.
        most_gain: factor by which the rate would grow if loading cost nothing. None without a step.
        wait_fraction: share of the loop's time in which it was blocked in the loader.
        gil_fraction: share of the time of the user's own code in which it holds the interpreter
            lock. None: there is no such code, or it is unknown.
        own_code: what that code is: "transform", "collate_fn" or "dataset".
        workers, cores: number of workers of the loader, and of cores of the machine for this rank.
        stages: the stages, in processing order.
        advice: all advice, largest gain first.
        config: the resolved options of the loader.
        batches: the last batches of the loop, for the time line: one `BatchTimes` each, as a dict.
        series: seconds, samples per second and bytes of memory (PSS of this process and its
            workers) over the loop.
        seconds: duration of the profile.
    """

    loader: str
    verdict: str
    limit: str
    has_step: bool
    samples_per_second: float
    loading_per_second: float
    free_per_second: float | None
    most_gain: float | None
    wait_fraction: float
    gil_fraction: float | None
    own_code: str
    workers: int
    cores: int
    stages: list[Stage] = field(default_factory=list)
    advice: list[Advice] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    batches: list[dict[str, Any]] = field(default_factory=list)
    series: list[tuple[float, float, int]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_limited_by_data(self) -> bool:
        """True if a faster loader would make the loop faster."""
        return self.limit != "step"

    @property
    def best(self) -> Advice | None:
        """The measured advice with the largest gain. None: no gain is large enough."""
        worth = [one for one in self.advice if one.options and (one.measured or 0.0) >= WORTH]
        return max(worth, key=lambda one: one.measured or 0.0, default=None)

    def config_to_paste(self) -> str:
        """The call that creates the loader with the best measured option. "": nothing was
        better.
        """
        return self.best.code if self.best else ""

    def as_dict(self) -> dict[str, Any]:
        """Returns the whole profile as JSON-compatible values."""
        return asdict(self)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes one self-contained HTML page."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(page_of(self.as_dict()))

    def save_plot(self, path: str | os.PathLike[str]) -> None:
        """Writes a picture (PNG, SVG or PDF, by extension). Needs the extra `plot`.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        save_plot(self.as_dict(), path)

    def __str__(self) -> str:
        return Lines("\n".join(self.lines()))

    def lines(self) -> Iterator[str]:
        """The lines of the table."""
        yield self.verdict
        yield ""
        yield (
            f"the loop            {self.samples_per_second:>12,.1f} samples/s, "
            f"{self.wait_fraction:.0%} of it waiting for data"
        )
        if self.has_step:
            yield f"the loader alone    {self.loading_per_second:>12,.1f} samples/s"
        if self.free_per_second is not None:
            most = f"x{self.most_gain or 1.0:.2f} is the most that data can gain"
            yield f"data from memory    {self.free_per_second:>12,.1f} samples/s: {most}"
        yield ""
        yield f"{'stage':<13}{'samples/s':>12}  {'of ceiling':>10}  {'of work':>8}"
        for stage in self.stages:
            of_ceiling = (
                "" if not stage.ceiling else f"{stage.samples_per_second / stage.ceiling:.0%}"
            )
            share = "" if stage.share is None else f"{stage.share:.0%}"
            ceiling = f"  ceiling: {stage.ceiling_is}" if stage.ceiling_is else ""
            mark = "  <-- limit" if stage.is_limit else ""
            yield (
                f"{stage.name:<13}{shown(stage.samples_per_second):>12}  {of_ceiling:>10}  "
                f"{share:>8}{ceiling}{mark}"
            )
        if self.gil_fraction is not None:
            does = "holds" if self.gil_fraction >= 0.5 else "lets go of"
            yield (
                f"the {self.own_code} {does} the interpreter's lock ({self.gil_fraction:.0%} of "
                "its time held)"
            )
        if self.advice:
            yield ""
            yield f"{'advice':<20}{'predicted':>10}{'measured':>10}   spread"
            for one in self.advice:
                measured = "" if one.measured is None else f"x{one.measured:.2f}"
                spread = (
                    f"x{one.spread[0]:.2f} to x{one.spread[1]:.2f}"
                    if one.spread
                    else one.not_measured
                )
                yield f"{one.name:<20}{f'x{one.predicted:.2f}':>10}{measured:>10}   {spread}"
                yield f"  {one.why}"
                if one.code:
                    yield f"  {one.code}"
        if self.best is not None:
            yield ""
            yield f"the best of what was measured: {self.config_to_paste()}"


def shown(rate: float) -> str:
    """A rate as people read it."""
    return "-" if not math.isfinite(rate) else f"{rate:,.0f}" if rate >= 100 else f"{rate:,.1f}"
