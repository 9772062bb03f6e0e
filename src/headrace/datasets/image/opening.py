"""Opens images and finds their targets: files with labels or masks, and packed files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, cast

import numpy as np

from headrace.datasets.image.coco import import_pycocotools
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
    numbers, classes = folder_targets(files)
    pair = None if wanted.is_outright else mask_folders(files)
    if pair is not None:
        warn(
            f"ImageDataset: the folders {pair[0]} and {pair[1]} hold files of the same names, and "
            f"count as two classes of images; if {pair[1]} are masks, open the folder {pair[0]} "
            "and pass the other one as targets="
        )
    if numbers is None:
        warn(
            f"ImageDataset: the {len(source):,} images lie flat in the folder, so every target is "
            "None; put them into class folders, or pass targets= (targets=None to say that this is "
            "meant)"
        )
    return source, Labels(numbers, classes)


def first_packed(source: ImageSource) -> PackedSource | None:
    """The packed file, or the first of several; None: images are files of their own."""
    first = source.sources[0] if isinstance(source, ConcatSource) else source
    if isinstance(first, (FilesSource, PairedSource)):
        return None
    return first
