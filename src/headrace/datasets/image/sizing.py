"""Decodes an encoded image straight to pixels of a given size.

The plain way is `decode_image`, cropping and `resize_image`. JPEGs in colours take another one to
the same pixels: four bytes a pixel instead of three, into memory that is used again, resized in
place. A JPEG that is at least twice, 4 or 8 times as large as what is wanted of it is decoded at a
half, a quarter or an eighth of its size: by an inverse DCT of fewer coefficients (libjpeg-turbo),
so its pixels differ a little from those of the plain way.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import simplejpeg
import torch

from headrace.datasets.image.claims import Claim, Left
from headrace.datasets.image.pixels import (
    Pixels,
    check_pixels,
    claim_jpeg,
    decode_claimed,
    decode_image,
    decoding,
    exif_orientation,
    open_image,
    orientation_of,
    resize_image,
    upright,
)

_SIDEWAYS = (5, 6, 7, 8)
_KEPT = 16 << 20  # bytes that a thread keeps for the pixels of the next JPEG
_resize = torch.ops.aten._upsample_bilinear2d_aa.out  # what `interpolate` calls


class Box(NamedTuple):
    """A part of an image, in its pixels as they stand upright."""

    top: int
    left: int
    height: int
    width: int

    def of(self, pixels: Pixels) -> Pixels:
        """That part of an array [H, W, C], as a view."""
        return pixels[self.top : self.top + self.height, self.left : self.left + self.width]


@decoding
def load_image(
    data: Any,
    color: str,
    size: tuple[int, int],
    channels_first: bool,
    box: Box | None = None,
    flip: bool = False,
    exact: bool = False,
    left: Left | None = None,
) -> Pixels:
    """An encoded image, or a part of it, at a size: what `decode_image`, cropping, `resize_image`
    and mirroring give, but for large JPEGs, which are decoded at a fraction of their size.

    Args:
        data, color: as for `decode_image`.
        size: height and width of the result.
        channels_first: give [C, H, W].
        box: the part of the image; None: all of it.
        flip: mirror it, left to right.
        exact: decode large JPEGs whole, too.
        left: as for `decode_image`.

    Returns:
        [C, H, W] or [H, W, C] uint8, contiguous, and of nobody else's memory.

    Raises:
        FormatError: as `decode_image`.
    """
    with Claim(left) as claim:
        pixels = _load_jpeg(data, size, box, exact, claim) if color == "RGB" else None
        if pixels is None:
            pixels = decode_claimed(data, color, claim, size)
            pixels = resize_image(pixels if box is None else box.of(pixels), size)
    if flip:
        pixels = pixels[:, ::-1]
    if not channels_first:
        return _interleaved(pixels)
    return _planes(pixels) if pixels.shape[2] == 4 else pixels.transpose(2, 0, 1).copy()


@decoding
def image_shape(data: Any, left: Left | None = None) -> tuple[int, int]:
    """Height and width of an encoded image as it stands upright, as its header says. (`left`: as
    for `decode_image`.)

    Raises:
        FormatError: it has none that can be read.
    """
    header = _jpeg_header(data)
    if header is not None:
        return header.upright
    try:
        with open_image(data) as image:
            if image.format != "TIFF":  # whose reader turns the image itself, as it loads it
                return _Header(image.height, image.width, orientation_of(image)).upright
    except Exception:  # `decode_image` says what is wrong
        pass
    height, width = decode_image(data, left=left).shape[:2]
    return height, width


@decoding
def check_header(data: Any, left: Left | None = None) -> None:
    """Reads the header of an encoded image. (`left`: as for `decode_image`.)

    Raises:
        FormatError: it has none that can be read.
    """
    if bytes(data[:3]) == b"\xff\xd8\xff":
        with contextlib.suppress(ValueError):
            height, width, _, _ = simplejpeg.decode_jpeg_header(data)
            check_pixels(width, height)
            return
    image_shape(data, left)


def _interleaved(pixels: Pixels) -> Pixels:
    """[H, W, 4] -> [H, W, 3], a channel at a time, four times as fast as pixel by pixel; others:
    a copy.
    """
    if pixels.shape[2] < 4:
        return pixels.copy()
    made = np.empty((*pixels.shape[:2], 3), np.uint8)
    for channel in range(3):
        made[..., channel] = pixels[..., channel]
    return made


def _planes(pixels: Pixels) -> Pixels:
    """[H, W, 4] -> [3, H, W]. Four bytes are taken for one number, whose parts are cheaper to
    come by than single bytes with gaps.
    """
    planes = np.empty((3, *pixels.shape[:2]), np.uint8)
    if sys.byteorder == "big":
        planes[:] = pixels[..., :3].transpose(2, 0, 1)
        return planes
    words = pixels.view(np.uint32)[..., 0]
    np.copyto(planes[0], words, casting="unsafe")  # the lowest byte
    shifted = _scratch.of_words(words.shape)
    np.right_shift(words, 8, out=shifted)
    np.copyto(planes[1], shifted, casting="unsafe")
    np.right_shift(words, 16, out=shifted)
    np.copyto(planes[2], shifted, casting="unsafe")
    return planes


class _Scratch(threading.local):
    """Memory of each thread that is used again for one image after the other: fresh pages cost a
    fifth of a JPEG's decoding.
    """

    def __init__(self) -> None:
        self.pixels = np.empty(0, np.uint8)
        self.words = np.empty((0, 0), np.uint32)
        self.resized: tuple[torch.Tensor, Pixels] | None = None

    def of_words(self, shape: tuple[int, ...]) -> npt.NDArray[np.uint32]:
        if math.prod(shape) * 4 > _KEPT:
            return np.empty(shape, np.uint32)
        if self.words.shape != shape:
            self.words = np.empty(shape, np.uint32)
        return self.words

    def of_pixels(self, nbytes: int) -> Pixels:
        if nbytes > _KEPT:
            return _unaligned(nbytes)
        if len(self.pixels) < nbytes:
            self.pixels = _unaligned(nbytes)
        return self.pixels

    def of_size(self, size: tuple[int, int]) -> tuple[torch.Tensor, Pixels]:
        """The same memory as a tensor [1, 4, H, W] and as an array [H, W, 4]."""
        if self.resized is None or self.resized[1].shape[:2] != size:
            resized = torch.from_numpy(np.empty((1, *size, 4), np.uint8)).permute(0, 3, 1, 2)
            self.resized = resized, resized[0].permute(1, 2, 0).numpy()
        return self.resized


def _unaligned(nbytes: int) -> Pixels:
    """Memory that begins between two multiples of 32. Rows at such a multiple libjpeg-turbo writes
    past the processor's cache, where resizing, which comes next, would have them: that costs a
    tenth of both.
    """
    memory = np.empty(nbytes + 32, np.uint8)
    start = (16 - memory.ctypes.data) % 32
    return memory[start : start + nbytes]


_scratch = _Scratch()


class _Header(NamedTuple):
    height: int
    width: int
    orientation: Any

    @property
    def upright(self) -> tuple[int, int]:
        return (
            (self.width, self.height)
            if self.orientation in _SIDEWAYS
            else (self.height, self.width)
        )


def _jpeg_header(data: Any) -> _Header | None:
    """Of a JPEG in colours that is whole as far as its header says; None where someone else has
    to look.
    """
    if bytes(data[:3]) != b"\xff\xd8\xff":
        return None
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    if space != "YCbCr":
        return None
    check_pixels(width, height)
    return _Header(height, width, exif_orientation(data))


def _load_jpeg(
    data: Any, size: tuple[int, int], box: Box | None, exact: bool, claim: Claim
) -> Pixels | None:
    """[H, W, 4] in memory that the next image will use; None where `decode_image` has to look."""
    header = _jpeg_header(data)
    if header is None:
        return None
    whole = Box(0, 0, *header.upright)
    box = box or whole
    factor = 1 if exact else _factor(box, size)
    height, width = -(-header.height // factor), -(-header.width // factor)
    scaled = {"min_height": height, "min_width": width, "min_factor": factor} if factor > 1 else {}
    claim_jpeg(claim, data, header[:2], 4, factor, size)
    buffer = _scratch.of_pixels(height * width * 4)
    try:  # four bytes a pixel: faster to decode, resize and take apart than three
        pixels: Pixels = simplejpeg.decode_jpeg(data, "RGBX", buffer=buffer, **scaled)
    except ValueError:
        return None  # `decode_image` will say what is wrong, or that nothing is
    pixels = upright(pixels, header.orientation)
    if box != whole:
        top, left = round(box.top / factor), round(box.left / factor)
        bottom, right = (
            round((box.top + box.height) / factor),
            round((box.left + box.width) / factor),
        )
        pixels = pixels[top : max(bottom, top + 1), left : max(right, left + 1)]
    if pixels.shape[:2] == size:
        return np.ascontiguousarray(pixels)
    out, resized = _scratch.of_size(size)
    source = torch.from_numpy(pixels).permute(2, 0, 1).unsqueeze(0)
    _resize(source, size, False, None, None, out=out)
    return resized


def _factor(box: Box, size: tuple[int, int]) -> int:
    """The fraction of its size at which a JPEG is decoded."""
    least = min(box.height // size[0], box.width // size[1])
    return next(factor for factor in (8, 4, 2, 1) if least >= factor) if least > 1 else 1
