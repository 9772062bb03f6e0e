"""Rows and patches of Zarr arrays as samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import numpy.typing as npt

from headrace.datasets.arrays import ArrayDataset, Paths, dtype_named, expanded_paths, joined_targets
from headrace.datasets.base import CommonOptions
from headrace.datasets.filling import Like
from headrace.errors import ConfigError
from headrace.modes import LoadingMode
from headrace.storage.far_list import far_stores
from headrace.storage.ome import Scale
from headrace.storage.paths import is_url
from headrace.storage.remote_files import RemoteOptions
from headrace.storage.volumes import PADS, PatchSource
from headrace.storage.zarr import OpenZarr, ZarrSource
from headrace.storage.zarr_volumes import Extents, Found, Patches, array_or_level, patch_source, position


class ZarrDataset(ArrayDataset):
    """Samples are the rows of a Zarr array, or patches of a volume, as tensors of its dtype.

    Rows: the first axis counts the samples; with `target_name` ``(row, target)``; with several names dicts of a row of each. Patches:
    with `patch_shape`; with `target_name` ``(patch, patch of the labels)``, where the labels have the volume's last axes, or are labels
    of an image of OME-NGFF: then they may have voxels of another size, and each voxel of the image gets the label of the nearest one.

    Args:
        data_path: a Zarr store, version 2 or 3, a folder or a zip file, or the URL of one (a zip file's ends in .zip); for rows several, as
            a list or a glob.
        dataset_name: path of the array in the store, or (for rows) a list of such; None: the only one there is. Or path of an image of
            OME-NGFF 0.4 or 0.5; None: the store itself.
        target_name: path of the targets: for rows an array with one row a sample, for patches one of labels; for an image of OME-NGFF
            the name of one of its labels.
        transform: called with the row or patch as a tensor; for patches with labels, `transforms` is called with both.
        loading_mode: see `LoadingMode`.
        patch_shape: extents of a patch along the last axes, all earlier axes being whole; -1: the whole axis. Or a dict of extents by the
            names of axes, where the store names them. None: rows.
        stride: from one patch to the next, along the same axes; None: `patch_shape`, so that patches don't overlap.
        scale: which level of an image of OME-NGFF: that whose voxels are nearest in size, in the image's unit. A number: the least of a
            voxel's extents; several: those along the axes of space; a dict: along the axes that it names. None: the finest level.
        edges: what becomes of the rest at the end of an axis: "drop" it; "pad" the last patch; or "shift" it back, so that it overlaps.
        pad: for edges="pad": "reflect", "edge" or "constant" (the array's fill value; labels: 0).
        boxes: sample patches from these parts of the volume only: pairs of corners (first, and one past the last) along the same axes.
        dtype: numbers are cast to this NumPy dtype (as ``ndarray.astype`` does), labels are not; None: they stay as they are.
        missing: "fill": a chunk that was never written has the fill value; "error": reading it is an error.
        direct: read the files themselves where their layout is known, which is faster; False: through zarr-python alone. Both give the
            same; `explain()` names the path that each array takes, and why.
        storage_options: to fsspec, for URLs.
        retries, deadline: for URLs: attempts after the first (5), and seconds for all of them (60), until a request is given up.
        disk_cache_size: for URLs: bytes (or "20GB") of what was fetched that are kept in `cache_dir`; None: none.
        **options: see `BaseDataset`.

    Raises:
        ConfigError: URLs of several servers, or beside local paths; an empty list, extents that make no sense, an option that goes with
            patches and there are none; no level of about that scale; labels whose axes or units are others than the image's.
        DataNotFoundError, FormatError: no such store; no Zarr store, damaged metadata.
        AccessError, RemoteError: a server refuses, or does not answer.
        MissingNameError: no such array, or several and no name; the message lists them. Behind HTTP they are known only where the store has
            consolidated metadata.
        BudgetError: a chunk does not fit the memory budget when it is decoded.
    """

    def __init__(
        self,
        data_path: Paths,
        dataset_name: str | Sequence[str] | None = None,
        target_name: str | None = None,
        transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
        loading_mode: LoadingMode | str = LoadingMode.LAZY,
        patch_shape: Extents | None = None,
        stride: Extents | int | None = None,
        scale: Scale | None = None,
        edges: str = "drop",
        pad: str = "reflect",
        boxes: Sequence[tuple[Sequence[int], Sequence[int]]] | None = None,
        dtype: npt.DTypeLike | None = None,
        missing: str = "fill",
        direct: bool = True,
        storage_options: dict[str, Any] | None = None,
        retries: int | None = None,
        deadline: float | None = None,
        disk_cache_size: int | str | None = None,
        **options: Unpack[CommonOptions],
    ) -> None:
        if missing not in ("fill", "error"):
            raise ConfigError(f"missing must be 'fill' or 'error', not {missing!r}")
        if pad not in PADS:
            raise ConfigError(f"pad must be one of {', '.join(map(repr, PADS))}, not {pad!r}")
        paths = expanded_paths(data_path, "Zarr store")
        opened = OpenZarr()
        if any(map(is_url, paths)):
            reach = RemoteOptions(storage_options, retries, deadline, options.get("cache_dir"), disk_cache_size)
            far, paths = far_stores(paths, reach)
            opened = OpenZarr(far)
        self._has_labels = False
        self._found: Found | None = None
        targets = None
        if patch_shape is None:
            for option, value in (("stride", stride), ("boxes", boxes)):
                if value is not None:
                    raise ConfigError(f"{option} goes with patches: give patch_shape too")
            reading: dict[str, Any] = {"direct": direct, "missing": missing, "opened": opened, "column": target_name}
            sources = [ZarrSource(path, _rows_of(path, dataset_name, target_name, scale, opened), **reading) for path in paths]
            source = self._describe(sources, dtype)
            targets = None if target_name is None else joined_targets([one.column(target_name) for one in sources])
        else:
            if len(paths) != 1 or not (dataset_name is None or isinstance(dataset_name, str)):
                raise ConfigError("patches come from one array of one store: give one data_path and one dataset_name")
            self._dtype, self._is_plain, self._has_labels = dtype_named(dtype), target_name is None, target_name is not None
            patches = Patches(patch_shape, stride, edges, pad, boxes)
            source, self._found = patch_source(paths[0], dataset_name, target_name, scale, patches, opened, direct=direct, missing=missing)
        super().__init__(source, targets=targets, transform=transform, loading_mode=loading_mode, **options)

    def _decoded_record(self, record: Any) -> Any:
        if not self._has_labels:
            return super()._decoded_record(record)
        patch, labels = record
        return patch if self._dtype is None else patch.astype(self._dtype), labels

    def pair(self, index: int, value: Any) -> tuple[Any, Any]:
        if not self._has_labels:
            return super().pair(index, value)
        return value[0], super().present(value[1])

    @property
    def _pairs_plainly(self) -> bool:
        return not self._has_labels and type(self).pair is ZarrDataset.pair

    @property
    def always_pairs(self) -> bool:  # type: ignore[override]
        return self._has_labels

    def value_like(self) -> Like | None:
        return None if self._has_labels else super().value_like()

    def corner_of(self, index: int) -> tuple[int, ...]:
        """The lowest corner of a patch in the volume, along the axes of `patch_shape`.

        Raises:
            ConfigError: samples are rows.
        """
        source: Any = self._source
        if not isinstance(source, PatchSource):
            raise ConfigError("samples are rows, which have no corner: give patch_shape")
        return source.grid.corner(int(self._whole_indices([range(len(self))[index]])[0]))

    def position_of(self, index: int) -> tuple[float, ...]:
        """Where the centre of a patch's lowest voxel lies, in the image's units, along the axes of `patch_shape`.

        Raises:
            ConfigError: samples are rows, or the volume is no image of OME-NGFF.
        """
        corner = self.corner_of(index)
        assert self._found is not None
        return position(self._found, corner)

    @property
    def axes(self) -> tuple[str, ...] | None:
        """The names of the axes of a patch, such as ("c", "z", "y", "x"); None: the volume is no image of OME-NGFF."""
        image = None if self._found is None else self._found.image
        return None if image is None else image.names

    @property
    def voxel_size(self) -> tuple[float, ...] | None:
        """From one voxel to the next along each of `axes`, in the image's units; None: the volume is no image of OME-NGFF."""
        level = None if self._found is None else self._found.level
        return None if level is None else level.scale

    def explain(self) -> str:
        lines = super().explain().splitlines()
        if self._found is not None and self._found.image is not None:
            sizes = zip(self._found.image.axes, self.voxel_size or (), strict=True)
            size = ", ".join(f"{axis.name} {extent:g} {axis.unit}".rstrip() for axis, extent in sizes)
            lines.insert(2, f"level {self._found.name!r} of {len(self._found.image.levels)}: voxels of {size}")
        return "\n".join(lines)

    def held_nbytes(self) -> int | None:
        source: Any = self._source
        if not isinstance(source, PatchSource):
            return super().held_nbytes()
        if type(self).decode is not ArrayDataset.decode:
            return None
        return source.sample_bytes(self._dtype) * len(source)

    @property
    def _sources(self) -> list[Any]:
        return [self._source] if isinstance(self._source, PatchSource) else super()._sources


def _rows_of(
    path: str, name: str | Sequence[str] | None, target: str | None, scale: Scale | None, opened: OpenZarr
) -> str | Sequence[str] | None:
    """The array, or arrays, whose rows are samples."""
    if name is not None and not isinstance(name, str):
        if scale is not None:
            raise ConfigError("scale= goes with one dataset_name, of an image of OME-NGFF")
        return name
    return array_or_level(opened.store(path, [name, target]), name, scale).name
