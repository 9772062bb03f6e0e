"""Compares samples, batches, orders and resumed epochs of two checkouts, bit for bit.

    python -m tests.digests --against CHECKOUT [--photos FOLDER] [--only WORD ...]

Each checkout runs in a process of its own, over files that this one writes: every format of the
gallery, in each mode, with 0 and 2 workers, and what users do with datasets (views of views,
overridden steps, attributes that are set later, samples that can't be read). The order and the
remaining batches after a resume are compared too; the state itself is not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace import BaseDataset, ImageDataset, MemoryEfficientDataset, create_dataloader
from headrace.testing.contract import RandomProbe
from tests.data.gallery import gallery_at, write_gallery

MODES = ("lazy", "eager", "cached", "streaming")
ROOT = Path(__file__).parents[1]


def digest(value: Any) -> str:
    """A hash of structure, types, dtypes, shapes and bits of a sample or batch."""
    hashed = hashlib.blake2b(digest_size=12)
    _add(hashed, value)
    return hashed.hexdigest()


def _add(hashed: Any, value: Any) -> None:
    hashed.update(type(value).__name__.encode())
    if isinstance(value, dict):
        for name, item in value.items():
            hashed.update(repr(name).encode())
            _add(hashed, item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _add(hashed, item)
    elif isinstance(value, torch.Tensor) and value.layout is torch.sparse_csr:
        for part in (value.crow_indices(), value.col_indices(), value.values()):
            _add(hashed, part)
    elif isinstance(value, torch.Tensor):
        dense = value.to_dense() if value.is_sparse else value
        _add(hashed, dense.contiguous().view(torch.uint8).numpy() if dense.ndim else dense.item())
        hashed.update(f"{value.dtype} {tuple(value.shape)}".encode())
    elif isinstance(value, np.ndarray):
        hashed.update(f"{value.dtype} {value.shape}".encode())
        hashed.update(np.ascontiguousarray(value).tobytes())
    else:
        hashed.update(repr(value).encode())


class Overriding(ImageDataset):
    """Overrides each step from a record to a sample."""

    def decode(self, record: Any) -> Any:
        return super().decode(record)[:4, :4].copy()

    def value_spec(self) -> Any:
        return None

    def split_target(self, index: int, value: Any) -> Any:
        value, target = super().split_target(index, value)
        return value, (target, index)

    def to_input(self, value: Any) -> Any:
        return torch.from_numpy(value.copy()).float()

    def make_sample(self, value: Any, target: Any) -> Any:
        return {"input": value, "target": target}


class Foreign:
    """A map-style dataset of somebody's, which draws random numbers."""

    def __len__(self) -> int:
        return 17

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3,), float(index)) + torch.rand(3), index


def cases(folder: Path, photos: Path | None) -> Iterator[tuple[str, Callable[..., Any]]]:
    """By name what makes each dataset, by its loading mode."""
    for name, make in gallery_at(folder, folder / "cache").items():
        yield name, make
        yield f"{name}, transformed", lambda make=make, **o: make(transform=RandomProbe(), **o)
        yield f"{name}, view of a view", lambda make=make, **o: _view(make(**o))
    images = folder / "photos"
    damaged = folder / "damaged"
    yield "steps overridden", lambda **o: Overriding(images, progress=False, **o)
    yield "attributes set later", lambda **o: _changed(ImageDataset(images, progress=False, **o))
    for policy in ("skip", _stand_in):
        name = f"damaged, on_error={getattr(policy, '__name__', policy)}"
        yield (
            name,
            lambda policy=policy, **o: ImageDataset(
                damaged, image_size=(8, 8), on_error=policy, progress=False, **o
            ),
        )
    yield "foreign", lambda **o: MemoryEfficientDataset(Foreign(), progress=False, **o)
    if photos is not None:
        yield (
            "photographs",
            lambda **o: ImageDataset(photos, image_size=(64, 48), progress=False, **o),
        )


def _view(dataset: BaseDataset) -> BaseDataset:
    return dataset.subset(np.arange(len(dataset) - 1, -1, -1)).subset(range(2, 17))


def _changed(dataset: BaseDataset) -> BaseDataset:
    dataset.transform = RandomProbe()
    dataset.return_index = True
    dataset.seed = 9
    return dataset


def _stand_in(index: int, path: str, error: Exception) -> Any:
    return torch.zeros(3, 8, 8), -1


def digests(make: Callable[..., Any], mode: str, workers: int) -> list[str]:
    """Of the samples, two epochs and a resumed one, in both shuffled orders."""
    found = []
    dataset = make(loading_mode=mode)
    if mode != "streaming" and not workers:
        for index in range(0, len(dataset), 3):
            try:
                found.append(digest(dataset[index]))
            except Exception as error:
                found.append(type(error).__name__)
    options = {"batch_size": 5, "seed": 3, "num_workers": workers, "collate_fn": "list"}
    for shuffle in (True, "block"):
        with create_dataloader(dataset, shuffle=shuffle, **options) as loader:
            for _ in range(2):
                found.extend(map(digest, loader))
            batches = iter(loader)
            next(batches)
            state = loader.state_dict()
        with create_dataloader(dataset, shuffle=shuffle, **options) as loader:
            loader.load_state_dict(state)
            found.extend(map(digest, loader))
    options.pop("collate_fn")
    try:
        with create_dataloader(dataset, **options) as loader:
            found.extend(map(digest, loader))
    except Exception as error:  # samples of several sizes have no default batch
        found.append(type(error).__name__)
    dataset.close()
    return found


def run(folder: Path, photos: Path | None, only: list[str]) -> dict[str, list[str]]:
    """Digests by case, mode and number of workers."""
    made = {}
    for name, make in cases(folder, photos):
        if only and not any(word in name for word in only):
            continue
        for mode in MODES:
            for workers in (0, 2):
                made[f"{name}, {mode}, {workers} workers"] = digests(make, mode, workers)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--photos", type=Path, help="a folder of image folders")
    parser.add_argument("--only", nargs="+", default=[], help="cases whose names have such a word")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run is not None:
        print(json.dumps(run(given.run, given.photos, given.only)))
        return 0
    with tempfile.TemporaryDirectory(prefix="headrace-digests-") as place:
        folder = Path(place)
        write_gallery(folder)
        damaged = folder / "damaged" / "a"
        damaged.mkdir(parents=True)
        for number, photo in enumerate(sorted((folder / "photos").rglob("*.*"))[:12]):
            data = photo.read_bytes()
            (damaged / photo.name).write_bytes(data[: len(data) // 3] if number % 4 == 1 else data)
        made = []
        for checkout in (ROOT, given.against or ROOT):
            command = [sys.executable, __file__, "--run", place]
            if given.photos is not None:
                command += ["--photos", str(given.photos)]
            if given.only:
                command += ["--only", *given.only]
            paths = os.pathsep.join([str(checkout.resolve() / "src"), str(ROOT)])
            environment = {**os.environ, "PYTHONPATH": paths}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
            made.append(json.loads(done.stdout))
    ours, theirs = made
    unequal = [name for name in ours if ours[name] != theirs[name]]
    count = sum(map(len, ours.values()))
    print(f"{len(ours)} cases, {count:,} digests; unequal: {', '.join(unequal) or 'none'}")
    return int(bool(unequal))


if __name__ == "__main__":
    raise SystemExit(main())
