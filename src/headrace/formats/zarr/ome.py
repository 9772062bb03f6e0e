"""Images of OME-NGFF in a Zarr store: their arrays, and where in space their voxels lie.

Versions 0.4 and 0.5 (https://ngff.openmicroscopy.org): a group whose attributes list "multiscales":
the axes, and the same image at several voxel sizes. A voxel's index is that of its centre: the
centre of voxel i lies at ``scale * i + translation``, where both are made of the level's
transformations and, after these, of those of the whole image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError, FormatError
from headrace.formats.zarr.store import Store, key_of
from headrace.io.paths import redact

Scale = float | Sequence[float] | Mapping[str, float]

_FARTHEST = 2.0  # how many times larger or smaller than asked for a voxel may be
_TIE = 1e-6  # of a voxel: what counts as halfway between two


class Axis(NamedTuple):
    """An axis of an image."""

    name: str
    kind: str
    """"space", "time", "channel" or what the file says; "" if it doesn't."""
    unit: str
    """Such as "micrometer"; "" if the file doesn't say."""


class Level(NamedTuple):
    """An image at one voxel size."""

    path: str
    """Of its array in the store."""
    scale: tuple[float, ...]
    """From one voxel's centre to the next, along each axis."""
    translation: tuple[float, ...]
    """Where the centre of the first voxel lies."""


class Image(NamedTuple):
    """An image of OME-NGFF."""

    group: str
    """Its path in the store."""
    where: str
    """Names it in messages."""
    axes: tuple[Axis, ...]
    levels: tuple[Level, ...]
    """In the file's order, the finest first."""

    @property
    def names(self) -> tuple[str, ...]:
        """Those of the axes."""
        return tuple(axis.name for axis in self.axes)

    @property
    def spatial_axes(self) -> list[int]:
        """The numbers of the axes of space."""
        return [number for number, axis in enumerate(self.axes) if axis.kind == "space"]

    def level(self, scale: Scale | None) -> Level:
        """The level whose voxels are nearest in size; None: the first.

        Args:
            scale: a number: the least of a voxel's extents; several: those along all axes of space;
                a mapping: along the axes it names.

        Raises:
            ConfigError: it names no such extents, or no level is within a factor of 2 along each
                axis.
        """
        if scale is None:
            return self.levels[0]
        axes = self.spatial_axes or [*range(len(self.axes))]
        if isinstance(scale, Mapping):
            if not scale or set(scale) - set(self.names):
                raise ConfigError(
                    f"scale={dict(scale)} must name some of the axes {', '.join(self.names)} of "
                    f"{self.where}"
                )
            axes = [self.names.index(name) for name in scale]
            scale = [*scale.values()]
        voxels = np.array([level.scale for level in self.levels])[:, axes]
        if isinstance(scale, int | float):
            voxels = voxels.min(axis=1, keepdims=True)
        wanted = np.array(scale, np.float64).reshape(-1)
        if len(wanted) != voxels.shape[1]:
            names = ", ".join(self.names[axis] for axis in axes)
            raise ConfigError(
                f"scale={scale} needs {len(axes)} extents, along {names} of {self.where}"
            )
        if not (np.isfinite(wanted).all() and (wanted > 0).all()):
            raise ConfigError(f"scale={scale!r}: the extents of a voxel are positive numbers")
        ratios = np.abs(np.log(voxels / wanted))
        nearest_level = int(ratios.sum(axis=1).argmin())
        if ratios[nearest_level].max() > np.log(_FARTHEST) + _TIE:
            raise ConfigError(
                f"scale={scale!r}: no level of {self.where} is within a factor of 2; its voxels "
                f"have {voxels.tolist()}"
            )
        return self.levels[nearest_level]


def nearest(
    here: tuple[float, float], extent: int, there: tuple[float, float], size: int
) -> npt.NDArray[np.int64]:
    """For each voxel along an axis of one array the one of another array whose centre is nearest,
    [extent]; -1: none covers it.

    Args:
        here: scale and translation of the first array along the axis.
        extent: its voxels.
        there, size: the same of the other array.
    """
    centres = (np.arange(extent) * here[0] + (here[1] - there[1])) / there[0]
    # of two that are as near the upper one, also after rounding errors
    places = np.floor(centres + 0.5 + _TIE).astype(np.int64)
    return np.where((places >= 0) & (places < size), places, -1)


