"""What the soak loads, and what must come out.

What a sample holds follows from its index alone, so that the parent can make each batch again by
itself: `Dataset`s make it in the workers, an `Oracle` in the parent. A `Trap` makes the workers
fail at samples of the soak's choice.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    get_worker_info,
)

from headrace import (
    BaseDataset,
    HDF5Dataset,
    ImageDataset,
    MemoryEfficientDataset,
    SampleError,
    Source,
)
from headrace.collate import stack_collate
from headrace.order import EpochOrder, RankBatches
from headrace.testing.contract import RandomProbe
from tests.data.make import make_photos

MODES = ("lazy", "eager", "cached", "streaming")
OWN, FOREIGN = (
    ("own", "photos", "rows", "wrapped"),
    ("foreign", "subset", "joined", "tensors", "pages", "stream"),
)
FORMS = ("image", "dict", "nested", "words")
RANDOM = ("ragged", "draws")  # what a transform draws decides what they look like
CLASSES = 7
_ROWS = 60
_BASE = 1 << 21

# --- what a sample holds --------------------------------------------------------------------------

_noise = np.frombuffer(np.random.default_rng(0).bytes(2 * _BASE), np.uint8)


def content(index: int, nbytes: int, seed: int) -> npt.NDArray[np.uint8]:
    """The bytes of a sample, uint8 [nbytes]."""
    start = (index * 7919 + seed * 104_729) % _BASE
    return _noise[start : start + nbytes] ^ np.uint8((index * 31 + seed) % 256)


def row_of(index: int) -> npt.NDArray[np.int16]:
    """A row of the HDF5 file."""
    return content(index, 240, 0).view(np.int16).reshape(8, 15)


@dataclass(frozen=True)
class Spec:
    """All that a round's data follow from.

    Attributes:
        how: what kind of dataset gives the samples (see `open_data`).
        form: what a sample looks like (see `made`).
        n: number of samples.
        size: height and width of an image; the other forms have as many bytes.
        seed: of content, order and transforms.
        block: samples a block of the storage; 0: the source says nothing of blocks.
        is_slow: some samples take some milliseconds, so that batches overtake each other.
        folder: where photographs and rows lie, and the trap.
    """

    how: str
    form: str
    n: int
    size: tuple[int, int]
    seed: int
    block: int
    is_slow: bool
    folder: str

    @property
    def nbytes(self) -> int:
        return self.size[0] * self.size[1] * 3

    @property
    def trap(self) -> Trap:
        return Trap(os.path.join(self.folder, "trap.json"))

    def inner(self, index: int) -> int:
        """The number that content follows from: `Subset` and `ConcatDataset` number their
        samples anew.
        """
        if self.how == "subset":
            return self.n - 1 - index
        return index % (self.n // 2 or 1) if self.how == "joined" else index


def made(spec: Spec, index: int, raw: npt.NDArray[np.uint8]) -> Any:
    """A sample of its bytes, over memory of its own."""
    if spec.form in ("image", "view", *RANDOM):
        return raw.reshape(*spec.size, 3).copy()
    # a batch of these holds no tensor, and some are more than a pipe takes at once
    if spec.form == "words":
        return f"sample {index}", None, ["a", "b" * (index * 7919 % 20_000)]
    wide = torch.from_numpy(raw.astype(np.int32))
    if spec.form == "dict":
        dtypes = (torch.uint8, torch.int16, torch.float32, torch.bfloat16, torch.complex64)
        columns = {
            str(dtype): wide[: 5 + 1000 * number].to(dtype) for number, dtype in enumerate(dtypes)
        }
        return {
            **columns,
            "bool": wide.view(-1, 3) > 99,
            "scalar": torch.tensor(index / 3),
            "none": torch.empty(0, 3),
            "index": index,
        }
    array, text = raw.reshape(3, -1).copy(), "x" * (index % 50)
    return (
        f"sample {index}",
        None,
        {"list": [wide, text], "tuple": (array, index, index / 3, index % 2 == 0)},
        raw[: index % 9].tobytes(),
    )


def turned(value: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """A transform that returns a view of its input, with holes and back to front."""
    return value[::2, ::-1].transpose(2, 0, 1)


def cropped(value: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """A transform that returns another shape each time, and sometimes nothing."""
    return value[: random.randint(0, value.shape[0]), : random.randint(1, value.shape[1])]


def viewed(samples: list[Any]) -> Any:
    """A collate function whose batch holds views of what lies in its slot."""
    return parted(stack_collate(samples))


def parted(batch: Any) -> dict[str, Any]:
    """A batch of image tensors, and parts of it."""
    images, numbers = batch
    return {
        "some": images[1:],
        "half": images[:, ::2],
        "turned": images.transpose(1, 2),
        "same": images,
        "rows": images[0].numpy(),
        "n": numbers,
    }


# --- where workers fail ---------------------------------------------------------------------------


class Planned(Exception):
    """The soak asked for it."""


class Trap:
    """A file that says at which samples workers are to fail; processes that run already see it
    too.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def set(self, action: str, where: str, indices: Sequence[int]) -> None:
        """From now on samples fail by "raise", "exit" or "kill", while the source is read or
        while they are finished.
        """
        part = Path(self.path + ".part")
        part.write_text(json.dumps([action, where, list(indices)]))
        part.rename(self.path)

    def clear(self) -> None:
        Path(self.path).unlink(missing_ok=True)

    def trip(self, where: str, index: int) -> None:
        """Called at each sample."""
        try:
            action, place, indices = json.loads(Path(self.path).read_bytes())
        except FileNotFoundError:
            return
        if index not in indices or where != place:
            return
        if action == "raise":
            raise Planned(f"planned for sample {index}")
        if get_worker_info() is not None:
            os._exit(3) if action == "exit" else os.kill(os.getpid(), signal.SIGKILL)


