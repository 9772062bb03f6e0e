"""Decodes masks, whose pixels are class numbers. They are never interpolated or treated as
colours.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from headrace.datasets.image.claims import SIXTEEN_BIT, Left, claimed
from headrace.datasets.image.pixels import decoding, open_image
from headrace.dtypes import ArraySpec
from headrace.errors import FormatError

Mask = npt.NDArray[Any]
"""[H, W] uint8, uint16 or int32."""
_WIDEST = 8  # bytes a pixel: Pillow's image and the array


@decoding
def decode_mask(data: Any, left: Left | None = None) -> Mask:
    """Decodes a mask to the class numbers as stored: palette indices, greyscale of 8, 16 or 32
    bits, or 0 and 1 for one bit.

    EXIF is ignored. (A TIFF's own orientation tag is part of its format and is applied by Pillow.)
    Greyscale PNGs of 2 and 4 bits are scaled to 0..255, as the format defines. GIF and TIFF files
    yield their first frame.

    Args:
        data: bytes of the file (bytes-like).
        left: returns the remaining memory budget; see
            `headrace.datasets.image.pixels.decode_image`.

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
        dtype = _dtype_of(image.mode)
        if image.mode == "1":
            return np.array(image.convert("L"), np.uint8) // 255
        return np.array(image).astype(dtype)


def _dtype_of(mode: str) -> np.dtype[Any]:
    """The dtype of masks that are images of a mode of Pillow's.

    Raises:
        FormatError: no mask is.
    """
    if mode in ("1", "L", "P"):
        return np.dtype(np.uint8)
    if mode in SIXTEEN_BIT:
        return np.dtype(np.uint16)
    if mode == "I":
        return np.dtype(np.int32)
    raise FormatError(
        "a mask holds class numbers (grey of 1 to 32 bits, or a palette), and this image is of "
        f"mode {mode!r}: convert it once, "
        "and save it as PNG"
    )


@decoding
def mask_spec(data: Any, left: Left | None = None) -> ArraySpec:
    """Shape and dtype that `decode_mask` would give, by the header alone. (A TIFF is decoded: its
    reader turns it as it loads it.)

    Raises:
        FormatError: as `decode_mask`; damage behind the header is not seen.
    """
    with open_image(data) as image:
        if image.format != "TIFF":
            return ArraySpec((image.height, image.width), _dtype_of(image.mode))
    mask = decode_mask(data, left)
    return ArraySpec(mask.shape, mask.dtype)


def encode_mask(mask: Mask) -> bytes:
    """A file that `decode_mask` makes the same mask of: a PNG, and of int32 a TIFF."""
    stream = io.BytesIO()
    if mask.dtype == np.int32:
        mask_image(mask).save(stream, "TIFF", compression="tiff_adobe_deflate")
    else:
        mask_image(mask).save(stream, "PNG")
    return stream.getvalue()


def resize_nearest(mask: Mask, size: tuple[int, int] | None) -> Mask:
    """[H, W] -> [size[0], size[1]]: each pixel is the one that its centre lies in; aspect not
    kept. None: as it is.
    """
    if size is None or mask.shape == size:
        return mask
    rows, columns = (
        (2 * np.arange(wanted) + 1) * stored // (2 * wanted)
        for wanted, stored in zip(size, mask.shape, strict=True)
    )
    # two passes over rows are faster than a gather of pixels
    picked: Mask = mask.take(rows, axis=0).take(columns, axis=1)
    return picked


def mask_image(mask: Mask) -> Image.Image:
    """A mask as a PIL image of mode "L", "I;16" or "I"."""
    return Image.fromarray(np.ascontiguousarray(mask))
