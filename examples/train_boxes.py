"""Trains a small network to put a box around the one object in each image, and measures it on
images that it has not seen.

    python examples/train_boxes.py  # images and annotations of its own
    # annotations as COCO has them; the first object counts
    python examples/train_boxes.py street/images instances.json

Exit status: 0; 2 for an error.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from make_shapes import make_shapes
from torch import nn

from headrace import (
    HeadraceError,
    ImageDataset,
    RandomHorizontalFlip,
    create_dataloader,
    seed_everything,
)


def boxes_of(targets: list[dict[str, Any]], size: int) -> torch.Tensor:
    """The first box of each image, in parts of its sides: [batch, 4]."""
    return torch.stack([target["boxes"][0] for target in targets]) / size


def overlap(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Intersection over union of boxes, pair by pair: [batch]."""
    sides = (
        torch.minimum(one[:, 2:], other[:, 2:]) - torch.maximum(one[:, :2], other[:, :2])
    ).clamp(min=0)
    areas = [(boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(1) for boxes in (one, other)]
    return sides.prod(1) / (areas[0] + areas[1] - sides.prod(1)).clamp(min=1e-9)


def train(given: argparse.Namespace) -> None:
    seed_everything(given.seed)
    if given.images is None:
        folder = make_shapes(given.out)
        given.images, given.annotations = folder / "images", folder / "instances.json"
    options: dict[str, Any] = {
        "image_size": given.size,
        "loading_mode": "cached",
        "seed": given.seed,
    }
    dataset = ImageDataset(
        given.images, targets=given.annotations, transform=[RandomHorizontalFlip()], **options
    )
    seen, unseen = dataset.subset([len(target["boxes"]) > 0 for target in dataset.targets]).split(
        0.8, seed=given.seed, val_transform=[]
    )
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
    layers = [
        layer
        for before, after in ((3, 16), (16, 32), (32, 32))
        for layer in (nn.Conv2d(before, after, 3, 2, 1), nn.ReLU())
    ]
    model = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(64), nn.ReLU(), nn.Linear(64, 4))
    model(torch.zeros(1, 3, given.size, given.size))
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with dataset, loader, measured:
        for epoch in range(given.epochs):
            loss = torch.zeros(())
            # float32 [batch, 3, size, size], and a dict for each image
            for pictures, targets in loader:
                loss = nn.functional.smooth_l1_loss(model(pictures), boxes_of(targets, given.size))
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            with torch.no_grad():
                found = torch.cat(
                    [
                        overlap(model(pictures), boxes_of(targets, given.size))
                        for pictures, targets in measured
                    ]
                )
            print(
                f"epoch {epoch + 1}/{given.epochs}   loss {loss.item():.5f}   overlap with unseen "
                f"boxes {found.mean().item():.3f}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description="Trains a small network on images and boxes.")
    parser.add_argument("images", nargs="?", help="a folder; without: makes one")
    parser.add_argument("annotations", nargs="?", help="a JSON file as COCO has it")
    parser.add_argument(
        "--out", type=Path, default=Path("out/shapes"), help="folder for what is made (out/shapes)"
    )
    parser.add_argument("--workers", type=int, help="worker processes; without: chosen by headrace")
    for name, default in (("size", 64), ("epochs", 12), ("batch-size", 8), ("seed", 42)):
        parser.add_argument(f"--{name}", type=int, default=default)
    try:
        train(parser.parse_args())
    except HeadraceError as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
