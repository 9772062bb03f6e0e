"""Crops, resizes and arranges pixels. Images are resized by torch's antialiased bilinear
interpolation.
"""

from __future__ import annotations

import math
import threading
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from headrace.collate.vision import STATISTICS, Normalization

Pixels = npt.NDArray[np.uint8]
IMAGENET_MEAN, IMAGENET_STD = STATISTICS["imagenet"]
IMAGENET = Normalization(IMAGENET_MEAN, IMAGENET_STD, fits_grey=True)
_KEPT = 16 << 20  # bytes of memory that a thread keeps for the next image
_resize = torch.ops.aten._upsample_bilinear2d_aa.out  # called by `interpolate`


class Box(NamedTuple):
    """A part of an image, in pixels of the upright image."""

    top: int
    left: int
    height: int
    width: int

    def of(self, pixels: Pixels) -> Pixels:
        """The part of an array [H, W, C], as a view."""
        return pixels[self.top : self.top + self.height, self.left : self.left + self.width]

    def at(self, factor: int) -> Box:
        """The part of the image at 1 / factor of its size, at least a pixel."""
        top = round(self.top / factor)
        left = round(self.left / factor)
        bottom = round((self.top + self.height) / factor)
        right = round((self.left + self.width) / factor)
        return Box(top, left, max(bottom - top, 1), max(right - left, 1))


class _Scratch(threading.local):
    """Memory of each thread that is reused for all its images: fresh pages cost a fifth of a JPEG's
    decoding.

    It starts between two multiples of 32 bytes: libjpeg-turbo writes rows at a multiple past the
    processor's cache, from which resizing reads them next. That costs a tenth of both.
    """

    def __init__(self) -> None:
        self._held: dict[str, Pixels] = {}

    def take(self, use: str, nbytes: int) -> Pixels:
        """Memory of that size for one use."""
        memory = self._held.get(use)
        if memory is None or len(memory) < nbytes:
            memory = np.empty(nbytes + 32, np.uint8)
            start = (16 - memory.ctypes.data) % 32
            memory = memory[start : start + nbytes]
            if nbytes <= _KEPT:
                self._held[use] = memory
        return memory[:nbytes]


scratch = _Scratch()


def resize_image(pixels: Pixels, size: tuple[int, int] | None) -> Pixels:
    """[H, W, C] uint8 -> [size[0], size[1], C], bilinear with antialiasing (torch's `interpolate`);
    the aspect ratio is not kept. None: unchanged. Four channels are returned in memory that the
    next image reuses.
    """
    height, width = pixels.shape[:2]
    if size is None or (height, width) == size:
        return pixels
    shape = (*size, pixels.shape[2])
    if shape[2] == 4:
        made = scratch.take("resized", math.prod(shape)).reshape(shape)
    else:
        made = np.empty(shape, np.uint8)
    source = torch.from_numpy(writable(pixels)).permute(2, 0, 1)[None]
    _resize(source, size, False, None, None, out=torch.from_numpy(made).permute(2, 0, 1)[None])
    return made


def arranged(pixels: Pixels, flip: bool, channels_first: bool) -> Pixels:
    """[H, W, C] mirrored left to right, or not, as contiguous [H, W, C] or [C, H, W]. A fourth
    channel is dropped.
    """
    if flip:
        pixels = pixels[:, ::-1]
    height, width, stored = pixels.shape
    channels = min(stored, 3)
    if channels_first:
        made = planes = np.empty((channels, height, width), np.uint8)
    elif stored < 4:
        return np.ascontiguousarray(pixels)
    else:
        made = np.empty((height, width, channels), np.uint8)
        planes = made.transpose(2, 0, 1)
    words = None
    if channels_first and stored == 4:  # bytes of one integer are faster to extract
        words = pixels.view("<u4")[..., 0]
    for channel in range(channels):  # four times as fast as pixel by pixel
        planes[channel] = pixels[..., channel] if words is None else words >> (8 * channel)
    return made


def writable(pixels: Pixels) -> Pixels:
    """The pixels, copied if they are read-only, which torch warns of."""
    if pixels.flags.writeable:
        return pixels
    return pixels.copy()


def to_channels_first(pixels: Pixels) -> Pixels:
    """[H, W, C] -> contiguous [C, H, W]."""
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))
