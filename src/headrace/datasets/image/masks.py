"""Masks as targets: their files, and pairs of an image and a mask."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from headrace.core.dataset import BaseDataset
from headrace.datasets.image.augment import Drawn
from headrace.datasets.image.decoder import JointDecoder, Opened
from headrace.datasets.image.labels import SHOWN, Wanted, keys_for, stem
from headrace.datasets.pixels import (
    SIXTEEN_BIT,
    Left,
    claimed,
    decoding,
    image_shape,
    open_image,
)
from headrace.dtypes import ArraySpec, IntArray
from headrace.errors import ConfigError, DataNotFoundError, FormatError, warn
from headrace.formats.files import FilesSource, PairedSource, check_splits
from headrace.formats.resolve.file_set import EXTENSIONS, FileSet
from headrace.io.paths import composed, redact
from headrace.io.remote.options import RemoteOptions

_WORDS = re.compile(r"[-_. ].*$", re.DOTALL)
Mask = npt.NDArray[Any]
"""[H, W] uint8, uint16 or int32."""
_WIDEST = 8  # bytes per pixel: Pillow's image and the array
_MASK_DTYPES: dict[str, type] = {
    **dict.fromkeys(("1", "L", "P"), np.uint8),
    **dict.fromkeys(SIXTEEN_BIT, np.uint16),
    "I": np.int32,
}
"""The dtypes of masks by the mode of Pillow's image."""


@decoding()
def decode_mask(data: Any, left: Left | None = None) -> Mask:
    """Decodes a mask to the class numbers as stored: palette indices, greyscale of 8, 16 or 32
    bits, or 0 and 1 for one bit.

    EXIF is ignored. (A TIFF's own orientation tag is part of its format and is applied by Pillow.)
    Greyscale PNGs of 2 and 4 bits are scaled to 0..255, as the format defines. GIF and TIFF files
    yield their first frame.

    Args:
        data: bytes of the file (bytes-like).
        left: returns the remaining memory budget; see
            `headrace.datasets.pixels.decode_image`.

    Returns:
        [H, W] uint8, uint16 or int32, in memory of its own.

    Raises:
        FormatError: the file is not an image, is broken or too large, or has colours, floats or
            alpha.
    """
    with (
        open_image(data) as image,
        claimed(left, image.height, image.width, image.height * image.width * _WIDEST),
    ):
        image.load()
        if image.mode not in _MASK_DTYPES:
            raise FormatError(
                f"an image of mode {image.mode!r} is not a mask of class numbers: save it as PNG, "
                "in grey or with a palette"
            )
        return np.array(image).astype(_MASK_DTYPES[image.mode])


def encode_mask(mask: Mask) -> bytes:
    """A file that `decode_mask` decodes to the same mask: a PNG, or a TIFF for int32."""
    stream = io.BytesIO()
    if mask.dtype == np.int32:
        mask_image(mask).save(stream, "TIFF", compression="tiff_adobe_deflate")
    else:
        mask_image(mask).save(stream, "PNG")
    return stream.getvalue()


def resize_nearest(mask: Mask, size: tuple[int, int] | None) -> Mask:
    """[H, W] -> [size[0], size[1]] by the nearest pixel; the aspect ratio is not kept. None:
    unchanged.
    """
    if size is None or mask.shape == size:
        return mask
    rows, columns = (
        (2 * np.arange(wanted) + 1) * stored // (2 * wanted)
        for wanted, stored in zip(size, mask.shape, strict=True)
    )
    # two takes are faster than a gather of pixels
    picked: Mask = mask.take(rows, axis=0).take(columns, axis=1)
    return picked


def mask_image(mask: Mask) -> Image.Image:
    """A mask as a PIL image of mode "L", "I;16" or "I"."""
    return Image.fromarray(np.ascontiguousarray(mask))


def mask_of(image: Any, data: Any, left: Left | None = None) -> Mask:
    """Decodes the mask of an encoded image, and checks that both have the same size.

    Args:
        image: bytes of the image.
        data: bytes of the mask.
        left: see `decode_mask`.

    Raises:
        FormatError: the mask has another size, or can't be decoded.
    """
    height, width = image_shape(image, left)
    try:
        mask = decode_mask(data, left)
    except FormatError as error:
        raise FormatError(f"the mask: {error}") from error
    if mask.shape != (height, width):
        raise FormatError(
            f"the image has {width:,} x {height:,} pixels (EXIF applied), and its mask "
            f"{mask.shape[1]:,} x {mask.shape[0]:,}"
        )
    return mask


