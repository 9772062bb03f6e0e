"""Trains a small network to find shapes in images with masks, and measures it on images that it has
not seen.

    python examples/train_masks.py                               # images and masks of its own
    # masks of the same names as images; class numbers as pixels
    python examples/train_masks.py street/images street/masks

Images and masks are cropped and mirrored by the same random numbers. Exit status: 0; 2 for an
error.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from make_shapes import make_shapes
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
    """Each pixel's scores are made of the 15 x 15 around it."""
    layers: list[nn.Module] = []
    for before, after, dilation in ((3, 16, 1), (16, 16, 2), (16, 16, 4)):
        layers += [
            nn.Conv2d(before, after, 3, padding=dilation, dilation=dilation),
            nn.BatchNorm2d(after),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.Conv2d(16, classes, 1))


def train(given: argparse.Namespace) -> None:
    seed_everything(given.seed)
    if given.images is None:
        folder = make_shapes(given.out)
        given.images, given.masks = folder / "images", folder / "masks"
    augment = [RandomResizedCrop(given.size, scale=(0.4, 1)), RandomHorizontalFlip()]
    dataset = ImageDataset(
        given.images, targets=given.masks, transform=augment, loading_mode="cached", seed=given.seed
    )
    seen, unseen = dataset.split(0.8, seed=given.seed, val_transform=[])  # those are only resized
    loader = create_dataloader(
        seen,
        batch_size=given.batch_size,
        num_workers=given.workers,
        seed=given.seed,
        drop_last=True,
    )
    measured = create_dataloader(
        unseen, batch_size=given.batch_size, num_workers=given.workers, shuffle=False
    )
    model = network(given.classes)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with dataset, loader, measured:
        for epoch in range(given.epochs):
            loss = torch.zeros(())
            # float32 [batch, 3, size, size], int64 [batch, size, size]
            for pictures, classes in loader:
                loss = nn.functional.cross_entropy(model(pictures), classes)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            both, either = torch.zeros(given.classes), torch.zeros(given.classes)
            for pictures, classes in measured:
                found = model(pictures).argmax(1)
                for number in range(given.classes):
                    both[number] += ((found == number) & (classes == number)).sum()
                    either[number] += ((found == number) | (classes == number)).sum()
            overlap = ", ".join(f"{share:.3f}" for share in (both / either.clamp(min=1)).tolist())
            print(
                f"epoch {epoch + 1}/{given.epochs}   loss {loss.item():.4f}   overlap of each "
                f"class with unseen masks {overlap}",
                flush=True,
            )


def main() -> int:
    parser = argparse.ArgumentParser(description="Trains a small network on images and masks.")
    parser.add_argument("images", nargs="?", help="a folder; without: makes one")
    parser.add_argument("masks", nargs="?", help="a folder of masks of the same names")
    parser.add_argument(
        "--out", type=Path, default=Path("out/shapes"), help="folder for what is made (out/shapes)"
    )
    parser.add_argument("--workers", type=int, help="worker processes; without: chosen by headrace")
    for name, default in (
        ("classes", 3),
        ("size", 64),
        ("epochs", 6),
        ("batch-size", 8),
        ("seed", 42),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    try:
        train(parser.parse_args())
    except HeadraceError as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
