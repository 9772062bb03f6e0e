"""Rows and patches of Zarr arrays as samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack

import numpy as np
import numpy.typing as npt

from headrace.casting import DTypeArgument, cast, dtype_named
from headrace.datasets.arrays import ArrayDataset, ArrayFormat, joined_rows, labelled_targets
from headrace.datasets.core.checks import check_arguments
from headrace.datasets.core.format import HasTargets
from headrace.datasets.core.options import PathOptions, split_options
from headrace.display import Lines
from headrace.errors import ConfigError, FormatError
from headrace.io.resolve.expressions import DataPath
from headrace.io.resolve.resolver import resolve
from headrace.modes import LoadingMode, ModeName
from headrace.storage.arrays.axes import checked_axis
from headrace.storage.arrays.packed import DATA
from headrace.storage.arrays.volumes import PADS, PatchSource
from headrace.storage.concat import ConcatSource
from headrace.storage.sparse.frames import Column, column_of_group
from headrace.storage.sparse.zarr import ZarrGroups
from headrace.storage.zarr.ome import Scale
from headrace.storage.zarr.packed import PackedGroup, packed_group
from headrace.storage.zarr.rows import OpenZarr, ZarrSource
from headrace.storage.zarr.store import Store
from headrace.storage.zarr.stores import ZARR
from headrace.storage.zarr.volumes import Extents, ZarrArray, array_or_level, patch_source


class LabelledPatches(ArrayFormat):
    """Pairs of a patch and a patch of labels.

    Args:
        dtype: that the numbers of patches are cast to, and labels are not; None: they stay as they are.
    """

    splits_targets = True
    always_pairs = True

    def __init__(self, dtype: np.dtype[Any] | None) -> None:
        super().__init__(dtype)
        self.stores_values = False

    def decode(self, record: Any) -> Any:
        patch, labels = record
        return patch if self.dtype is None else cast(patch, self.dtype), labels

    def split_target(self, value: Any, index: int, dataset: HasTargets) -> tuple[Any, Any]:
        return value[0], self.to_input(value[1])


class ZarrDataset(ArrayDataset):
    """Samples are the rows of a Zarr array, or patches of a volume, as tensors of its dtype.

    Rows: the first axis counts the samples, or that which `axis` names; with `target_name` ``(row, target)``; with several names dicts of
    a row of each. Patches: with `patch_shape`; with `target_name` ``(patch, patch of the labels)``, where the labels have the volume's
    last axes, or are labels of an image of OME-NGFF: then they may have voxels of another size, and each voxel of the image gets the label
    of the nearest one.

    Args:
        data_path: a Zarr store, version 2 or 3, a folder or a zip file, or the URL of one (a zip file's ends in .zip); or several, as a
            folder with stores in it (.zarr, .zarr.zip), a glob, a pattern in braces or a list: the rows, or the patches, of all, one
            store after the other.
        dataset_name: path of the array in the store, or (for rows) a list of such; None: the only one there is. Or path of an image of
            OME-NGFF 0.4 or 0.5; None: the store itself.
        target_name: path of the targets: for rows an array with one row a sample, for patches one of labels; for an image of OME-NGFF
            the name of one of its labels. For rows of a store of AnnData also a column of `obs` that is categorical ("obs/kind"): targets
            are class numbers (-1 where there is none).
        transform: called with the row or patch as a tensor; for patches with labels, `transforms` is called with both.
        loading_mode: see `LoadingMode`.
        patch_shape: extents of a patch along the last axes, all earlier axes being whole; -1: the whole axis. Or a dict of extents by the
            names of axes, where the store names them. Or one extent for all axes of space: those that an image of OME-NGFF says, or that
            the store names x, y and z, or else the last three; all others (channels, time) are whole. None: rows.
        stride: from one patch to the next, along the same axes; None: `patch_shape`, so that patches don't overlap.
        axis: of rows: along which samples lie, if not along the first axis: its number, from the end too, or, where the store (or an
            image of OME-NGFF) names its axes, its name. Samples have the other axes. The targets have one row a sample.
        scale: which level of an image of OME-NGFF: that whose voxels are nearest in size, in the image's unit. A number: the least of a
            voxel's extents; several: those along the axes of space; a dict: along the axes that it names. None: the finest level.
        edges: what becomes of the rest at the end of an axis: "drop" it; "pad" the last patch; or "shift" it back, so that it overlaps. A
            volume into which no patch fits is an error, but with "pad".
        pad: for edges="pad": "reflect", "edge" or "constant" (the array's fill value; labels: 0).
        boxes: sample patches from these parts of the volume only: pairs of corners (first, and one past the last) along the same axes.
        dtype: numbers are cast to this NumPy or torch dtype, also torch.bfloat16, labels are not; None: they stay as they are.
        missing: "fill": a chunk that was never written has the fill value; "error": reading it is an error.
        direct: read the files themselves where their layout is known, which is faster; False: through zarr-python alone. Both give the
            same; `explain()` names the path that each array takes, and why.
        **options: see `BaseDataset`, and for URLs `RemoteOptions`.

    Attributes:
        classes: names of the classes of a categorical target; None: it is none.

    Raises:
        ConfigError: URLs of several servers, or beside local paths; extents that make no sense, an option that goes with
            patches and there are none; no level of about that scale; labels whose axes or units are others than the image's.
        DataNotFoundError, FormatError: no such store; no Zarr store, damaged metadata.
        AccessError, RemoteError: a server refuses, or does not answer.
        MissingNameError: no such array, or several and no name; the message lists them. Behind HTTP they are known only where the store has
            consolidated metadata.
        BudgetError: a chunk does not fit the memory budget when it is decoded.
    """

    def __init__(
        self,
        data_path: DataPath,
        dataset_name: str | Sequence[str] | None = None,
        *,
        target_name: str | None = None,
        transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
        loading_mode: LoadingMode | ModeName = LoadingMode.LAZY,
        patch_shape: Extents | int | None = None,
        stride: Extents | int | None = None,
        axis: int | str = 0,
        scale: Scale | None = None,
        edges: Literal["drop", "pad", "shift"] = "drop",
        pad: Literal["reflect", "edge", "constant"] = "reflect",
        boxes: Sequence[tuple[Sequence[int], Sequence[int]]] | None = None,
        dtype: DTypeArgument | None = None,
        missing: Literal["fill", "error"] = "fill",
        direct: bool = True,
        **options: Unpack[PathOptions],
    ) -> None:
        check_arguments(self, data_path, options, transform=transform, loading_mode=loading_mode)
        self.data_path = data_path
        if missing not in ("fill", "error"):
            raise ConfigError(f"missing must be 'fill' or 'error', not {missing!r}")
        if pad not in PADS:
            raise ConfigError(f"pad must be one of {', '.join(map(repr, PADS))}, not {pad!r}")
        reach, common = split_options(options)
        files = resolve(data_path, ZARR, reach)
        paths, opened = files.urls(), OpenZarr(files.server, direct=direct, missing=missing)
        self._volumes: list[tuple[PatchSource, ZarrArray]] = []
        targets: Any = None
        source: Any
        is_one = dataset_name is None or isinstance(dataset_name, str)
        axis = checked_axis(axis)
        if axis != 0 and patch_shape is not None:
            raise ConfigError("axis is for rows, and patches are cut along all axes: leave it out, or leave out patch_shape")
        if patch_shape is None:
            for option, value in (("stride", stride), ("boxes", boxes)):
                if value is not None:
                    raise ConfigError(f"{option} goes with patches: give patch_shape too")
            if not is_one and scale is not None:
                raise ConfigError("scale= goes with one dataset_name, of an image of OME-NGFF")
        elif not is_one:
            raise ConfigError("patches come from one array of each store: give one dataset_name")
        elif boxes is not None and len(paths) > 1:
            raise ConfigError(f"boxes are parts of one volume, and data_path names {len(paths)} stores: make one dataset of each")
        arrays = list[ZarrArray]()
        nodes = [dataset_name if isinstance(dataset_name, str) else None, target_name]
        is_pack = patch_shape is None and scale is None and axis == 0 and dataset_name in (None, DATA)
        is_pack = is_pack and all(packed_group(opened.store(path, nodes)) is not None for path in paths)
        if not is_pack and (dataset_name is None or isinstance(dataset_name, str)):
            arrays = [array_or_level(opened.store(path, nodes), dataset_name, scale) for path in paths]
        if patch_shape is None:
            names: list[Any] = [array.name for array in arrays] if is_one else [dataset_name] * len(paths)
            along: list[int | str] = [array.axis(axis) for array in arrays] if is_one and axis != 0 else [axis] * len(paths)
            sources: list[Any] = (
                [PackedGroup(path, opened) for path in paths]
                if is_pack
                else [
                    ZarrSource(path, name, opened=opened, column=target_name, axis=one)
                    for path, name, one in zip(paths, names, along, strict=True)
                ]
            )
            source, sample_format = joined_rows(sources, dtype)
            if target_name is not None:
                columns = [_targets(source, opened.store(path), opened, target_name) for source, path in zip(sources, paths, strict=True)]
                targets, self.classes = labelled_targets(columns, target_name)
        else:
            cast_to, how = dtype_named(dtype), (patch_shape, stride, edges, pad, boxes)
            self._volumes = [(patch_source(array, target_name, opened, *how), array) for array in arrays]
            source = _joined_volumes(self._volumes)
            sample_format = ArrayFormat(cast_to, None, source.array_spec, True) if target_name is None else LabelledPatches(cast_to)
        super().__init__(source, sample_format=sample_format, targets=targets, transform=transform, loading_mode=loading_mode, **common)

    def corner_of(self, index: int) -> tuple[int, ...]:
        """The lowest corner of a patch in the volume, along the axes of `patch_shape`.

        Raises:
            ConfigError: samples are rows.
        """
        number, inner = self._place_of(index)
        return self._volumes[number][0].grid.corner(inner)

    def volume_of(self, index: int) -> int:
        """Which volume a patch lies in: its number among the stores that `data_path` names.

        Raises:
            ConfigError: samples are rows.
        """
        return self._place_of(index)[0]

    def _place_of(self, index: int) -> tuple[int, int]:
        """The number of the volume, and that of the patch in it."""
        if not self._volumes:
            raise ConfigError("samples are rows, which have no corner: give patch_shape")
        source: Any = self.sample_source
        whole = int(self.whole_indices(range(len(self))[index]))
        return source.place(whole) if isinstance(source, ConcatSource) else (0, whole)

    def position_of(self, index: int) -> tuple[float, ...]:
        """Where the centre of a patch's lowest voxel lies, in the image's units, along the axes of `patch_shape`.

        Raises:
            ConfigError: samples are rows, or the volume is no image of OME-NGFF.
        """
        number, inner = self._place_of(index)
        patches, array = self._volumes[number]
        return array.position(patches.grid.corner(inner))

    @property
    def axes(self) -> tuple[str, ...] | None:
        """The names of the axes of a patch, such as ("c", "z", "y", "x"); None: the volume is no image of OME-NGFF."""
        image = self._volumes[0][1].image if self._volumes else None
        return None if image is None else image.names

    @property
    def voxel_size(self) -> tuple[float, ...] | None:
        """From one voxel to the next along each of `axes`, in the (first) image's units; None: the volume is no image of OME-NGFF."""
        level = self._volumes[0][1].level if self._volumes else None
        return None if level is None else level.scale

    def explain(self) -> str:
        lines = super().explain().splitlines()
        if self._volumes and (found := self._volumes[0][1]).image is not None:
            sizes = zip(found.image.axes, self.voxel_size or (), strict=True)
            size = ", ".join(f"{axis.name} {extent:g} {axis.unit}".rstrip() for axis, extent in sizes)
            first = f" (the first of {len(self._volumes)} images)" if len(self._volumes) > 1 else ""
            lines.insert(2, f"level {found.name!r} of {len(found.image.levels)}: voxels of {size}{first}")
        return Lines("\n".join(lines))

    def held_nbytes(self) -> int | None:
        if not self._volumes:
            return super().held_nbytes()
        if "decode" in self._overridden:
            return None
        return sum(patches.sample_bytes(self._format.dtype) * len(patches) for patches, _ in self._volumes)


def _targets(source: Any, store: Store, opened: OpenZarr, name: str) -> npt.NDArray[Any] | Column:
    """The targets of a store: an array, or a column of a table of AnnData."""
    group = column_of_group(ZarrGroups(store, opened), name, len(source))
    column: npt.NDArray[Any] | Column = source.column(name) if group is None else group
    return column


def _joined_volumes(volumes: Sequence[tuple[PatchSource, ZarrArray]]) -> PatchSource | ConcatSource[PatchSource]:
    """The patches of all volumes, one volume after the other.

    Raises:
        FormatError: they are of different kinds.
    """
    first, found = volumes[0]
    for other, its in volumes[1:]:
        if other.patches_are != first.patches_are:
            raise FormatError(
                f"{other.path} and {first.path} can't be one dataset: patches of {other.patches_are} here, and of {first.patches_are} "
                "there; earlier axes, and those of extent -1 in patch_shape, are whole and must be equally long"
            )
        names = [None if one.image is None else one.image.names for one in (its, found)]
        if names[0] != names[1]:
            raise FormatError(f"{other.path} and {first.path} can't be one dataset: their axes are {names[0]} here, and {names[1]} there")
    return first if len(volumes) == 1 else ConcatSource([source for source, _ in volumes])
