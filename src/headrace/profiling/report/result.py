"""What a profile has found: stages, advice, and the sentence that sums it up."""

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
"""A gain below this is within what two runs of the same loader differ by."""


@dataclass(slots=True)
class Stage:
    """One stage, measured by itself.

    Attributes:
        name: "read (cold)", "read (warm)", "decode", "transform", "sample", "collate", "workers", "device" or "step".
        samples_per_second: of one process, alone; of "workers" that of all of them, of "step" with batches that lie in memory.
        ceiling: samples a second of the same work with nothing around it; None: not known.
        ceiling_is: what that was.
        share: of the workers' time on batches while the loader ran; None: it is no part of that.
        is_limit: True if it holds the training back.
    """

    name: str
    samples_per_second: float
    ceiling: float | None = None
    ceiling_is: str = ""
    share: float | None = None
    is_limit: bool = False


@dataclass(slots=True)
class Advice:
    """A change, with the gain that is predicted and, where it was tried, what was measured.

    Attributes:
        name: an option, such as "num_workers", or the stage that would have to become faster.
        why: in words.
        code: to paste; "": there is no option that does it.
        predicted: by which the rate of the loop is multiplied.
        measured: the same, measured: the median of several rounds, each beside the loader as it is; None: not measured.
        spread: the least and the most of those rounds.
        not_measured: why not.
        options: of the loader that the change sets.
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
    """What `profile_dataloader` has found. As text a table; `as_dict()` for JSON, `save_html()` and `save_plot()` to look at.

    Attributes:
        loader: its repr.
        verdict: one sentence.
        limit: what holds the loop back: "step" (nothing is to be gained from data), "workers" (too few), or the stage.
        has_step: False: the loader was measured alone.
        samples_per_second: of the loop, with the step if there is one.
        loading_per_second: of the loader alone.
        free_per_second: of the step with batches that lie in memory; None without a step.
        most_gain: by which the rate grows if data cost nothing; None without a step.
        wait_fraction: share of the loop's time that it was blocked in the loader.
        gil_fraction: share of the time of the user's own code in which it holds the interpreter's lock; None: there is none, or it is not
            known.
        own_code: what that code is: "transform", "collate_fn" or "dataset".
        workers, cores: of the loader, and of the machine for this rank.
        stages: in the order in which a sample goes through them.
        advice: the largest gain first.
        config: the options of the loader, as they were resolved.
        batches: the last batches of the loop, for the time line: a `BatchTimes` each, as a dict.
        series: seconds, samples a second and bytes of memory (PSS of this process and its workers) over the loop.
        seconds: that the profile took.
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
        """The measured advice that gains most, if it is worth it; None: there is none."""
        worth = [one for one in self.advice if one.options and (one.measured or 0.0) >= WORTH]
        return max(worth, key=lambda one: one.measured or 0.0, default=None)

    def config_to_paste(self) -> str:
        """The call that makes the loader with the best of what was measured; "" where nothing was better."""
        return self.best.code if self.best else ""

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON can say it."""
        return asdict(self)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes one page that needs nothing from elsewhere."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(page_of(self.as_dict()))

    def save_plot(self, path: str | os.PathLike[str]) -> None:
        """Writes a picture (PNG, SVG or PDF, by the ending), which needs the extra `plot`.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        save_plot(self.as_dict(), path)

    def __str__(self) -> str:
        return Lines("\n".join(self.lines()))

    def lines(self) -> Iterator[str]:
        """The table as lines."""
        yield self.verdict
        yield ""
        yield f"the loop            {self.samples_per_second:>12,.1f} samples/s, {self.wait_fraction:.0%} of it waiting for data"
        if self.has_step:
            yield f"the loader alone    {self.loading_per_second:>12,.1f} samples/s"
        if self.free_per_second is not None:
            most = f"x{self.most_gain or 1.0:.2f} is the most that data can gain"
            yield f"data from memory    {self.free_per_second:>12,.1f} samples/s: {most}"
        yield ""
        yield f"{'stage':<13}{'samples/s':>12}  {'of ceiling':>10}  {'of work':>8}"
        for stage in self.stages:
            of_ceiling = "" if not stage.ceiling else f"{stage.samples_per_second / stage.ceiling:.0%}"
            share = "" if stage.share is None else f"{stage.share:.0%}"
            ceiling = f"  ceiling: {stage.ceiling_is}" if stage.ceiling_is else ""
            mark = "  <-- limit" if stage.is_limit else ""
            yield f"{stage.name:<13}{shown(stage.samples_per_second):>12}  {of_ceiling:>10}  {share:>8}{ceiling}{mark}"
        if self.gil_fraction is not None:
            does = "holds" if self.gil_fraction >= 0.5 else "lets go of"
            yield f"the {self.own_code} {does} the interpreter's lock ({self.gil_fraction:.0%} of its time held)"
        if self.advice:
            yield ""
            yield f"{'advice':<20}{'predicted':>10}{'measured':>10}   spread"
            for one in self.advice:
                measured = "" if one.measured is None else f"x{one.measured:.2f}"
                spread = f"x{one.spread[0]:.2f} to x{one.spread[1]:.2f}" if one.spread else one.not_measured
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
