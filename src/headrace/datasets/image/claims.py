"""Compares what decoding and resizing a large image takes with what the memory budget leaves.

The figures per pixel are peaks measured with Pillow 13, simplejpeg 1.9 and torch 2.13.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from PIL import Image

from headrace.errors import FormatError
from headrace.memory.budget import format_size
from headrace.memory.per_process import renew_after_fork

FREE = 64 << 20
"""Bytes that an image may take without the budget being asked: a photograph of 16 million
pixels.
"""
_WEIGHTS = 16  # bytes that torch takes for each row and column of what it resizes
_PROGRESSIVE = 6  # libjpeg holds the coefficients of a progressive JPEG until the last scan
SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I;16N")

Left = Callable[[], int]
"""Bytes that the budget leaves to this process."""


class _Claimed:
    """Bytes that this process's threads have claimed by now. A child begins with none: the
    parent's threads don't decode there.
    """

    def __init__(self) -> None:
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        self.changed = threading.Condition()
        self.nbytes = 0


_claimed = _Claimed()


@contextlib.contextmanager
def claimed(left: Left | None, height: int, width: int, nbytes: int) -> Iterator[None]:
    """Claims what an image takes, and waits while other threads take too many bytes.

    Args:
        left: bytes that the budget leaves to this process; None: any number.
        height, width: of the image, for the message.
        nbytes: what it takes.

    Raises:
        FormatError: it takes more than the budget leaves.
    """
    if nbytes <= FREE or left is None:
        yield
        return
    remaining = left()
    if nbytes > remaining:
        raise FormatError(
            f"an image of {width:,} x {height:,} pixels takes {format_size(nbytes)} to be decoded "
            f"and resized, and the memory budget leaves {format_size(remaining)}: make the image "
            "smaller, use fewer workers or a smaller batch_size, or raise max_memory_usage"
        )
    with _claimed.changed:
        _claimed.changed.wait_for(
            lambda: not _claimed.nbytes or _claimed.nbytes + nbytes <= remaining
        )
        _claimed.nbytes += nbytes
    try:
        yield
    finally:
        with _claimed.changed:
            _claimed.nbytes -= nbytes
            _claimed.changed.notify_all()


def jpeg_nbytes(
    shape: tuple[int, int],
    channels: int,
    factor: int,
    size: tuple[int, int] | None,
    turns: bool,
    is_progressive: bool,
) -> int:
    """What simplejpeg takes of a JPEG of that shape, decoded at a fraction of it, and resizing
    it then.
    """
    height = -(-shape[0] // factor)
    width = -(-shape[1] // factor)
    decoded = height * width * channels * (1 + turns)
    coefficients = shape[0] * shape[1] * _PROGRESSIVE * is_progressive
    return decoded + max(_resizing_nbytes(height, width, size), coefficients)


def pillow_nbytes(image: Image.Image, color: str, size: tuple[int, int] | None) -> int:
    """What Pillow takes of an image that it has opened, and its copy as an array, and resizing
    that then.
    """
    shown = 1 if color == "L" else 3
    if image.mode == "I":
        each = 24  # scaled as floats
    elif image.mode in (*SIXTEEN_BIT, "F"):
        each = 16
    else:
        stored = 1 if image.mode in ("1", "L", "P") else 4
        each = stored + 2 * shown  # an array is joined from its parts
        if image.mode != color:
            each += 1 if color == "L" else 4
        if image.mode == "LAB":
            each += 4
    if image.format in ("WEBP", "AVIF", "HEIF", "JXL"):
        each += 8
    pixels = image.height * image.width
    return max(pixels * each, pixels * shown + _resizing_nbytes(image.height, image.width, size))


def _resizing_nbytes(height: int, width: int, size: tuple[int, int] | None) -> int:
    """What resizing takes: torch makes rows of the new width first."""
    if size is None:
        return 0
    return height * min(width, size[1]) * 4 + (height + width) * _WEIGHTS
