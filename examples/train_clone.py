"""Clones a behaviour: trains a small network to act as demonstrations do, and measures it on
episodes that it has not seen.

python examples/train_clone.py  # demonstrations of its own: a hand that reaches for a bright spot
# of robomimic's layout, with obs/image, obs/position and actions
python examples/train_clone.py demos.hdf5
"""

from __future__ import annotations

import argparse
from pathlib import Path

import h5py
import numpy as np
import torch
from torch import nn

from headrace import EpisodeDataset, create_dataloader, seed_everything


def make_demos(path: Path, episodes: int = 200, side: int = 8) -> Path:
    """Episodes of different lengths: a hand goes half of the way to a spot in each step, which
    only the image shows.
    """
    draws = np.random.default_rng(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for number in range(episodes):
            steps, spot = int(draws.integers(8, 30)), draws.integers(0, side, 2)
            positions, actions, position = (
                np.empty((steps, 2), "f4"),
                np.empty((steps, 2)),
                draws.uniform(0, side, 2),
            )
            for step in range(steps):
                positions[step], actions[step] = position, (spot - position) / 2
                position = position + actions[step] + draws.normal(0, 0.3, 2)
            images = draws.integers(0, 60, (steps, side, side, 3), np.uint8)
            images[:, spot[0], spot[1]] = 255
            demo = file.create_group(f"data/demo_{number}")
            demo.create_dataset(
                "obs/image", data=images, chunks=(8, side, side, 3), compression="gzip"
            )
            demo["obs/position"], demo["actions"] = positions, actions
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "path", nargs="?", type=Path, help="without: demonstrations are made, in ./out"
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--mode", default="lazy", help="lazy, eager, cached or streaming")
    parser.add_argument("--workers", type=int)
    given = parser.parse_args()
    seed_everything(7)
    path, keys = (
        given.path or make_demos(Path("out") / "demos.hdf5"),
        ["obs/image", "obs/position", "actions"],
    )
    names = EpisodeDataset(path, keys).episode_names
    options = {
        "window": {"obs/*": 1, "actions": 4},
        "loading_mode": given.mode,
        "dtype": {"actions": "float32", "obs/position": "float32"},
    }
    held_out = [name for number, name in enumerate(names) if number % 5 == 0]
    train = EpisodeDataset(
        path, keys, episodes=[name for name in names if name not in held_out], **options
    )
    val = EpisodeDataset(path, keys, episodes=held_out, **options)
    steps = create_dataloader(  # each step once: whole episodes, padded
        EpisodeDataset(path, keys[1:], episodes=train.episode_names, dtype=options["dtype"]),
        shuffle=False,
        pad=False,
        num_workers=0,
    )
    whole = [{key: batch[key][batch["mask"]] for key in keys[1:]} for batch in steps]
    values = {key: torch.cat([each[key] for each in whole]) for key in keys[1:]}
    mean = {key: value.mean(0) for key, value in values.items()}
    std = {key: value.std(0) for key, value in values.items()}
    sizes = (
        train[0]["obs/image"].numel() + train[0]["obs/position"].numel(),
        train[0]["actions"].numel(),
    )
    network = nn.Sequential(nn.Linear(sizes[0], 128), nn.ReLU(), nn.Linear(128, sizes[1]))
    optimiser = torch.optim.AdamW(network.parameters(), lr=3e-3)

    def loss_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        position = (batch["obs/position"][:, 0] - mean["obs/position"]) / std["obs/position"]
        wanted = (batch["actions"] - mean["actions"]) / std["actions"]
        found = network(
            torch.cat([batch["obs/image"][:, 0].flatten(1) / 255, position], 1)
        ).view_as(wanted)
        return ((found - wanted) ** 2)[batch["mask"]].mean()  # not of steps behind the end

    loader = create_dataloader(
        train, batch_size=32, shuffle="block", num_workers=given.workers, seed=7
    )
    unseen = create_dataloader(val, batch_size=64, shuffle=False, num_workers=given.workers)
    for epoch in range(given.epochs):
        losses = []
        for batch in loader:
            optimiser.zero_grad()
            (loss := loss_of(batch)).backward()
            optimiser.step()
            losses.append(loss.item())
        with torch.no_grad():
            measured = [loss_of(batch).item() for batch in unseen]
        print(
            f"epoch {epoch + 1}/{given.epochs}   loss {np.mean(losses):.4f}   of unseen episodes "
            f"{np.mean(measured):.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
