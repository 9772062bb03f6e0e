"""Opens images and finds their targets: files with labels or masks, and packed files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from headrace.datasets.image.coco import CocoTargets, import_pycocotools
from headrace.datasets.image.labels import (
    Labels,
    Wanted,
    given_targets,
    names_masks,
)
from headrace.datasets.image.matching import mask_numbers
from headrace.errors import ConfigError, warn
from headrace.io.paths import redact
from headrace.io.remote.options import RemoteOptions
from headrace.io.resolve.expressions import DataPath
from headrace.io.resolve.file_set import FileSet, Kind
from headrace.io.resolve.resolver import kind_of
from headrace.storage.class_folders import (
    folder_targets,
    mask_folders,
    refuse_other_folders,
    warn_of_splits,
)
from headrace.storage.concat import ConcatSource
from headrace.storage.files import FilesSource
from headrace.storage.hdf5.kind import HDF5
from headrace.storage.image_formats import BY_PLUGIN, is_readable, remedy
from headrace.storage.kinds import EXTENSIONS, IMAGES
from headrace.storage.pairs import PairedSource
from headrace.storage.zarr.kind import ZARR

if TYPE_CHECKING:
    from headrace.storage.arrays.packed_rows import PackedSource

    ImageSource = FilesSource | PairedSource | PackedSource | ConcatSource[PackedSource]


def open_images(
    data_path: DataPath, wanted: Wanted, reach: RemoteOptions
) -> tuple[ImageSource, Labels]:
    """The images under a path, and their targets.

    Raises:
        DataNotFoundError, ConfigError, FormatError, MissingNameError: see `ImageDataset`.
    """
    if isinstance(data_path, FileSet):
        kind: Kind | None = ZARR if ZARR.fits(os.fsdecode(data_path.names[0])) else HDF5
    else:
        kind = kind_of(data_path, (IMAGES, HDF5, ZARR), reach)
    if kind in (HDF5, ZARR):
        # imported here: files of images need no reader of arrays
        from headrace.datasets.image.packed import open_packed

        return open_packed(data_path, kind, wanted, reach)
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
) -> tuple[ImageSource, Labels]:
    if names_masks(wanted.targets):
        return _with_masks(source, wanted, reach), Labels(None, [])
    if not wanted.are_folders:
        options: dict[str, Any] = {
            "target_name": wanted.target_name,
            "label_separator": wanted.label_separator,
            "with_masks": wanted.masks,
        }
        options["skips_unused"] = wanted.skips_unused
        options["delimiter"] = wanted.delimiter
        labels = given_targets(wanted.targets, source.listing, reach, **options)
        if wanted.masks and not isinstance(labels.targets, CocoTargets):
            raise ConfigError(
                "masks=True is for annotations of COCO, which hold objects' outlines: leave it out"
            )
        return source, labels
    if not wanted.is_bare:
        raise ConfigError(
            "target_name, label_separator, delimiter, masks and unused_targets are for labels in "
            "files: "
            "pass targets='labels.csv' or 'instances.json'"
        )
    if not wanted.is_outright:
        refuse_other_folders(source.listing)
    numbers, classes = folder_targets(source.listing)
    if not wanted.is_outright and (pair := mask_folders(source.listing)) is not None:
        warn(
            f"ImageDataset: the folders {pair[0]} and {pair[1]} hold files of the same names, and "
            "count as two classes of images; if "
            f"{pair[1]} are masks, open the folder {pair[0]} and pass the other one as targets="
        )
    if numbers is None:
        warn(
            f"ImageDataset: the {len(source):,} images lie flat in the folder, so every target is "
            "None; "
            "put them into class folders, or pass targets= (targets=None to say that this is meant)"
        )
    return source, Labels(numbers, classes)


def _with_masks(source: FilesSource, wanted: Wanted, reach: RemoteOptions) -> PairedSource:
    """The images and their masks."""
    if not wanted._replace(skips_unused=False).is_bare:
        raise ConfigError(
            "target_name, label_separator, delimiter and masks are for labels in files, and "
            "targets names masks: leave them out"
        )
    masks = FilesSource(cast(str, wanted.targets), EXTENSIONS, reach)
    warn_of_splits(source.listing)
    try:
        return PairedSource(
            source, masks, mask_numbers(source.listing, masks.listing, wanted.skips_unused)
        )
    except BaseException:
        masks.close()
        raise


def first_packed(source: ImageSource) -> PackedSource | None:
    """The packed file, or the first of several; None: images are files of their own."""
    first = source.sources[0] if isinstance(source, ConcatSource) else source
    if isinstance(first, (FilesSource, PairedSource)):
        return None
    return first
