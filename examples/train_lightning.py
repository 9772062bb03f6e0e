"""Trains on photographs with Lightning, stops in the middle of an epoch, and resumes: the same
losses as without a stop.

# a folder of class folders; without: photographs are made, in ./out
python examples/train_lightning.py photos/train

Needs `pip install lightning`. docs/trainers.md says how several processes, validation and
checkpoints work together.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from make_photos import make_photos
from torch import nn

from headrace import DataModule, ImageDataset, RandomHorizontalFlip, seed_everything

try:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
except ImportError:
    print("error: this example needs Lightning: pip install lightning", file=sys.stderr)
    sys.exit(2)


class Photos(lightning.LightningDataModule):
    """Wraps headrace's DataModule: Lightning takes no other class."""

    def __init__(self, folder: Path, workers: int | None) -> None:
        super().__init__()
        self.folder, self.workers = folder, workers

    def setup(self, stage: str) -> None:
        photos = ImageDataset(
            self.folder, image_size=48, loading_mode="cached", transform=RandomHorizontalFlip()
        )
        self.module = DataModule(
            photos, val_split=0.2, val_transform=[], batch_size=16, seed=7, num_workers=self.workers
        )

    def train_dataloader(self) -> Any:
        return self.module.train_dataloader()

    def val_dataloader(self) -> Any:
        return self.module.val_dataloader()

    def teardown(self, stage: str) -> None:
        self.module.close()


class Classifier(lightning.LightningModule):
    def __init__(self, classes: int) -> None:
        super().__init__()
        layers = [
            nn.Conv2d(3, 32, 5, 2),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 5, 2),
            nn.BatchNorm2d(64),
            nn.ReLU(),
        ]
        self.network, self.losses = (
            nn.Sequential(*layers, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(64, classes)),
            [],
        )

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        images, targets = batch
        self.log("accuracy", (self.network(images).argmax(1) == targets).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def fit(
    given: argparse.Namespace, folder: Path, resume: str | None = None, **options: Any
) -> tuple[list[float], lightning.Trainer]:
    """Trains; the losses of its steps, and the trainer."""
    seed_everything(7)
    model = Classifier(len(ImageDataset(folder).classes))
    options |= {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    trainer = lightning.Trainer(accelerator="cpu", devices=1, **options)
    trainer.fit(
        model, datamodule=Photos(folder, given.workers), ckpt_path=resume, weights_only=False
    )
    return model.losses, trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--images", type=int, default=360, help="how many to make")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--workers", type=int)
    given = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    folder = given.folder or make_photos(Path("out") / "small_photos", given.images, (64, 48))
    whole, trainer = fit(given, folder, max_epochs=given.epochs, enable_checkpointing=False)
    stop = len(whole) // given.epochs // 2  # a step in the middle of the first epoch
    keep = ModelCheckpoint("out/lightning", every_n_train_steps=stop, save_last=True)
    first, _ = fit(given, folder, max_steps=stop, callbacks=[keep])
    rest, _ = fit(
        given,
        folder,
        str(keep.last_model_path),
        max_epochs=given.epochs,
        enable_checkpointing=False,
    )
    print(
        f"{len(whole)} steps: loss {whole[0]:.4f} to {whole[-1]:.4f}, accuracy "
        f"{float(trainer.callback_metrics['accuracy']):.1%}"
    )
    print(
        f"stopped after {len(first)}, resumed for {len(rest)}: the same losses to the last bit: "
        f"{'yes' if first + rest == whole else 'NO'}"
    )
