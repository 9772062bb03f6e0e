"""Makes pictures of arrays: images as they are, three slices of a volume, a curve of numbers."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.sorting import distinct

Picture = npt.NDArray[np.uint8]
"""[height, width, 3]"""
_CHANNELS = (1, 3, 4)
_CURVE = (96, 192)  # height and width of a curve


def value_range(arrays: Sequence[npt.NDArray[Any]]) -> tuple[float, float]:
    """The values that are shown black and white: 0 and 255 of bytes, else the least and the
    largest of all.
    """
    if all(array.dtype == np.uint8 for array in arrays):
        return 0.0, 255.0
    finite = [array[np.isfinite(array)] if array.dtype.kind == "f" else array for array in arrays]
    least = min((float(array.min()) for array in finite if array.size), default=0.0)
    most = max((float(array.max()) for array in finite if array.size), default=1.0)
    return least, most if most > least else least + 1.0


def pictures_of(
    array: npt.NDArray[Any], shown: tuple[float, float], is_labels: bool = False
) -> list[Picture]:
    """The pictures that show an array: one of an image or a row of numbers, three of a volume (its
    middle slices).

    Args:
        array: of any shape; of images with their channels first or last.
        shown: the values that are black and white.
        is_labels: True if values are classes, which get colours.
    """
    if 0 in array.shape:
        return []
    if array.ndim <= 1:
        return [_curve(np.atleast_1d(array), shown)]
    if array.ndim == 2:
        return [_painted(array, shown, is_labels)]
    if array.ndim == 3 and not is_labels:
        if array.shape[0] in _CHANNELS and min(array.shape[1:]) > 4:
            return [_colored(np.moveaxis(array, 0, -1), shown)]
        if array.shape[-1] in _CHANNELS:
            return [_colored(array, shown)]
    if array.ndim == 3:
        return [
            _painted(array.take(extent // 2, axis), shown, is_labels)
            for axis, extent in enumerate(array.shape)
        ]
    if array.shape[-1] in _CHANNELS and array.ndim == 4:  # frames of a film
        picked = distinct(np.linspace(0, len(array) - 1, 3).astype(int)).tolist()
        return [_colored(array[number], shown) for number in picked]
    return pictures_of(array[0], shown, is_labels)


def _colored(image: npt.NDArray[Any], shown: tuple[float, float]) -> Picture:
    if image.shape[-1] == 1:
        return _painted(image[..., 0], shown, False)
    return _scaled(image[..., :3], shown)


def _painted(plane: npt.NDArray[Any], shown: tuple[float, float], is_labels: bool) -> Picture:
    if not is_labels:
        return np.repeat(_scaled(plane, shown)[..., None], 3, axis=-1)
    values, numbers = np.unique(plane, return_inverse=True)
    colors = np.array([_color_of(value) for value in values.tolist()], np.uint8)
    return colors[numbers.reshape(plane.shape)]


def _color_of(label: float) -> tuple[int, int, int]:
    """Black for 0 and what is no number, else a hue far from those of the numbers before it."""
    if label == 0 or not math.isfinite(label):
        return 0, 0, 0
    red, green, blue = colorsys.hsv_to_rgb(float(label) * 0.618 % 1.0, 0.75, 0.95)
    return int(red * 255), int(green * 255), int(blue * 255)


def _scaled(array: npt.NDArray[Any], shown: tuple[float, float]) -> Picture:
    if array.dtype == np.uint8 and shown == (0.0, 255.0):
        return np.ascontiguousarray(array)
    least, most = shown
    part = (
        np.nan_to_num(array.astype(np.float64), nan=least, posinf=most, neginf=least) - least
    ) / (most - least)
    return (part.clip(0, 1) * 255).round().astype(np.uint8)


def _curve(values: npt.NDArray[Any], shown: tuple[float, float]) -> Picture:
    """A row of numbers as a curve, white on black."""
    height, width = _CURVE
    picture = np.zeros((height, width, 3), np.uint8)
    places = np.linspace(0, len(values) - 1, width).round().astype(int)
    levels = (
        height
        - 1
        - (_scaled(np.asarray(values, np.float64)[places], shown).astype(int) * (height - 1)) // 255
    )
    before = levels[0]
    for column, level in enumerate(levels.tolist()):
        picture[min(before, level) : max(before, level) + 1, column] = 255
        before = level
    return picture
