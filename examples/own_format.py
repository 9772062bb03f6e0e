"""Reads a binary format that headrace does not know: a Source, which finds the records, and
`decode`, which makes a sample of one.

python examples/own_format.py                       # a file of its own
# 4 bytes of a label (int32), then 256 float32, again and again
python examples/own_format.py signals.bin

All loading modes, orders, workers, the memory budget, resumption and packing come with these two
classes. docs/own_format.md says more.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace import BaseDataset, HDF5Dataset, Source, create_dataloader, pack
from headrace.memory import WorkerHandle

VALUES = 256
RECORD = 4 + 4 * VALUES  # bytes


class SignalSource(Source):
    """Where the records lie: `RECORD` bytes each, one behind the other."""

    def __init__(self, path: Path) -> None:
        self.path, size = path, path.stat().st_size
        if size % RECORD:
            raise ValueError(
                f"{path}: {size:,} bytes are no whole number of records of {RECORD:,}; the file "
                "is cut short"
            )
        self.count = size // RECORD
        # opened in each process
        self.file = WorkerHandle(functools.partial(os.open, path, os.O_RDONLY), os.close)

    def __len__(self) -> int:
        return self.count

    def read(self, indices: Sequence[int]) -> list[bytes]:
        return [os.pread(self.file.get(), RECORD, RECORD * int(index)) for index in indices]

    def fingerprint(self) -> str:
        """A saved state is refused where this differs."""
        return f"signals-{self.count}"


class SignalDataset(BaseDataset):
    """Samples (float32 [256], label)."""

    def __init__(self, path: Path, **options: Any) -> None:
        source = SignalSource(path)
        labels = np.fromfile(path, "<i4").reshape(-1, RECORD // 4)[:, 0].astype(np.int64)
        super().__init__(source, targets=labels, **options)

    def decode(self, record: bytes) -> np.ndarray:
        return np.frombuffer(record, "<f4", offset=4)


def make_signals(path: Path, count: int = 500) -> Path:
    """Sine waves with noise; the label is how many periods there are."""
    draws = np.random.default_rng(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        for label in draws.integers(1, 9, count, "i4"):
            wave = np.sin(np.linspace(0, 2 * np.pi * label, VALUES)) + draws.normal(0, 0.3, VALUES)
            file.write(label.tobytes() + wave.astype("<f4").tobytes())
    return path


def epoch_of(dataset: Any, workers: int | None) -> torch.Tensor:
    """All signals of a shuffled epoch, [n, 256]."""
    with create_dataloader(
        dataset, batch_size=32, seed=7, shuffle=True, num_workers=workers
    ) as loader:
        return torch.cat([signals.clone() for signals, _ in loader])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", nargs="?", type=Path, help="without: a file is made, in ./out")
    parser.add_argument("--workers", type=int)
    given = parser.parse_args()
    path = given.path or make_signals(Path("out") / "signals.bin")
    lazy = epoch_of(SignalDataset(path), given.workers)
    print(
        f"{path}: {len(lazy):,} signals; labels of the first five "
        f"{[label for _, label in map(SignalDataset(path).__getitem__, range(5))]}"
    )
    for mode in ("eager", "cached", "streaming"):
        same = torch.equal(lazy, epoch_of(SignalDataset(path, loading_mode=mode), given.workers))
        print(f"{mode:<10} the same batches as lazy: {'yes' if same else 'NO'}")
    packed = pack(SignalDataset(path), path.with_suffix(".h5"), progress=False, overwrite=True)
    same = torch.equal(lazy, epoch_of(HDF5Dataset(packed, target_name="targets"), given.workers))
    print(f"{'packed':<10} the same batches, from {packed}: {'yes' if same else 'NO'}")
