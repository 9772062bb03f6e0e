"""Objects in images: reads their annotations in COCO's JSON format, and decodes pairs of an image
and its objects.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from headrace.collate import DetectionCollator
from headrace.core.batcher import Collating
from headrace.core.dataset import BaseDataset
from headrace.datasets.image.augment import Drawn
from headrace.datasets.image.decoder import JointDecoder
from headrace.datasets.image.labels import FlatTargets, keys_for, named_few, spellings_of
from headrace.datasets.image.masks import cut_mask, resize_nearest
from headrace.datasets.pixels import image_shape
from headrace.dtypes import ArraySpec, IntArray
from headrace.errors import ConfigError, FormatError, warn
from headrace.formats.arrays.packed import (
    BOXES,
    IMAGE_ID,
    IMAGE_SIZE,
    SEGMENTATIONS,
    offsets_named,
)
from headrace.formats.resolve.file_set import FileSet, PackedNames
from headrace.io.paths import redact

if TYPE_CHECKING:
    from headrace.formats.hdf5.rows import HDF5Source


ARRAYS: dict[str, tuple[type, tuple[int, ...]]] = {
    BOXES: (np.float32, (4,)),
    "labels": (np.int64, ()),
    "area": (np.float32, ()),
    "iscrowd": (np.int64, ()),
}
"""The arrays of objects: dtype and shape of an item."""
_LARGEST = 1e38  # fits float32
_LONGEST = 1 << 31  # sides of images are shorter
_LEAST = 1.0  # pixels that a crop must leave of a box


class Objects(NamedTuple):
    """The objects in one image.

    Attributes:
        arrays: boxes ([N, 4] float32: left, top, right and bottom edge in pixels), labels ([N]
            int64, ids of the categories), area ([N] float32, pixels) and iscrowd ([N] int64).
        image_id: id of the image.
        segmentations: as in the file. None: masks were not requested.
    """

    arrays: dict[str, npt.NDArray[Any]]
    image_id: int
    segmentations: list[Any] | None


@dataclass(eq=False)
class CocoTargets(FlatTargets):
    """The objects of each image: a target is a dict of tensors and `image_id`, in pixels of the
    image file.

    Args:
        counts: number of objects in each image ([n]).
        arrays: the arrays of `Objects`, concatenated over all images.
        image_ids: ids of the images ([n] int64).
        file_sizes: height and width of each image according to the annotations ([n, 2] int64); 0 if
            they don't say.
        class_to_idx: ids of the categories by name, in the order of the ids.
        segmentations: the segmentations in each image, as a JSON list. None: masks were not
            requested.
        where: the source of the annotations, for messages.
        is_packed: True if boxes are in pixels of `file_sizes`, if these are known, whatever the
            stored size of the image.
    """

    arrays: dict[str, npt.NDArray[Any]]
    image_ids: IntArray
    file_sizes: IntArray
    class_to_idx: dict[str, int]
    segmentations: PackedNames | None
    where: str
    is_packed: bool = False

    def _target(self, index: int) -> Any:
        found = self.objects(index)
        target = {name: torch.from_numpy(values.copy()) for name, values in found.arrays.items()}
        return {**target, "image_id": found.image_id}

    def objects(self, index: int) -> Objects:
        """The objects in one image."""
        items = self._items(index)
        number = int(self._chosen[index])
        segmentations = None
        if self.segmentations is not None:
            segmentations = json.loads(self.segmentations[number])
        arrays = {name: values[items] for name, values in self.arrays.items()}
        return Objects(arrays, int(self.image_ids[number]), segmentations)

    def size_of(self, index: int, size: tuple[int, int]) -> tuple[int, int]:
        """Height and width of the image whose pixels boxes are in; `size` is that of the image.

        Raises:
            FormatError: the annotations have another size.
        """
        height, width = self.file_sizes[self._chosen[index]].tolist()
        if not (height and width):
            return size
        if (height, width) != size and not self.is_packed:
            raise FormatError(
                f"the image has {size[1]:,} x {size[0]:,} pixels (EXIF applied), and {self.where} "
                f"says {width:,} x {height:,}"
            )
        return height, width

    # -- in packs

    @property
    def sizes(self) -> IntArray:
        """Height and width of each image according to the annotations ([n, 2] int64), or 0."""
        return self.file_sizes[self._chosen]

    def columns(self, sizes: IntArray) -> dict[str, npt.NDArray[Any]]:
        """The arrays of a pack: `ARRAYS` with their offsets, `IMAGE_ID`, and `sizes` as
        `IMAGE_SIZE`.
        """
        counts = np.diff(self._ends)[self._chosen]
        offsets = np.cumsum([0, *counts], dtype=np.int64)
        picked = np.repeat(self._ends[self._chosen] - offsets[:-1], counts) + np.arange(offsets[-1])
        columns = {name: values[picked] for name, values in self.arrays.items()}
        columns[offsets_named(BOXES)] = offsets
        columns[IMAGE_ID] = self.image_ids[self._chosen]
        columns[IMAGE_SIZE] = sizes
        if self.segmentations is not None:
            texts, ends = self.segmentations.take(self._chosen).arrays
            columns[SEGMENTATIONS] = texts
            columns[offsets_named(SEGMENTATIONS)] = ends
        return columns

    @classmethod
    def of_packs(cls, sources: Sequence[HDF5Source], class_to_idx: dict[str, int]) -> CocoTargets:
        """The concatenated objects of packed files.

        Raises:
            MissingNameError, FormatError: a file lacks an array.
        """
        where = redact(sources[0].path)
        counts = np.concatenate([np.diff(source.ragged(BOXES)[1]) for source in sources])
        arrays = {
            name: np.concatenate([source.ragged(name)[0] for source in sources]) for name in ARRAYS
        }
        segmentations = None
        if sources[0].has_column(SEGMENTATIONS):
            segmentations = PackedNames.joined(
                [PackedNames.from_arrays(*source.ragged(SEGMENTATIONS)) for source in sources]
            )
        return cls(
            counts,
            arrays,
            np.concatenate([source.column(IMAGE_ID) for source in sources]),
            np.concatenate([source.column(IMAGE_SIZE) for source in sources]),
            class_to_idx,
            segmentations,
            where,
            is_packed=True,
        )


def read_coco(
    found: Mapping[str, Any],
    where: str,
    files: FileSet,
    with_masks: bool = False,
    unused: str = "raise",
) -> CocoTargets:
    """The objects of each file.

    Args:
        found: the object in the JSON file.
        where: path of the file, for messages.
        files: the images.
        with_masks: keep segmentations.
        unused: "skip": ignore annotated images that are not among the files, with a warning.

    Raises:
        ConfigError: a file is not annotated, two annotated images have the same name, or
            pycocotools is missing.
        DataNotFoundError: an annotated image is not among the files.
        FormatError: an entry lacks a field, or has an invalid value; the message names it.
    """
    if with_masks:
        import_pycocotools()
    numbers = dict[int, int]()  # of the entries of images, by their ids
    names = dict[str, int]()
    sizes = list[tuple[int, int]]()
    for number, entry in enumerate(found["images"]):
        place = f"targets: {where}, images[{number}]"
        one_id = _field(entry, "id", int, place)
        name = _field(entry, "file_name", str, place)
        if one_id in numbers or name in names:
            raise FormatError(f"{place}: the id {one_id} or file_name {name!r} occurs twice")
        numbers[one_id] = names[name] = number
        size = (entry.get("height"), entry.get("width"))
        if not all(isinstance(side, int) and 0 < side < _LONGEST for side in size):
            size = (0, 0)
        sizes.append(size)
    by_base = {os.path.basename(name): number for name, number in names.items()}
    first = spellings_of(os.fsdecode(files.names[0]))
    if len(by_base) == len(names) and names.keys().isdisjoint(first):
        names = by_base  # without folders that are not among the data
    keys = keys_for(names, files, f"targets: {where}", unused)
    categories = _categories(found.get("categories"), where)
    known = set(categories.values())
    each: list[list[tuple[Any, ...]]] = [[] for _ in sizes]
    empty = list[Any]()
    for number, one in enumerate(found["annotations"]):
        place = f"targets: {where}, annotations[{number}]"
        image = numbers.get(_field(one, "image_id", int, place))
        label = _field(one, "category_id", int, place)
        if image is None or label not in known:
            raise FormatError(f"{place}: no image {one['image_id']}, or no category {label}")
        sides = one.get("bbox")
        if (
            not isinstance(sides, list)
            or len(sides) != 4
            or not all(isinstance(side, (int, float)) and abs(side) < _LARGEST for side in sides)
        ):
            raise FormatError(f"{place}: bbox must be four numbers, not {sides!r:.60}")
        left, top, width, height = map(float, sides)
        rows, columns = sizes[image]
        is_outside = rows and (
            left >= columns or top >= rows or left + width <= 0 or top + height <= 0
        )
        if width <= 0 or height <= 0 or is_outside:
            empty.append(one.get("id", number))
            continue
        area = one.get("area", width * height)
        if not isinstance(area, (int, float)) or abs(area) > _LARGEST:
            raise FormatError(f"{place}: area must be a number, not {area!r:.60}")
        box = (left, top, left + width, top + height)
        is_crowd = int(bool(one.get("iscrowd", 0)))
        segmentation = _segmentation(one, place) if with_masks else None
        each[image].append((box, label, area, is_crowd, segmentation))
    if empty:
        warn(
            f"targets: {where}: {named_few(empty)} annotations have boxes without area, or outside "
            "of their image, and are ignored"
        )
    order = [names[key] for key in keys]
    ids = list(numbers)
    flat = [one for number in order for one in each[number]]
    segmentations = None
    if with_masks:
        segmentations = PackedNames(
            json.dumps([one[4] for one in each[number]]).encode() for number in order
        )
    return CocoTargets(
        [len(each[number]) for number in order],
        {
            name: np.array([one[place] for one in flat], dtype).reshape(-1, *shape)
            for place, (name, (dtype, shape)) in enumerate(ARRAYS.items())
        },
        np.array([ids[number] for number in order], np.int64),
        np.array([sizes[number] for number in order], np.int64).reshape(-1, 2),
        categories,
        segmentations,
        where,
    )


def _field(entry: Any, name: str, kind: type, place: str) -> Any:
    value = entry.get(name) if isinstance(entry, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        wanted = {int: "an integer", str: "a string"}[kind]
        raise FormatError(f"{place}: {name} must be {wanted}, not {value!r:.60}")
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise FormatError(f"{place}: {name} does not fit int64: use a smaller integer")
    return value


def _categories(categories: Any, where: str) -> dict[str, int]:
    """Ids by name, in the order of the ids."""
    if not isinstance(categories, list):
        raise FormatError(f"targets: {where} has no categories: pass annotations of objects")
    found = dict[int, str]()
    for number, one in enumerate(categories):
        place = f"targets: {where}, categories[{number}]"
        found[_field(one, "id", int, place)] = _field(one, "name", str, place)
    ids = {name: number for number, name in sorted(found.items())}
    if len(ids) < len(categories):
        raise FormatError(f"targets: {where}: two categories have the same id or name")
    return ids


# -- masks


def _segmentation(one: dict[str, Any], place: str) -> Any:
    """Polygons, or a run-length encoding."""
    found = one.get("segmentation")
    if isinstance(found, dict) and "size" in found and isinstance(found.get("counts"), (list, str)):
        return found
    if (
        isinstance(found, list)
        and found
        and all(isinstance(p, list) and len(p) >= 6 and len(p) % 2 == 0 for p in found)
    ):
        return found
    raise FormatError(f"{place}: segmentation must be polygons or run lengths for masks=True")


def import_pycocotools() -> Any:
    """The module `pycocotools.mask`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        from pycocotools import mask
    except ImportError:
        raise ConfigError("masks=True needs pycocotools: pip install 'headrace[coco]'") from None
    return mask


