"""Draws a preview as a picture: a contact sheet, or a table of texts."""

from __future__ import annotations

import colorsys
import contextlib
import functools
import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from headrace.dtypes import AnyArray
from headrace.previewing.batch import Preview

Picture = npt.NDArray[np.uint8]
"""[height, width, 3]"""
_MARGIN = 16
_GAP = 10
_LINE = 18
_LETTER = 7  # pixels of a letter, about
_WIDTH = 1100  # at most, and of a table of texts
_COLUMNS = 6  # samples in a row, at most
_INK = (24, 24, 27)
_PALE = (113, 113, 122)
_PAPER = (250, 250, 250)
_FRAME = (212, 212, 216)
_BOX = (250, 60, 180)
_FONTS = (
    *("NotoSansCJK-Regular.ttc", "PingFang.ttc", "msyh.ttc", "msgothic.ttc"),
    *("NotoSans-Regular.ttf", "DejaVuSans.ttf", "Arial.ttf", "arial.ttf"),
)


def draw_sheet(shown: Preview, *, cell: int = 160) -> Image.Image:
    """A picture of a preview.

    Args:
        shown: what is drawn.
        cell: pixels of the longer side of a sample's picture.
    """
    if shown.is_text:
        lines = []
        for line in shown.lines(600):
            lines += textwrap.wrap(line, _WIDTH // _LETTER, subsequent_indent="    ")
        return _paper(_WIDTH, 0, lines)[0]
    values = [item.value for item in shown.items if item.value is not None]
    limits = value_range(values)
    pictures = [
        pictures_of(item.value, limits) + pictures_of(item.target, (0.0, 1.0), is_labels=True)
        for item in shown.items
    ]
    across = max(map(len, pictures), default=1) or 1
    wide = across * (cell + 4) - 4
    high = cell + 2 * _LINE + 4
    columns = max(1, min(_COLUMNS, len(shown.items), _WIDTH // (wide + _GAP)))
    width = max(480, 2 * _MARGIN + columns * (wide + _GAP) - _GAP)
    head = [shown.title, f"batch: {shown.batch}", *shown.notes]
    if values:
        head.append(f"shown from {limits[0]:.4g} (black) to {limits[1]:.4g} (white)")
    lines = [part for line in head for part in textwrap.wrap(line, width // _LETTER - 5)]
    rows = -(-len(shown.items) // columns)
    sheet, draw, top = _paper(width, rows * (high + _GAP), lines)
    letters = wide // _LETTER
    for number, (item, some) in enumerate(zip(shown.items, pictures, strict=True)):
        left = _MARGIN + number % columns * (wide + _GAP)
        y = top + number // columns * (high + _GAP)
        for place, picture in enumerate(some):
            boxes = item.boxes if place == 0 else None
            _paste(sheet, draw, picture, (left + place * (cell + 4), y), cell, boxes)
        if not some:
            draw.rectangle((left, y, left + cell - 1, y + cell - 1), outline=_FRAME)
            text = textwrap.fill(item.text or item.caption or "nothing to draw", cell // _LETTER)
            _write(draw, (left + 4, y + 4), text[:300], _INK)
        _write(draw, (left, y + cell + 3), item.caption[:letters], _INK)
        where = item.where.replace("\\", "/").rpartition("/")[2]
        index = "" if item.index is None else f"#{item.index:,} "
        where = index + where[-max(4, letters - len(index)) :]
        _write(draw, (left, y + cell + _LINE), where, _PALE)
    return sheet


def _paper(width: int, height: int, lines: list[str]) -> tuple[Image.Image, Any, int]:
    """A sheet with some lines at its top, and where there is room below them."""
    top = _MARGIN + len(lines) * _LINE + _GAP
    sheet = Image.new("RGB", (width, top + height + _MARGIN), _PAPER)
    draw = ImageDraw.Draw(sheet)
    for number, line in enumerate(lines):
        _write(draw, (_MARGIN, _MARGIN + number * _LINE), line, _PALE if number else _INK)
    return sheet, draw, top


def _write(draw: Any, at: tuple[float, float], text: str, ink: tuple[int, int, int]) -> None:
    draw.text(at, text, ink, _font())


@functools.cache
def _font() -> Any:
    """The system's font that has letters of most languages, or Pillow's own."""
    for name in _FONTS:
        with contextlib.suppress(OSError):
            return ImageFont.truetype(name, 12)
    return ImageFont.load_default(12)


def _paste(
    sheet: Image.Image, draw: Any, picture: Any, at: tuple[int, int], cell: int, boxes: Any
) -> None:
    """A picture in the middle of its cell, as large as fits: small ones with sharp pixels; and
    the boxes of the objects in it.
    """
    image = Image.fromarray(picture)
    scale = cell / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    image = image.resize(
        size, Image.Resampling.NEAREST if scale >= 2 else Image.Resampling.BILINEAR
    )
    x = at[0] + (cell - size[0]) // 2
    y = at[1] + (cell - size[1]) // 2
    sheet.paste(image, (x, y))
    for x0, y0, x1, y1 in () if boxes is None else boxes * scale:
        draw.rectangle((x + x0, y + y0, x + max(x0, x1 - 1), y + max(y0, y1 - 1)), outline=_BOX)
    draw.rectangle((x - 1, y - 1, x + size[0], y + size[1]), outline=_FRAME)


def value_range(arrays: Sequence[AnyArray]) -> tuple[float, float]:
    """The values that are shown black and white: 0 and 255 of bytes, else the least and the
    largest of all.
    """
    if all(array.dtype == np.uint8 for array in arrays):
        return 0.0, 255.0
    finite = [array[np.isfinite(array)] for array in arrays]
    least = min((float(array.min()) for array in finite if array.size), default=0.0)
    most = max((float(array.max()) for array in finite if array.size), default=1.0)
    return least, most if most > least else least + 1.0


def pictures_of(
    array: AnyArray | None, limits: tuple[float, float], is_labels: bool = False
) -> list[Picture]:
    """The pictures that show an array: one of an image or a row of numbers, three of a volume (its
    middle slices).

    Args:
        array: of any shape; of images with their channels first or last. None: no picture.
        limits: the values that are black and white.
        is_labels: True if values are classes, which get colours.
    """
    if array is None or 0 in array.shape:
        return []
    if array.ndim <= 1:  # a strip, an eighth as high as it is long
        array = array.reshape(1, -1).repeat(-(-array.size // 8), axis=0)
    if array.ndim == 3 and not is_labels:
        if array.shape[0] in (1, 3, 4) and min(array.shape[1:]) > 4:
            array = np.moveaxis(array, 0, -1)
        if array.shape[-1] in (3, 4):
            return [_scaled(array[..., :3], limits)]
        if array.shape[-1] == 1:
            array = array[..., 0]
    if array.ndim == 2:
        return [_painted(array, limits, is_labels)]
    if array.ndim == 3:
        middles = [array.take(extent // 2, axis) for axis, extent in enumerate(array.shape)]
        return [_painted(middle, limits, is_labels) for middle in middles]
    return pictures_of(array[0], limits, is_labels)


def _painted(plane: AnyArray, limits: tuple[float, float], is_labels: bool) -> Picture:
    if not is_labels:
        return np.repeat(_scaled(plane, limits)[..., None], 3, axis=-1)
    values, numbers = np.unique(plane, return_inverse=True)
    colors = np.zeros((len(values), 3), np.uint8)
    for number, label in enumerate(values.tolist()):
        if label and math.isfinite(label):  # a hue far from those of the numbers before it
            hue = float(label) * 0.618 % 1.0
            colors[number] = [255 * part for part in colorsys.hsv_to_rgb(hue, 0.75, 0.95)]
    return colors[numbers.reshape(plane.shape)]


def _scaled(array: AnyArray, limits: tuple[float, float]) -> Picture:
    least, most = limits
    numbers = np.nan_to_num(array.astype(np.float64), nan=least, posinf=most, neginf=least)
    part = (numbers - least) / (most - least)
    return (part.clip(0, 1) * 255).round().astype(np.uint8)
