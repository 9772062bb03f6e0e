"""Re-encodes images as JPEG for packing: smaller, and faster to decode."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from typing import Any

import numpy as np
import numpy.typing as npt
import simplejpeg

from headrace.core.dataset import BaseDataset
from headrace.datasets.image.image import ImageDataset
from headrace.datasets.image.pixels import decode_image, image_shape, load_image
from headrace.errors import ConfigError, SampleError
from headrace.memory.whole import read_full, write_full
from headrace.packing.beside.pairs import boxes_of, check_size, has_masks, with_mask
from headrace.packing.options import LARGEST_SIDE, StoreOptions
from headrace.packing.plan import Packing, make_plan
from headrace.packing.samples import each_sample, groups_of, some_of, with_progress, without
from headrace.storage.arrays.packed import crc_of


def reencoded(data: Any, jpeg: StoreOptions, color: str = "RGB", left: Any = None) -> bytes:
    """An encoded image as JPEG, its longer side at most `max_size`; the image as it is, if that is
    not larger.

    Args:
        data: the file's bytes (bytes-like).
        jpeg: how.
        color: "RGB" or "L".
        left: as for `decode_image`.

    Raises:
        FormatError: it can't be decoded.
    """
    height, width = image_shape(data, left)
    scale = 1.0 if jpeg.max_size is None else jpeg.max_size / max(height, width)
    if scale < 1:
        size = max(1, round(height * scale)), max(1, round(width * scale))
        pixels = load_image(data, color, size, False, left=left)
    else:
        pixels = decode_image(data, color, left)
    if max(pixels.shape) > LARGEST_SIDE:
        return bytes(data)
    space = (
        {"colorspace": "GRAY", "colorsubsampling": "Gray"}
        if color == "L"
        else {"colorspace": "RGB", "colorsubsampling": "420"}
    )
    made: bytes = simplejpeg.encode_jpeg(
        np.ascontiguousarray(pixels), quality=jpeg.quality, **space
    )
    return made if len(made) < len(data) else bytes(data)


def plan_reencoded(
    dataset: BaseDataset,
    jpeg: StoreOptions,
    folder: str,
    workers: int,
    progress: bool | None,
    planned: Packing | None = None,
) -> Packing:
    """Re-encodes all images into a temporary file without a name, since their sizes must be known
    before a packed file is laid out.

    Args:
        dataset: of encoded images.
        jpeg: how.
        folder: where that file goes; it takes as much room as what is packed.
        workers: threads; 0: none.
        progress: show a progress bar; None: only on a terminal.
        planned: what `plan_of_files` gave already.

    Raises:
        ConfigError: the dataset has no encoded images.
        SampleError: one can't be decoded, and is not left out.
    """
    given, unreadable = planned or plan_of_files(dataset), dict[int, str]()
    sizes, images = np.zeros((2, len(dataset)), np.int64)
    with contextlib.ExitStack() as opened:
        spool = opened.enter_context(tempfile.TemporaryFile(dir=folder))
        groups, task = (
            groups_of(given.plan.read_sizes),
            functools.partial(reencode_group, dataset, jpeg),
        )
        with with_progress(task, groups, workers, progress, len(dataset), "re-encoding") as results:
            for group, made in results:
                for index, sample in zip(group, made, strict=True):
                    if isinstance(sample, SampleError):
                        unreadable[index] = str(sample)
                    else:
                        write_full(spool.fileno(), b"".join(sample))
                        sizes[index], images[index] = sum(map(len, sample)), len(sample[0])
        readable = without(dataset, unreadable)
        sizes, images = (np.delete(column, list(unreadable)) for column in (sizes, images))
        plan = make_plan(
            readable, "encoded", sizes, {"jpeg": [jpeg.max_size, jpeg.quality]}, made_images=images
        )
        opened.pop_all()  # it is closed when all is written
    begins = np.concatenate([[0], np.cumsum(plan.sizes)])

    def prepare(group: range) -> list[tuple[npt.NDArray[Any] | SampleError, int]]:
        data = np.empty(int(begins[group.stop] - begins[group.start]), np.uint8)
        read_full(spool.fileno(), [memoryview(data)], int(begins[group.start]))  # type: ignore[arg-type]
        images = np.split(
            data, (begins[group.start + 1 : group.stop] - begins[group.start]).tolist()
        )
        return [(image, crc_of(image)) for image in images]

    return Packing(readable, plan, prepare, unreadable, spool=spool)


def plan_of_files(dataset: BaseDataset, read_sizes: npt.NDArray[np.int64] | None = None) -> Packing:
    """The plan to pack the files as they are, by whose sizes groups and parts are made.

    Raises:
        ConfigError: the dataset has no encoded images.
    """
    if not isinstance(dataset, ImageDataset):
        raise ConfigError("store='jpeg' is for images: open them with ImageDataset")
    plan = make_plan(dataset, "encoded", read_sizes=read_sizes)
    return Packing(dataset, plan, lambda group: [], {})


def reencode_group(
    dataset: BaseDataset, jpeg: StoreOptions, group: range
) -> list[tuple[bytes, ...] | SampleError]:
    """The images of a group as JPEG, each with its mask where they have masks; a SampleError for
    one that may be left out.
    """
    color, are_pairs = getattr(dataset, "color", "RGB"), has_masks(dataset)

    def make(position: int, index: int, record: Any) -> tuple[bytes, ...] | SampleError:
        image, *masks = record if are_pairs else (record,)
        try:
            if boxes_of(dataset) is not None:
                check_size(dataset, position, image_shape(image, dataset.budget.left))
            made = reencoded(image, jpeg, color, dataset.budget.left)
            return with_mask(image, masks[0], made, dataset) if masks else (made,)
        except Exception as error:  # as the dataset itself would meet it
            return dataset.sample_reader.failed(index, "can't be decoded", error)

    return [made for _, made in each_sample(dataset, group, make)]


def ratio_of(dataset: BaseDataset, jpeg: StoreOptions, sizes: npt.NDArray[np.int64]) -> float:
    """About how large re-encoded images are beside what they were, by some of them, evenly
    spread.
    """
    before = after = 0
    for index in some_of(len(dataset)):
        with contextlib.suppress(SampleError):  # said when it is packed
            image = reencode_group(dataset, jpeg, range(index, index + 1))[0]
            if not isinstance(image, SampleError):
                before, after = before + int(sizes[index]), after + sum(map(len, image))
    return after / before if before else 1.0
