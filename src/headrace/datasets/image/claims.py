"""Compares what decoding and resizing a large image takes with what the memory budget leaves.

The figures per pixel are peaks measured with Pillow 13, simplejpeg 1.9 and torch 2.13.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self

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
        self.changed, self.nbytes = threading.Condition(), 0


_claimed = _Claimed()


class Claim:
    """What one image takes while this is open as a context.

    Args:
        left: bytes that the budget leaves to this process; None: any number.
    """

    __slots__ = ("_left", "_nbytes")

    def __init__(self, left: Left | None) -> None:
        self._left, self._nbytes = left, 0

    def take(self, height: int, width: int, nbytes: int) -> None:
        """Claims the bytes, in place of those of an earlier call, and waits while other threads
        take too many.

        Raises:
            FormatError: they are more than the budget leaves.
        """
        if nbytes <= FREE or self._left is None:
            return
        left = self._left()
        if nbytes > left:
            raise FormatError(
                f"an image of {width:,} x {height:,} pixels takes {format_size(nbytes)} to be "
                "decoded and resized, and the memory budget "
                f"leaves {format_size(left)}: make the image smaller, use fewer workers or a "
                "smaller batch_size, or raise max_memory_usage"
            )
        self.release()
        with _claimed.changed:
            _claimed.changed.wait_for(
                lambda: not _claimed.nbytes or _claimed.nbytes + nbytes <= left
            )
            _claimed.nbytes += nbytes
            self._nbytes = nbytes

    def release(self) -> None:
        """Gives the bytes back."""
        if self._nbytes:
            with _claimed.changed:
                _claimed.nbytes -= self._nbytes
                _claimed.changed.notify_all()
            self._nbytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


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
    height, width = -(-shape[0] // factor), -(-shape[1] // factor)
    decoded = height * width * channels * (2 if turns else 1)
    return decoded + max(
        _resizing_nbytes(height, width, size),
        shape[0] * shape[1] * _PROGRESSIVE if is_progressive else 0,
    )


def pillow_nbytes(image: Image.Image, color: str, size: tuple[int, int] | None) -> int:
    """What Pillow takes of an image that it has opened, and its copy as an array, and resizing
    that then.
    """
    stored = 1 if image.mode in ("1", "L", "P") else 2 if image.mode in SIXTEEN_BIT else 4
    converted = 0 if image.mode == color else 1 if color == "L" else 4
    shown = 1 if color == "L" else 3
    each = stored + converted + 2 * shown  # an array is joined from its parts
    if image.mode in (*SIXTEEN_BIT, "I", "F"):
        each = 24 if image.mode == "I" else 16  # scaled as floats
    elif image.mode == "LAB":
        each += 4
    if image.format in ("WEBP", "AVIF", "HEIF", "JXL"):
        each += 8
    pixels = image.height * image.width
    return max(pixels * each, pixels * shown + _resizing_nbytes(image.height, image.width, size))


def _resizing_nbytes(height: int, width: int, size: tuple[int, int] | None) -> int:
    """What resizing takes: torch makes rows of the new width first."""
    return 0 if size is None else height * min(width, size[1]) * 4 + (height + width) * _WEIGHTS
