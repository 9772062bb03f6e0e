"""Rows and patches of Zarr arrays as samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack

import numpy as np
import numpy.typing as npt

from headrace.casting import DTypeArgument, cast, dtype_named
from headrace.core.dataset import BaseDataset
from headrace.core.modes import LoadingMode, ModeName
from headrace.core.options import PathOptions, check_arguments, split_options
from headrace.datasets.arrays import (
    ArrayDataset,
    ArrayDecoder,
    checked_names,
    joined_rows,
    joined_targets,
)
from headrace.errors import ConfigError, FormatError
from headrace.formats.arrays.volumes import PADS, PatchSource
from headrace.formats.concat import ConcatSource
from headrace.formats.resolve.resolver import DataPath, resolve
from headrace.formats.sparse.frames import Column, column_of_group
from headrace.formats.zarr.ome import (
    Extents,
    Scale,
    ZarrArray,
    array_or_level,
    check_row_targets,
    patch_source,
)
from headrace.formats.zarr.rows import OpenZarr, ZarrSource, ZarrTree
from headrace.formats.zarr.stores import ZARR, Store


class LabelledPatches(ArrayDecoder):
    """Pairs of a patch and a patch of labels.

    Args:
        dtype: that the numbers of patches are cast to, and labels are not; None: they stay as they
            are.
    """

    splits_targets = True
    always_pairs = True

    def __init__(self, dtype: np.dtype[Any] | None) -> None:
        super().__init__(dtype)
        self.stores_values = False

    def decode(self, record: Any) -> Any:
        patch, labels = record
        return patch if self.dtype is None else cast(patch, self.dtype), labels

    def split_target(self, value: Any, index: int, dataset: BaseDataset) -> tuple[Any, Any]:
        return value[0], self.to_input(value[1])


class ZarrDataset(ArrayDataset):
    """Rows of Zarr arrays, or patches of volumes, as tensors of the array's dtype.

    Rows: the first axis is the sample axis. With `target_name` a
    sample is ``(row, target)``. With several names it is a dict with one row of each.

    Patches: with `patch_shape`. With `target_name` a sample is ``(patch, patch of the labels)``.
    Labels have the last axes of the volume. Labels of an OME-NGFF image may have voxels of another
    size; each voxel of the image then gets the label of the nearest one.

    Args:
        data_path: a Zarr store of version 2 or 3, as a folder, a zip file, or a URL (of a zip file:
            ending in .zip); or several, as a folder with stores in it (.zarr, .zarr.zip), a glob, a
            pattern with braces or a list. Rows or patches of several stores are concatenated.
        dataset_name: path of the array in the store, or (for rows) a list of paths. None: the only
            array. Or path of an image of OME-NGFF 0.4 or 0.5; None: the store itself.
        target_name: path of the targets: for rows an array with one row per sample, for patches an
            array of labels, for an OME-NGFF image the name of one of its labels. For rows of an
            AnnData store also a categorical column of `obs` ("obs/kind"): targets are class numbers
            (-1 for missing values).
        transform: a callable that is applied to the row or patch as a tensor. For patches with
            labels, `transforms` receives both.
        loading_mode: see `LoadingMode`.
        patch_shape: size of a patch along the last axes; -1: the whole axis. Earlier axes are
            whole. Or a dict of sizes by axis name, if the store names its axes. Or one size for all
            spatial axes: those of an OME-NGFF image, those named x, y and z, or else the last
            three; all other axes (channels, time) are whole. None: samples are rows.
        stride: step between patches along the same axes. None: `patch_shape`, so that patches don't
            overlap.
        scale: resolution level of an OME-NGFF image: the one with the voxel size nearest to this,
            in the image's unit. A number: the smallest extent of a voxel. Several: the extents
            along the spatial axes. A dict: the extents along the axes it names. None: the finest
            level.
        edges: what to do with the rest at the end of an axis: "drop" it, "pad" the last patch, or
            "shift" the last patch back, so that it overlaps. A volume that is smaller than a patch
            is an error, except with "pad".
        pad: for edges="pad": "reflect", "edge" or "constant" (the array's fill value; labels: 0).
        boxes: parts of the volume to take patches from, as pairs of corners (first, and one past
            the last) along the same axes. None: the whole volume.
        dtype: NumPy or torch dtype that numbers are cast to, also torch.bfloat16. Labels are not
            cast. None: unchanged.
        missing: chunks that were never written: "fill": use the fill value; "error": raise an
            error.
        direct: True: read the files directly if their layout is supported, which is faster. False:
            always use zarr-python. Samples are the same; `explain()` names the path of each array
            and the reason.
        **options: see `BaseDataset`, and for URLs `RemoteOptions`.

    Attributes:
        classes: class names of a categorical target. None: targets are not categories.

    Raises:
        ConfigError: URLs of several servers, or URLs mixed with local paths; invalid sizes; an
            option for patches without `patch_shape`; no resolution level of about that scale; or
            labels whose axes or units differ from those of the image.
        DataNotFoundError, FormatError: a store does not exist; it is not a Zarr store, or its
            metadata are damaged.
        AccessError, RemoteError: a server refuses a request, or does not answer.
        MissingNameError: there is no such array, or there are several and no name was given; the
            message lists them. Over HTTP they are known only if the store has consolidated
            metadata.
        BudgetError: a decoded chunk does not fit the memory budget.
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
        name: Any = checked_names(dataset_name, target_name)
        is_one = not isinstance(name, tuple)
        given = {
            "stride": stride is not None,
            "boxes": boxes is not None,
            "edges": edges != "drop",
            "pad": pad != "reflect",
        }
        if patch_shape is None and any(given.values()):
            raise ConfigError(
                f"{next(filter(given.get, given))} goes with patches: give patch_shape too"
            )
        if not is_one and (patch_shape is not None or scale is not None):
            raise ConfigError(
                "patches, and the levels of an image (scale=), come from one array of each store: "
                "give one dataset_name"
            )
        reach, common = split_options(options)
        files = resolve(data_path, ZARR, reach)
        paths = files.urls()
        if boxes is not None and len(paths) > 1:
            raise ConfigError(
                f"boxes are parts of one volume, and data_path names {len(paths)} stores: make "
                "one dataset of each"
            )
        opened = OpenZarr(files.server, direct=direct, missing=missing)
        self._volumes: list[tuple[PatchSource, ZarrArray]] = []
        nodes = [*([name] if is_one else name), target_name]
        stores = [opened.store(path, nodes) for path in paths]
        targets: Any = None
        source: Any
        sources: list[Any]
        if patch_shape is not None:
            cast_to = dtype_named(dtype)
            for store in stores:
                array = array_or_level(store, name, scale)
                patches = patch_source(
                    array, target_name, opened, patch_shape, stride, edges, pad, boxes
                )
                self._volumes.append((patches, array))
            source = _joined_volumes(self._volumes)
            sample_decoder = ArrayDecoder(cast_to, None, source.array_spec, True)
            if target_name is not None:
                sample_decoder = LabelledPatches(cast_to)
        else:
            sources = []
            for path, store in zip(paths, stores, strict=True):
                rows_of = name
                if is_one:
                    array = array_or_level(store, name, scale)
                    rows_of = array.name
                    if target_name is not None:
                        check_row_targets(array, target_name)
                sources.append(ZarrSource(path, rows_of, opened=opened, column=target_name))
            source, sample_decoder = joined_rows(sources, dtype)
            if target_name is not None:
                columns = [
                    _targets(one, store, opened, target_name)
                    for one, store in zip(sources, stores, strict=True)
                ]
                targets, self.classes = joined_targets(
                    columns, [one.path for one in sources], target_name
                )
        super().__init__(
            source,
            sample_decoder=sample_decoder,
            targets=targets,
            transform=transform,
            loading_mode=loading_mode,
            **common,
        )

    def corner_of(self, index: int) -> tuple[int, ...]:
        """Lowest corner of a patch in the volume, along the axes of `patch_shape`.

        Raises:
            ConfigError: samples are rows.
        """
        number, inner = self._place_of(index)
        return self._volumes[number][0].grid.corner(inner)

    def volume_of(self, index: int) -> int:
        """Number of the volume that contains a patch, among the stores of `data_path`.

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
        if isinstance(source, ConcatSource):
            return source.place(whole)
        return (0, whole)

    def position_of(self, index: int) -> tuple[float, ...]:
        """Position of the centre of a patch's lowest voxel, in the image's units, along the axes of
        `patch_shape`.

        Raises:
            ConfigError: samples are rows, or the volume is not an OME-NGFF image.
        """
        number, inner = self._place_of(index)
        patches, array = self._volumes[number]
        return array.position(patches.grid.corner(inner))

    @property
    def axes(self) -> tuple[str, ...] | None:
        """Names of the axes of a patch, such as ("c", "z", "y", "x"). None: the volume is not an
        OME-NGFF image.
        """
        image = self._volumes[0][1].image if self._volumes else None
        if image is None:
            return None
        return image.names

    @property
    def voxel_size(self) -> tuple[float, ...] | None:
        """Distance between voxels along each of `axes`, in the (first) image's units. None: the
        volume is not an OME-NGFF image.
        """
        level = self._volumes[0][1].level if self._volumes else None
        if level is None:
            return None
        return level.scale

    def held_nbytes(self) -> int | None:
        if not self._volumes:
            return super().held_nbytes()
        if "decode" in self._overridden:
            return None
        return sum(
            patches.sample_bytes(self._decoder.dtype) * len(patches) for patches, _ in self._volumes
        )


def _targets(source: Any, store: Store, opened: OpenZarr, name: str) -> npt.NDArray[Any] | Column:
    """The targets of a store: an array, or a column of a table of AnnData."""
    group = column_of_group(ZarrTree(store, opened), name, len(source))
    column: npt.NDArray[Any] | Column = source.column(name) if group is None else group
    return column


def _joined_volumes(
    volumes: Sequence[tuple[PatchSource, ZarrArray]],
) -> PatchSource | ConcatSource[PatchSource]:
    """The patches of all volumes, one volume after the other.

    Raises:
        FormatError: they are of different kinds.
    """
    first, found = volumes[0]
    for other, its in volumes[1:]:
        if other.patches_are != first.patches_are:
            raise FormatError(
                f"{other.path} and {first.path} can't be one dataset: patches of "
                f"{other.patches_are} here, and of {first.patches_are} "
                "there; earlier axes, and those of extent -1 in patch_shape, are whole and must "
                "be equally long"
            )
        names = [None if one.image is None else one.image.names for one in (its, found)]
        if names[0] != names[1]:
            raise FormatError(
                f"{other.path} and {first.path} can't be one dataset: their axes are {names[0]} "
                f"here, and {names[1]} there"
            )
    if len(volumes) == 1:
        return first
    return ConcatSource([source for source, _ in volumes])
