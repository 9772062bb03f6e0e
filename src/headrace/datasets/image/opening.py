"""Opens images and finds their targets: files with labels or masks, and packed files."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from headrace.core.views import ColumnTargets
from headrace.datasets.image.coco import CocoTargets, import_pycocotools
from headrace.datasets.image.labels import (
    Labels,
    Wanted,
    given_targets,
    names_masks,
)
from headrace.datasets.image.matching import mask_numbers
from headrace.errors import ConfigError, FormatError, MissingNameError, warn
from headrace.formats.arrays.packed import BOXES, MASKS, SEGMENTATIONS, TARGETS
from headrace.formats.class_folders import (
    folder_targets,
    mask_folders,
    refuse_other_folders,
    warn_of_splits,
)
from headrace.formats.concat import ConcatSource
from headrace.formats.files import FilesSource
from headrace.formats.hdf5.kind import HDF5
from headrace.formats.image_formats import BY_PLUGIN, is_readable, remedy
from headrace.formats.kinds import EXTENSIONS, IMAGES
from headrace.formats.pairs import PairedSource
from headrace.formats.resolve.expressions import DataPath
from headrace.formats.resolve.file_set import FileSet
from headrace.formats.resolve.resolver import kind_of
from headrace.formats.tar.source import TARS
from headrace.io.paths import redact
from headrace.io.remote.options import RemoteOptions

if TYPE_CHECKING:
    from headrace.formats.hdf5.rows import HDF5Source
    from headrace.formats.source import Source

    ImageSource = FilesSource | PairedSource | HDF5Source | ConcatSource[HDF5Source] | Source


def open_images(
    data_path: DataPath, wanted: Wanted, reach: RemoteOptions, column: str | None = None
) -> tuple[ImageSource, Labels]:
    """The images under a path, or in a column, and their targets.

    Raises:
        DataNotFoundError, ConfigError, FormatError, MissingNameError: see `ImageDataset`.
    """
    kind = HDF5
    if column is None and not isinstance(data_path, FileSet):
        kind = kind_of(data_path, (IMAGES, TARS, HDF5), reach) or IMAGES
    if column is not None or kind is TARS:
        from headrace.datasets.image.columns import open_column  # which imports tables and tars

        return open_column(data_path, column, wanted, reach)
    if kind is HDF5:
        return _open_packed(data_path, wanted, reach)
    if wanted.masks:
        import_pycocotools()
    source = FilesSource(data_path, EXTENSIONS, reach)
    try:
        _check_readable(source.listing)
        return _with_targets(source, wanted, reach)
    except BaseException:
        source.close()
        raise


def _check_readable(files: FileSet) -> None:
    """Raises a ConfigError where a plugin that some images need is not installed."""
    for wanted in BY_PLUGIN:
        are_of_it = np.logical_or.reduce(
            [files.names.end_in(os.fsencode(ending)) for ending in wanted.endings]
        )
        if are_of_it.any() and not is_readable(wanted):
            first = redact(files.names[int(are_of_it.argmax())])
            raise ConfigError(
                f"{are_of_it.sum():,} of {len(files):,} images are of the format "
                f"{remedy(wanted)}; the first: {first}; "
                "or name the others by a glob, such as 'photos/**/*.jpg'"
            )


def _with_targets(
    source: FilesSource, wanted: Wanted, reach: RemoteOptions
) -> tuple[FilesSource | PairedSource, Labels]:
    files = source.listing
    if names_masks(wanted.targets):
        wanted.refuse_options("masks", "unused_targets")
        warn_of_splits(files)
        masks = FilesSource(cast(str, wanted.targets), EXTENSIONS, reach)
        try:
            mask_of = mask_numbers(files, masks.listing, wanted.skips_unused)
            return PairedSource(source, masks, mask_of), Labels(None, [])
        except BaseException:
            masks.close()
            raise
    if not wanted.are_folders:
        return source, given_targets(wanted, files, reach)
    wanted.refuse_options("class folders")
    if not wanted.is_outright:
        refuse_other_folders(files)
        pair = mask_folders(files)
        if pair is not None:
            warn(
                f"ImageDataset: the folders {pair[0]} and {pair[1]} hold files of the same names, "
                f"and count as two classes of images; if {pair[1]} are masks, open the folder "
                f"{pair[0]} and pass the other one as targets="
            )
    numbers, classes = folder_targets(files)
    if numbers is None:
        warn(
            f"ImageDataset: the {len(source):,} images lie flat in the folder, so every target is "
            "None; put them into class folders, or pass targets= (targets=None to say that this is "
            "meant)"
        )
    return source, Labels(numbers, classes)


def _open_packed(
    data_path: DataPath | FileSet, wanted: Wanted, reach: RemoteOptions
) -> tuple[HDF5Source | ConcatSource[HDF5Source], Labels]:
    """The images in packed files, and their targets.

    Raises:
        ConfigError: targets are wanted that the files don't have.
        FormatError: a file is no pack of images; or they can't be one dataset.
    """
    if not (wanted.targets is None or wanted.are_folders):
        raise ConfigError(
            "targets= can't be changed for a packed file: give it when you pack, or use "
            "target_transform"
        )
    wanted.refuse_options("those of a packed file", "masks")
    # imported here: files of images need no reader of arrays
    from headrace.formats.hdf5.rows import HDF5Source, open_files

    paths, hdf5 = open_files(data_path, reach)

    def open_one(path: str) -> tuple[HDF5Source, npt.NDArray[Any] | None]:
        source = None
        with contextlib.suppress(MissingNameError):
            source = HDF5Source(path, opened=hdf5)
        if source is None or source.info is None or source.info.kind != "image":
            raise FormatError(
                f"{redact(path)} holds no images that headrace packed: open it with "
                "HDF5Dataset(path, dataset_name)"
            )
        has_targets = wanted.targets is not None and source.has_column(TARGETS)
        return source, source.column(TARGETS) if has_targets else None

    opened = hdf5.hdf5.read_each(paths, open_one)
    sources = [source for source, _ in opened]
    columns = [column for _, column in opened if column is not None]
    first = sources[0]
    info = first.info
    assert info is not None
    for other, column in opened:
        if _common(other) != _common(first) or (column is None) != (opened[0][1] is None):
            raise FormatError(
                f"{other.path} and {first.path} can't be one dataset: they were packed with other "
                "classes, sizes or colours, or only one holds targets: pack them from one "
                "dataset, or pass targets=None"
            )
    whole: HDF5Source | ConcatSource[HDF5Source] = first
    if len(sources) > 1:
        whole = ConcatSource(sources)
    kept = info.image.get("targets")
    has_outlines = kept == BOXES and first.has_column(SEGMENTATIONS)
    if wanted.masks and not (has_outlines and wanted.targets is not None):
        raise ConfigError(
            f"masks=True: {first.path} holds no outlines of objects: pack a dataset that was "
            "opened with masks=True"
        )
    if kept == MASKS:
        for source in sources:
            source.give_pairs(images_alone=wanted.targets is None)
    if wanted.targets is None or kept == MASKS:
        return whole, Labels(None, [])
    classes = list(info.classes or [])
    if kept == BOXES:
        if has_outlines:
            import_pycocotools()
        numbers = dict(zip(classes, info.image["class_ids"], strict=True))
        boxes = CocoTargets.of_packs(sources, numbers)
        return whole, Labels(boxes, classes, class_to_idx=numbers)
    if not columns:
        return whole, Labels(None, classes)
    rows = np.concatenate(columns)
    if info.target_columns is None:
        return whole, Labels(rows, classes)
    dicts = ColumnTargets.of_rows(rows)
    named = {name: list(found) for name, found in info.target_columns if found}
    return whole, Labels(dicts, [], dicts.columns, named)


def _common(source: HDF5Source) -> tuple[Any, ...]:
    """What the files of one dataset have in common."""
    info = source.info
    assert info is not None
    return info.store, info.image, info.classes, info.target_columns, source.rows_are


def first_packed(source: ImageSource) -> HDF5Source | None:
    """The packed file, or the first of several; None: images are files of their own."""
    first: Any = source.sources[0] if isinstance(source, ConcatSource) else source
    return first if getattr(first, "info", None) is not None else None
