"""Volumes and their labels in Zarr stores, and how they lie to one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError, FormatError, MissingNameError
from headrace.formats.arrays.chunks import shown_array
from headrace.formats.arrays.patches import Box, PatchGrid
from headrace.formats.arrays.reader import ArrayReader
from headrace.formats.arrays.volumes import PatchSource, Volume
from headrace.formats.zarr.ome import (
    Image,
    Level,
    Scale,
    image_at,
    label_names,
    labels_at,
    nearest,
)
from headrace.formats.zarr.rows import OpenZarr
from headrace.formats.zarr.store import Store
from headrace.io.nearest_names import listed_names
from headrace.io.paths import redact

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
    def where(self) -> str:
        return shown_array(self.store.path, self.name)

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
        names = self.axis_names
        if self.image is not None:
            space = self.image.spatial_axes
        else:
            space = [axis for axis, name in enumerate(names) if name.lower() in ("x", "y", "z")]
        return space or [*range(len(names))][-3:]

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
                f"{self.where} is no image of OME-NGFF: its voxels have an index and no position"
            )
        scale = self.level.scale[-len(corner) :]
        translation = self.level.translation[-len(corner) :]
        lies = zip(scale, corner, translation, strict=True)
        return tuple(extent * index + first for extent, index, first in lies)


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
            "patches: pass patch_shape=64, or another size"
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
    names = array.axis_names[before:]
    if stride is None:
        steps = patch
    elif isinstance(stride, int | np.integer):
        steps = [int(stride)] * len(patch)
    elif isinstance(stride, Mapping):
        _check_names("stride", stride, names)
        steps = [stride.get(axis, extent) for axis, extent in zip(names, patch, strict=True)]
    else:
        steps = list(stride)
    parts: list[Box] | None = None
    if boxes is not None:
        parts = [Box(tuple(map(int, first)), tuple(map(int, last))) for first, last in boxes]
    grid = PatchGrid(reader.shape[before:], patch, steps, edges, parts)
    if not len(grid):
        short = [names[axis] or str(axis) for axis in grid.too_short()]
        along = ""
        if short:
            along = f", along {', '.join(short)}"
        raise ConfigError(
            f"{array.where}: no patch of {list(grid.patch)} fits into a volume of "
            f"{list(grid.shape)}, or into its boxes{along}: use a smaller patch_shape, or "
            "edges='pad', which fills patches up (edges='shift' only moves back patches that fit)"
        )
    axes = (*[None] * before, *range(len(patch)))
    volumes = [Volume(array.name, reader, pad, reader.chunks.fill, axes)]
    if target_name is not None:
        volumes.append(_labels(array, target_name, grid, pad, opened))
    return PatchSource(array.store.path, volumes, grid, opened)


def _check_names(what: str, given: Mapping[str, int], names: Sequence[str]) -> None:
    if not given or set(given) - set(names):
        has = ", ".join(filter(None, names)) or "no names"
        raise ConfigError(f"{what}={dict(given)}: the axes have {has}")


def _extents(array: ZarrArray, given: Extents | int, shape: Sequence[int]) -> list[int]:
    """Extents along the last axes, as many as there are; -1 becomes the whole axis."""
    wanted: list[int] = []
    if isinstance(given, int | np.integer):
        space = array.spatial_axes
        if space:
            wanted = [int(given) if n in space else -1 for n in range(min(space), len(shape))]
    elif isinstance(given, Mapping):
        names = array.axis_names
        _check_names("patch_shape", given, names)
        first = min(names.index(name) for name in given)
        wanted = [given.get(name, -1) for name in names[first:]]
    else:
        wanted = list(given)
    if not 1 <= len(wanted) <= len(shape):
        raise ConfigError(
            f"patch_shape={wanted} has {len(wanted)} extents, and {array.where} has shape "
            f"{list(shape)}"
        )
    last = shape[len(shape) - len(wanted) :]
    return [whole if asked == -1 else asked for asked, whole in zip(wanted, last, strict=True)]


# -- labels


def _labels(array: ZarrArray, name: str, grid: PatchGrid, pad: str, opened: OpenZarr) -> Volume:
    """The labels of a volume: an array of its shape; or, of an image, labels that lie where it
    lies, with voxels of any size.
    """
    image = array.image
    level = array.level
    if image is None or level is None:
        return _plain_labels(array, name, grid, pad, opened)
    path = labels_at(array.store, image.group, name)
    if path is None:
        raise MissingNameError(
            f"{redact(array.store.path)} has no labels {name!r}; its image {image.group or '/'!r} "
            f"lists: {listed_names(label_names(array.store, image.group), name, repr)}"
        )
    labels = image_at(array.store, path)
    if labels is None:
        return _plain_labels(array, path, grid, pad, opened)
    axes = _follow(image, labels, len(grid.patch))
    before = len(image.axes) - len(grid.patch)

    def difference(other: Level) -> float:
        """How much voxels differ in size; of levels that differ as much the first is taken."""
        ratios = [
            other.scale[number] / level.scale[image.names.index(name)]
            for number, name in enumerate(labels.names)
            if name in image.names
        ]
        return round(float(np.abs(np.log(ratios)).sum()), 6)

    own = min(labels.levels, key=difference)
    reader = _level_of(array.store, labels, own).reader(opened)
    tables: dict[int, npt.NDArray[np.int64]] = {}
    for number, axis in enumerate(axes):
        if axis is None:
            continue
        size = reader.shape[number]
        extent = grid.shape[axis]
        if labels.axes[number].kind in ("space", "time"):
            here = (level.scale[before + axis], level.translation[before + axis])
            table = nearest(here, extent, (own.scale[number], own.translation[number]), size)
            if size != extent or not np.array_equal(table, np.arange(extent)):
                tables[axis] = table
        elif size == 1 != extent:
            axes[number] = None
        elif size != extent:
            raise ConfigError(
                f"{labels.where} has {size} along {labels.names[number]!r}, and the image {extent}"
            )
    return Volume(own.path, reader, pad, 0, tuple(axes), tables)


def _plain_labels(
    array: ZarrArray, name: str, grid: PatchGrid, pad: str, opened: OpenZarr
) -> Volume:
    label = ZarrArray(array.store, *array.store.array(name))
    reader = label.reader(opened)
    before = max(0, len(reader.shape) - len(grid.patch))
    if reader.shape[before:] != grid.shape:
        raise ConfigError(
            f"{label.name!r} has shape {list(reader.shape)}, which does not end in "
            f"{list(grid.shape)} as {array.name!r} does"
        )
    return Volume(label.name, reader, pad, 0, (*[None] * before, *range(len(grid.patch))))


def _follow(image: Image, labels: Image, patch_axes: int) -> list[int | None]:
    """For each axis of the labels, the axis of patches that it goes along; None: none.

    Raises:
        ConfigError: an axis of space is missing, axes come in another order, or are in other units.
    """
    own = image.axes[len(image.axes) - patch_axes :]
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
    for label, axis in zip(labels.axes, axes, strict=True):
        if axis is None or not label.unit or not own[axis].unit:
            continue
        if label.unit != own[axis].unit:
            raise ConfigError(
                f"{labels.where} is measured in {label.unit} along {label.name!r}, and the image "
                f"in {own[axis].unit}: write both in one unit"
            )
    return axes
