"""Reports a training in all loading modes: a table, whether the losses are equal, and a plot of
the speeds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MODES = ("lazy", "eager", "cached", "streaming")
LOOKS = {
    "lazy": ("#0072b2", "o", "-"),
    "eager": ("#d55e00", "s", "-"),
    "cached": ("#009e73", "^", "-"),
    "streaming": ("#aa4499", "D", ":"),
}
LOG_FROM = 8.0  # times the slowest: from there on, a linear axis would hide what is slow


@dataclass
class Epoch:
    """Sums over one epoch; its time begins with the object."""

    images: int = 0
    seconds: float = 0.0
    loss: float = 0.0
    right: int = 0

    def __post_init__(self) -> None:
        self._counted = time.perf_counter()

    def add(self, loss: torch.Tensor, scores: torch.Tensor, targets: torch.Tensor) -> None:
        """Counts a batch: its mean loss, scores [batch, classes] and targets [batch], and the
        time since the one before.
        """
        self.images += len(targets)
        self.loss += loss.item() * len(targets)
        self.right += int((scores.argmax(1) == targets).sum())
        now = time.perf_counter()  # when a GPU has given the loss
        self.seconds, self._counted = self.seconds + now - self._counted, now

    @property
    def sums(self) -> tuple[int, float, float, int]:
        """What `Epoch(*sums)` goes on from."""
        return self.images, self.seconds, self.loss, self.right

    @property
    def speed(self) -> float:
        """Images a second."""
        return self.images / max(self.seconds, 1e-9)

    @property
    def mean_loss(self) -> float:
        return self.loss / max(1, self.images)

    @property
    def accuracy(self) -> float:
        """Of the images as they were seen, before the step that learnt from them."""
        return self.right / max(1, self.images)

    def __str__(self) -> str:
        return (
            f"{self.speed:>8,.0f} img/s   loss {self.mean_loss!r:<20} accuracy {self.accuracy:6.1%}"
        )


def report_modes(runs: Mapping[str, Sequence[Epoch]], path: Path = Path("out/training.png")) -> int:
    """Prints what the modes took and learnt, and draws their speeds into `path`.

    Args:
        runs: the epochs of each mode.
        path: of the plot; without matplotlib it is left out, and the output says so.

    Returns:
        0; 1 where two modes differ in a loss.
    """
    first = next(iter(runs.values()))
    print(
        f"\n{table(runs)}\n\nepochs in img/s, the first one with the start-up; loss and accuracy "
        "are the last epoch's"
    )
    equal = all(
        [epoch.mean_loss for epoch in epochs] == [epoch.mean_loss for epoch in first]
        for epochs in runs.values()
    )
    print(f"losses equal in all modes: {'yes' if equal else 'no'}")
    try:
        draw_speeds(
            {mode: [epoch.speed for epoch in epochs] for mode, epochs in runs.items()},
            first[-1].images,
            path,
        )
        print(f"plot: {path}")
    except ImportError:
        print('no plot: matplotlib is missing, pip install "headrace[plot]"')
    return 0 if equal else 1


def table(runs: Mapping[str, Sequence[Epoch]]) -> str:
    """A line a mode, under one with the names of the columns."""
    rows = [
        [
            "mode",
            *(f"epoch {number + 1}" for number in range(len(next(iter(runs.values()))))),
            "loss",
            "accuracy",
        ]
    ]
    for mode, epochs in runs.items():
        rows.append(
            [
                mode,
                *(f"{epoch.speed:,.0f}" for epoch in epochs),
                repr(epochs[-1].mean_loss),
                f"{epochs[-1].accuracy:.1%}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )


def draw_speeds(speeds: Mapping[str, Sequence[float]], images: int, path: Path) -> None:
    """Writes a PNG. Needs matplotlib.

    Args:
        speeds: of each mode, the images a second of its epochs.
        images: how many an epoch has.
        path: the file to write.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 4.8), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    # the legend in the order in which the lines end
    for mode in sorted(speeds, key=lambda mode: -speeds[mode][-1]):
        colour, marker, line = LOOKS[mode]
        label = f"{mode}\n{speeds[mode][-1]:,.0f} img/s at the end"
        epochs = range(1, len(speeds[mode]) + 1)
        axes.plot(
            epochs,
            speeds[mode],
            color=colour,
            marker=marker,
            linestyle=line,
            markersize=7,
            linewidth=2,
            label=label,
        )
    _scale(axes, [speed for of_mode in speeds.values() for speed in of_mode])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(0.8, max(map(len, speeds.values())) + 0.2)
    axes.set_xlabel("epoch")
    axes.set_title(
        "Training: speed by epoch and loading mode",
        loc="left",
        fontsize=13,
        fontweight="bold",
        pad=22,
    )
    axes.annotate(
        f"{images:,} images an epoch",
        (0, 1),
        (0, 8),
        xycoords="axes fraction",
        textcoords="offset points",
        color="#555555",
    )
    axes.grid(axis="y", color="#dddddd")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, labelspacing=1.2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _scale(axes: Any, speeds: Sequence[float]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

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