def cut_mask(mask: Mask, drawn: Drawn | None, size: tuple[int, int] | None) -> Mask:
    """Crops a mask [H, W], resizes it to `size` and mirrors it, like its image."""
    part, flip = drawn or (None, False)
    if part is not None:
        mask = part.of(mask)
    mask = resize_nearest(mask, size)
    if flip:
        mask = mask[:, ::-1]
    return mask


# -- samples


class MaskDecoder(JointDecoder):
    """Decodes pairs of an image and a mask of the same size, which is resized to the nearest pixel.
    A record is the bytes of both.

    A target is an int64 tensor [H, W]. A joint transform receives it in the type of the image: PIL
    image, array or tensor.
    """

    def decode(self, record: Any) -> Any:
        image, mask = record
        if self.is_encoded:
            return bytes(image), bytes(mask)
        if not self.is_stored_decoded:
            mask = mask_of(image, mask, self.left)
        return super().decode(image), resize_nearest(mask, self.image_size)

    def value_nbytes(self) -> None:
        return None  # the dtype of masks is not known

    def split_target(self, value: Any, index: int, dataset: BaseDataset) -> tuple[Any, Any]:
        image, mask = value
        if self.is_encoded:
            mask = mask_of(image, mask, self.left)
        return image, mask

    def _target_row(self, size: tuple[int, ...]) -> ArraySpec:
        return ArraySpec(size, np.dtype(np.int64))

    def placed(self, target: Mask, drawn: Drawn | None) -> Mask:
        return cut_mask(target, drawn, self.crop_size)

    def to_pair(self, value: Any, target: Mask) -> tuple[Any, Any]:
        image, mask = super().to_pair(value, target)
        if self.is_joint and self.transformed:
            if self.transform_input == "pil":
                return image, mask_image(mask)
            if self.transform_input == "numpy":
                return image, np.array(mask)
        return image, torch.from_numpy(mask.astype(np.int64))


# -- files


def open_pairs(images: FilesSource, wanted: Wanted, reach: RemoteOptions) -> Opened:
    """Opens the masks of images, and returns pairs of both.

    Raises:
        DataNotFoundError, ConfigError: see `mask_numbers`; or there are no masks.
    """
    wanted.refuse_options("unused_targets")
    check_splits(images.listing)
    try:
        masks = FilesSource(wanted.targets, EXTENSIONS, reach)
    except DataNotFoundError as error:
        raise DataNotFoundError(f"targets: {error}") from error
    try:
        mask_of = mask_numbers(images.listing, masks.listing, wanted.unused_targets)
    except BaseException:
        masks.close()
        raise
    return Opened(PairedSource(images, masks, mask_of), decoder=MaskDecoder)


def mask_numbers(images: FileSet, masks: FileSet, unused: str = "raise") -> IntArray:
    """For each image the number of the mask with its relative name, extensions apart ([n] int64).
    If no image has one, names are compared without the words at the end of all images and of all
    masks: ``7_leftImg8bit.png`` and ``7_labelIds.png``.

    Args:
        images, masks: their files.
        unused: "skip": ignore masks without an image, with a warning.

    Raises:
        DataNotFoundError: an image has no mask, or a mask no image.
        ConfigError: two images or two masks have the same name.
    """
    where = f"targets: masks in {', '.join(map(redact, masks.roots[:SHOWN]))}"
    jpeg = ""
    numbers = dict[str, int]()
    for number, name in enumerate(map(os.fsdecode, masks.names)):
        other_number = numbers.setdefault(stem(name), number)
        if other_number != number:
            raise ConfigError(
                f"targets: the masks {redact(masks.path(other_number))} and "
                f"{redact(masks.path(number))} differ in their extension only: remove one of them"
            )
        if not jpeg and name.lower().endswith((".jpg", ".jpeg")):
            jpeg = name
    if jpeg:
        warn(
            f"targets: masks such as {redact(jpeg)} are JPEGs, whose compression changes class "
            "numbers: save masks as PNG"
        )
    stems = [stem(os.fsdecode(name)) for name in images.names]
    end = ""
    if set(map(composed, stems)).isdisjoint(map(composed, numbers)):
        end = _common_end(stems)
        of_masks = _common_end(numbers)
        numbers = {stem.removesuffix(of_masks): number for stem, number in numbers.items()}
    keys = keys_for(
        numbers,
        images,
        where,
        unused,
        lambda name: [stem(name).removesuffix(end)],
        are_files=True,
    )
    return np.array([numbers[key] for key in keys], np.int64)


def _common_end(names: Iterable[str]) -> str:
    """The words at the end of all names: what follows the first separator in their common end."""
    ends = {name[::-1] for name in names}
    if len(ends) < 2:
        return ""
    common = os.path.commonprefix(list(ends))[::-1]  # noqa: RUF071 (of characters)
    words = _WORDS.search(common.rpartition("/")[2])
    if words is None:
        return ""
    return words[0]
