"""Volumes and their labels in Zarr stores, and how they lie to one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError, FormatError
from headrace.io.paths import redact
from headrace.storage.arrays.chunks import shown_array
from headrace.storage.arrays.patches import Box, PatchGrid
from headrace.storage.arrays.reader import ArrayReader
from headrace.storage.arrays.rows import axis_number
from headrace.storage.arrays.volumes import PatchSource, Volume
from headrace.storage.zarr.ome import (
    Axis,
    Image,
    Level,
    Scale,
    image_at,
    labels_at,
    missing_labels,
    nearest,
)
from headrace.storage.zarr.rows import OpenZarr
from headrace.storage.zarr.store import Store

Extents = Sequence[int] | Mapping[str, int]


@dataclass(frozen=True)
class ZarrArray:
    """An array that a user named.

    Attributes:
        store: that it lies in.
        name: its path in the store.
        metadata: of it.
        image, level: if it is of an image of OME-NGFF.
    """

    store: Store
    name: str
    metadata: dict[str, Any]
    image: Image | None = None
    level: Level | None = None

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The names of the axes; empty ones where the store doesn't say."""
        if self.image is not None:
            return self.image.names
        return self.store.axis_names(self.name, self.metadata)

    @property
    def spatial_axes(self) -> list[int]:
        """The axes that a single extent means: those of space, as an image of OME-NGFF says; those
        that are named x, y and z; else the last three.
        """
        if self.image is not None:
            space = [number for number, axis in enumerate(self.image.axes) if axis.kind == "space"]
        else:
            space = [
                number
                for number, name in enumerate(self.axis_names)
                if name.lower() in ("x", "y", "z")
            ]
        return space or [*range(len(self.axis_names))][-3:]

    def axis(self, axis: int | str) -> int:
        """The number of an axis, given by its number or name.

        Raises:
            ConfigError: there is none.
        """
        return axis_number(
            axis, self.metadata["shape"], self.axis_names, shown_array(self.store.path, self.name)
        )

    def reader(self, opened: OpenZarr) -> ArrayReader:
        """A reader of boxes.

        Raises:
            FormatError: the array has other axes than its image says, or can't be read.
        """
        reader = opened.reader(self.store, self.name, self.metadata, by_row=False)
        if self.image is not None and len(self.image.axes) != len(reader.shape):
            raise FormatError(
                f"{self.image.where} has {len(self.image.axes)} axes, and {self.name!r} has shape "
                f"{list(reader.shape)}"
            )
        return reader

    def position(self, corner: Sequence[int]) -> tuple[float, ...]:
        """Where the centre of a voxel lies, along the last axes.

        Raises:
            ConfigError: the store doesn't say.
        """
        if self.level is None:
            raise ConfigError(
                f"{shown_array(self.store.path, self.name)} is no image of OME-NGFF: its voxels "
                "have an index and no position"
            )
        scale, translation = (
            self.level.scale[-len(corner) :],
            self.level.translation[-len(corner) :],
        )
        return tuple(
            one * at + offset for one, at, offset in zip(scale, corner, translation, strict=True)
        )


def array_or_level(store: Store, name: str | None, scale: Scale | None) -> ZarrArray:
    """An array, or the level of an image of OME-NGFF, that a path in a store leads to.

    Raises:
        MissingNameError: there is none.
        ConfigError: `scale` is given and there is no image, or it has no such level.
        FormatError: damaged metadata.
    """
    group = (name or "").strip("/")
    image = image_at(store, group)
    if image is not None:
        return _level_of(store, image, image.level(scale))
    if scale is not None:
        raise ConfigError(
            f"scale= picks a level of an image of OME-NGFF, and {group or '/'!r} of "
            f"{redact(store.path)} is none"
        )
    return ZarrArray(store, *store.array(name))


def check_row_targets(array: ZarrArray, target_name: str) -> None:
    """Raises a ConfigError for targets that are labels of an image: these are an image too, and
    lie beside its patches.
    """
    if array.image is None:
        return
    path = labels_at(array.store, array.image.group, target_name)
    if path is not None and image_at(array.store, path) is not None:
        raise ConfigError(
            f"{redact(array.store.path)}: {target_name!r} are labels of an image, and go with its "
            "patches: pass patch_shape=64, or "
            "another size"
        )


