"""Opens images and finds their targets: files with labels or masks, and packed files."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from headrace.datasets.core.views import ColumnTargets
from headrace.datasets.image.coco import CocoTargets, import_pycocotools
from headrace.datasets.image.labels import (
    FOLDERS,
    Labels,
    TargetsArgument,
    given_targets,
    names_masks,
)
from headrace.datasets.image.matching import mask_numbers
from headrace.datasets.image.tables import Table
from headrace.errors import ConfigError, FormatError, MissingNameError, warn
from headrace.io.paths import redact
from headrace.io.remote.options import RemoteOptions
from headrace.io.resolve.expressions import DataPath
from headrace.io.resolve.file_set import FileSet, Kind
from headrace.io.resolve.resolver import kind_of
from headrace.storage.arrays.packed import BOXES, MASKS, SEGMENTATIONS, TARGETS, PackedSource
from headrace.storage.class_folders import (
    folder_targets,
    mask_folders,
    refuse_other_folders,
    warn_of_splits,
)
from headrace.storage.concat import ConcatSource
from headrace.storage.files import FilesSource
from headrace.storage.hdf5.files import HDF5
from headrace.storage.hdf5.rows import HDF5Source, open_files
from headrace.storage.image_formats import BY_PLUGIN, is_readable, remedy
from headrace.storage.kinds import EXTENSIONS, IMAGES
from headrace.storage.pairs import PairedSource
from headrace.storage.zarr.packed import PackedGroup, packed_groups
from headrace.storage.zarr.stores import ZARR

ImageSource = FilesSource | PairedSource | PackedSource | ConcatSource[PackedSource]


class Wanted(NamedTuple):
    """Which targets are wanted, as the user gave it."""

    targets: TargetsArgument | Table
    target_name: str | Sequence[str] | None
    label_separator: str | None
    masks: bool
    skips_unused: bool = False
    """True if targets of files that are not among the data are left out."""
    is_outright: bool = True
    """True if the user gave `targets`; False: they are the default."""
    delimiter: str | None = None
    """What stands between the cells of a CSV of labels, where that is not its ending's own."""

    @property
    def are_folders(self) -> bool:
        """True if they are those of class folders."""
        return isinstance(self.targets, str) and self.targets == FOLDERS

    @property
    def is_bare(self) -> bool:
        """True if no option of labels was given."""
        given = (self.target_name, self.label_separator, self.delimiter)
        return given == (None, None, None) and not (self.masks or self.skips_unused)


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
        return _open_packed(data_path, kind, wanted, reach)
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


def _open_packed(
    data_path: DataPath | FileSet, kind: Kind, wanted: Wanted, reach: RemoteOptions
) -> tuple[ImageSource, Labels]:
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
    whole: ImageSource = first if len(sources) == 1 else ConcatSource(sources)
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


def first_packed(source: ImageSource) -> PackedSource | None:
    """The packed file, or the first of several; None: images are files of their own."""
    first = source.sources[0] if isinstance(source, ConcatSource) else source
    return first if isinstance(first, PackedSource) else None