def _come_by(spec: Spec, index: int) -> None:
    if spec.is_slow and index % 11 == 3:
        time.sleep(0.004)
    spec.trap.trip("finish", index)


# --- datasets -------------------------------------------------------------------------------------


class Numbers(Source):
    """Records of which each begins with its index."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    def __len__(self) -> int:
        return self.spec.n

    def read(self, indices: Sequence[int]) -> list[bytes]:
        for index in indices:
            self.spec.trap.trip("read", index)
        return [
            index.to_bytes(8, "little") + content(index, self.spec.nbytes, self.spec.seed).tobytes()
            for index in indices
        ]

    def fingerprint(self) -> str:
        return f"{self.spec.form} {self.spec.n} {self.spec.size} {self.spec.seed}"

    def blocks(self) -> npt.NDArray[np.int64] | None:
        n, block = self.spec.n, self.spec.block
        return np.diff(np.r_[np.arange(0, n, block), n]).astype(np.int64) if block else None


class Known(BaseDataset):
    """A dataset of headrace's over a source of one's own."""

    def __init__(self, spec: Spec, **options: Any) -> None:
        self.spec = spec
        targets = (
            np.arange(spec.n) % CLASSES if spec.form not in ("dict", "nested", "words") else None
        )
        super().__init__(
            Numbers(spec),
            targets=targets,
            transform=TRANSFORMS.get(spec.form),
            seed=spec.seed,
            progress=False,
            **options,
        )

    def decode(self, record: bytes) -> Any:
        return made(
            self.spec,
            int.from_bytes(record[:8], "little"),
            np.frombuffer(record, np.uint8, offset=8),
        )

    def split_target(self, index: int, value: Any) -> tuple[Any, Any]:
        _come_by(self.spec, index)
        return super().split_target(index, value)


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "view": turned,
    "ragged": cropped,
    "draws": RandomProbe(),
}


class Foreign(Dataset[Any]):
    """A plain map-style dataset."""

    def __init__(self, spec: Spec, n: int) -> None:
        self.spec, self.n = spec, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.n:
            raise IndexError(index)
        _come_by(self.spec, index)
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
    how, n = spec.how, spec.n
    if how == "own":
        return Known(spec, loading_mode=mode)
    if how == "photos":
        return ImageDataset(
            f"{spec.folder}/photos",
            image_size=spec.size,
            loading_mode=mode,
            seed=spec.seed,
            progress=False,
        )
    if how == "rows":
        return HDF5Dataset(
            f"{spec.folder}/rows.h5",
            "data",
            target_name="labels",
            loading_mode=mode,
            seed=spec.seed,
            progress=False,
        )
    if how == "wrapped":
        return MemoryEfficientDataset(
            Foreign(spec, n), loading_mode=mode, seed=spec.seed, progress=False
        )
    if how == "subset":
        return Subset(Foreign(spec, n), range(n - 1, -1, -1))
    if how == "joined":
        half = n // 2 or 1
        return ConcatDataset([Foreign(spec, half)] * (n // half))
    if how == "tensors":
        oracle = Oracle(spec)
        return TensorDataset(
            *map(torch.stack, zip(*(oracle.sample(0, index) for index in range(n)), strict=True))
        )
    return Stream(spec) if how == "stream" else Foreign(spec, n)


def draw_spec(
    rng: random.Random, folder: str, how: str | None = None, form: str | None = None
) -> Spec:
    """The data of a round; `how` and `form` may be named."""
    how = how or rng.choice(("own",) * 6 + OWN + FOREIGN)
    form = form or rng.choice(FORMS + (("view", *RANDOM, *RANDOM) if how == "own" else ()))
    form = "image" if how in ("photos", "rows", "tensors") else form
    scale = rng.choice((2, 20, 20, 60, 200))
    size = rng.randint(2, scale), rng.randint(2, scale)
    n = {"photos": 24, "rows": _ROWS}.get(
        how, rng.choice((1, 7, 30, 60, 150)) if scale < 200 else rng.choice((8, 30))
    )
    if how == "joined":
        n = max(2, n // 2 * 2)
    size = (size[0] + 6, size[1] + 6) if how == "photos" else (size[0], size[1] * 4)
    return Spec(
        how,
        form,
        n,
        size,
        rng.randrange(1 << 20),
        rng.choice((0, 3, 8)),
        rng.random() < 0.3,
        folder,
    )


# --- loaders --------------------------------------------------------------------------------------


def draw_options(rng: random.Random, spec: Spec, workers: int, start: str) -> dict[str, Any]:
    """Options of a loader over the data of a round; all that `Oracle` needs are among them."""
    is_own = spec.how in ("own", "photos")
    # bytes of a batch are bounded
    most = max(1, min(64, (8 << 20) // spec.nbytes, max(3, spec.n // 2)))
    options: dict[str, Any] = {
        "batch_size": rng.choice((1, 2, rng.randint(1, most), most)),
        "seed": spec.seed,
        "collate_fn": "list" if spec.form == "ragged" or (is_own and rng.random() < 0.2) else None,
        "enable_monitoring": rng.random() < 0.5,
        **draw_workers(rng, workers, start),
    }
    if spec.how == "pages":
        return {**options, "batch_size": None, "shuffle": rng.random() < 0.5}
    if spec.how == "stream":
        return options
    if spec.how == "tensors" and rng.random() < 0.5:
        options["collate_fn"] = viewed
    world, shuffle = (
        rng.choice((1, 1, 1, 2)),
        rng.choice((True, True, False, "block") if is_own else (True, False)),
    )
    return {
        **options,
        "shuffle": shuffle,
        "drop_last": rng.random() < 0.2,
        "world_size": world,
        "rank": rng.randrange(world),
    }


def draw_workers(rng: random.Random, workers: int, start: str) -> dict[str, Any]:
    """The options that must not change any batch."""
    if not workers:
        return {
            "num_workers": 0,
            "prefetch_factor": None,
            "persistent_workers": None,
            "multiprocessing_context": None,
        }
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
        self.spec = spec = replace(spec, is_slow=False)
        self._alone = (
            open_data(spec, "lazy") if spec.how == "photos" or spec.form in RANDOM else None
        )
        self._known: dict[int, Any] = {}

    def sample(self, epoch: int, index: int) -> Any:
        """One sample of an epoch."""
        if self._alone is not None and self.spec.how != "photos":
            self._alone.set_epoch(epoch)
            return self._alone[index]
        if index not in self._known:
            self._known[index] = (
                self._alone[index] if self._alone is not None else self._made(index)
            )
        return self._known[index]

    def _made(self, index: int) -> Any:
        spec = self.spec
        if spec.how == "rows":
            return torch.from_numpy(row_of(index)), index % CLASSES
        value = made(spec, spec.inner(index), content(spec.inner(index), spec.nbytes, spec.seed))
        if spec.how == "tensors":
            return torch.from_numpy(content(index, spec.nbytes, spec.seed)).view(
                *spec.size, 3
            ), torch.tensor(index)
        if spec.how != "own" or spec.form not in ("image", "view"):
            return value
        return turned(value) if spec.form == "view" else value, index % CLASSES

    def batch(self, epoch: int, indices: Sequence[int], collate: Any) -> Any:
        """A batch of an epoch, by another collate function than headrace's."""
        samples = [self.sample(epoch, index) for index in indices]
        if self.spec.how == "pages":
            return samples[0]
        batch = samples if collate == "list" else stacked(samples)
        return parted(batch) if collate is viewed else batch

    def order(self, dataset: Any, options: dict[str, Any], epoch: int) -> list[list[int]]:
        """The indices of each batch of an epoch, by the documented law."""
        size, n = options["batch_size"] or 1, self.spec.n
        if self.spec.how == "stream":
            workers = options["num_workers"] or 1
            parts = [range(worker, n, workers) for worker in range(workers)]
            return [
                list(part[at : at + size])
                for at in range(0, n, size)
                for part in parts
                if part[at : at + size]
            ]
        rank, world, drop_last = (
            options.get("rank", 0),
            options.get("world_size", 1),
            options.get("drop_last", False),
        )
        if isinstance(dataset, BaseDataset):
            order = dataset.epoch_order(options["shuffle"], self.spec.seed, epoch, size * world)
        else:
            order = EpochOrder(
                n,
                shuffle=options["shuffle"],
                seed=self.spec.seed,
                epoch=epoch,
                global_batch=size * world,
            )
        batches = [batch.tolist() for batch in RankBatches(order, rank, world, size, drop_last)]
        if world == 1 and not drop_last:
            assert sorted(itertools.chain(*batches)) == list(range(n)), (
                "not each sample exactly once"
            )
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


