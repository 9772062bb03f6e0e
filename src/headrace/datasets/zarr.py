"""Rows and patches of Zarr arrays as samples."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import numpy.typing as npt

from headrace.datasets.arrays import ArrayDataset, Paths, dtype_named, expanded_paths, joined_targets
from headrace.datasets.base import CommonOptions
from headrace.datasets.filling import Like
from headrace.errors import ConfigError
from headrace.modes import LoadingMode
from headrace.storage.patches import Box, PatchGrid
from headrace.storage.volumes import PADS, PatchSource, Volume
from headrace.storage.zarr import OpenZarr, ZarrSource, zarr_reader
from headrace.storage.zarr_files import array_named, open_store


class ZarrDataset(ArrayDataset):
    """Samples are the rows of a Zarr array, or patches of a volume, as tensors of its dtype.

    Rows: the first axis counts the samples; with `target_name` ``(row, target)``; with several names dicts of a row of each. Patches:
    with `patch_shape`; with `target_name` ``(patch, patch of the labels)``, where the labels have the volume's last axes.

    Args:
        data_path: a local Zarr store, version 2 or 3, a folder or a zip file; for rows several, as a list or a glob.
        dataset_name: path of the array in the store, or (for rows) a list of such; None: the only one there is.
        target_name: path of the targets: for rows an array with one row a sample, for patches one of labels.
        transform: called with the row or patch as a tensor; for patches with labels, `transforms` is called with both.
        loading_mode: see `LoadingMode`.
        patch_shape: extents of a patch along the last axes, all earlier axes being whole; -1: the whole axis. None: rows.
        stride: from one patch to the next, along the same axes; None: `patch_shape`, so that patches don't overlap.
        edges: what becomes of the rest at the end of an axis: "drop" it; "pad" the last patch; or "shift" it back, so that it overlaps.
        pad: for edges="pad": "reflect", "edge" or "constant" (the array's fill value; labels: 0).
        boxes: sample patches from these parts of the volume only: pairs of corners (first, and one past the last) along the same axes.
        dtype: numbers are cast to this NumPy dtype (as ``ndarray.astype`` does), labels are not; None: they stay as they are.
        missing: "fill": a chunk that was never written has the fill value; "error": reading it is an error.
        direct: read the files themselves where their layout is known, which is faster; False: through zarr-python alone. Both give the
            same; `explain()` names the path that each array takes, and why.
        **options: see `BaseDataset`.

    Raises:
        ConfigError: a URL, an empty list, extents that make no sense, an option that goes with patches and there are none.
        DataNotFoundError, FormatError: no such store; no Zarr store, damaged metadata.
        MissingNameError: no such array, or several and no name; the message lists them.
        BudgetError: a chunk does not fit the memory budget when it is decoded.
    """

    def __init__(
        self,
        data_path: Paths,
        dataset_name: str | Sequence[str] | None = None,
        target_name: str | None = None,
        transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
        loading_mode: LoadingMode | str = LoadingMode.LAZY,
        patch_shape: Sequence[int] | None = None,
        stride: Sequence[int] | int | None = None,
        edges: str = "drop",
        pad: str = "reflect",
        boxes: Sequence[tuple[Sequence[int], Sequence[int]]] | None = None,
        dtype: npt.DTypeLike | None = None,
        missing: str = "fill",
        direct: bool = True,
        **options: Unpack[CommonOptions],
    ) -> None:
        if missing not in ("fill", "error"):
            raise ConfigError(f"missing must be 'fill' or 'error', not {missing!r}")
        if pad not in PADS:
            raise ConfigError(f"pad must be one of {', '.join(map(repr, PADS))}, not {pad!r}")
        paths, opened = expanded_paths(data_path, "Zarr store"), OpenZarr()
        self._has_labels = False
        targets = None
        if patch_shape is None:
            for name, value in (("stride", stride), ("boxes", boxes)):
                if value is not None:
                    raise ConfigError(f"{name} goes with patches: give patch_shape too")
            sources = [ZarrSource(path, dataset_name, direct=direct, missing=missing, opened=opened) for path in paths]
            source = self._describe(sources, dtype)
            targets = None if target_name is None else joined_targets([one.column(target_name) for one in sources])
        else:
            if len(paths) != 1 or not (dataset_name is None or isinstance(dataset_name, str)):
                raise ConfigError("patches come from one array of one store: give one data_path and one dataset_name")
            self._dtype, self._is_plain, self._has_labels = dtype_named(dtype), target_name is None, target_name is not None
            reading = {"direct": direct, "missing": missing}
            source = _patches(paths[0], dataset_name, target_name, patch_shape, stride, edges, pad, boxes, opened, reading)
        super().__init__(source, targets=targets, transform=transform, loading_mode=loading_mode, **options)

    def decode(self, record: Any) -> Any:
        if not self._has_labels:
            return super().decode(record)
        patch, labels = record
        return patch if self._dtype is None else patch.astype(self._dtype), labels

    def pair(self, index: int, value: Any) -> tuple[Any, Any]:
        if not self._has_labels:
            return super().pair(index, value)
        return value[0], super().present(value[1])

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

    def held_nbytes(self) -> int | None:
        source: Any = self._source
        if not isinstance(source, PatchSource):
            return super().held_nbytes()
        return source.sample_bytes(self._dtype) * len(source)

    @property
    def _sources(self) -> list[Any]:
        return [self._source] if isinstance(self._source, PatchSource) else super()._sources


def _patches(
    path: str,
    name: str | None,
    target_name: str | None,
    patch_shape: Sequence[int],
    stride: Sequence[int] | int | None,
    edges: str,
    pad: str,
    boxes: Sequence[tuple[Sequence[int], Sequence[int]]] | None,
    opened: OpenZarr,
    reading: dict[str, Any],
) -> PatchSource:
    store = open_store(path)
    one, said = array_named(store, name)
    reader = zarr_reader(store, one, said, opened, **reading)
    axes = len(patch_shape)
    if not 1 <= axes <= len(reader.shape):
        raise ConfigError(f"patch_shape={list(patch_shape)} has {axes} extents, and {one!r} has shape {list(reader.shape)}")
    shape = reader.shape[len(reader.shape) - axes :]
    patch = [extent if wanted == -1 else wanted for wanted, extent in zip(patch_shape, shape, strict=True)]
    steps = patch if stride is None else [stride] * axes if isinstance(stride, int) else list(stride)
    parts = None if boxes is None else [Box(tuple(map(int, first)), tuple(map(int, last))) for first, last in boxes]
    grid = PatchGrid(shape, patch, steps, edges, parts)
    volumes = [Volume(one, reader, pad, reader.chunks.fill_value())]
    if target_name is not None:
        label, told = array_named(store, target_name)
        labels = zarr_reader(store, label, told, opened, **reading)
        if labels.shape[max(0, len(labels.shape) - axes) :] != shape:
            raise ConfigError(f"{label!r} has shape {list(labels.shape)}, which does not end in {list(shape)} as {one!r} does")
        volumes.append(Volume(label, labels, pad, 0))
    return PatchSource(os.path.abspath(path), volumes, grid, opened)
