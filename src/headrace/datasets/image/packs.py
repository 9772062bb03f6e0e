"""Opens the images in packed HDF5 files, and their targets."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.views import ColumnTargets
from headrace.datasets.image.coco import BoxDecoder, CocoTargets, import_pycocotools
from headrace.datasets.image.decoder import Opened
from headrace.datasets.image.labels import BY_FOLDERS, Labels, Wanted
from headrace.datasets.image.masks import MaskDecoder
from headrace.errors import ConfigError, FormatError, MissingNameError
from headrace.formats.arrays.packed import BOXES, IMAGE, MASKS, SEGMENTATIONS, TARGETS
from headrace.formats.arrays.rows import concatenated
from headrace.formats.hdf5 import HDF5
from headrace.formats.hdf5.rows import HDF5Source
from headrace.formats.resolve.file_set import FileSet
from headrace.formats.resolve.resolver import DataPath
from headrace.formats.trees import open_trees
from headrace.io.paths import redact
from headrace.io.remote.options import RemoteOptions


def open_packs(data_path: DataPath | FileSet, wanted: Wanted, reach: RemoteOptions) -> Opened:
    """Opens the images in packed files, and their targets.

    Raises:
        ConfigError: the files don't have the targets.
        FormatError: a file is not a pack of images; or files can't be one dataset.
    """
    if wanted.targets not in (None, *BY_FOLDERS):
        raise ConfigError("targets= of a packed file are fixed: pass them to the dataset to pack")
    wanted.refuse_options("masks")
    paths, hdf5 = open_trees(data_path, HDF5, reach)

    def open_one(path: str) -> tuple[HDF5Source, npt.NDArray[Any] | None]:
        source = None
        with contextlib.suppress(MissingNameError):
            source = HDF5Source(path, opened=hdf5)
        if source is None or source.info is None or source.info.kind != "image":
            raise FormatError(
                f"{redact(path)} is not a pack of images: open it with HDF5Dataset(path, "
                "dataset_name), or name its images by column="
            )
        if wanted.targets is None or not source.has_column(TARGETS):
            return source, None
        return source, source.column(TARGETS)

    opened = hdf5.each(paths, open_one)
    sources = [source for source, _ in opened]
    columns = [column for _, column in opened if column is not None]
    first = sources[0]
    info = first.info
    assert info is not None
    for other in sources:
        if _common(other) != _common(first) or len(columns) not in (0, len(sources)):
            raise FormatError(
                f"{other.path} and {first.path} can't be one dataset: classes, sizes or colours "
                "differ, or only one has targets: pack them again, or pass targets=None"
            )
    images = Opened(concatenated(sources))
    if info.store == "decoded":
        height, width, *_ = first.shape[1:] or first.dtype[IMAGE].shape
        images = images._replace(color=info.image["color"], size=(int(height), int(width)))
    kept = info.image.get("targets")
    has_outlines = kept == BOXES and first.has_column(SEGMENTATIONS)
    if wanted.masks and not (has_outlines and wanted.targets is not None):
        raise ConfigError(f"masks=True: {first.path} has no outlines: pack with masks=True")
    if kept == MASKS:
        for source in sources:
            source.give_pairs(images_alone=wanted.targets is None)
    if wanted.targets is None:
        return images
    if kept == MASKS:
        return images._replace(decoder=MaskDecoder)
    classes = list(info.classes or [])
    if kept == BOXES:
        if has_outlines:
            import_pycocotools()
        numbers = dict(zip(classes, info.image["class_ids"], strict=True))
        targets = CocoTargets.of_packs(sources, numbers)
        labels = Labels(targets, classes, are_objects=True)
        return images._replace(labels=labels, decoder=BoxDecoder)
    labels = Labels(None, classes)
    if columns:
        rows = np.concatenate(columns)
        labels = Labels(rows, classes)
        if info.target_columns is not None:
            dicts = ColumnTargets.of_rows(rows)
            named = {name: list(found) for name, found in info.target_columns if found}
            labels = Labels(dicts, [], dicts.columns, named)
    return images._replace(labels=labels)


def _common(source: HDF5Source) -> tuple[Any, ...]:
    """What all files of a dataset must have in common."""
    info = source.info
    assert info is not None
    return info.store, info.image, info.classes, info.target_columns, source.rows_are
