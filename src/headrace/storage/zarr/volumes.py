"""Finds the arrays of a Zarr store that are a volume and its labels, and aligns them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError, FormatError
from headrace.io.paths import redact
from headrace.storage.arrays.patches import Box, PatchGrid
from headrace.storage.arrays.reader import ArrayReader
from headrace.storage.arrays.volumes import PatchSource, Volume
from headrace.storage.zarr.ome import Axis, Image, Level, Scale, image_at, labels_at, missing_labels, nearest
from headrace.storage.zarr.opened import OpenZarr
from headrace.storage.zarr.store import Store

Extents = Sequence[int] | Mapping[str, int]


@dataclass(frozen=True)
class Patches:
    """How patches are to be taken; see `ZarrDataset` for what each means."""

    shape: Extents | int
    stride: Extents | int | None
    edges: str
    pad: str
    boxes: Sequence[tuple[Sequence[int], Sequence[int]]] | None


@dataclass(frozen=True)
class Found:
    """An array that a user named.

    Attributes:
        name: its path in the store.
        said: its metadata.
        image, level: if it is of an image of OME-NGFF.
    """

    name: str
    said: dict[str, Any]
    image: Image | None = None
    level: Level | None = None


def array_or_level(store: Store, name: str | None, scale: Scale | None) -> Found:
    """An array, or the level of an image of OME-NGFF, that a path in a store leads to.

    Raises:
        MissingNameError: there is none.
        ConfigError: `scale` is given and there is no image, or it has no such level.
        FormatError: damaged metadata.
    """
    group = (name or "").strip("/")
    image = image_at(store, group)
    if image is None:
        if scale is not None:
            raise ConfigError(f"scale= picks a level of an image of OME-NGFF, and {group or '/'!r} of {redact(store.path)} is none")
        return Found(*store.array(name))
    return _level_of(store, image, image.level(scale))


def _level_of(store: Store, image: Image, level: Level) -> Found:
    """The array that a level of an image is.

    Raises:
        FormatError: there is none.
    """
    said = store.metadata(level.path)
    if said is None or said["node_type"] != "array":
        raise FormatError(f"{image.where} lists {level.path!r} as a level, and there is no such array")
    return Found(level.path, said, image, level)


def _reader_of(store: Store, found: Found, opened: OpenZarr) -> ArrayReader:
    """A reader of an array, which has the axes that its image says.

    Raises:
        FormatError: it has not; or it can't be read.
    """
    reader = opened.reader(store, found.name, found.said, by_row=False)
    if found.image is not None and len(found.image.axes) != len(reader.shape):
        raise FormatError(f"{found.image.where} has {len(found.image.axes)} axes, and {found.name!r} has shape {list(reader.shape)}")
    return reader


def patch_source(
    path: str,
    name: str | None,
    target_name: str | None,
    scale: Scale | None,
    patches: Patches,
    opened: OpenZarr,
) -> tuple[PatchSource, Found]:
    """Patches of the volume at a path in a store, with those of its labels; and what the volume is.

    Args:
        path, name, target_name, scale: of the store, and in it.
        patches: how they are taken.
        opened: what is open and decoded; for a URL it knows the server.

    Raises:
        ConfigError: extents, axes or units that don't fit; no patch fits into the volume.
        MissingNameError, FormatError: no such array or labels; damaged metadata.
    """
    store = opened.store(path, [name, target_name])
    found = array_or_level(store, name, scale)
    reader = _reader_of(store, found, opened)
    patch = _extents("patch_shape", patches.shape, store, found, reader.shape)
    before = len(reader.shape) - len(patch)
    names, shape = _axis_names(store, found)[before:], reader.shape[before:]
    if patches.stride is None:
        steps = patch
    elif isinstance(patches.stride, int | np.integer):
        steps = [int(patches.stride)] * len(patch)
    elif isinstance(patches.stride, Mapping):
        _check_names("stride", patches.stride, names)
        steps = [patches.stride.get(axis, extent) for axis, extent in zip(names, patch, strict=True)]
    else:
        steps = list(patches.stride)
    boxes = None if patches.boxes is None else [Box(tuple(map(int, first)), tuple(map(int, last))) for first, last in patches.boxes]
    grid = PatchGrid(shape, patch, steps, patches.edges, boxes)
    if not len(grid):
        raise _too_large(store, found, grid, names)
    axes = (*[None] * before, *range(len(patch)))
    volumes = [Volume(found.name, reader, patches.pad, reader.chunks.fill_value(), axes)]
    if target_name is not None:
        volumes.append(_labels(store, found, target_name, grid, patches.pad, opened))
    return PatchSource(store.path, volumes, grid, opened), found


# -- extents by the names of axes


def _axis_names(store: Store, found: Found) -> tuple[str, ...]:
    """The names of an array's axes; empty ones where the store doesn't say."""
    axes = len(found.said["shape"])
    if found.image is not None:
        return found.image.names
    names = found.said.get("dimension_names") or store.attributes(found.name).get("_ARRAY_DIMENSIONS")
    return tuple(str(name or "") for name in names) if isinstance(names, list) and len(names) == axes else ("",) * axes


def _check_names(what: str, given: Mapping[str, int], names: Sequence[str]) -> None:
    unknown = sorted(set(given) - set(names))
    if unknown or not given:
        has = ", ".join(name for name in names if name) or "no names"
        raise ConfigError(f"{what}={dict(given)}: the axes have {has}")


def _spatial_axes(store: Store, found: Found) -> list[int]:
    """The axes that a single extent means: those of space, as an image of OME-NGFF says; those that are named x, y and z; else the last
    three."""
    names = _axis_names(store, found)
    if found.image is not None:
        space = [number for number, axis in enumerate(found.image.axes) if axis.kind == "space"]
    else:
        space = [number for number, name in enumerate(names) if name.lower() in ("x", "y", "z")]
    return space or [*range(len(names))][-3:]


def _too_large(store: Store, found: Found, grid: PatchGrid, names: Sequence[str]) -> ConfigError:
    """What to say when there is no patch."""
    short = [f"axis {names[axis] or axis!r} has {grid.shape[axis]} of {grid.patch[axis]}" for axis in grid.too_short()]
    where = "into any of the boxes" if grid.boxes[0].stop != grid.shape or len(grid.boxes) > 1 else f"into a volume of {list(grid.shape)}"
    return ConfigError(
        f"{redact(store.path)}, {found.name or 'the array'}: no patch of {list(grid.patch)} fits {where}"
        f"{': ' + ', '.join(short) if short else ''}; use a smaller patch_shape, or edges='pad', which fills patches up "
        "(edges='shift' only moves back patches that fit)"
    )


def _extents(what: str, given: Extents | int, store: Store, found: Found, shape: Sequence[int]) -> list[int]:
    """Extents along the last axes, as many as there are; -1 becomes the whole axis."""
    names, array = _axis_names(store, found), found.name
    if isinstance(given, int | np.integer):
        space = _spatial_axes(store, found)
        wanted = [int(given) if axis in space else -1 for axis in range(min(space), len(shape))] if space else []
    elif isinstance(given, Mapping):
        _check_names(what, given, names)
        first = min(names.index(name) for name in given)
        wanted = [given.get(name, -1) for name in names[first:]]
    else:
        wanted = list(given)
    if not 1 <= len(wanted) <= len(shape):
        raise ConfigError(f"{what}={wanted} has {len(wanted)} extents, and {array!r} has shape {list(shape)}")
    return [extent if asked == -1 else asked for asked, extent in zip(wanted, shape[len(shape) - len(wanted) :], strict=True)]


# -- labels


def _labels(store: Store, found: Found, name: str, grid: PatchGrid, pad: str, opened: OpenZarr) -> Volume:
    """The labels of a volume: an array of its shape; or, of an image, labels that lie where it lies, with voxels of any size."""
    if found.image is None or found.level is None:
        return _plain_labels(store, found, name, grid, pad, opened)
    path = labels_at(store, found.image.group, name)
    if path is None:
        raise missing_labels(store, found.image.group, name)
    image = image_at(store, path)
    if image is None:
        return _plain_labels(store, found, path, grid, pad, opened)
    axes = _follow(found.image, image, len(grid.patch))
    level = _nearest_level(found.image, found.level, image)
    reader = _reader_of(store, _level_of(store, image, level), opened)
    before, tables = len(found.image.axes) - len(grid.patch), dict[int, npt.NDArray[np.int64]]()
    for number, axis in enumerate(axes):
        if axis is None:
            continue
        size, extent = reader.shape[number], grid.shape[axis]
        if image.axes[number].kind in ("space", "time"):
            here = found.level.scale[before + axis], found.level.translation[before + axis]
            table = nearest(here, extent, (level.scale[number], level.translation[number]), size)
        elif size == extent:
            continue
        elif size == 1:
            axes[number] = None
            continue
        else:
            raise ConfigError(f"{image.where} has {size} along {image.names[number]!r}, and the image {extent}")
        if not np.array_equal(table, np.arange(extent)) or size != extent:
            tables[axis] = table
    return Volume(level.path, reader, pad, 0, tuple(axes), tables)


def _plain_labels(store: Store, found: Found, name: str, grid: PatchGrid, pad: str, opened: OpenZarr) -> Volume:
    label, said = store.array(name)
    reader, axes = opened.reader(store, label, said, by_row=False), len(grid.patch)
    before = max(0, len(reader.shape) - axes)
    if reader.shape[before:] != grid.shape:
        raise ConfigError(f"{label!r} has shape {list(reader.shape)}, which does not end in {list(grid.shape)} as {found.name!r} does")
    return Volume(label, reader, pad, 0, (*[None] * before, *range(axes)))


def _follow(image: Image, labels: Image, patch_axes: int) -> list[int | None]:
    """For each axis of the labels, the axis of patches that it goes along; None: none.

    Raises:
        ConfigError: an axis of space is missing, axes come in another order, or are in other units.
    """
    own: Sequence[Axis] = image.axes[len(image.axes) - patch_axes :]
    names = [axis.name for axis in own]
    missing = [axis.name for axis in own if axis.kind == "space" and axis.name not in labels.names]
    if missing:
        raise ConfigError(f"{labels.where} has axes {', '.join(labels.names)}: patches of the image go along {', '.join(missing)} too")
    axes = [names.index(name) if name in names else None for name in labels.names]
    shared = [axis for axis in axes if axis is not None]
    if shared != sorted(shared):
        raise ConfigError(f"{labels.where} has its axes in another order, {', '.join(labels.names)}, than the image: {', '.join(names)}")
    for number, axis in enumerate(axes):
        if axis is not None and labels.axes[number].unit and own[axis].unit and labels.axes[number].unit != own[axis].unit:
            units = f"{labels.axes[number].unit} along {names[axis]!r}, and the image in {own[axis].unit}"
            raise ConfigError(f"{labels.where} is measured in {units}: write both in one unit")
    return axes


def _nearest_level(image: Image, level: Level, labels: Image) -> Level:
    """The level of labels whose voxels are nearest in size to those of the image's level; of two as near the finer one."""
    shared = [(image.names.index(name), number) for number, name in enumerate(labels.names) if name in image.names]

    def off(other: Level) -> float:
        return float(sum(abs(np.log(other.scale[theirs] / level.scale[ours])) for ours, theirs in shared))

    return min(labels.levels, key=lambda other: round(off(other), 6))


def position(found: Found, corner: Sequence[int]) -> tuple[float, ...]:
    """Where the centre of a voxel lies, along the last axes.

    Raises:
        ConfigError: the store doesn't say.
    """
    if found.level is None:
        raise ConfigError(f"{found.name!r} is no image of OME-NGFF: its voxels have an index and no position")
    scale, translation = found.level.scale[-len(corner) :], found.level.translation[-len(corner) :]
    return tuple(one * at + offset for one, at, offset in zip(scale, corner, translation, strict=True))
