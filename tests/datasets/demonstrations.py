"""Writes HDF5 files of demonstrations, as robomimic and LIBERO lay them out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

LENGTHS = (7, 12, 5, 1, 9, 20, 3, 8, 6, 11, 4, 10)


def write_demos(path: Path, lengths: Sequence[int] = LENGTHS, seed: int = 0, **images: Any) -> Path:
    """A file of demonstrations of these lengths, in which demo_10 comes before demo_2 as HDF5 sorts names; `images` are options of their
    datasets."""
    draws = np.random.default_rng(seed)
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["total"] = sum(lengths)
        for number, length in enumerate(lengths):
            demo = data.create_group(f"demo_{number}")
            demo.attrs["num_samples"], demo.attrs["model_file"] = length, f"<mujoco {number}>"
            demo["actions"] = draws.normal(size=(length, 7))
            demo["obs/joint_pos"] = draws.normal(size=(length, 3)).astype("f4")
            how = dict(images) if length else {}
            if isinstance(how.get("chunks"), tuple):
                how["chunks"] = (min(how["chunks"][0], length), *how["chunks"][1:])
            demo.create_dataset("obs/agentview_image", data=draws.integers(0, 256, (length, 6, 5, 3), np.uint8), **how)
            demo["dones"] = np.arange(length) == length - 1
        for name, part in (("train", slice(1, None)), ("valid", slice(1))):
            file[f"mask/{name}"] = np.array([f"demo_{number}".encode() for number in range(len(lengths))][part])
    return path


def arrays_of(path: Path, episode: str) -> dict[str, Any]:
    """The arrays of an episode, as h5py reads them."""
    found: dict[str, Any] = {}
    with h5py.File(path) as file:
        file[episode].visititems(lambda key, item: found.update({key: item[...]}) if isinstance(item, h5py.Dataset) else None)
    return found
