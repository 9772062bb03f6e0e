"""What soak.py and kill_rounds.py load.

What a sample holds follows from its index alone. A trap, a file, makes samples of the soak's choice
fail.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, get_worker_info

from headrace import BaseDataset, HDF5Dataset, ImageDataset, MemoryEfficientDataset, Source
from headrace.testing.contract import RandomProbe
from tests.data.make import make_photos

HOW = ("own", "photos", "rows", "wrapped", "foreign", "joined")
FORMS = ("image", "nested")  # and, of "own" alone, "view" and "draws"
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
    form: str
    n: int
    size: tuple[int, int]  # height and width of an image
    seed: int
    block: int  # samples a block of the storage; 0: the source says nothing of blocks
    is_slow: bool  # some samples take milliseconds, so that batches overtake each other
    folder: str

    @property
    def nbytes(self) -> int:
        return self.size[0] * self.size[1] * 3

    @property
    def trap(self) -> Path:
        return Path(self.folder, "trap.json")

    def inner(self, index: int) -> int:
        """The number that content follows from: `ConcatDataset` numbers its samples anew."""
        return index % (self.n // 2) if self.how == "joined" else index


def made(spec: Spec, index: int, raw: Any) -> Any:
    """A sample of its bytes, over memory of its own."""
    image = raw.reshape(*spec.size, 3).copy()
    if spec.form != "nested":
        return image
    wide = torch.from_numpy(raw.astype(np.int32))
    # some texts are more than a pipe takes at once
    parts = {"list": [wide, "x" * (index * 7919 % 20_000)], "none": torch.empty(0, 3)}
    for dtype in (torch.uint8, torch.float32, torch.bfloat16, torch.complex64):
        parts[str(dtype)] = wide[:1000].to(dtype)
    return f"{index}", None, parts, (image, index, index / 3, index % 2 == 0), bytes(index % 9)


def turned(value: Any) -> Any:
    """A transform that returns a view of its input, with holes and back to front."""
    return value[::2, ::-1].transpose(2, 0, 1)


# --- where workers fail ---------------------------------------------------------------------------


class Planned(Exception):
    """The soak asked for it."""


def set_trap(spec: Spec, where: str, indices: Sequence[int]) -> None:
    """From now on samples fail, while the source is read or while they are finished, in processes
    that run already too.
    """
    part = spec.trap.with_suffix(".part")
    part.write_text(json.dumps([where, list(indices)]))
    part.rename(spec.trap)


def trip(spec: Spec, where: str, index: int) -> None:
    """Called at each sample."""
    if spec.is_slow and index % 11 == 3:
        time.sleep(0.004)
    try:
        place, indices = json.loads(spec.trap.read_bytes())
    except FileNotFoundError:
        return
    if index in indices and where == place:
        raise Planned(f"planned for sample {index}")


# --- datasets -------------------------------------------------------------------------------------


class Numbers(Source):
    """Records of which each begins with its index."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    def __len__(self) -> int:
        return self.spec.n

    def read(self, indices: Sequence[int]) -> list[bytes]:
        records = []
        for index in indices:
            trip(self.spec, "read", index)
            raw = content(index, self.spec.nbytes, self.spec.seed)
            records.append(index.to_bytes(8, "little") + raw.tobytes())
        return records

    def fingerprint(self) -> str:
        return f"{self.spec.form} {self.spec.n} {self.spec.size} {self.spec.seed}"

    def blocks(self) -> Any:
        n, block = self.spec.n, self.spec.block
        return np.diff(np.r_[np.arange(0, n, block), n]).astype(np.int64) if block else None


class Known(BaseDataset):
    """A dataset of headrace's over a source of one's own."""

    def __init__(self, spec: Spec, **options: Any) -> None:
        self.spec = spec
        options["targets"] = None if spec.form == "nested" else np.arange(spec.n) % CLASSES
        options["transform"] = {"view": turned, "draws": RandomProbe()}.get(spec.form)
        super().__init__(Numbers(spec), **options)

    def decode(self, record: bytes) -> Any:
        raw = np.frombuffer(record, np.uint8, offset=8)
        return made(self.spec, int.from_bytes(record[:8], "little"), raw)

    def split_target(self, index: int, value: Any) -> tuple[Any, Any]:
        trip(self.spec, "finish", index)
        return super().split_target(index, value)


class Foreign(Dataset[Any]):
    """A plain map-style dataset."""

    def __init__(self, spec: Spec, n: int) -> None:
        self.spec, self.n = spec, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        trip(self.spec, "finish", index)
        return made(self.spec, index, content(index, self.spec.nbytes, self.spec.seed))


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


def draw_spec(
    rng: random.Random, folder: str, how: str | None = None, form: str | None = None
) -> Spec:
    """The data of a round; `how` and `form` may be named."""
    how = how or rng.choice(("own", "own", "own", *HOW))
    form = form or rng.choice((*FORMS, "view", "draws") if how == "own" else FORMS)
    scale = rng.choice((2, 20, 20, 60, 200))
    height, width = rng.randint(2, scale), rng.randint(2, scale) * 4
    n = rng.choice((2, 8, 30, 60, 150)) if scale < 200 else rng.choice((8, 30))
    if how in ("photos", "rows"):
        form, n = "image", 24 if how == "photos" else _ROWS
    seed, block = rng.randrange(1 << 20), rng.choice((0, 3, 8))
    return Spec(how, form, n, (height + 6, width), seed, block, rng.random() < 0.3, folder)


def draw_options(rng: random.Random, spec: Spec, workers: int, start: str) -> dict[str, Any]:
    """Options of a loader over the data of a round."""
    # bytes of a batch are bounded
    most = max(1, min(64, (8 << 20) // spec.nbytes, max(3, spec.n // 2)))
    options: dict[str, Any] = {
        "batch_size": rng.choice((1, 2, rng.randint(1, most), most)),
        "seed": spec.seed,
        "collate_fn": rng.choice((None, None, None, "list")),
        "enable_monitoring": rng.random() < 0.5,
        **draw_workers(rng, workers, start),
    }
    world = rng.choice((1, 1, 1, 2))
    options |= {"world_size": world, "rank": rng.randrange(world)}
    options |= {"shuffle": rng.choice((True, False, "block")), "drop_last": rng.random() < 0.2}
    return options


def draw_workers(rng: random.Random, workers: int, start: str) -> dict[str, Any]:
    """The options that must not change any batch."""
    if not workers:
        return {"num_workers": 0}
    return {
        "num_workers": workers,
        "prefetch_factor": rng.randint(1, 4),
        "persistent_workers": rng.random() < 0.6,
        "multiprocessing_context": start,
    }


def arrays_in(value: Any) -> Iterator[Any]:
    """The tensors and arrays of a batch."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        yield value
    elif isinstance(value, (dict, tuple, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from arrays_in(item)
