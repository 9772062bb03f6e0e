"""Opens packed images, and their targets."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.datasets.core.views import ColumnTargets
from headrace.datasets.image.coco import CocoTargets, import_pycocotools
from headrace.datasets.image.labels import Labels, Wanted
from headrace.errors import ConfigError, FormatError, MissingNameError
from headrace.io.paths import redact
from headrace.io.remote.options import RemoteOptions
from headrace.io.resolve.expressions import DataPath
from headrace.io.resolve.file_set import FileSet, Kind
from headrace.storage.arrays.packed import BOXES, MASKS, SEGMENTATIONS, TARGETS
from headrace.storage.arrays.packed_rows import PackedSource
from headrace.storage.concat import ConcatSource
from headrace.storage.hdf5.kind import HDF5
from headrace.storage.hdf5.rows import HDF5Source, open_files
from headrace.storage.zarr.packed import PackedGroup, packed_groups


def open_packed(
    data_path: DataPath | FileSet, kind: Kind, wanted: Wanted, reach: RemoteOptions
) -> tuple[PackedSource | ConcatSource[PackedSource], Labels]:
    targets = wanted.targets

    def one(
        path: str, source_of: Callable[[str], PackedSource], dataset: str
    ) -> tuple[PackedSource, npt.NDArray[Any] | None]:
        foreign = FormatError(
            f"{redact(path)} holds no images that headrace packed: open it with {dataset}(path, "
            "dataset_name)"
        )
        try:
            source = source_of(path)
        except MissingNameError:
            raise foreign from None
        if source.info is None or source.info.kind != "image":
            raise foreign
        return source, source.column(TARGETS) if targets is not None and source.has_column(
            TARGETS
        ) else None

    if (targets is not None and not wanted.are_folders) or not wanted._replace(masks=False).is_bare:
        raise ConfigError(
            "targets= can't be changed for a packed file: give it when you pack, or use "
            "target_transform"
        )
    if kind is HDF5:
        paths, hdf5 = open_files(data_path, reach)
        each = hdf5.hdf5.read_each(
            paths, lambda path: one(path, functools.partial(HDF5Source, opened=hdf5), "HDF5Dataset")
        )
    else:
        paths, zarr = packed_groups(data_path, reach)
        each = [
            one(path, functools.partial(PackedGroup, opened=zarr), "ZarrDataset") for path in paths
        ]
    sources, columns = (
        [source for source, _ in each],
        [column for _, column in each if column is not None],
    )
    first = sources[0]
    assert first.info is not None
    for source in sources[1:]:
        infos = [(one.info, one.rows_are) for one in (first, source) if one.info is not None]
        alike = [
            (info.store, info.image, info.classes, info.target_columns, rows_are)
            for info, rows_are in infos
        ]
        if alike[0] != alike[1]:
            raise FormatError(
                f"{source.path} and {first.path} can't be one dataset: they were packed with "
                "other classes, sizes or colours: pack them "
                "from one dataset"
            )
    if len(columns) not in (0, len(sources)):
        raise FormatError(
            "some of the packed files hold targets, and some none: pack them from one dataset, or "
            "pass targets=None"
        )
    whole: PackedSource | ConcatSource[PackedSource] = (
        first if len(sources) == 1 else ConcatSource(sources)
    )
    kept = first.info.image.get("targets")
    if wanted.masks and not (
        kept == BOXES and targets is not None and first.has_column(SEGMENTATIONS)
    ):
        raise ConfigError(
            f"masks=True: {first.path} holds no outlines of objects: pack a dataset that was "
            "opened with masks=True"
        )
    if kept == MASKS:
        for source in sources:
            source.give_pairs(images_alone=targets is None)
    if targets is None or kept == MASKS:
        return whole, Labels(None, [])
    if kept == BOXES:
        if first.has_column(SEGMENTATIONS):
            import_pycocotools()
        numbers = dict(zip(first.info.classes or [], first.info.image["class_ids"], strict=True))
        boxes = CocoTargets.of_packs(sources, numbers)
        return whole, Labels(boxes, boxes.classes, class_to_idx=boxes.class_to_idx)
    rows = np.concatenate(columns) if columns else None
    if rows is None or first.info.target_columns is None:
        return whole, Labels(rows, list(first.info.classes or []))
    dicts = ColumnTargets.of_rows(rows)
    return whole, Labels(
        dicts,
        [],
        dicts.columns,
        {name: list(classes) for name, classes in first.info.target_columns if classes},
    )
