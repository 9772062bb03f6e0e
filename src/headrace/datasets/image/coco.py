"""Reads annotations of objects in images, as JSON files of COCO hold them."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from headrace.datasets.core.views import TargetSequence
from headrace.datasets.image.matching import (
    keys_for,
    named_few,
    names_of,
    refuse_unused,
    unused_among,
)
from headrace.dtypes import IntArray
from headrace.errors import ConfigError, FormatError, warn
from headrace.io.packed_strings import PackedNames
from headrace.io.paths import composed, redact
from headrace.io.resolve.file_set import FileSet
from headrace.storage.arrays.packed import (
    BOXES,
    IMAGE_ID,
    IMAGE_SIZE,
    OBJECT,
    RAGGED,
    SEGMENTATIONS,
    offsets_named,
)

if TYPE_CHECKING:
    from headrace.storage.arrays.packed_rows import PackedSource


class Objects(NamedTuple):
    """The objects in one image.

    Attributes:
        boxes: [N, 4] float32: left, top, right and bottom edge in pixels.
        labels: [N] int64, the categories' ids.
        area: [N] float32, pixels.
        iscrowd: [N] int64.
        image_id: the image's id.
        segmentations: as the file has them; None: they are not wanted.
    """

    boxes: npt.NDArray[np.float32]
    labels: IntArray
    area: npt.NDArray[np.float32]
    iscrowd: IntArray
    image_id: int
    segmentations: list[Any] | None

    def as_target(self) -> dict[str, Any]:
        """A dict of tensors, without segmentations."""
        target: dict[str, Any] = {
            name: torch.from_numpy(np.array(value))
            for name, value in self._asdict().items()
            if isinstance(value, np.ndarray)
        }
        return {**target, "image_id": self.image_id}


class CocoTargets(TargetSequence):
    """The objects of each image, in flat arrays: a target is a dict as `Objects.as_target` makes
    it, in pixels of the image file.

    Args:
        objects: of all images, one after the other; `image_id` is [n] int64 here.
        ends: [n + 1] int64, where those of each image begin.
        sizes: [n, 2] int64, height and width of each image as the file says; 0: it does not.
        class_to_idx: the ids of the categories.
        segmentations: of each image those of its objects, as a list in JSON; None: they are not
            wanted.
        where: they are from, for messages.
        is_packed: True if boxes are in pixels of `sizes` where these are known, whatever size the
            image has by now.
    """

    def __init__(
        self,
        objects: dict[str, npt.NDArray[Any]],
        ends: IntArray,
        sizes: IntArray,
        class_to_idx: dict[str, int],
        segmentations: PackedNames | None,
        where: str,
        is_packed: bool = False,
    ) -> None:
        self._objects, self._ends, self._sizes, self._segmentations = (
            objects,
            ends,
            sizes,
            segmentations,
        )
        self.class_to_idx, self.where, self._is_packed = class_to_idx, where, is_packed
        self._chosen: IntArray = np.arange(len(sizes))

    @property
    def classes(self) -> list[str]:
        """The names of the categories, in the order of their ids."""
        return list(self.class_to_idx)

    @property
    def has_segmentations(self) -> bool:
        """True if masks can be made."""
        return self._segmentations is not None

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        return self.objects(index).as_target()

    def take(self, indices: IntArray) -> CocoTargets:
        taken = CocoTargets(
            self._objects,
            self._ends,
            self._sizes,
            self.class_to_idx,
            self._segmentations,
            self.where,
            self._is_packed,
        )
        taken._chosen = self._chosen[indices]
        return taken

    def objects(self, index: int) -> Objects:
        """Those of one image."""
        image = int(self._chosen[range(len(self))[index]])
        start, stop = int(self._ends[image]), int(self._ends[image + 1])
        found = {
            name: values[start:stop] for name, values in self._objects.items() if name != "image_id"
        }
        packed = self._segmentations
        segmentations = None if packed is None else json.loads(packed[image])
        return Objects(
            **found, image_id=int(self._objects["image_id"][image]), segmentations=segmentations
        )

    def size_of(self, index: int, size: tuple[int, int]) -> tuple[int, int]:
        """Height and width that the boxes of an image are in pixels of, where its own are `size`.

        Raises:
            FormatError: the file of the annotations says other ones.
        """
        height, width = self._sizes[self._chosen[range(len(self))[index]]].tolist()
        if not (height and width):
            return size
        if (height, width) != size and not self._is_packed:
            turned = (
                "; is it turned by its EXIF orientation, and the boxes are not?"
                if (width, height) == size
                else ""
            )
            raise FormatError(
                f"the image is {size[1]:,} x {size[0]:,} pixels, and {self.where} says {width:,} "
                f"x {height:,}{turned}"
            )
        return height, width

    # -- in packs

    @property
    def sizes(self) -> IntArray:
        """Height and width of each image as the file says ([n, 2] int64); 0: it does not."""
        return self._sizes[self._chosen]

    def columns(self, sizes: IntArray) -> dict[str, npt.NDArray[Any]]:
        """The arrays that a pack has of them, beside its samples: `RAGGED` with their offsets,
        `IMAGE_ID`, and `sizes` as `IMAGE_SIZE`.
        """
        counts = np.diff(self._ends)[self._chosen]
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        picked = np.repeat(self._ends[:-1][self._chosen] - offsets[:-1], counts) + np.arange(
            offsets[-1]
        )
        columns = {
            name: self._objects[name][picked] for name, edges in RAGGED.items() if edges == OBJECT
        }
        columns |= {
            offsets_named(BOXES): offsets,
            IMAGE_ID: self._objects["image_id"][self._chosen],
            IMAGE_SIZE: sizes,
        }
        if self._segmentations is not None:
            columns[SEGMENTATIONS], columns[offsets_named(SEGMENTATIONS)] = (
                self._segmentations.take(self._chosen).arrays
            )
        return columns

    @classmethod
    def of_packs(cls, sources: Sequence[PackedSource], class_to_idx: dict[str, int]) -> CocoTargets:
        """Those of packed files, one after the other.

        Raises:
            MissingNameError, FormatError: a file lacks some of them, or is damaged.
        """
        where, ends = redact(sources[0].path), np.zeros(1, np.int64)
        for source in sources:
            ends = np.concatenate([ends, ends[-1] + source.ragged(BOXES)[1][1:]])
        objects = {
            name: np.concatenate([source.ragged(name)[0] for source in sources])
            for name, edges in RAGGED.items()
            if edges == OBJECT
        }
        for name, found in objects.items():
            wanted = np.dtype(np.float32 if name in (BOXES, "area") else np.int64)
            if found.dtype != wanted or found.shape != (int(ends[-1]), *(4,) * (name == BOXES)):
                raise FormatError(
                    f"{where}: {name!r} has shape {found.shape} of {found.dtype}: the file is "
                    "damaged: pack it again"
                )
        objects["image_id"] = np.concatenate([source.column(IMAGE_ID) for source in sources])
        sizes = np.concatenate([source.column(IMAGE_SIZE) for source in sources])
        segmentations = None
        if sources[0].has_column(SEGMENTATIONS):
            segmentations = PackedNames.joined(
                [PackedNames.from_arrays(*source.ragged(SEGMENTATIONS)) for source in sources]
            )
        return cls(objects, ends, sizes, class_to_idx, segmentations, where, is_packed=True)


def is_coco(found: Mapping[str, Any]) -> bool:
    """True if a JSON object holds annotations of images."""
    return isinstance(found.get("images"), list) and isinstance(found.get("annotations"), list)


def read_coco(
    found: Mapping[str, Any],
    where: str,
    files: FileSet,
    with_masks: bool = False,
    skips_unused: bool = False,
) -> CocoTargets:
    """The objects of each file.

    Args:
        found: what the JSON file holds.
        where: its path, for messages.
        files: the images.
        with_masks: keep segmentations.
        skips_unused: leave out images that are not among the files, with a warning.

    Raises:
        ConfigError: a file is not among its images; or two of them have one name.
        DataNotFoundError: one of its images is not among the files, and may not be left out.
        FormatError: an entry lacks a field, or has a value that makes no sense; the message names
            it.
    """
    entries, ids = _images(found["images"], where)
    files_of = _keyed(
        {
            _field(entry, "file_name", str, f"images[{n}]", where): n
            for n, entry in enumerate(entries)
        },
        files,
        entries,
        where,
    )
    keys = keys_for(files_of, files, f"targets: {where}")
    if len(set(keys)) < len(files_of):
        lacking = sorted(unused_among(files_of, keys))
        refuse_unused(
            f"targets: {named_few(lacking, len(lacking))} of {len(entries):,} images of {where} "
            f"are not among the {len(files):,} files",
            skips_unused,
        )
    order = np.array([files_of[key] for key in keys], np.int64)  # of each file its entry
    categories = _categories(found.get("categories"), where)
    known, sizes = (
        set(categories.values()),
        np.array([_size_of(entry) for entry in entries], np.int64).reshape(len(entries), 2),
    )
    each: list[list[tuple[Any, ...]]] = [[] for _ in entries]
    empty = list[Any]()
    for number, one in enumerate(found["annotations"]):
        place = f"annotations[{number}]"
        image = ids.get(_field(one, "image_id", int, place, where))
        if image is None:
            raise FormatError(
                f"targets: {where}, {place}: its image_id {one['image_id']!r} is that of no image"
            )
        label = _field(one, "category_id", int, place, where)
        if label not in known:
            raise FormatError(
                f"targets: {where}, {place}: its category_id {label} is not among the categories"
            )
        left, top, width, height = box = _box(one, place, where)
        if width <= 0 or height <= 0 or _is_outside(box, sizes[image]):
            empty.append(one.get("id", number))
            continue
        segmentation = _segmentation(one, place, where) if with_masks else None
        area = one.get("area", width * height)
        if not isinstance(area, (int, float)):
            raise FormatError(f"targets: {where}, {place}: area must be a number, not {area!r:.60}")
        each[image].append(
            (
                left,
                top,
                left + width,
                top + height,
                label,
                area,
                int(bool(one.get("iscrowd", 0))),
                segmentation,
            )
        )
    if empty:
        warn(
            f"targets: {where}: {named_few(empty, len(empty))} annotations have boxes without "
            "area, or outside of their image: left out"
        )
    image_ids = [entries[number]["id"] for number in order.tolist()]
    return _flat(
        [each[number] for number in order.tolist()],
        image_ids,
        sizes[order],
        categories,
        with_masks,
        where,
    )


def _flat(
    each: list[list[tuple[Any, ...]]],
    image_ids: list[int],
    sizes: IntArray,
    categories: dict[str, int],
    with_masks: bool,
    where: str,
) -> CocoTargets:
    flat = [one for objects in each for one in objects]
    numbers = np.array([one[:7] for one in flat], np.float64).reshape(len(flat), 7)
    objects: dict[str, npt.NDArray[Any]] = {
        "boxes": numbers[:, :4].astype(np.float32),
        "labels": np.array([one[4] for one in flat], np.int64),
        "area": numbers[:, 5].astype(np.float32),
        "iscrowd": numbers[:, 6].astype(np.int64),
        "image_id": np.array(image_ids, np.int64),
    }
    ends = np.concatenate([[0], np.cumsum([len(one) for one in each])]).astype(np.int64)
    segmentations = (
        PackedNames(json.dumps([one[7] for one in of_image]).encode() for of_image in each)
        if with_masks
        else None
    )
    return CocoTargets(objects, ends, sizes, categories, segmentations, where)


# -- fields


def _field(entry: Any, name: str, kind: type, place: str, where: str) -> Any:
    value = entry.get(name) if isinstance(entry, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        wanted = {int: "an integer", str: "a text", list: "a list"}[kind]
        raise FormatError(f"targets: {where}, {place}: {name} must be {wanted}, not {value!r:.60}")
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise FormatError(
            f"targets: {where}, {place}: {name} is an integer of more than 64 bits: give one in "
            "the range of int64"
        )
    return value


def _images(images: Sequence[Any], where: str) -> tuple[list[dict[str, Any]], dict[int, int]]:
    """The entries of images, and the number of each by its id."""
    ids: dict[int, int] = {}
    for number, entry in enumerate(images):
        image = _field(entry, "id", int, f"images[{number}]", where)
        if ids.setdefault(image, number) != number:
            raise FormatError(
                f"targets: {where}: images[{ids[image]}] and images[{number}] have the same id "
                f"{image}"
            )
    return list(images), ids


def _keyed(
    by_name: dict[str, int], files: FileSet, entries: Sequence[dict[str, Any]], where: str
) -> dict[str, int]:
    """The number of each entry by the name that the files have: the part behind the folders that
    are named before it, where they are not among the data.
    """
    if len(by_name) < len(entries):
        name, count = Counter(entry["file_name"] for entry in entries).most_common(1)[0]
        raise FormatError(f"targets: {where}: {count} images have the file_name {name!r}")
    first = os.fsdecode(files.names[0]) if len(files) else ""
    known = set(map(composed, by_name))
    if any(composed(name) in known for name in names_of(first)):
        return by_name
    by_base = {os.path.basename(name): number for name, number in by_name.items()}
    return by_base if len(by_base) == len(by_name) else by_name


def _categories(categories: Any, where: str) -> dict[str, int]:
    """Ids by name, in the order of the ids."""
    if not isinstance(categories, list):
        raise FormatError(f"targets: {where} has no categories: are these annotations of objects?")
    found: dict[int, str] = {}
    for number, one in enumerate(categories):
        place = f"categories[{number}]"
        found[_field(one, "id", int, place, where)] = _field(one, "name", str, place, where)
    if len(found) < len(categories) or len(set(found.values())) < len(categories):
        raise FormatError(f"targets: {where}: two categories have the same id or name")
    return {name: number for number, name in sorted(found.items())}


def _size_of(entry: Mapping[str, Any]) -> tuple[int, int]:
    sides = entry.get("height"), entry.get("width")
    return sides if all(isinstance(side, int) and side > 0 for side in sides) else (0, 0)  # type: ignore[return-value]


def _box(one: dict[str, Any], place: str, where: str) -> tuple[float, float, float, float]:
    """Left and top edge, width and height."""
    box = one.get("bbox")
    if (
        not isinstance(box, list)
        or len(box) != 4
        or not all(isinstance(x, (int, float)) and math.isfinite(x) for x in box)
    ):
        raise FormatError(
            f"targets: {where}, {place}: bbox must be four numbers (left, top, width, height), "
            f"not {box!r:.60}"
        )
    left, top, width, height = map(float, box)
    return left, top, width, height


def _is_outside(box: tuple[float, float, float, float], size: IntArray) -> bool:
    height, width = size.tolist()
    return bool(height) and (
        box[0] >= width or box[1] >= height or box[0] + box[2] <= 0 or box[1] + box[3] <= 0
    )


# -- masks


def _segmentation(one: dict[str, Any], place: str, where: str) -> Any:
    """Polygons, or a run-length encoding."""
    found = one.get("segmentation")
    if (
        isinstance(found, list)
        and found
        and all(isinstance(p, list) and len(p) >= 6 and len(p) % 2 == 0 for p in found)
    ):
        return found
    if (
        isinstance(found, dict)
        and isinstance(found.get("counts"), (list, str))
        and isinstance(found.get("size"), list)
    ):
        return found
    raise FormatError(
        f"targets: {where}, {place}: segmentation is neither polygons nor a run-length encoding, "
        "so masks=True can't be had"
    )


def import_pycocotools() -> Any:
    """The module `pycocotools.mask`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        from pycocotools import mask
    except ImportError:
        raise ConfigError(
            "masks=True needs the package pycocotools: pip install 'headrace[coco]'"
        ) from None
    return mask


def instance_masks(segmentations: Sequence[Any], height: int, width: int) -> npt.NDArray[np.uint8]:
    """The masks of objects: [N, height, width] uint8, 1 inside.

    Raises:
        FormatError: a run-length encoding is of another size.
    """
    coco, masks = import_pycocotools(), np.zeros((len(segmentations), height, width), np.uint8)
    for mask, found in zip(masks, segmentations, strict=True):
        if isinstance(found, dict):
            if found["size"] != [height, width]:
                raise FormatError(
                    f"the image is {width} x {height} pixels, and the size of a segmentation "
                    f"(height, width) is {found['size']}"
                )
            encoded = (
                coco.frPyObjects(found, height, width)
                if isinstance(found["counts"], list)
                else found
            )
        else:
            encoded = coco.merge(coco.frPyObjects(found, height, width))
        mask[...] = coco.decode(encoded)
    return masks
