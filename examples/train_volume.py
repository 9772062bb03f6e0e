"""Trains a small network to find cells in patches of an OME-Zarr volume, and measures it on a part
that it has not seen.

    python examples/train_volume.py  # a volume of its own, in ./out
    # an image of OME-NGFF 0.4 or 0.5 with axes z, y, x and labels
    python examples/train_volume.py image.zarr --labels cells
    # at the level whose voxels have about that size
    python examples/train_volume.py image.zarr --labels cells --scale 0.5

Three quarters of the volume, along its last axis, are trained on, with patches that overlap by half
and are flipped together with their labels; the last quarter is measured on.
"""

import argparse
import os
from pathlib import Path

# torch's threads leave their cores to the workers instead of spinning
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from make_volume import make_volume
from torch import nn

from headrace import HeadraceError, ZarrDataset, create_dataloader, seed_everything


def flip(patch: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mirrors both along the same random axes; seeded by headrace, by epoch and sample."""
    axes = [axis for axis in (-3, -2, -1) if torch.rand(()) < 0.5]
    return patch.flip(axes), labels.flip(axes)


def network() -> nn.Sequential:
    """Four convolutions; each voxel's score is made of the 13 x 13 x 13 around it."""
    layers: list[nn.Module] = [nn.BatchNorm3d(1)]
    for before, after, dilation in ((1, 12, 1), (12, 16, 2), (16, 16, 2)):
        layers += [
            nn.Conv3d(before, after, 3, padding=dilation, dilation=dilation),
            nn.BatchNorm3d(after),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.Conv3d(16, 1, 3, padding=1))


def open_parts(given: argparse.Namespace) -> tuple[ZarrDataset, ZarrDataset]:
    """Patches of the part to train on and of the part to measure on; both of one level."""
    path, patch = given.path or make_volume(Path("out") / "cells.zarr"), given.patch
    options = {
        "target_name": given.labels,
        "patch_shape": patch,
        "scale": given.scale,
        "dtype": "float32",
        "loading_mode": given.mode,
    }
    with ZarrDataset(path, **options) as whole:
        print(whole.explain().splitlines()[2])
        depth, height, width = (
            last + extent
            for last, extent in zip(whole.corner_of(len(whole) - 1), patch, strict=True)
        )
    cut = max(patch[-1], width * 3 // 4)
    seen, unseen = ((0, 0, 0), (depth, height, cut)), ((0, 0, cut), (depth, height, width))
    halves = [max(1, extent // 2) for extent in patch]
    train = ZarrDataset(
        path,
        stride=halves,
        edges="shift",
        boxes=[seen],
        transforms=flip,
        seed=given.seed,
        **options,
    )
    return train, ZarrDataset(path, boxes=[unseen], **options)


def train(given: argparse.Namespace) -> None:
    seed_everything(given.seed, deterministic=True)
    seen, unseen = open_parts(given)
    print(
        f"{len(seen):,} patches to train on, {len(unseen):,} to measure on, torch "
        f"{torch.__version__}",
        flush=True,
    )
    model = network().to(given.device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3)
    options = {
        "batch_size": given.batch_size,
        "num_workers": given.workers,
        "seed": given.seed,
        "device": given.device,
    }
    loader = create_dataloader(seen, shuffle="block", drop_last=True, **options)
    measured = create_dataloader(unseen, shuffle=False, **options)
    with seen, unseen, loader, measured:
        for epoch in range(given.epochs):
            losses, both, either = [], 0, 0
            model.train()
            for patches, labels in loader:  # float32 and the labels' dtype, [batch, *patch]
                loss = nn.functional.binary_cross_entropy_with_logits(
                    model(patches[:, None])[:, 0], (labels > 0).float()
                )
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                losses.append(loss.item())
            model.eval()
            with torch.no_grad():
                for patches, labels in measured:
                    found, cells = model(patches[:, None])[:, 0] > 0, labels > 0
                    both, either = (
                        both + int((found & cells).sum()),
                        either + int((found | cells).sum()),
                    )
            mean, overlap = sum(losses) / max(1, len(losses)), both / max(1, either)
            print(
                f"epoch {epoch + 1}/{given.epochs}   loss {mean:.4f}   overlap with unseen labels "
                f"{overlap:.3f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", nargs="?", type=Path, help="without: a volume is made, in ./out")
    parser.add_argument("--labels", default="cells", help="name of the image's labels")
    parser.add_argument(
        "--scale", type=float, help="voxel size in the image's unit; without: the finest level"
    )
    parser.add_argument(
        "--patch",
        type=int,
        nargs=3,
        default=(16, 32, 32),
        metavar=("Z", "Y", "X"),
        help="voxels; default: 16 32 32",
    )
    parser.add_argument("--mode", default="lazy", help="lazy, eager, cached or streaming")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, default in (("epochs", 6), ("batch-size", 8), ("seed", 42), ("workers", None)):
        parser.add_argument(
            f"--{name}",
            type=int,
            default=default,
            help=f"default: {default or 'chosen by headrace'}",
        )
    try:
        train(parser.parse_args())
    except HeadraceError as error:
        parser.exit(2, f"error: {str(error).splitlines()[0]}\n")


if __name__ == "__main__":
    main()
