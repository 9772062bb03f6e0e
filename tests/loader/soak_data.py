"""What test_soak.py and kill_rounds.py load. What a sample holds follows from its index alone."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, get_worker_info

from headrace import BaseDataset, HDF5Dataset, ImageDataset, MemoryEfficientDataset, Source
from tests.data.make import make_photos

HOW = ("own", "photos", "rows", "wrapped", "foreign", "joined")
CLASSES = 7
_ROWS = 60
_BASE = 1 << 21
_noise = np.frombuffer(np.random.default_rng(0).bytes(2 * _BASE), np.uint8)


def content(index: int, nbytes: int, seed: int) -> Any:
    """The bytes of a sample, uint8 [nbytes]."""
    start = (index * 7919 + seed * 104_729) % _BASE
    return _noise[start : start + nbytes] ^ np.uint8((index * 31 + seed) % 256)


@dataclass(frozen=True)
class Spec:
    """All that a round's data follow from."""

    how: str
    n: int
    size: tuple[int, int]  # height and width of an image
    seed: int
    block: int  # samples a block of the storage; 0: the source says nothing of blocks
    is_slow: bool  # some samples take milliseconds, so that batches overtake each other
    folder: str

    @property
    def nbytes(self) -> int:
        return self.size[0] * self.size[1] * 3

    def record(self, index: int) -> Any:
        """The bytes of a sample, after a while."""
        if self.is_slow and index % 11 == 3:
            time.sleep(0.004)
        return content(index, self.nbytes, self.seed)


class Numbers(Source):
    """The bytes of images."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    def __len__(self) -> int:
        return self.spec.n

    def read(self, indices: Sequence[int]) -> list[bytes]:
        return [self.spec.record(index).tobytes() for index in indices]

    def fingerprint(self) -> str:
        return f"{self.spec.n} {self.spec.size} {self.spec.seed}"

    def blocks(self) -> Any:
        n, block = self.spec.n, self.spec.block
        return np.diff(np.r_[np.arange(0, n, block), n]).astype(np.int64) if block else None


class Known(BaseDataset):
    """A dataset of headrace's over a source of one's own."""

    def __init__(self, spec: Spec, **options: Any) -> None:
        self.spec = spec
        super().__init__(Numbers(spec), targets=np.arange(spec.n) % CLASSES, **options)

    def decode(self, record: bytes) -> Any:
        return np.frombuffer(record, np.uint8).reshape(*self.spec.size, 3).copy()


class Foreign(Dataset[Any]):
    """A plain map-style dataset."""

    def __init__(self, spec: Spec, n: int) -> None:
        self.spec, self.n = spec, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return self.spec.record(index).reshape(*self.spec.size, 3).copy()


class Stream(IterableDataset[Any]):
    """A plain iterable dataset; worker w of W has the samples w, w + W, ..."""

    def __init__(self, spec: Spec) -> None:
        self.samples = Foreign(spec, spec.n)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (self.samples[index] for index in range(first, self.samples.n, step))


def make_files(folder: Path) -> None:
    """Writes the photographs and the HDF5 file that all rounds share."""
    make_photos(folder / "photos")
    with h5py.File(folder / "rows.h5", "w") as file:
        rows = np.stack([content(index, 120, 0) for index in range(_ROWS)])
        file.create_dataset("data", data=rows, chunks=(7, *rows.shape[1:]), compression="gzip")
        file["labels"] = np.arange(_ROWS) % CLASSES


def open_data(spec: Spec, mode: str) -> Any:
    """The dataset of a round; those that are not headrace's own have no mode."""
    options: dict[str, Any] = {"loading_mode": mode, "seed": spec.seed, "progress": False}
    if spec.how == "own":
        return Known(spec, **options)
    if spec.how == "photos":
        return ImageDataset(f"{spec.folder}/photos", image_size=spec.size, **options)
    if spec.how == "rows":
        return HDF5Dataset(f"{spec.folder}/rows.h5", "data", target_name="labels", **options)
    if spec.how == "wrapped":
        return MemoryEfficientDataset(Foreign(spec, spec.n), **options)
    if spec.how == "joined":
        return ConcatDataset([Foreign(spec, spec.n // 2)] * 2)
    return Stream(spec) if spec.how == "stream" else Foreign(spec, spec.n)


def draw_spec(rng: random.Random, folder: str, how: str) -> Spec:
    """The data of a round."""
    scale = rng.choice((2, 20, 20, 60, 200))
    height, width = rng.randint(2, scale), rng.randint(2, scale) * 4
    n = rng.choice((2, 8, 30, 60, 150)) if scale < 200 else rng.choice((8, 30))
    n = {"photos": 24, "rows": _ROWS}.get(how, n)
    seed, block = rng.randrange(1 << 20), rng.choice((0, 3, 8))
    return Spec(how, n, (height + 6, width), seed, block, rng.random() < 0.3, folder)


def draw_workers(rng: random.Random, workers: int, start: str | None) -> dict[str, Any]:
    """The options that must not change any batch."""
    if not workers:
        return {"num_workers": 0}
    return {
        "num_workers": workers,
        "prefetch_factor": rng.randint(1, 4),
        "persistent_workers": rng.random() < 0.6,
        "multiprocessing_context": start,
    }
