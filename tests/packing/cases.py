"""A source of each kind, the ways to pack it, and what opens the packs."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from headrace import HDF5Dataset, ImageDataset, TextDataset, open_dataset, pack
from tests.data.labelled import make_coco, make_masks, save_mask
from tests.data.make import make_photos

COUNT = 12
WAYS: dict[str, dict[str, Any]] = {
    "file": {},
    "header": {"check": "header"},
    "jpeg": {"store": "jpeg", "max_size": 24},
    "parts": {"shard_size": 3000},
    "decoded": {"store": "decoded"},
    "decoded parts": {"store": "decoded", "shard_size": 500, "compression": "gzip", "chunks": 2},
    "zstd parts": {"store": "decoded", "shard_size": 500, "compression": "zstd", "chunks": 2},
}
COLUMNS = ("kind", "height/m", "sound", "seen in")
SHARDS = {"arrays": 500, "ragged": 50, "texts": 40}
"""Bytes a part, where images have others."""


class Own(Dataset[Any]):
    """Arrays of several lengths, with a dict of targets each."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[Any, dict[str, Any]]:
        targets = {"turn": index / 2, "kind": index % 3, "place": np.arange(2, dtype="i1") + index}
        return torch.full((index % 4, 3), index, dtype=torch.int16), targets


def make_arrays(folder: Path) -> Path:
    with h5py.File(folder / "arrays.h5", "w") as file:
        file["rows"] = np.random.default_rng(0).random((COUNT, 6, 8), np.float32)
        file["labels"] = np.arange(COUNT) % 4
    return folder / "arrays.h5"


def make_grey_masks(folder: Path) -> Path:
    """Images and masks, all of 8 bits."""
    make_masks(folder, COUNT)
    for path in (folder / "masks").glob("*/*"):
        save_mask(path, np.asarray(Image.open(path)), "L")
    return folder


def make_texts(folder: Path) -> Path:
    """Texts in two class folders, some empty, some not ASCII."""
    draw = np.random.default_rng(0)
    for number, size in enumerate((40, 0, 7, 8, 23, 1, 16, 0, 30, 12, 5, 60)):
        path = folder / ("prose", "verse")[number % 2] / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes("".join(draw.choice(list("abcdé \n"), size)).encode())
    return folder


def make_labels(photos: Path, table: Path) -> Path:
    """A table of columns that are texts, floats, truth values, and several labels of a sample."""
    names = sorted(path.relative_to(photos).as_posix() for path in photos.glob("*/*"))
    rows = [
        {
            "file": name,
            "kind": ("oak", "ash", "elm")[number % 3],
            "height/m": number / 4,
            "sound": number % 2 == 0,
            "seen in": ["may"] * (number % 2) + ["june"] * (number % 3 > 0),
        }
        for number, name in enumerate(names)
    ]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return table


of_images = partial(ImageDataset, image_size=8)


def photos(folder: Path) -> Any:
    return partial(of_images, make_photos(folder / "photos", per_class=COUNT // 3, size=(32, 24)))


def columns(folder: Path) -> Any:
    images = make_photos(folder / "photos", per_class=COUNT // 3, size=(32, 24))
    labels = make_labels(images, folder / "labels.jsonl")
    return partial(of_images, images, targets=labels, target_name=COLUMNS)


def masks(folder: Path) -> Any:
    made = make_grey_masks(folder / "masks")
    return partial(of_images, made / "images", targets=made / "masks")


def boxes(folder: Path) -> Any:
    made = make_coco(folder / "boxes", COUNT)
    return partial(of_images, made / "images", targets=made / "instances.json", masks=True)


def arrays(folder: Path) -> Any:
    return partial(HDF5Dataset, make_arrays(folder), "rows", target_name="labels")


def ragged(folder: Path) -> Any:
    return Own


def texts(folder: Path) -> Any:
    made = make_texts(folder / "texts")
    return partial(TextDataset, made, labels="folders", cache_dir=folder / "cache")


MAKERS = {maker.__name__: maker for maker in (photos, columns, masks, boxes, arrays, ragged, texts)}
"""What writes a source of each kind below a folder, and returns what opens it."""
IMAGES = ("photos", "columns", "masks", "boxes")
CASES = [
    *((source, way) for way in WAYS for source in IMAGES),
    *(("arrays", way) for way in ("file", "parts", "decoded parts", "zstd parts")),
    *(("ragged", way) for way in ("file", "parts")),
    *(("texts", way) for way in ("file", "parts")),
]


class Case(NamedTuple):
    """What opens a source and its packs, its pack, and the options that it was packed with."""

    source: Callable[..., Any]
    open: Callable[..., Any]
    path: Path
    options: dict[str, Any]


def make_case(source: str, way: str, folder: Path) -> Case:
    opened, options = MAKERS[source](folder), dict(WAYS[way])
    if "shard_size" in options and source in SHARDS:
        options["shard_size"] = SHARDS[source]
    more: dict[str, Any] = {"image_size": 8} if source in IMAGES else {}
    if source in ("arrays", "ragged"):
        more = {"target_name": "targets"}
    out = folder / ("out" if "shard_size" in options else "out.h5")
    with_source = opened()
    path = Path(pack(with_source, out, **options))
    if source != "ragged":
        with_source.close()
    return Case(opened, partial(open_dataset, **more), path, options)
