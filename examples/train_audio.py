"""Trains a small network on .wav files of different lengths: a torch dataset of one's own, batches
of like length, padding.

python examples/train_audio.py  # recordings of its own: one of four notes, 0.2 to 1 s
python examples/train_audio.py sounds/           # 16-bit .wav files in a folder for each class

Python's standard library reads the files.
"""

from __future__ import annotations

import argparse
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from headrace import MemoryEfficientDataset, create_dataloader, pad_collate, seed_everything

NOTES = {"a4": 440.0, "c5": 523.25, "e5": 659.26, "g5": 783.99}  # Hz
RATE = 8000  # samples a second


class Sounds(torch.utils.data.Dataset[dict[str, Any]]):
    """Samples {"wave": float32 [n] in [-1, 1], "target": class}; nothing here is headrace's."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*/*.wav"))
        self.classes = sorted({path.parent.name for path in self.paths})

    def __len__(self) -> int:
        return len(self.paths)

    def lengths(self) -> list[int]:
        """The number of values of each file, from its header alone."""
        found = []
        for path in self.paths:
            with wave.open(str(path)) as file:
                found.append(file.getnframes())
        return found

    def __getitem__(self, index: int) -> dict[str, Any]:
        with wave.open(str(self.paths[index])) as file:
            if file.getsampwidth() != 2:
                raise ValueError(
                    f"{self.paths[index]}: {8 * file.getsampwidth()} bits a value; this example "
                    "reads 16"
                )
            channels = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(
                -1, file.getnchannels()
            )
        target = self.classes.index(self.paths[index].parent.name)
        return {
            "wave": torch.from_numpy(channels.mean(1, dtype=np.float32) / 32768),
            "target": target,
        }


def make_sounds(folder: Path, count: int = 320) -> Path:
    """Notes with noise, in a folder for each."""
    draws = np.random.default_rng(0)
    for number in range(count):
        name, length = list(NOTES)[number % len(NOTES)], int(draws.uniform(0.2, 1) * RATE)
        sound = 0.3 * np.sin(2 * np.pi * NOTES[name] * np.arange(length) / RATE) + draws.normal(
            0, 0.1, length
        )
        (folder / name).mkdir(parents=True, exist_ok=True)
        with wave.open(str(folder / name / f"{number:04d}.wav"), "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", ""))
            file.writeframes((sound.clip(-1, 1) * 32767).astype("<i2").tobytes())
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, help="without: sounds are made, in ./out")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--workers", type=int)
    given = parser.parse_args()
    seed_everything(7)
    sounds = Sounds(given.folder or make_sounds(Path("out") / "sounds"))
    # decoded once, held within the budget, shared by the workers
    dataset = MemoryEfficientDataset(sounds, loading_mode="cached")
    options = {
        "batch_size": 16,
        "collate_fn": pad_collate(),
        "num_workers": given.workers,
        "seed": 7,
    }
    for name, extra in (
        ("any lengths", {}),
        ("like lengths", {"bucket_by_length": sounds.lengths()}),
    ):
        with create_dataloader(dataset, **options, **extra) as loader:
            padded = sum(int((~batch["attention_mask"].bool()).sum()) for batch in loader)
            print(
                f"batches of {name}: {padded / (padded + sum(sounds.lengths())):.1%} of the "
                "values are padding"
            )
    model = nn.Sequential(nn.Conv1d(1, 32, 64, 4), nn.ReLU(), nn.Conv1d(32, 32, 8, 2), nn.ReLU())
    head = nn.Linear(32, len(sounds.classes))
    optimiser = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=3e-3)
    with create_dataloader(dataset, **options, bucket_by_length=sounds.lengths()) as loader:
        for epoch in range(given.epochs):
            losses, right = [], 0
            # {"wave": float32 [16, longest], "attention_mask": [16, longest], "target": int64 [16],
            # "lengths": [16]}
            for batch in loader:
                features = model(batch["wave"][:, None])  # [16, 32, steps]
                mask = nn.functional.interpolate(
                    batch["attention_mask"][:, None].float(), features.shape[2]
                )
                # the mean over what is no padding
                scores = head((features * mask).sum(2) / mask.sum(2))
                loss = nn.functional.cross_entropy(scores, batch["target"])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                losses.append(loss.item())
                right += int((scores.argmax(1) == batch["target"]).sum())
            print(
                f"epoch {epoch + 1}: loss {np.mean(losses):.4f}   right {right / len(sounds):.1%} "
                f"  classes {', '.join(sounds.classes)}"
            )