def instance_masks(segmentations: Sequence[Any], height: int, width: int) -> npt.NDArray[np.uint8]:
    """The masks of objects: [N, height, width] uint8, 1 inside.

    Raises:
        FormatError: a run-length encoding has another size.
    """
    coco = import_pycocotools()
    masks = np.zeros((len(segmentations), height, width), np.uint8)
    for mask, encoded in zip(masks, segmentations, strict=True):
        if isinstance(encoded, list):
            encoded = coco.merge(coco.frPyObjects(encoded, height, width))
        elif encoded["size"] != [height, width]:
            size = encoded["size"]
            raise FormatError(f"a segmentation has the size {size}, not {[height, width]}")
        elif isinstance(encoded["counts"], list):
            encoded = coco.frPyObjects(encoded, height, width)
        mask[...] = coco.decode(encoded)
    return masks


class BoxDecoder(JointDecoder):
    """Decodes pairs of an image and a dict of the objects in it. Values are the pixels and the size
    of the stored image.

    A target has `boxes` (float32 [N, 4]: left, top, right, bottom in pixels of the input), `labels`
    (int64 [N]), `area` (float32 [N]), `iscrowd` (int64 [N]), `image_id` (int) and, on request,
    `masks` (uint8 [N, H, W]).
    """

    def decode(self, record: Any) -> Any:
        value = super().decode(record)
        if self.is_encoded:
            return value
        shape = record.shape[:2] if self.is_stored_decoded else image_shape(record, self.left)
        return value, np.array(shape, np.int64)

    def pair_rows(self, collating: Collating) -> tuple[ArraySpec, None] | None:
        row = self._row(self.image_size)
        function = collating.function
        if row is None or type(function) is not DetectionCollator:
            return None
        return (row, None) if function.stack and collating.calls(function) else None

    def _target_row(self, size: tuple[int, ...]) -> None:
        return None

    def split_target(self, value: Any, index: int, dataset: BaseDataset) -> tuple[Any, Any]:
        """See `Decoder`. The target is the objects, the (height, width) that boxes refer to, and
        the upright (height, width) of the stored image.
        """
        if self.is_encoded:
            shape = image_shape(value, self.left)
        else:
            value, sides = value
            shape = tuple(sides.tolist())
        targets = dataset.targets
        assert isinstance(targets, CocoTargets)
        return value, (targets.objects(index), targets.size_of(index, shape), shape)

    def placed(
        self, target: tuple[Objects, tuple[int, int], tuple[int, int]], drawn: Drawn | None
    ) -> dict[str, Any]:
        """The objects in coordinates of the input."""
        objects, size, shape = target
        frame = self.image_size or shape
        before = objects.arrays["boxes"]
        boxes, kept = place_boxes(before, size, frame, drawn, self.crop_size)
        arrays = {name: values[kept] for name, values in objects.arrays.items()}
        scales = _areas(boxes) / _areas(before[kept])
        arrays["area"] = (arrays["area"] * scales).astype(np.float32)
        arrays["boxes"] = boxes
        made: dict[str, Any] = {name: torch.from_numpy(one) for name, one in arrays.items()}
        made["image_id"] = objects.image_id
        if objects.segmentations is not None:
            wanted = [objects.segmentations[number] for number in np.flatnonzero(kept)]
            masks = np.zeros((len(wanted), *(self.crop_size or frame)), np.uint8)
            for number, mask in enumerate(instance_masks(wanted, *size)):
                masks[number] = cut_mask(resize_nearest(mask, frame), drawn, self.crop_size)
            made["masks"] = torch.from_numpy(masks)
        return made


