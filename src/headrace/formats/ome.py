"""Volumes, their patches and labels, and where in space voxels lie.

Images of OME-NGFF, versions 0.4 and 0.5 (https://ngff.openmicroscopy.org), are groups whose
attributes list "multiscales": the axes, and the same image at several voxel sizes. A voxel's
index is that of its centre: the centre of voxel i lies at ``scale * i + translation``, where both
are made of the level's transformations and, after these, of those of the whole image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError, FormatError, MissingNameError
from headrace.formats.arrays.chunks import shown_array
from headrace.formats.arrays.reader import ArrayReader
from headrace.formats.arrays.volumes import PatchGrid, PatchSource, Volume
from headrace.formats.tree import Tree, join
from headrace.io.paths import listed_names

Extents = Sequence[int] | Mapping[str, int]
Scale = float | Sequence[float] | Mapping[str, float]

Floats = npt.NDArray[np.float64]

_FARTHEST = 2.0  # how many times larger or smaller than asked for a voxel may be
_TIE = 1e-6  # of a voxel: what counts as halfway between two


class Axis(NamedTuple):
    """An axis of an image.

    Attributes:
        kind: "space", "time", "channel" or what the file says; "" if it doesn't.
        unit: such as "micrometer"; "" if the file doesn't say.
    """

    name: str
    kind: str
    unit: str


class Image(NamedTuple):
    """An image of OME-NGFF.

    Attributes:
        group: its path in the store.
        where: names it in messages.
        levels: the path of the array of each resolution level, the finest first.
        scales: [levels, axes] distances from one voxel's centre to the next.
        translations: [levels, axes] where the centre of the first voxel lies.
    """

    group: str
    where: str
    axes: tuple[Axis, ...]
    levels: tuple[str, ...]
    scales: Floats
    translations: Floats

    @property
    def names(self) -> tuple[str, ...]:
        """Those of the axes."""
        return tuple(axis.name for axis in self.axes)

    @property
    def spatial_axes(self) -> list[int]:
        """The numbers of the axes of space."""
        return [number for number, axis in enumerate(self.axes) if axis.kind == "space"]

    def level(self, scale: Scale | None) -> int:
        """The number of the level whose voxels are nearest in size; None: the first.

        Args:
            scale: a number: the least of a voxel's extents; several: those along all axes of space;
                a mapping: along the axes it names.

        Raises:
            ConfigError: it names no such extents, or no level is within a factor of 2 along each
                axis.
        """
        if scale is None:
            return 0
        axes = self.spatial_axes or list(range(len(self.axes)))
        if isinstance(scale, Mapping):
            _check_names("scale", scale, self.names)
            axes = [self.names.index(name) for name in scale]
            scale = [*scale.values()]
        voxels = self.scales[:, axes]
        if isinstance(scale, int | float):
            voxels = voxels.min(axis=1, keepdims=True)
        wanted = np.array(scale, np.float64).reshape(-1)
        if len(wanted) != voxels.shape[1] or not ((wanted > 0) & (wanted < np.inf)).all():
            names = ", ".join(self.names[axis] for axis in axes)
            raise ConfigError(
                f"scale={scale} must be {voxels.shape[1]} positive numbers: extents of a voxel, "
                f"along {names} of {self.where}"
            )
        nearest = _nearest(voxels, wanted)
        if np.abs(np.log(voxels[nearest] / wanted)).max() > np.log(_FARTHEST) + _TIE:
            raise ConfigError(
                f"scale={scale!r}: no level of {self.where} is within a factor of 2; its voxels "
                f"have {voxels.tolist()}"
            )
        return nearest


def _nearest(voxels: Floats, wanted: Floats) -> int:
    """Which of the sizes of voxels ([levels, axes]) is nearest to a size; of several the first."""
    distances = np.abs(np.log(voxels / wanted)).sum(axis=1)
    return int(distances.round(6).argmin())


def _ome_in(tree: Tree, group: str) -> dict[str, Any]:
    """The OME-NGFF metadata in the attributes of a group."""
    attributes = tree.attrs(group)
    ome = attributes.get("ome", attributes)
    return ome if isinstance(ome, dict) else {}


def claims(tree: Tree, group: str = "") -> Image | None:
    """The image that a group is; None: it is none.

    Raises:
        FormatError: its metadata are damaged, or of a version that isn't read.
    """
    ome = _ome_in(tree, group)
    where = shown_array(tree.path, group)
    if ome.get("multiscales") is None:
        return None
    try:
        metadata = ome["multiscales"][0]
        version = str(ome.get("version", metadata.get("version", "")))
        # such as 0.6 and 0.6.dev1
        number = [int(part) for part in version.split(".")[:2] if part.isdecimal()]
        described = metadata.get("axes", [None])
        if number > [0, 5] or not all(isinstance(axis, dict) for axis in described):
            raise FormatError(
                f"{where} is of OME-NGFF {version or '0.3 or older'}, which is not supported; 0.4 "
                "and 0.5 are: pass the path of an array as dataset_name, or convert it"
            )
        axes = tuple(
            Axis(str(axis["name"]), str(axis.get("type", "")), str(axis.get("unit") or ""))
            for axis in described
        )
        if len({axis.name for axis in axes}) != len(axes):
            raise ValueError(f"two axes of one name: {[axis.name for axis in axes]}")
        of_image = _transform(metadata, len(axes))
        paths = [str(dataset["path"]) for dataset in metadata["datasets"]]
        for path in paths:
            if ".." in path.split("/"):
                raise ValueError(f"a level at {path!r}, which leads out of the store")
        if not paths:
            raise ValueError("it has no levels")
        transforms = np.array([_transform(one, len(axes)) for one in metadata["datasets"]])
        transforms *= of_image[0]
        scales, translations = np.moveaxis(transforms, 1, 0)
        levels = tuple(join(group, path) for path in paths)
        return Image(group, where, axes, levels, scales, translations + of_image[1])
    except (TypeError, KeyError, IndexError, AttributeError, ValueError, OverflowError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(
            f"{where}: its OME-NGFF metadata are damaged: {type(error).__name__}: {error}"
        ) from error


def _transform(metadata: dict[str, Any], axes: int) -> tuple[Floats, Floats]:
    """Scale and translation that the transformations of an image or level make together."""
    scale = np.ones(axes)
    translation = np.zeros(axes)
    for one in metadata.get("coordinateTransformations", []):
        if one["type"] == "identity":
            continue
        values = np.array(one.get(one["type"]), np.float64)
        is_fit = values.shape == (axes,) and np.isfinite(values).all()
        if one["type"] == "translation" and is_fit:
            translation = translation + values
        elif one["type"] == "scale" and is_fit and (values > 0).all():
            scale = scale * values
            translation = translation * values
        else:
            raise ValueError(f"{one} is neither a positive scale nor a translation of {axes} axes")
    return scale, translation


def _labels_at(tree: Tree, group: str, name: str) -> str | None:
    """The path of a group of labels that belongs to an image; None: the image has none of that
    name.
    """
    for path in (join(group, f"labels/{name}"), name.strip("/")):
        if tree.kind(path) is not None:
            return path
    return None


# -- arrays and their patches


class VolumeArray(NamedTuple):
    """An array that a user named.

    Attributes:
        name: its path in the store.
        where: names it in messages.
        image, level: the image of OME-NGFF that it is a level of, and which.
    """

    name: str
    where: str
    image: Image | None = None
    level: int = 0

    def reader(self, tree: Tree) -> ArrayReader:
        """A reader of boxes.

        Raises:
            FormatError: the array has other axes than its image says, or can't be read.
        """
        reader = tree.reader(self.name, by_row=False)
        assert isinstance(reader, ArrayReader)
        if self.image is not None and len(self.image.axes) != len(reader.shape):
            raise FormatError(
                f"{self.image.where} has {len(self.image.axes)} axes, and {self.name!r} has shape "
                f"{list(reader.shape)}"
            )
        return reader


def volume_in(tree: Tree, name: str | None, scale: Scale | None) -> VolumeArray:
    """An array, or the level of an image of OME-NGFF, that a path in a store leads to.

    Raises:
        MissingNameError: there is none.
        ConfigError: `scale` is given and there is no image, or it has no such level.
        FormatError: damaged metadata.
    """
    group = (name or "").strip("/")
    image = claims(tree, group)
    if image is not None:
        return _level_of(tree, image, image.level(scale))
    if scale is not None:
        raise ConfigError(
            f"scale= picks a level of an OME-NGFF image, but {group or '/'!r} of {tree.shown} is "
            "not one"
        )
    array = tree.array_named(name)
    return VolumeArray(array, shown_array(tree.path, array))


def _level_of(tree: Tree, image: Image, level: int) -> VolumeArray:
    path = image.levels[level]
    if not tree.is_array(path):
        raise FormatError(f"{image.where} lists the level {path!r}, which is missing")
    return VolumeArray(path, shown_array(tree.path, path), image, level)


def check_row_targets(tree: Tree, array: VolumeArray, target_name: str) -> None:
    """Raises a ConfigError for targets that are labels of an image: these are an image too, and
    lie beside its patches.
    """
    if array.image is None:
        return
    path = _labels_at(tree, array.image.group, target_name)
    if path is not None and claims(tree, path) is not None:
        raise ConfigError(
            f"{tree.shown}: {target_name!r} are labels of an image, which need patches: pass "
            "patch_shape=64, or another size"
        )


def patch_source(
    tree: Tree,
    array: VolumeArray,
    target_name: str | None,
    patch_shape: Extents | int,
    stride: Extents | int | None,
    edges: str,
    pad: str,
    boxes: Sequence[tuple[Sequence[int], Sequence[int]]] | None,
) -> PatchSource:
    """Patches of a volume, with those of its labels.

    Args:
        tree, array: the volume, and what it lies in.
        target_name: path of the labels in the store, or their name in the image; None: there are
            none.
        patch_shape, stride, edges, pad, boxes: see `ZarrDataset`.

    Raises:
        ConfigError: extents, axes or units that don't fit; no patch fits into the volume.
        MissingNameError, FormatError: no such labels; damaged metadata.
    """
    reader = array.reader(tree)
    axis_names = tree.axis_names(array.name) if array.image is None else array.image.names
    patch = _extents(array, axis_names, patch_shape, reader.shape)
    before = len(reader.shape) - len(patch)
    names = axis_names[before:]
    if isinstance(stride, int | np.integer):
        stride = [int(stride)] * len(patch)
    elif isinstance(stride, Mapping):
        _check_names("stride", stride, names)
        stride = [stride.get(axis, extent) for axis, extent in zip(names, patch, strict=True)]
    grid = PatchGrid(reader.shape[before:], patch, stride or patch, edges, boxes)
    if not len(grid):
        fits = np.reshape(grid.counts, (-1, len(patch))).any(axis=0)
        short = [names[axis] or str(axis) for axis in np.flatnonzero(~fits).tolist()]
        raise ConfigError(
            f"{array.where}: no patch of {list(grid.patch)} fits into a volume of "
            f"{list(grid.shape)}, or into its boxes, along {', '.join(short) or 'all axes'}: use a "
            "smaller patch_shape, or edges='pad', which fills patches up (edges='shift' only moves "
            "back patches that fit)"
        )
    axes = (*[None] * before, *range(len(patch)))
    volumes = [Volume(array.name, reader, pad, reader.chunks.fill, axes)]
    if target_name is not None:
        volumes.append(_labels(tree, array, target_name, grid, pad))
    return PatchSource(tree.path, volumes, grid, tree.opened)


def _check_names(what: str, given: Mapping[str, Any], names: Sequence[str]) -> None:
    if not given or set(given) - set(names):
        has = ", ".join(filter(None, names)) or "no names"
        raise ConfigError(f"{what}={dict(given)} must name some of the axes, which have {has}")


def _extents(
    array: VolumeArray, names: Sequence[str], given: Extents | int, shape: Sequence[int]
) -> list[int]:
    """Extents along the last axes, as many as there are; -1 becomes the whole axis. A single extent
    means the axes of space, as an image of OME-NGFF says; those that are named x, y and z; else the
    last three.
    """
    if isinstance(given, int | np.integer):
        space = [axis for axis, name in enumerate(names) if name.lower() in ("x", "y", "z")]
        if array.image is not None:
            space = array.image.spatial_axes
        space = space or [*range(len(names))][-3:]
        wanted = [
            int(given) if n in space else -1 for n in range(min(space, default=0), len(shape))
        ]
    elif isinstance(given, Mapping):
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


def _labels(tree: Tree, array: VolumeArray, name: str, grid: PatchGrid, pad: str) -> Volume:
    """The labels of a volume: an array of its shape; or, of an image, labels that lie where it
    lies, with voxels of any size.
    """
    image = array.image
    labels: Image | None = None
    if image is not None:
        path = _labels_at(tree, image.group, name)
        if path is None:
            listed = _ome_in(tree, join(image.group, "labels")).get("labels")
            names = [*map(str, listed)] if isinstance(listed, list) else []
            raise MissingNameError(
                f"{tree.shown} has no labels {name!r}; its image {image.group or '/'!r} "
                f"lists: {listed_names(names, name, repr)}"
            )
        name = path
        labels = claims(tree, name)
    if image is None or labels is None:
        label = VolumeArray(tree.array_named(name), "")
        reader = label.reader(tree)
        before = max(0, len(reader.shape) - len(grid.patch))
        if reader.shape[before:] != grid.shape:
            raise ConfigError(
                f"{label.name!r} has shape {list(reader.shape)}, which does not end in "
                f"{list(grid.shape)} as {array.name!r} does"
            )
        return Volume(label.name, reader, pad, 0, (*[None] * before, *range(len(grid.patch))))
    shared = [name for name in labels.names if name in image.names]
    scale = image.scales[array.level]
    translation = image.translations[array.level]
    voxels = labels.scales[:, [labels.names.index(name) for name in shared]]
    own = _nearest(voxels, scale[[image.names.index(name) for name in shared]])
    label = _level_of(tree, labels, own)
    reader = label.reader(tree)
    before = len(image.axes) - len(grid.patch)
    axes = _follow(image.axes[before:], labels)
    tables: dict[int, npt.NDArray[np.int64]] = {}
    for number, axis in enumerate(axes):
        if axis is None:
            continue
        size = reader.shape[number]
        extent = grid.shape[axis]
        if labels.axes[number].kind in ("space", "time"):
            # for each voxel of the image the label whose centre is nearest, -1: none covers it; of
            # two that are as near the upper one, also after rounding errors
            shift = translation[before + axis] - labels.translations[own, number]
            centres = np.arange(extent) * scale[before + axis] + shift
            centres /= labels.scales[own, number]
            places = np.floor(centres + 0.5 + _TIE).astype(np.int64)
            table = np.where((places >= 0) & (places < size), places, -1)
            if size != extent or not np.array_equal(table, np.arange(extent)):
                tables[axis] = table
        elif size == 1 != extent:
            axes[number] = None
        elif size != extent:
            raise ConfigError(
                f"{labels.where} has {size} along {labels.names[number]!r}, and the image {extent}"
            )
    return Volume(label.name, reader, pad, 0, tuple(axes), tables)


def _follow(own: Sequence[Axis], labels: Image) -> list[int | None]:
    """For each axis of the labels, which of the axes of patches it goes along; None: none.

    Raises:
        ConfigError: an axis of space is missing, axes come in another order, or are in other units.
    """
    names = [axis.name for axis in own]
    axes = [names.index(name) if name in names else None for name in labels.names]
    shared = [axis for axis in axes if axis is not None]
    is_missing = any(axis.kind == "space" and axis.name not in labels.names for axis in own)
    if is_missing or shared != sorted(shared):
        raise ConfigError(
            f"{labels.where} has axes {', '.join(labels.names)}: patches of the image go along "
            f"{', '.join(names)}, in this order"
        )
    for label, axis in zip(labels.axes, axes, strict=True):
        if axis is not None and "" != label.unit != own[axis].unit != "":
            raise ConfigError(
                f"{labels.where} is measured in {label.unit} along {label.name!r}, and the image "
                f"in {own[axis].unit}: write both in one unit"
            )
    return axes
