"""Makes values of the bytes that they are in shards."""

from __future__ import annotations

import io
import itertools
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import PIL.Image

Decoder = Callable[[memoryview], Any]
"""Makes a value of its bytes. It travels to workers by pickle."""


def text(make: Callable[[str], Any], data: memoryview) -> Any:
    return make(str(data, "utf-8"))


def array(dtype: str, shape: tuple[int, ...], data: memoryview, start: int = 0) -> Any:
    """An array of little-endian numbers; -1 in its shape stands for what there is."""
    values = np.frombuffer(data, np.dtype(dtype).newbyteorder("<"), offset=start)
    return values.reshape(shape).copy()


def pixels(data: memoryview) -> bytes:
    """An image that lies there as its pixels, encoded without loss."""
    width, height, length = struct.unpack_from("<3I", data)
    mode = str(data[12 : 12 + length], "ascii")
    pixels = bytes(data[12 + length :])
    if width * height > 8 * len(pixels):  # Pillow would take the memory first
        raise ValueError(f"{width:,} x {height:,} pixels in {len(pixels):,} bytes")
    encoded = io.BytesIO()
    image = PIL.Image.frombytes(mode, (width, height), pixels)
    image.save(encoded, "BMP" if mode in ("L", "RGB") else "TIFF")
    return encoded.getvalue()


def many(start: int, make: Callable[[memoryview], Any], data: memoryview) -> list[Any]:
    """Values one behind the other, after their number and their sizes, which begin at `start`."""
    (count,) = struct.unpack_from("<I", data, start)
    sizes = struct.unpack_from(f"<{count}I", data, start + 4)
    edges = list(itertools.accumulate(sizes, initial=start + 4 + 4 * count))
    if edges[-1] != len(data):
        raise ValueError(f"a list of {edges[-1]:,} bytes in {len(data):,}")
    return [make(data[first:last]) for first, last in itertools.pairwise(edges)]