def _areas(boxes: npt.NDArray[Any]) -> Any:
    return np.prod(boxes[:, 2:].astype(np.float64) - boxes[:, :2], axis=1)


def place_boxes(
    boxes: npt.NDArray[np.float32],
    size: tuple[int, int],
    frame: tuple[int, int],
    drawn: Drawn | None,
    crop_size: tuple[int, int] | None,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Moves boxes to where they are after a crop, a resize and a flip of their image.

    Args:
        boxes: left, top, right, bottom in pixels of the image ([N, 4]).
        size: (height, width) of the image.
        frame: (height, width) of the image before the crop.
        drawn: the part that is cropped, and whether it is mirrored.
        crop_size: size to which the part is resized. None: it is not resized.

    Returns:
        The boxes, clipped to the result (float32 [M, 4]); and which of the N are kept ([N] bool):
        those with at least a pixel left each way, or with all of their size.
    """
    part, flip = drawn or (None, False)
    top, left, height, width = part or (0, 0, *frame)
    rows, columns = crop_size or (height, width)
    moved = boxes * np.array([frame[1] / size[1], frame[0] / size[0]] * 2)
    moved -= [left, top] * 2
    moved *= [columns / width, rows / height] * 2
    least = np.minimum(moved[:, 2:] - moved[:, :2], _LEAST)  # of what was smaller before, all
    moved = moved.clip(0, [columns, rows] * 2)
    sides = moved[:, 2:] - moved[:, :2]
    kept = np.asarray(((sides >= least * (1 - 1e-6)) & (sides > 0)).all(axis=1))
    if flip:
        moved[:, [0, 2]] = columns - moved[:, [2, 0]]
    return moved[kept].astype(np.float32), kept
