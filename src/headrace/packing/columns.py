"""The columns of a pack beside its samples: offsets, names, targets, boxes, where masks begin.

Targets are one array or, where they are dicts, one for each of their columns, named by
`target_named`. Boxes lie as `CocoTargets.columns` gives them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.dataset import BaseDataset
from headrace.core.views import ColumnTargets
from headrace.datasets.image.coco import CocoTargets
from headrace.datasets.image.decoder import MaskDecoder
from headrace.datasets.image.labels import FOLDERS
from headrace.datasets.image.pixels import image_shape
from headrace.dtypes import IntArray
from headrace.errors import ConfigError, SampleError
from headrace.formats.arrays.packed import (
    NAME_OFFSETS,
    NAMES,
    OFFSETS,
    TARGETS,
    PackedInfo,
    bytes_of,
    target_named,
)
from headrace.formats.concat import ConcatSource
from headrace.formats.files import FilesSource, PairedSource
from headrace.formats.hdf5.rows import HDF5Source
from headrace.io.packed_strings import PackedNames

Column = npt.NDArray[Any]
PAIRS_LAYOUT = 4
"""The version of packs with masks or boxes."""
COLUMNS_LAYOUT = 7
"""That of packs whose targets are dicts."""


def columns_of(
    lengths: IntArray | None, names: PackedNames | None, targets: Any
) -> dict[str, Column]:
    """The columns of any pack, by name, without checksums.

    Args:
        lengths: of samples that lie flat, one behind the other: items of the first axis; None: they
            are rows.
        names: of the samples, or None.
        targets: one a sample, or None.

    Raises:
        ConfigError: see `target_arrays`.
    """
    columns = target_arrays(targets)
    if lengths is not None:
        columns[OFFSETS] = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if names is not None:
        columns[NAMES], columns[NAME_OFFSETS] = names.arrays
    return columns


def files_of(source: Any) -> list[HDF5Source]:
    """The sources of rows, or of what was packed, that a source consists of; []: it is another
    one.
    """
    each = source.sources if isinstance(source, ConcatSource) else [source]
    return list(each) if all(isinstance(one, HDF5Source) for one in each) else []


def names_of(dataset: BaseDataset) -> PackedNames | None:
    """The names of a dataset's samples, where they are files or have been."""
    source = dataset.sample_source
    if isinstance(source, PairedSource):
        source = source.files
    names = None
    if isinstance(source, FilesSource):
        names = source.listing.names
    elif files := files_of(source):
        names = PackedNames.joined([one.names for one in files])
    return None if names is None else names.take(dataset.whole_indices(np.arange(len(dataset))))


# -- targets


def target_arrays(targets: Any) -> dict[str, Column]:
    """The arrays that a pack has of the targets, by name; {}: there are none.

    Raises:
        ConfigError: see `as_column`, `check_names`.
    """
    if targets is None:
        return {}
    columns = _columns_in(targets)
    if columns is None:
        return {TARGETS: as_column(targets)}
    check_names(columns)
    return {
        target_named(number): as_column(column, name)
        for number, (name, column) in enumerate(columns.items())
    }


def crc_of_columns(columns: Mapping[str, Column]) -> int:
    """One CRC of all columns."""
    crc = 0
    for _, column in sorted(columns.items()):
        crc = zlib.crc32(bytes_of(column).data, crc)
    return crc


def target_columns_of(
    dataset: BaseDataset, targets: Any, packed: PackedInfo | None = None
) -> list[Any] | None:
    """What `PackedInfo.target_columns` says of targets that are dicts; None: they are none.

    Args:
        dataset: what is packed.
        targets: its targets.
        packed: what the pack says that they are from; None: they are from none.
    """
    columns = _columns_in(targets)
    if columns is None:
        return None
    classes: Any = getattr(dataset, "column_classes", None)
    if not isinstance(classes, Mapping):
        classes = {} if packed is None else dict(packed.target_columns or ())
    return [[name, list(classes[name]) if classes.get(name) else None] for name in columns]


