"""Trains in bfloat16 by autocast, with batches that are on the GPU before they are asked for; on
the CPU where there is no GPU.

# a folder of class folders; without: photographs are made, in ./out
python examples/train_mixed_precision.py photos/train
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from make_photos import make_photos
from torch import nn

from headrace import (
    HeadraceError,
    ImageDataset,
    RandomHorizontalFlip,
    RandomResizedCrop,
    create_dataloader,
    seed_everything,
)


def network(classes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, 2, 1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes))


def train(given: argparse.Namespace) -> None:
    seed_everything(7)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else "no GPU here: bfloat16 on the CPU, which shows the code, not the speed"
    )
    folder = given.folder or make_photos(Path("out") / "photos", given.images)
    # Images stay uint8, a quarter of the bytes, until they are on the GPU: there the loader
    # normalises them, on a stream of its own.
    augment = [RandomResizedCrop(given.size, scale=(0.5, 1)), RandomHorizontalFlip()]
    dataset = ImageDataset(folder, transform=augment, loading_mode="cached", seed=7)
    layout = torch.channels_last
    loader = create_dataloader(
        dataset,
        batch_size=32,
        seed=7,
        drop_last=True,
        num_workers=given.workers,
        device=device,
        memory_format=layout,
    )
    model = network(len(dataset.classes)).to(device, memory_format=layout)
    # weights stay float32; bfloat16 needs no GradScaler
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    print(f"device: {device} ({name})")
    for epoch in range(given.epochs):
        total = torch.zeros((), device=device)
        for images, targets in loader:  # float32 [32, 3, size, size], on the device
            with torch.autocast(device.type, torch.bfloat16):
                scores = model(images)
                loss = nn.functional.cross_entropy(scores, targets)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            total += loss.detach()
        stats = loader.get_stats()
        print(
            f"epoch {epoch + 1}: loss {float(total) / len(loader):.4f}   "
            f"{stats['samples_per_second']:,.0f} img/s   "
            f"scores {scores.dtype}, weights {next(model.parameters()).dtype}, batch on "
            f"{images.device}"
        )
    loader.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--images", type=int, default=600, help="how many to make")
    parser.add_argument("--size", type=int, default=96, help="pixels of a crop")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--workers", type=int)
    try:
        train(parser.parse_args())
    except HeadraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
