"""What soak.py and kill_rounds.py load, and what must come out.

What a sample holds follows from its index alone, so that the parent can make each batch again by
itself: datasets make it in the workers, an `Oracle` in the parent. A trap, a file, makes the
workers fail at samples of the soak's choice.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, get_worker_info

from headrace import BaseDataset, HDF5Dataset, ImageDataset, MemoryEfficientDataset, Source
from headrace.order import EpochOrder, RankBatches
from headrace.testing.contract import RandomProbe
from tests.data.make import make_photos

HOW = ("own", "photos", "rows", "wrapped", "foreign", "joined", "stream")
FORMS = ("image", "nested")  # and, of "own" alone, "view" and "draws"
CLASSES = 7
_ROWS = 60
_BASE = 1 << 21
_noise = np.frombuffer(np.random.default_rng(0).bytes(2 * _BASE), np.uint8)


def content(index: int, nbytes: int, seed: int) -> Any:
    """The bytes of a sample, uint8 [nbytes]."""
    start = (index * 7919 + seed * 104_729) % _BASE
    return _noise[start : start + nbytes] ^ np.uint8((index * 31 + seed) % 256)


def row_of(index: int) -> Any:
    """A row of the HDF5 file."""
    return content(index, 240, 0).view(np.int16).reshape(8, 15)


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
        rows = np.stack([row_of(index) for index in range(_ROWS)])
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
    """Options of a loader over the data of a round; all that `Oracle` needs are among them."""
    # bytes of a batch are bounded
    most = max(1, min(64, (8 << 20) // spec.nbytes, max(3, spec.n // 2)))
    options: dict[str, Any] = {
        "batch_size": rng.choice((1, 2, rng.randint(1, most), most)),
        "seed": spec.seed,
        "collate_fn": rng.choice((None, None, None, "list")),
        "enable_monitoring": rng.random() < 0.5,
        **draw_workers(rng, workers, start),
    }
    if spec.how != "stream":
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


# --- what must come out ---------------------------------------------------------------------------


class Oracle:
    """Says which batches an epoch has, and what is in them, without a loader."""

    def __init__(self, spec: Spec) -> None:
        self.spec = replace(spec, is_slow=False)
        self._alone: Any = None
        if spec.how == "photos" or spec.form == "draws":
            self._alone = open_data(self.spec, "lazy")

    def sample(self, epoch: int, index: int) -> Any:
        """One sample of an epoch."""
        if self._alone is not None:
            self._alone.set_epoch(epoch)
            return self._alone[index]
        spec, inner = self.spec, self.spec.inner(index)
        if spec.how == "rows":
            return torch.from_numpy(row_of(index)), index % CLASSES
        value = made(spec, inner, content(inner, spec.nbytes, spec.seed))
        if spec.how != "own" or spec.form == "nested":
            return value
        return turned(value) if spec.form == "view" else value, index % CLASSES

    def batch(self, epoch: int, indices: Sequence[int], collate: Any) -> Any:
        """A batch of an epoch, by another collate function than headrace's."""
        samples = [self.sample(epoch, index) for index in indices]
        return samples if collate == "list" else stacked(samples)

    def order(self, dataset: Any, options: dict[str, Any], epoch: int) -> list[list[int]]:
        """The indices of each batch of an epoch, by the documented law."""
        size, n = options["batch_size"], self.spec.n
        if self.spec.how == "stream":
            workers = options["num_workers"] or 1
            shares = [range(worker, n, workers) for worker in range(workers)]
            parts = [share[at : at + size] for at in range(0, n, size) for share in shares]
            return [list(part) for part in parts if part]
        rank, world, drop_last = (options[name] for name in ("rank", "world_size", "drop_last"))
        if isinstance(dataset, BaseDataset):
            order = dataset.epoch_order(options["shuffle"], self.spec.seed, epoch, size * world)
        else:
            shuffle = bool(options["shuffle"])
            common = {"seed": self.spec.seed, "epoch": epoch, "global_batch": size * world}
            order = EpochOrder(n, shuffle=shuffle, **common)
        batches = [batch.tolist() for batch in RankBatches(order, rank, world, size, drop_last)]
        if world == 1 and not drop_last:
            assert sorted(itertools.chain(*batches)) == list(range(n)), "not each exactly once"
        return batches


def stacked(samples: list[Any]) -> Any:
    """A batch: tensors, arrays and numbers stacked, structures kept, everything else in a list."""
    first = samples[0]
    if isinstance(first, torch.Tensor):
        return torch.stack(samples)
    if isinstance(first, np.ndarray):
        return torch.from_numpy(np.stack(samples))
    if isinstance(first, (bool, int, float)):
        return torch.tensor(samples, dtype=torch.float64 if isinstance(first, float) else None)
    if isinstance(first, dict):
        return {key: stacked([sample[key] for sample in samples]) for key in first}
    if isinstance(first, (tuple, list)):
        return type(first)(stacked(list(column)) for column in zip(*samples, strict=True))
    return samples


def arrays_in(value: Any) -> Iterator[Any]:
    """The tensors and arrays of a batch."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        yield value
    elif isinstance(value, (dict, tuple, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from arrays_in(item)