def _level_of(store: Store, image: Image, level: Level) -> ZarrArray:
    metadata = store.metadata(level.path)
    if metadata is None or metadata["node_type"] != "array":
        raise FormatError(
            f"{image.where} lists {level.path!r} as a level, and there is no such array"
        )
    return ZarrArray(store, level.path, metadata, image, level)


def patch_source(
    array: ZarrArray,
    target_name: str | None,
    opened: OpenZarr,
    patch_shape: Extents | int,
    stride: Extents | int | None,
    edges: str,
    pad: str,
    boxes: Sequence[tuple[Sequence[int], Sequence[int]]] | None,
) -> PatchSource:
    """Patches of a volume, with those of its labels.

    Args:
        array: the volume.
        target_name: path of the labels in the store, or their name in the image; None: there are
            none.
        opened: what is open and decoded; for a URL it knows the server.
        patch_shape, stride, edges, pad, boxes: see `ZarrDataset`.

    Raises:
        ConfigError: extents, axes or units that don't fit; no patch fits into the volume.
        MissingNameError, FormatError: no such labels; damaged metadata.
    """
    reader = array.reader(opened)
    patch = _extents(array, patch_shape, reader.shape)
    before = len(reader.shape) - len(patch)
    names, shape = array.axis_names[before:], reader.shape[before:]
    if stride is None:
        steps = patch
    elif isinstance(stride, int | np.integer):
        steps = [int(stride)] * len(patch)
    elif isinstance(stride, Mapping):
        _check_names("stride", stride, names)
        steps = [stride.get(axis, extent) for axis, extent in zip(names, patch, strict=True)]
    else:
        steps = list(stride)
    parts = (
        None
        if boxes is None
        else [Box(tuple(map(int, first)), tuple(map(int, last))) for first, last in boxes]
    )
    grid = PatchGrid(shape, patch, steps, edges, parts)
    if not len(grid):
        short = [
            f"axis {names[axis] or axis!r} has {grid.shape[axis]} of {grid.patch[axis]}"
            for axis in grid.too_short()
        ]
        is_whole = len(grid.boxes) == 1 and grid.boxes[0].stop == grid.shape
        raise ConfigError(
            f"{redact(array.store.path)}, {array.name or 'the array'}: no patch of "
            f"{list(grid.patch)} fits "
            f"{f'into a volume of {list(grid.shape)}' if is_whole else 'into any of the boxes'}"
            f"{': ' + ', '.join(short) if short else ''}; use a smaller patch_shape, or "
            "edges='pad', which fills patches up "
            "(edges='shift' only moves back patches that fit)"
        )
    volumes = [
        Volume(array.name, reader, pad, reader.chunks.fill, (*[None] * before, *range(len(patch))))
    ]
    if target_name is not None:
        volumes.append(_labels(array, target_name, grid, pad, opened))
    return PatchSource(array.store.path, volumes, grid, opened)


def _check_names(what: str, given: Mapping[str, int], names: Sequence[str]) -> None:
    unknown = sorted(set(given) - set(names))
    if unknown or not given:
        has = ", ".join(name for name in names if name) or "no names"
        raise ConfigError(f"{what}={dict(given)}: the axes have {has}")


def _extents(array: ZarrArray, given: Extents | int, shape: Sequence[int]) -> list[int]:
    """Extents along the last axes, as many as there are; -1 becomes the whole axis."""
    if isinstance(given, int | np.integer):
        space = array.spatial_axes
        wanted = (
            [int(given) if axis in space else -1 for axis in range(min(space), len(shape))]
            if space
            else []
        )
    elif isinstance(given, Mapping):
        names = array.axis_names
        _check_names("patch_shape", given, names)
        wanted = [given.get(name, -1) for name in names[min(names.index(name) for name in given) :]]
    else:
        wanted = list(given)
    if not 1 <= len(wanted) <= len(shape):
        raise ConfigError(
            f"patch_shape={wanted} has {len(wanted)} extents, and "
            f"{shown_array(array.store.path, array.name)} has shape {list(shape)}"
        )
    return [
        extent if asked == -1 else asked
        for asked, extent in zip(wanted, shape[len(shape) - len(wanted) :], strict=True)
    ]


