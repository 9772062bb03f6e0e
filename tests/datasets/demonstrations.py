"""Demonstrations as robomimic and LIBERO lay them out, and replay buffers of Diffusion Policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import zarr

LENGTHS = (7, 12, 5, 1, 9, 20, 3, 8, 6, 11, 4, 10)


def write_demos(path: Path, lengths: Sequence[int] = LENGTHS, seed: int = 0, **images: Any) -> Path:
    """Demonstrations of these lengths, demo_10 before demo_2; `images` are options of images."""
    draws = np.random.default_rng(seed)
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["total"] = sum(lengths)
        for number, length in enumerate(lengths):
            demo = data.create_group(f"demo_{number}")
            demo.attrs["num_samples"] = length
            demo.attrs["model_file"] = f"<mujoco {number}>"
            demo["actions"] = draws.normal(size=(length, 7))
            demo["obs/joint_pos"] = draws.normal(size=(length, 3)).astype("f4")
            how = dict(images) if length else {}
            if isinstance(how.get("chunks"), tuple):
                how["chunks"] = (min(how["chunks"][0], length), *how["chunks"][1:])
            pixels = draws.integers(0, 256, (length, 6, 5, 3), np.uint8)
            demo.create_dataset("obs/agentview_image", data=pixels, **how)
            demo["dones"] = np.arange(length) == length - 1
        names = [f"demo_{number}".encode() for number in range(len(lengths))]
        file["mask/train"], file["mask/valid"] = np.array(names[1:]), np.array(names[:1])
    return path


def arrays_of(path: Path, episode: str) -> dict[str, Any]:
    """The arrays of an episode, as h5py reads them."""
    arrays: dict[str, Any] = {}

    def visit(key: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            arrays[key] = item[...]

    with h5py.File(path) as file:
        file[episode].visititems(visit)
    return arrays


def buffer_arrays(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> dict[str, Any]:
    """The arrays of all steps of a replay buffer."""
    draws, steps = np.random.default_rng(seed), sum(lengths)
    return {
        "action": draws.normal(size=(steps, 2)).astype("f4"),
        "img": draws.integers(0, 256, (steps, 6, 5, 3), np.uint8),
        "obs/state": draws.normal(size=(steps, 3)),
    }


def write_buffer(
    path: Path, lengths: Sequence[int] = LENGTHS, seed: int = 0, kind: str = "gzip"
) -> Path:
    """A replay buffer, as Diffusion Policy lays them out: an HDF5 file, or of a path that ends in
    .zarr a store.

    Args:
        kind: how images are stored in HDF5 ("gzip", "raw": chunks as they are, "contiguous"), or
            the version of the store ("2", "3").
    """
    ends, arrays = np.cumsum(lengths), buffer_arrays(lengths, seed)
    whole = {"meta/episode_ends": ends, "meta/success": np.arange(len(ends)) % 2 == 0}
    whole |= {f"data/{key}": values for key, values in arrays.items()}
    if path.suffix == ".zarr":
        root = zarr.open_group(path, mode="w", zarr_format=3 if kind == "3" else 2)
        for name, values in whole.items():
            root.create_array(name, data=values, chunks=(8, *values.shape[1:]))
        if kind != "3":
            zarr.consolidate_metadata(root.store)
        return path
    how: dict[str, Any] = {"chunks": (8, 6, 5, 3), "compression": None if kind == "raw" else kind}
    with h5py.File(path, "w") as file:
        for name, values in whole.items():
            is_packed = name == "data/img" and kind != "contiguous"
            file.create_dataset(name, data=values, **(how if is_packed else {}))
        file["meta/task"] = [f"task {number}" for number in range(len(ends))]
    return path


def spoil(path: Path, name: str, values: Any) -> Path:
    """Replaces an array; None: removes it."""
    is_zarr = path.suffix == ".zarr"
    root: Any = zarr.open_group(path, mode="r+") if is_zarr else h5py.File(path, "r+")
    del root[name]
    if values is not None and is_zarr:
        root.create_array(name, data=values)
    elif values is not None:
        root[name] = values
    if is_zarr:
        zarr.consolidate_metadata(root.store)
    else:
        root.close()
    return path


def damage_chunk(path: Path, name: str, number: int) -> Path:
    """Writes over the middle of a chunk of an HDF5 file."""
    with h5py.File(path) as file:
        place = file[name].id.get_chunk_info(number).byte_offset
    with open(path, "r+b") as raw:
        raw.seek(place + 20)
        raw.write(b"\0damage\0" * 4)
    return path
