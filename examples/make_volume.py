"""Makes a microscope-like volume with labels, as OME-Zarr (OME-NGFF 0.5), to train on.

Cells are bright balls; debris, smaller balls as bright, is not labelled. Cells touch, everything is
noisy, and the voxels are twice as long in z. The image has two levels; the labels are written with
voxels of their own, twice as fine in z as the image's.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import zarr

VOXEL = (0.5, 0.25, 0.25)
"""Micrometers along z, y and x."""


def make_volume(path: Path, shape: tuple[int, int, int] = (32, 144, 144), seed: int = 0) -> Path:
    """Writes the volume to `path`, unless it is there; gives `path`."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    random = np.random.default_rng(seed)
    cells = _balls(random, shape, 2.2, 3.4, 1.2e-3)
    debris = _balls(random, shape, 0.5, 1.1, 4e-3)
    image = (
        0.25
        + 0.5 * (_inside(cells, shape, VOXEL) | _inside(debris, shape, VOXEL))
        + random.normal(0, 0.15, shape)
    )
    image = (image.clip(0, 1) * 65535).astype(np.uint16)
    fine, fine_shape = (VOXEL[0] / 2, *VOXEL[1:]), (2 * shape[0], *shape[1:])
    # the first of two labels in an image's voxel has its centre a quarter before the voxel's
    shift = (-VOXEL[0] / 4, 0.0, 0.0)
    labels = _inside(cells, fine_shape, fine, shift).astype(np.uint8)

    root = zarr.open_group(unfinished, mode="w", zarr_format=3)
    coarse = (
        image.reshape(shape[0], shape[1] // 2, 2, shape[2] // 2, 2).mean((2, 4)).astype(np.uint16)
    )
    levels = []
    for number, (array, size) in enumerate(
        ((image, VOXEL), (coarse, (VOXEL[0], 2 * VOXEL[1], 2 * VOXEL[2])))
    ):
        root.create_array(
            str(number),
            shape=array.shape,
            dtype=array.dtype,
            chunks=(8, 32, 32),
            shards=(24, 96, 96),
        )[...] = array
        levels.append((size, [(own - finest) / 2 for own, finest in zip(size, VOXEL, strict=True)]))
    root.attrs.update(_described("cells in debris", levels))
    group = root.create_group("labels")
    group.attrs.update({"ome": {"version": "0.5", "labels": ["cells"]}})
    one = group.create_group("cells")
    one.create_array("0", shape=labels.shape, dtype=labels.dtype, chunks=(16, 32, 32))[...] = labels
    one.attrs.update(_described("cells", [(fine, list(shift))]))
    unfinished.rename(path)
    return path


def _balls(
    random: np.random.Generator,
    shape: tuple[int, int, int],
    least: float,
    most: float,
    density: float,
) -> np.ndarray[Any, Any]:
    """Centres and radii in micrometers, [balls, 4]."""
    extents = np.multiply(shape, VOXEL)
    count = int(np.prod(extents) * density)
    return np.column_stack(
        [random.uniform(0, extents, (count, 3)), random.uniform(least, most, count)]
    )


def _inside(
    balls: np.ndarray[Any, Any],
    shape: tuple[int, ...],
    voxel: tuple[float, ...],
    shift: tuple[float, ...] = (0, 0, 0),
) -> np.ndarray[Any, Any]:
    """Which voxels have their centre in a ball."""
    found = np.zeros(shape, bool)
    centres = [
        np.arange(extent) * size + offset
        for extent, size, offset in zip(shape, voxel, shift, strict=True)
    ]
    for *middle, radius in balls.tolist():
        near = [
            slice(*np.searchsorted(along, (at - radius, at + radius)))
            for along, at in zip(centres, middle, strict=True)
        ]
        z, y, x = np.ix_(*(along[part] for along, part in zip(centres, near, strict=True)))
        found[tuple(near)] |= (z - middle[0]) ** 2 + (y - middle[1]) ** 2 + (
            x - middle[2]
        ) ** 2 <= radius**2
    return found


def _described(name: str, levels: list[tuple[tuple[float, ...], list[float]]]) -> dict[str, Any]:
    datasets = []
    for number, (scale, translation) in enumerate(levels):
        lies = [
            {"type": "scale", "scale": list(scale)},
            {"type": "translation", "translation": translation},
        ]
        datasets.append({"path": str(number), "coordinateTransformations": lies})
    axes = [{"name": axis, "type": "space", "unit": "micrometer"} for axis in "zyx"]
    return {
        "ome": {
            "version": "0.5",
            "multiscales": [{"name": name, "axes": axes, "datasets": datasets}],
        }
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Makes a volume of cells with labels, as OME-Zarr."
    )
    parser.add_argument("path", type=Path)
    parser.add_argument(
        "--shape",
        type=int,
        nargs=3,
        default=(32, 144, 144),
        metavar=("Z", "Y", "X"),
        help="voxels (32 144 144)",
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(make_volume(given.path, tuple(given.shape), given.seed))