# -- labels


def _labels(array: ZarrArray, name: str, grid: PatchGrid, pad: str, opened: OpenZarr) -> Volume:
    """The labels of a volume: an array of its shape; or, of an image, labels that lie where it
    lies, with voxels of any size.
    """
    if array.image is None or array.level is None:
        return _plain_labels(array, name, grid, pad, opened)
    path = labels_at(array.store, array.image.group, name)
    if path is None:
        raise missing_labels(array.store, array.image.group, name)
    image = image_at(array.store, path)
    if image is None:
        return _plain_labels(array, path, grid, pad, opened)
    axes = _follow(array.image, image, len(grid.patch))
    level = _nearest_level(array.image, array.level, image)
    reader = _level_of(array.store, image, level).reader(opened)
    before, tables = len(array.image.axes) - len(grid.patch), dict[int, npt.NDArray[np.int64]]()
    for number, axis in enumerate(axes):
        if axis is None:
            continue
        size, extent = reader.shape[number], grid.shape[axis]
        if image.axes[number].kind in ("space", "time"):
            here = array.level.scale[before + axis], array.level.translation[before + axis]
            table = nearest(here, extent, (level.scale[number], level.translation[number]), size)
        elif size == extent:
            continue
        elif size == 1:
            axes[number] = None
            continue
        else:
            raise ConfigError(
                f"{image.where} has {size} along {image.names[number]!r}, and the image {extent}"
            )
        if not np.array_equal(table, np.arange(extent)) or size != extent:
            tables[axis] = table
    return Volume(level.path, reader, pad, 0, tuple(axes), tables)


def _plain_labels(
    array: ZarrArray, name: str, grid: PatchGrid, pad: str, opened: OpenZarr
) -> Volume:
    label = ZarrArray(array.store, *array.store.array(name))
    reader, axes = label.reader(opened), len(grid.patch)
    before = max(0, len(reader.shape) - axes)
    if reader.shape[before:] != grid.shape:
        raise ConfigError(
            f"{label.name!r} has shape {list(reader.shape)}, which does not end in "
            f"{list(grid.shape)} as {array.name!r} does"
        )
    return Volume(label.name, reader, pad, 0, (*[None] * before, *range(axes)))


def _follow(image: Image, labels: Image, patch_axes: int) -> list[int | None]:
    """For each axis of the labels, the axis of patches that it goes along; None: none.

    Raises:
        ConfigError: an axis of space is missing, axes come in another order, or are in other units.
    """
    own: Sequence[Axis] = image.axes[len(image.axes) - patch_axes :]
    names = [axis.name for axis in own]
    missing = [axis.name for axis in own if axis.kind == "space" and axis.name not in labels.names]
    if missing:
        raise ConfigError(
            f"{labels.where} has axes {', '.join(labels.names)}: patches of the image go along "
            f"{', '.join(missing)} too"
        )
    axes = [names.index(name) if name in names else None for name in labels.names]
    shared = [axis for axis in axes if axis is not None]
    if shared != sorted(shared):
        raise ConfigError(
            f"{labels.where} has its axes in another order, {', '.join(labels.names)}, than the "
            f"image: {', '.join(names)}"
        )
    for number, axis in enumerate(axes):
        if (
            axis is not None
            and labels.axes[number].unit
            and own[axis].unit
            and labels.axes[number].unit != own[axis].unit
        ):
            units = (
                f"{labels.axes[number].unit} along {names[axis]!r}, and the image in "
                f"{own[axis].unit}"
            )
            raise ConfigError(f"{labels.where} is measured in {units}: write both in one unit")
    return axes


def _nearest_level(image: Image, level: Level, labels: Image) -> Level:
    """The level of labels whose voxels are nearest in size to those of the image's level; of two
    as near the finer one.
    """
    shared = [
        (image.names.index(name), number)
        for number, name in enumerate(labels.names)
        if name in image.names
    ]

    def off(other: Level) -> float:
        return float(
            sum(abs(np.log(other.scale[theirs] / level.scale[ours])) for ours, theirs in shared)
        )

    return min(labels.levels, key=lambda other: round(off(other), 6))
