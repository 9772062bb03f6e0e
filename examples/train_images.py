"""Trains a small network on images in one loading mode, or in all four one after the other, and says what each of them costs.

    python examples/train_images.py --all-modes                         # photographs of its own
    python examples/train_images.py photos/train --mode cached          # a folder of class folders, or a packed train.h5
    python examples/train_images.py photos/train --all-modes --no-train # loading alone

Exit status: 0; 1 where --all-modes finds a loss that differs; 2 for an error; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from make_photos import make_photos
from torch import nn

from headrace import ConfigError, HeadraceError, ImageDataset, Loader, LoadingMode, create_dataloader, seed_everything

MODES = [mode.value for mode in (LoadingMode.LAZY, LoadingMode.EAGER, LoadingMode.CACHED, LoadingMode.STREAMING)]
SHUFFLES = {"true": True, "false": False, "block": "block"}


@dataclass
class Epoch:
    """Sums over one epoch."""

    images: int = 0
    seconds: float = 0.0
    loss: float = 0.0
    right: int = 0
    waited: float = 0.0
    hits: int = 0
    misses: int = 0

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


@dataclass
class Run:
    """What one loading mode took."""

    mode: str
    start_up: float = 0.0
    epochs: list[Epoch] = field(default_factory=list)
    peak: float = 0.0


class Learner:
    """A small convolutional network with its optimiser. The same seed gives the same network."""

    def __init__(self, classes: int, seed: int, device: str) -> None:
        seed_everything(seed, deterministic=True)
        layers: list[nn.Module] = []
        for before, after, size, stride in ((3, 32, 7, 4), (32, 64, 3, 1), (64, 128, 3, 1)):
            layers += [nn.Conv2d(before, after, size, stride, size // 2, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
            layers += [nn.MaxPool2d(2, ceil_mode=True)]
        self.features = nn.Sequential(*layers)
        self.network = nn.ModuleList([self.features, nn.Linear(128, classes)]).to(device)
        self.optimiser = torch.optim.AdamW(self.network.parameters(), lr=3e-3)

    def step(self, images: torch.Tensor, targets: torch.Tensor, sums: Epoch) -> None:
        """Learns from one batch."""
        scores = self.network[1](self.features(images).amax((2, 3)))  # amax: deterministic on every device
        loss = nn.functional.cross_entropy(scores, targets)
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        sums.loss += loss.item() * len(images)
        sums.right += int((scores.argmax(1) == targets).sum())

    def state_dict(self) -> dict[str, Any]:
        return {"network": self.network.state_dict(), "optimiser": self.optimiser.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["network"])
        self.optimiser.load_state_dict(state["optimiser"])


class Interrupted(Exception):
    """Ctrl-C, and the state is saved."""


def run_mode(given: argparse.Namespace, mode: str) -> Run:
    """Loads, and unless --no-train trains, for all epochs in one mode."""
    start = time.perf_counter()
    dataset = ImageDataset(given.path, image_size=given.image_size, loading_mode=mode, normalize=given.train, seed=given.seed)
    loader = create_dataloader(
        dataset, batch_size=given.batch_size, shuffle=SHUFFLES[given.shuffle], num_workers=given.workers, seed=given.seed,
        device=given.device,
    )  # fmt: skip
    run = Run(mode, time.perf_counter() - start)
    try:
        learner = Learner(_classes(dataset), given.seed, given.device) if given.train else None
        for sums in _epochs(given, run, loader, learner):
            learnt = f"   loss {sums.mean_loss!r:<20} accuracy {sums.accuracy:6.1%}" if given.train else ""
            print(f"  {mode:<9}  epoch {len(run.epochs)}/{given.epochs}  {sums.speed:>8,.0f} img/s{learnt}", flush=True)
        run.peak = loader.get_stats().get("peak_memory_usage", 0)
        return run
    finally:
        loader.close()
        dataset.close()


def _classes(dataset: ImageDataset) -> int:
    if dataset.targets is None:
        raise ConfigError("these images have no classes to learn: put them into class folders, or take --no-train")
    return len(dataset.classes) or int(max(dataset.targets)) + 1


def _epochs(given: argparse.Namespace, run: Run, loader: Loader, learner: Learner | None) -> Iterator[Epoch]:
    """The epochs, as they end; begun where --resume says, and saved where --save-state says."""
    if given.resume is not None and learner is not None:
        state = torch.load(given.resume, weights_only=True)
        learner.load_state_dict(state["learner"])
        loader.load_state_dict(state["loader"])
        run.epochs = [Epoch(**sums) for sums in state["epochs"]]
    while len(run.epochs) < given.epochs or (run.epochs and run.epochs[-1].images < len(loader.dataset)):
        if not run.epochs or run.epochs[-1].images >= len(loader.dataset):
            run.epochs.append(Epoch())
        loader.set_epoch(len(run.epochs) - 1)
        with _Interrupt(given.save_state is not None) as interrupt:
            _run_epoch(loader, learner, run.epochs[-1], interrupt)
        if given.save_state is not None and learner is not None:
            sums = [asdict(epoch) for epoch in run.epochs]
            torch.save({"learner": learner.state_dict(), "loader": loader.state_dict(), "epochs": sums}, given.save_state)
        if interrupt.came:
            raise Interrupted(f"stopped in epoch {len(run.epochs)}: --resume {given.save_state} goes on from there")
        yield run.epochs[-1]


def _run_epoch(loader: Loader, learner: Learner | None, sums: Epoch, interrupt: _Interrupt) -> None:
    before, start = loader.get_stats(), time.perf_counter()
    for images, targets in loader:
        if learner is not None:
            learner.step(images, targets, sums)
        sums.images += len(images)
        if interrupt.came:
            break
    sums.seconds += time.perf_counter() - start
    after = loader.get_stats()
    waited, hits, misses = (after[name] - before.get(name, 0) for name in ("wait_time", "cache_hits", "cache_misses"))
    sums.waited, sums.hits, sums.misses = sums.waited + waited, sums.hits + hits, sums.misses + misses


class _Interrupt:
    """Notes Ctrl-C, so that a step is not left half done."""

    def __init__(self, active: bool) -> None:
        self.came, self._active = False, active

    def _note(self, *_: object) -> None:
        self.came = True

    def __enter__(self) -> _Interrupt:
        self._old = signal.signal(signal.SIGINT, self._note) if self._active else None
        return self

    def __exit__(self, *_: object) -> None:
        if self._active:
            signal.signal(signal.SIGINT, self._old)


def table(runs: Sequence[Run], train: bool) -> str:
    """A line a mode."""
    head = ["mode", "start-up s", *(f"epoch {i} img/s" for i in range(1, len(runs[0].epochs) + 1)), "wait %", "hits %", "peak MB"]
    rows = [head + (["loss", "accuracy %"] if train else [])]
    for run in runs:
        last = run.epochs[-1]
        row = [run.mode, f"{run.start_up:.2f}", *(f"{epoch.speed:,.0f}" for epoch in run.epochs)]
        row += [f"{100 * last.waited / max(last.seconds, 1e-9):.0f}", f"{100 * last.hits / max(1, last.hits + last.misses):.0f}"]
        row += [f"{run.peak / 1e6:,.0f}"] + ([repr(last.mean_loss), f"{100 * last.accuracy:.1f}"] if train else [])
        rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))) for row in rows
    )


def compare(runs: Sequence[Run], train: bool) -> bool:
    """Says whether all modes gave the same losses, or how fast they loaded; False where losses differ."""
    if train:
        equal = all([e.mean_loss for e in run.epochs] == [e.mean_loss for e in runs[0].epochs] for run in runs)
        print(f"losses equal in all modes: {'yes' if equal else 'no'}")
        return equal
    if len(runs[0].epochs) > 1:
        speed = {run.mode: run.epochs[1].speed for run in runs}
        ratios = ", ".join(f"{mode} {speed[mode] / speed['lazy']:.1f} x" for mode in ("eager", "cached"))
        print(f"epoch 2 against lazy: {ratios}")
    return True


def plot(runs: Sequence[Run], path: Path, subject: str) -> bool:
    """Draws the speed of each epoch and mode; False where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
    except ImportError:
        return False
    looks = {"lazy": ("#0072b2", "o"), "eager": ("#d55e00", "s"), "cached": ("#009e73", "^"), "streaming": ("#aa4499", "D")}
    figure = Figure(figsize=(9, 4.8), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for run in sorted(runs, key=lambda run: -run.epochs[-1].speed):  # the legend in the order of the lines' ends
        speeds, (colour, marker) = [epoch.speed for epoch in run.epochs], looks[run.mode]
        label = f"{run.mode}\n{speeds[-1]:,.0f} img/s at the end, start-up {run.start_up:.1f} s"
        axes.plot(range(1, len(speeds) + 1), speeds, color=colour, marker=marker, markersize=7, linewidth=2, label=label)
    every = [epoch.speed for run in runs for epoch in run.epochs]
    if max(every) > 8 * min(every):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(0, 1.1 * max(every))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="epoch", ylabel="images per second", xlim=(0.8, len(runs[0].epochs) + 0.2))
    axes.set_title(subject, loc="left", fontsize=11)
    axes.grid(axis="y", color="#dddddd")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, labelspacing=1.2)
    figure.savefig(path)
    return True


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small network on images, and says what loading costs.")
    parser.add_argument("path", nargs="?", help="folder of class folders, or a packed .h5 file; without: makes photographs")
    parser.add_argument("--mode", choices=MODES, default="lazy")
    parser.add_argument("--all-modes", action="store_true", help="all four, one after the other, with the same seeds")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--workers", type=int, help="worker processes; without: chosen by headrace")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--shuffle", choices=SHUFFLES, default="true")
    parser.add_argument("--no-train", dest="train", action="store_false", help="load only, as uint8")
    parser.add_argument("--images", type=int, default=600, help="how many photographs to make")
    parser.add_argument("--resume", type=Path, metavar="STATE", help="go on where --save-state ended")
    parser.add_argument("--save-state", type=Path, metavar="STATE", help="save after each epoch, and at Ctrl-C")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the plot and the photographs (./out)")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args(arguments)
    if (given.resume or given.save_state) and (given.all_modes or not given.train):
        parser.error("--resume and --save-state are for training in one mode")
    if min(given.epochs, given.image_size, given.images) < 1:
        parser.error("--epochs, --image-size and --images must be at least 1")
    if given.device == "auto":
        given.device = "cuda" if torch.cuda.is_available() else "cpu"
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    try:
        if given.path is None:
            given.path = make_photos(given.out / f"photos-{given.images}", given.images)
        print(f"{'training on' if given.train else 'loading'} {given.path}, torch {torch.__version__} on {given.device}", flush=True)
        runs = [run_mode(given, mode) for mode in (MODES if given.all_modes else [given.mode])]
    except HeadraceError as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    except (Interrupted, KeyboardInterrupt) as error:
        print(error or "stopped", file=sys.stderr)
        return 130
    print(f"\n{table(runs, given.train)}\n")
    equal = not given.all_modes or compare(runs, given.train)
    what = "Training" if given.train else "Loading alone (uint8)"
    subject = f"{what}: {runs[0].epochs[-1].images:,} images at {given.image_size} x {given.image_size}, batches of {given.batch_size}"
    picture = given.out / ("training.png" if given.train else "loading.png")
    drawn = plot(runs, picture, subject)
    print(f"plot: {picture}" if drawn else 'no plot: matplotlib is missing, pip install "headrace[plot]"')
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
