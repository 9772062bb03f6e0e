"""Trains a small network on images in one loading mode, or in all four one after the other, and says what each of them costs.

    python examples/train_images.py --all-modes                         # photographs of its own
    python examples/train_images.py photos/train --mode cached          # a folder of class folders, or a packed train.h5
    python examples/train_images.py photos/train --all-modes --no-train # loading alone

Exit status: 0; 1 where --all-modes finds a loss that differs; 2 for an error; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # torch's threads leave their cores to the workers instead of spinning

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
    checksums: list[int] = field(default_factory=list)

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
    dataset = ImageDataset(given.path, image_size=given.image_size, loading_mode=LoadingMode(mode), normalize=given.train, seed=given.seed)
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
        run.peak = loader.get_stats().get("peak_memory_bytes", 0)
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
        saved = _read_state(given.resume)
        learner.load_state_dict(saved["learner"])
        loader.load_state_dict(saved["loader"])
        run.epochs = [Epoch(**sums) for sums in saved["epochs"]]
    size = len(loader.dataset)
    while len(run.epochs) < given.epochs or (run.epochs and run.epochs[-1].images < size):
        if not run.epochs or run.epochs[-1].images == size:
            run.epochs.append(Epoch())
        loader.set_epoch(len(run.epochs) - 1)  # a position that was loaded for this epoch stays
        with _Interrupt(given.save_state is not None) as interrupt:
            _run_epoch(loader, learner, run.epochs[-1], interrupt)
        if given.save_state is not None and learner is not None:
            sums = [asdict(epoch) for epoch in run.epochs]
            _write_state(given.save_state, {"learner": learner.state_dict(), "loader": loader.state_dict(), "epochs": sums})
        if interrupt.came:
            raise Interrupted(f"stopped in epoch {len(run.epochs)}: --resume {given.save_state} goes on from there")
        yield run.epochs[-1]


def _read_state(path: Path) -> dict[str, Any]:
    try:
        return torch.load(path, weights_only=True)
    except Exception as error:  # of many kinds, where the file is none of ours
        raise ConfigError(f"--resume {path}: {error}") from error


def _write_state(path: Path, state: dict[str, Any]) -> None:
    unfinished = path.with_name(f"{path.name}.unfinished")
    torch.save(state, unfinished)
    os.replace(unfinished, path)


def _run_epoch(loader: Loader, learner: Learner | None, sums: Epoch, interrupt: _Interrupt) -> None:
    before, start = loader.get_stats(), time.perf_counter()
    for images, targets in loader:
        if learner is not None:
            learner.step(images, targets, sums)
            sums.checksums.append(checksum(images, targets))  # after the step, to see what was written into the batch meanwhile
        sums.images += len(images)
        if interrupt.came:
            break
    sums.seconds += time.perf_counter() - start
    after = loader.get_stats()
    waited, hits, misses = (after.get(name, 0) - before.get(name, 0) for name in ("wait_time", "cache_hits", "cache_misses"))
    sums.waited, sums.hits, sums.misses = sums.waited + waited, sums.hits + hits, sums.misses + misses


def checksum(images: torch.Tensor, targets: torch.Tensor) -> int:
    """The bits of float32 images, taken for int64 and summed, and their int64 targets: changes with any single value."""
    values = images.flatten()
    pairs, rest = values[: len(values) // 2 * 2].view(torch.int64).sum(), values[len(values) // 2 * 2 :].view(torch.int32).sum()
    places = torch.arange(1, len(targets) + 1, device=targets.device)
    return int(pairs + rest + (targets * places).sum())


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
    """A line a mode, and one that says what the columns are."""
    head = ["mode", "start-up", *(f"epoch {i}" for i in range(1, len(runs[0].epochs) + 1)), "wait", "hits", "peak"]
    rows = [head + (["loss", "accuracy"] if train else [])]
    for run in runs:
        last = run.epochs[-1]
        row = [run.mode, f"{run.start_up:.2f} s", *(f"{epoch.speed:,.0f}" for epoch in run.epochs)]
        row += [f"{last.waited / max(last.seconds, 1e-9):.0%}", f"{last.hits / max(1, last.hits + last.misses):.0%}"]
        row += [f"{run.peak / 1e6:,.0f} MB"] + ([repr(last.mean_loss), f"{last.accuracy:.1%}"] if train else [])
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    learnt = ", loss and accuracy" if train else ""
    said = f"epochs in img/s; wait (for batches), hits (in memory){learnt} are the last epoch's; peak: this process and its workers"
    return "\n".join([*lines, "", said])


def compare(runs: Sequence[Run], train: bool) -> bool:
    """Says whether all modes gave the same losses, or how fast they loaded; False where losses differ."""
    if train:
        equal = all([e.mean_loss for e in run.epochs] == [e.mean_loss for e in runs[0].epochs] for run in runs)
        print(f"losses equal in all modes: {'yes' if equal else 'no'}")
        for run in () if equal else runs[1:]:
            print(f"  {run.mode} against {runs[0].mode}: {_difference(runs[0], run)}")
        return equal
    if len(runs[0].epochs) > 1:
        speed = {run.mode: run.epochs[1].speed for run in runs}
        ratios = ", ".join(f"{mode} {speed[mode] / speed['lazy']:.1f} x" for mode in ("eager", "cached"))
        print(f"epoch 2 against lazy: {ratios}")
    return True


def _difference(first: Run, other: Run) -> str:
    """The first batch that differs; where none does, the network's arithmetic is at fault."""
    for epoch, (one, two) in enumerate(zip(first.epochs, other.epochs, strict=True), 1):
        for batch, (mine, theirs) in enumerate(zip(one.checksums, two.checksums, strict=True)):
            if mine != theirs:
                return f"batch {batch} of epoch {epoch} differs, please report it"
        if one.mean_loss != two.mean_loss:
            return f"the losses of epoch {epoch} differ, and its batches are equal: torch calculated in another way"
    return "equal"


def draw(runs: Sequence[Run], given: argparse.Namespace) -> str:
    """Draws the speed of each epoch and mode, and says where; or what to install."""
    try:
        from draw_speed import draw_speed
    except ImportError:
        return 'no plot: matplotlib is missing, pip install "headrace[plot]"'
    path = given.out / ("training.png" if given.train else "loading.png")
    what = "Training" if given.train else "Loading alone, as uint8"
    subtitle = f"{runs[0].epochs[-1].images:,} images at {given.image_size} x {given.image_size}, batches of {given.batch_size}"
    speeds = {run.mode: [epoch.speed for epoch in run.epochs] for run in runs}
    draw_speed(speeds, {run.mode: run.start_up for run in runs}, path, f"{what}: speed by epoch and loading mode", subtitle)
    return f"plot: {path}"


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


def _where(device: str) -> str:
    """What the losses depend on beside the seeds: on a CPU they are rounded in another order by another number of threads."""
    cores = f", {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}" if device == "cpu" else ""
    return f"torch {torch.__version__} on {device}{cores}"


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    try:
        if given.path is None:
            given.path = make_photos(given.out / f"photos-{given.images}", given.images)
        print(f"{'training on' if given.train else 'loading'} {given.path}, {_where(given.device)}", flush=True)
        runs = [run_mode(given, mode) for mode in (MODES if given.all_modes else [given.mode])]
    except HeadraceError as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    except (Interrupted, KeyboardInterrupt) as error:
        print(error or "stopped", file=sys.stderr)
        return 130
    print(f"\n{table(runs, given.train)}")
    equal = not given.all_modes or compare(runs, given.train)
    print(draw(runs, given))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
