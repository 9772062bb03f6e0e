"""What tests of packing share: contents of folders, comparisons, and damage."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from headrace import ImageDataset
from headrace.testing.contract import same


def contents(folder: Path) -> dict[str, str]:
    """A checksum of each file, by its path below the folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def images(path: Any, **options: Any) -> ImageDataset:
    return ImageDataset(path, **{"image_size": (20, 30), "normalize": False, **options})


def samples_of(dataset: Any) -> list[Any]:
    """All samples, by their indices."""
    return [dataset[index] for index in range(len(dataset))]


def check_same(packed: Any, source: Any) -> None:
    """Every sample and target bit for bit, and what tells them from other data."""
    assert same(samples_of(packed), samples_of(source))
    assert packed.fingerprint == source.fingerprint


def plain(value: Any) -> Any:
    """A value that can be compared, and sorted by its repr: arrays as dtype, shape and bytes."""
    if isinstance(value, dict):
        return tuple((name, plain(value[name])) for name in sorted(value))
    if isinstance(value, (list, tuple)):
        return tuple(map(plain, value))
    if isinstance(value, (bytes, str)) or value is None:
        return value
    array = np.asarray(value)
    return (str(array.dtype), array.shape, array.tobytes()) if array.ndim else array.item()


def flip(path: Path, place: int, bit: int = 0) -> None:
    """Changes one bit of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def replace_array(packed: Path, name: str, value: object) -> None:
    """Another dataset under the name, as a program other than headrace could write it, and no
    checksum that says so; None: none.
    """
    with h5py.File(packed, "a") as file:
        said = json.loads(bytes(file.attrs["headrace"]))
        file.attrs["headrace"] = json.dumps({**said, "checksums": {}})
        del file.attrs["headrace_crc32"], file[name]
        if value is not None:
            file[name] = value