def _columns_in(targets: Any) -> Mapping[str, Any] | None:
    """The columns of targets that are dicts with the same names; None: they are something else."""
    if isinstance(targets, ColumnTargets):
        return targets.columns
    if isinstance(targets, np.ndarray):
        names = targets.dtype.names
        return None if names is None else {name: targets[name] for name in names}
    is_of_dicts = (
        isinstance(targets, Sequence)
        and len(targets) > 0
        and all(isinstance(one, dict) for one in targets)
    )
    if not is_of_dicts or not targets[0]:
        return None
    if any(one.keys() != targets[0].keys() for one in targets):
        return None
    return {name: [one[name] for one in targets] for name in targets[0]}


def check_names(names: Iterable[Any], what: str = "these targets") -> None:
    """Raises a ConfigError where one of the names in dicts is no text, as which it would come
    back, or is empty.
    """
    for name in names:
        if not isinstance(name, str) or not name:
            raise ConfigError(
                f"{what} can't be packed: names in dicts must be texts of one character at least, "
                f"and {name!r} is none: rename it"
            )


def as_column(targets: Sequence[Any] | Column, name: str | None = None) -> Column:
    """Targets as an array whose rows give back the same targets.

    Args:
        targets: one a sample.
        name: of the column that they are; None: they are no columns.

    Raises:
        ConfigError: they are not all numbers, or all arrays of one shape.
    """
    try:
        column = np.asarray(targets)
    except ValueError:  # rows of different lengths
        column = np.empty(0, object)
    types = set[type]()
    if not isinstance(targets, np.ndarray):
        types = {type(target) for target in targets}
    # NumPy rounds integers that neither int64 nor uint64 holds together
    is_rounded = int in types and column.dtype.kind == "f"
    is_sound = column.ndim == 1 or types <= {np.ndarray}
    if column.dtype.kind not in "biufc" or len(types) > 1 or not is_sound or is_rounded:
        what = "these targets" if name is None else f"the column {name!r} of these targets"
        raise ConfigError(
            f"{what} can't be packed: they must be numbers of one dtype, or NumPy arrays of one "
            "shape, or dicts of these with the same names; choose such columns of a table of "
            "labels by target_name=, or pack without any (images: targets=None; texts: no "
            "target_field=) and look them up by the numbers of the samples, which return_index "
            "gives"
        )
    return np.ascontiguousarray(column)


# -- masks and boxes


def has_masks(dataset: BaseDataset) -> bool:
    """True if samples are images and masks."""
    return isinstance(dataset.sample_decoder, MaskDecoder)


def boxes_of(dataset: BaseDataset) -> CocoTargets | None:
    """The annotations of objects, if these are the targets."""
    targets = dataset.targets
    return targets if isinstance(targets, CocoTargets) else None


def box_columns(dataset: BaseDataset, are_resized: bool) -> dict[str, Column]:
    """The columns of the boxes; {}: the dataset has none.

    Args:
        dataset: what is packed.
        are_resized: True if images are stored in other sizes than the boxes are in pixels of, which
            must be known then.

    Raises:
        SampleError: an image whose size is not known can't be read.
    """
    boxes = boxes_of(dataset)
    if boxes is None:
        return {}
    sizes = boxes.sizes.copy()
    if are_resized:
        for position in np.flatnonzero((sizes == 0).any(axis=1)).tolist():
            index = int(dataset.whole_indices(position))
            record = dataset.sample_reader.records([index], dataset.sample_source.read)[0]
            if not isinstance(record, SampleError):  # it is left out when it is packed
                sizes[position] = image_shape(record, dataset.budget.left)
    return boxes.columns(sizes)


def annotations_check(dataset: BaseDataset) -> dict[str, int]:
    """What a plan has of targets that lie beside the samples, by which other ones are noticed; {}:
    there are none, or they follow from the names of the files.
    """
    boxes = boxes_of(dataset)
    if boxes is not None:
        return {"annotations": crc_of_columns(boxes.columns(boxes.sizes))}
    given = dataset._arguments.get("targets", FOLDERS)
    by_folders = isinstance(dataset.sample_source, FilesSource) and (
        isinstance(given, str) and given == FOLDERS
    )
    if dataset.targets is None or by_folders or dataset.sample_decoder.splits_targets:
        return {}
    return {"annotations": crc_of_columns(target_arrays(dataset.targets))}
