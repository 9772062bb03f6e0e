"""Trains a small network on photographs in one loading mode, or in all four, and compares their
losses (exit status 1: they differ).

python examples/train_images.py --all-modes  # photographs of its own, made in ./out
# a folder of class folders, or a packed train.h5
python examples/train_images.py photos/train --mode cached
# Ctrl-C saves the state; the same command goes on from there
python examples/train_images.py photos/train --state state.pt
"""

import argparse
import os
import signal
import sys
from pathlib import Path

# torch's threads leave their cores to the workers instead of spinning
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from make_photos import make_photos
from report_modes import MODES, Epoch, report_modes
from torch import nn

from headrace import ConfigError, HeadraceError, ImageDataset, create_dataloader, seed_everything


class Network(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after, size, stride in ((3, 32, 7, 4), (32, 64, 3, 1), (64, 128, 3, 1)):
            convolution = nn.Conv2d(before, after, size, stride, size // 2, bias=False)
            layers += [
                convolution,
                nn.BatchNorm2d(after),
                nn.ReLU(),
                nn.MaxPool2d(2, ceil_mode=True),
            ]
        self.features, self.scores = nn.Sequential(*layers), nn.Linear(128, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        # amax: deterministic on every device
        return self.scores(self.features(images).amax((2, 3)))


def train(given: argparse.Namespace, mode: str) -> list[Epoch]:
    epochs, interrupts = [Epoch()], []
    seed_everything(given.seed, deterministic=True)
    dataset = ImageDataset(given.path, image_size=given.image_size, loading_mode=mode)
    if not dataset.classes:
        raise ConfigError(f"{given.path} has no classes to learn: use a folder of class folders")
    # one order in all modes
    options = {
        "shuffle": True,
        "num_workers": given.workers,
        "seed": given.seed,
        "device": given.device,
    }
    loader = create_dataloader(dataset, batch_size=given.batch_size, **options)
    network = Network(len(dataset.classes)).to(given.device)
    optimiser = torch.optim.AdamW(network.parameters(), lr=3e-3)
    parts = {"network": network, "optimiser": optimiser, "loader": loader}
    if given.state and given.state.exists():
        saved = torch.load(given.state, weights_only=True)
        epochs = [Epoch(*sums) for sums in saved.pop("epochs")]
        for name, state in saved.items():
            parts[name].load_state_dict(state)
    if given.state:  # Ctrl-C is noted, so that no step is left half done
        signal.signal(signal.SIGINT, lambda *_: interrupts.append(True))
    with dataset, loader:
        while len(epochs) <= given.epochs:
            loader.set_epoch(len(epochs) - 1)  # a position that was loaded for this epoch stays
            for images, targets in loader:  # float32 [batch, 3, size, size], int64 [batch]
                scores = network(images)
                loss = nn.functional.cross_entropy(scores, targets)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                epochs[-1].add(loss, scores, targets)
                if interrupts:
                    break
            print(f"{mode:<9}  epoch {len(epochs)}/{given.epochs}  {epochs[-1]}", flush=True)
            if epochs[-1].images == len(dataset):
                epochs.append(Epoch())
            if given.state:
                states = {name: part.state_dict() for name, part in parts.items()}
                torch.save(
                    {"epochs": [epoch.sums for epoch in epochs], **states},
                    f"{given.state}.unfinished",
                )
                os.replace(f"{given.state}.unfinished", given.state)
            if interrupts:
                sys.exit(130)
    return epochs[:-1]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", nargs="?", help="without: photographs are made, in ./out")
    parser.add_argument("--mode", default="lazy", help="lazy, eager, cached or streaming")
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--all-modes",
        action="store_true",
        help="all four, one after the other, with the same seeds",
    )
    either.add_argument(
        "--state",
        type=Path,
        help="a file that is loaded if it exists, and saved after each epoch and at Ctrl-C",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, default in (
        ("images", 600),
        ("epochs", 4),
        ("image-size", 224),
        ("batch-size", 64),
        ("seed", 42),
        ("workers", None),
    ):
        parser.add_argument(
            f"--{name}",
            type=int,
            default=default,
            help=f"default: {default or 'chosen by headrace'}",
        )
    given = parser.parse_args()
    try:
        given.path = given.path or make_photos(Path("out") / f"photos-{given.images}", given.images)
        runs = {mode: train(given, mode) for mode in (MODES if given.all_modes else [given.mode])}
    except HeadraceError as error:
        parser.exit(2, f"error: {str(error).splitlines()[0]}\n")
    return report_modes(runs) if given.all_modes else 0


if __name__ == "__main__":
    sys.exit(main())