def checksum(value: Any, crc: int = 0) -> int:
    """CRC-32 of a batch: of its structure, types, dtypes, shapes and bytes."""
    if isinstance(value, torch.Tensor):
        crc = zlib.crc32(f"{value.dtype} {list(value.shape)}".encode(), crc)
        # an extent of 1 may have any stride
        flat = value.contiguous().as_strided((value.numel(),), (1,))
        return zlib.crc32(flat.view(torch.uint8).numpy(), crc) if value.numel() else crc
    if isinstance(value, np.ndarray):
        return zlib.crc32(
            np.ascontiguousarray(value),
            zlib.crc32(f"array {value.dtype} {value.shape}".encode(), crc),
        )
    if isinstance(value, dict):
        return checksum([*value.items()], zlib.crc32(b"dict", crc))
    if isinstance(value, (tuple, list)):
        crc = zlib.crc32(f"{type(value).__name__} {len(value)}".encode(), crc)
        for item in value:
            crc = checksum(item, crc)
        return crc
    return zlib.crc32(f"{type(value).__name__} {value!r}".encode(), crc)


def difference(expected: Any, got: Any, place: str = "batch") -> str:
    """In words: the first place where two batches differ."""
    if (
        type(expected) is type(got)
        and isinstance(got, (dict, tuple, list))
        and len(expected) == len(got)
    ):
        for key, part in expected.items() if isinstance(expected, dict) else enumerate(expected):
            other = got.get(key) if isinstance(got, dict) else got[key]
            if checksum(part) != checksum(other):
                return difference(part, other, f"{place}[{key!r}]")
    return f"{place} is {_said(got)}, expected {_said(expected)}"


