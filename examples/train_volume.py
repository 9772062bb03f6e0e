"""Trains a small network to find cells in patches of an OME-Zarr volume, and measures it on a part that it has not seen.

    python examples/train_volume.py                                   # a volume of its own
    python examples/train_volume.py image.zarr --labels cells         # an image of OME-NGFF 0.4 or 0.5 with labels
    python examples/train_volume.py image.zarr --labels cells --scale 0.5   # at the level whose voxels have about that size

Three quarters of the volume, along its last axis, are trained on, with patches that overlap by half and are flipped together with their
labels; the last quarter is measured on. Before it trains, it checks that labels lie where the image says: a threshold of the image fits
them best unshifted.

Exit status: 0; 1 where labels fit better when they are shifted; 2 for an error; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # torch's threads leave their cores to the workers instead of spinning

import torch
from make_volume import make_volume
from torch import nn

from headrace import HeadraceError, ZarrDataset, create_dataloader, seed_everything

MODES = ["lazy", "eager", "cached", "streaming"]


def flip(patch: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mirrors both along the same random axes; seeded by headrace, by epoch and sample."""
    axes = [axis for axis in (-3, -2, -1) if torch.rand(()) < 0.5]
    return patch.flip(axes), labels.flip(axes)


class Network(nn.Module):
    """Four convolutions; each voxel's score is made of the 13 x 13 x 13 around it."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after, dilation in ((1, 12, 1), (12, 16, 2), (16, 16, 2)):
            layers += [nn.Conv3d(before, after, 3, padding=dilation, dilation=dilation), nn.BatchNorm3d(after), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Conv3d(16, 1, 3, padding=1))

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return self.layers(patches[:, None] / 65535 * 4 - 1)[:, 0]


def open_parts(given: argparse.Namespace) -> tuple[ZarrDataset, ZarrDataset]:
    """Patches of the part to train on and of the part to measure on; both of one level."""
    options = {"patch_shape": given.patch, "scale": given.scale, "dtype": "float32", "loading_mode": given.mode, "seed": given.seed}
    whole = ZarrDataset(given.path, None, target_name=given.labels, **options)
    shape = [last + extent for last, extent in zip(whole.corner_of(len(whole) - 1), given.patch, strict=True)]
    cut = max(given.patch[-1], shape[-1] * 3 // 4)
    whole.close()
    halves = [max(1, extent // 2) for extent in given.patch]
    seen = [((0, 0, 0), (*shape[:-1], cut))]
    unseen = [((0, 0, cut), tuple(shape))]
    train = ZarrDataset(given.path, None, target_name=given.labels, stride=halves, edges="shift", boxes=seen, transforms=flip, **options)
    return train, ZarrDataset(given.path, None, target_name=given.labels, boxes=unseen, **options)


def overlap(found: torch.Tensor, labels: torch.Tensor) -> tuple[int, int]:
    """Voxels in both, and in either."""
    return int((found & labels).sum()), int((found | labels).sum())


def is_aligned(dataset: ZarrDataset) -> bool:
    """Says how well a threshold of the image fits the labels, and the labels shifted by a voxel; is the first best?"""
    shifts = [(0, 0, 0), *(tuple(by if axis == along else 0 for along in range(3)) for axis in range(3) for by in (-1, 1))]
    sums = {shift: [0, 0] for shift in shifts}
    for patch, labels in (dataset[index] for index in range(len(dataset))):
        bright, cells = patch > (patch.min() + patch.max()) / 2, labels > 0
        for shift, both in sums.items():
            inside = (slice(1, -1),) * 3
            one, either = overlap(bright[inside], cells.roll(shift, (0, 1, 2))[inside])
            both[0], both[1] = both[0] + one, both[1] + either
    fits = {shift: both / max(1, either) for shift, (both, either) in sums.items()}
    best = max(fits.values())
    print(f"a threshold fits the labels to {fits[0, 0, 0]:.3f}, and labels shifted by a voxel to {max(list(fits.values())[1:]):.3f}")
    return fits[0, 0, 0] == best


def train(given: argparse.Namespace) -> bool:
    """Trains and measures; False where labels don't lie where the image says."""
    seed_everything(given.seed, deterministic=True)
    seen, unseen = open_parts(given)
    print(seen.explain().splitlines()[2], f"\n{len(seen):,} patches to train on, {len(unseen):,} to measure on", sep="", flush=True)
    aligned = is_aligned(unseen)
    network = Network().to(given.device)
    optimiser = torch.optim.AdamW(network.parameters(), lr=4e-3)
    options = {"batch_size": given.batch_size, "num_workers": given.workers, "seed": given.seed, "device": given.device}
    loader = create_dataloader(seen, shuffle="block", drop_last=True, **options)
    measured = create_dataloader(unseen, shuffle=False, **options)
    try:
        for epoch in range(1, given.epochs + 1):
            start, losses = time.perf_counter(), []
            network.train()
            for patches, labels in loader:
                scores, cells = network(patches), (labels > 0).float()
                loss = nn.functional.binary_cross_entropy_with_logits(scores, cells)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                losses.append(loss.item())
            seconds = time.perf_counter() - start
            network.eval()
            both = either = 0
            with torch.no_grad():
                for patches, labels in measured:
                    one, other = overlap(network(patches) > 0, labels > 0)
                    both, either = both + one, either + other
            mean = sum(losses) / max(1, len(losses))
            rest = f"overlap with unseen labels {both / max(1, either):.3f}   waited {loader.get_stats()['wait_fraction']:.0%}"
            print(
                f"epoch {epoch}/{given.epochs}   {len(losses) * given.batch_size / seconds:,.1f} patches/s   loss {mean:.4f}   {rest}",
                flush=True,
            )
    finally:
        for one in (loader, measured, seen, unseen):
            one.close()
    return aligned


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small network on patches of an OME-Zarr volume with labels.")
    parser.add_argument("path", nargs="?", type=Path, help="an image of OME-NGFF with axes z, y, x; without: makes one")
    parser.add_argument("--labels", default="cells", help="name of its labels (cells)")
    parser.add_argument("--scale", type=float, help="voxel size in the image's unit; without: the finest level")
    parser.add_argument("--patch", type=int, nargs=3, default=(16, 32, 32), metavar=("Z", "Y", "X"), help="voxels (16 32 32)")
    parser.add_argument("--mode", choices=MODES, default="lazy")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--workers", type=int, help="worker processes; without: chosen by headrace")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the volume that is made (./out)")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args(arguments)
    if min(given.epochs, given.batch_size, *given.patch) < 1:
        parser.error("--epochs, --batch-size and --patch must be at least 1")
    if given.device == "auto":
        given.device = "cuda" if torch.cuda.is_available() else "cpu"
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    try:
        if given.path is None:
            given.path = make_volume(given.out / "cells.zarr")
        print(f"training on {given.path}, torch {torch.__version__} on {given.device}", flush=True)
        return 0 if train(given) else 1
    except HeadraceError as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