def image_at(store: Store, name: str) -> Image | None:
    """The image that a group is; None: it is none.

    Raises:
        FormatError: its metadata are damaged, or of a version that isn't read.
    """
    attributes = store.attributes(name)
    where = f"{redact(store.path)}{', ' + repr(name) if name else ''}"
    ome = attributes.get("ome", attributes)
    images = ome.get("multiscales") if isinstance(ome, dict) else None
    if images is None:
        return None
    try:
        metadata = images[0]
        version = str(ome.get("version", metadata.get("version", "")))
        # such as 0.6 and 0.6.dev1
        number = [int(part) for part in version.split(".")[:2] if part.isdecimal()]
        axes = metadata.get("axes", [None])
        if number > [0, 5] or not all(isinstance(axis, dict) for axis in axes):
            raise FormatError(
                f"{where} is of OME-NGFF {version or '0.3 or older'}, which is not supported; 0.4 "
                "and 0.5 are: pass the path of an array as dataset_name, or convert it"
            )
        return _image(metadata, name, where)
    except (TypeError, KeyError, IndexError, AttributeError, ValueError, OverflowError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(
            f"{where}: its OME-NGFF metadata are damaged: {type(error).__name__}: {error}"
        ) from error


def _image(metadata: dict[str, Any], name: str, where: str) -> Image:
    axes = tuple(
        Axis(str(axis["name"]), str(axis.get("type", "")), str(axis.get("unit") or ""))
        for axis in metadata["axes"]
    )
    if len({axis.name for axis in axes}) != len(axes):
        raise ValueError(f"two axes of one name: {[axis.name for axis in axes]}")
    of_image = _transform(metadata, len(axes))
    levels: list[Level] = []
    for dataset in metadata["datasets"]:
        scale, translation = _transform(dataset, len(axes))
        translation = of_image[0] * translation + of_image[1]
        path = str(dataset["path"])
        if ".." in path.split("/"):
            raise ValueError(f"a level at {path!r}, which leads out of the store")
        scales = tuple((of_image[0] * scale).tolist())
        levels.append(Level(key_of(name, path), scales, tuple(translation.tolist())))
    if not levels:
        raise ValueError("it has no levels")
    return Image(name, where, axes, tuple(levels))


def _transform(
    metadata: dict[str, Any], axes: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Scale and translation that the transformations of an image or level make together."""
    scale = np.ones(axes)
    translation = np.zeros(axes)
    for transformation in metadata.get("coordinateTransformations", []):
        kind = transformation["type"]
        if kind == "identity":
            continue
        if kind not in ("scale", "translation"):
            raise ValueError(
                f"a transformation of type {kind!r}, where a scale and a translation may stand"
            )
        values = np.array(transformation[kind], np.float64)
        if values.shape != (axes,) or not np.isfinite(values).all():
            raise ValueError(f"a {kind} of {transformation[kind]} for {axes} axes")
        if kind == "translation":
            translation = translation + values
            continue
        if (values <= 0).any():
            raise ValueError(f"a scale of {transformation[kind]}, which is not positive")
        scale = scale * values
        translation = translation * values
    return scale, translation


def labels_at(store: Store, group: str, name: str) -> str | None:
    """The path of a group of labels that belongs to an image; None: the image has none of that
    name.
    """
    for path in (key_of(group, f"labels/{name}"), name.strip("/")):
        if store.metadata(path) is not None:
            return path
    return None


def label_names(store: Store, group: str) -> list[str]:
    """The names of the labels that an image lists."""
    attributes = store.attributes(key_of(group, "labels"))
    ome = attributes.get("ome", attributes)
    names = ome.get("labels") if isinstance(ome, dict) else None
    if isinstance(names, list):
        return [*map(str, names)]
    return []