def _said(value: Any) -> str:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        flat = value.reshape(-1)[:8].tolist()
        return f"{value.dtype} {list(value.shape)} {flat}... (crc {checksum(value):08x})"
    return f"{type(value).__name__} {str(value)[:80]!r}"


def arrays_in(value: Any) -> Iterator[torch.Tensor | npt.NDArray[Any]]:
    """The tensors and arrays of a batch."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        yield value
    elif isinstance(value, (dict, tuple, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from arrays_in(item)


# --- an epoch, batch by batch ---------------------------------------------------------------------


class Wrong(Exception):
    """What the soak found."""


class Walk:
    """An iterator of a loader, whose batches are compared with those that must come.

    Args:
        round_: the `Round` that it belongs to.
        loader, options: what it iterates over.
        epoch, start: where it must begin.
        bad: samples whose batches must fail.
    """

    def __init__(
        self,
        round_: Any,
        loader: Any,
        options: dict[str, Any],
        epoch: int,
        start: int = 0,
        bad: tuple[int, ...] = (),
    ) -> None:
        self.round, self.options, self.epoch, self.start, self.at, self.bad = (
            round_,
            options,
            epoch,
            start,
            start,
            bad,
        )
        self.soak, self.batches = round_.soak, round_.oracle.order(loader.dataset, options, epoch)
        self.asked = self.soak.watch(f"iter, epoch {epoch}")
        self.iterator = iter(loader)
        self.soak.counts["epochs"] += 1
        if loader.epoch != epoch:
            raise Wrong(f"the loader is in epoch {loader.epoch}, expected {epoch}")

    def step(self) -> bool:
        """Receives and checks a batch, or an error; False at the end."""
        where = f"epoch {self.epoch}, batch {self.at}"
        coming = self.batches[self.at] if self.at < len(self.batches) else None
        fails = coming is not None and any(
            self.round.spec.inner(index) in self.bad for index in coming
        )
        self.asked = self.soak.watch(where)
        try:
            batch = next(self.iterator)
        except StopIteration:
            if coming is not None:
                raise Wrong(
                    f"{where}: the epoch ended, expected {len(self.batches)} batches"
                ) from None
            return False
        except (Planned, SampleError) as error:
            if not fails:
                raise
            self._check_error(error, where)
        else:
            if coming is None or fails:
                raise Wrong(f"{where}: a batch came, expected {'an error' if fails else 'the end'}")
            self._check(batch, coming, where)
        self.at += 1
        return True

    def _check(self, batch: Any, indices: list[int], where: str) -> None:
        expected, crc = (
            self.round.oracle.batch(self.epoch, indices, self.options["collate_fn"]),
            checksum(batch),
        )
        if crc != checksum(expected):
            raise Wrong(f"{where}: of samples {indices}: {difference(expected, batch)}")
        self.soak.counts["batches"] += 1
        self.soak.counts["samples"] += len(indices)
        self.soak.use(batch, where, self.round.rng)

    def _check_error(self, error: Exception, where: str) -> None:
        self.soak.counts["exceptions"] += 1
        workers, kind, notes = (
            self.options["num_workers"],
            self.round.error,
            "\n".join(getattr(error, "__notes__", [])),
        )
        said = (
            f"headrace: in worker {(self.at - self.start) % workers}, {where}"
            if workers
            else f"headrace: in {where}"
        )
        if said not in notes or type(error) is not kind or "planned for sample" not in str(error):
            raise Wrong(
                f"{where}: expected a {kind.__name__} with the note {said!r}, got {error!r} with "
                f"{notes!r}"
            ) from error
        if workers and "Traceback" not in str(error.__cause__):
            raise Wrong(f"{where}: {error!r} lacks the worker's traceback") from error

    def rest(self) -> None:
        """The batches up to the end."""
        while self.step():
            pass

    def some(self, most: int | None = None) -> None:
        """A random number of the batches to come."""
        left = len(self.batches) - self.at
        for _ in range(self.round.rng.randint(0, left if most is None else min(most, left))):
            self.step()
