"""Draws a preview as a picture: a contact sheet, or a table of texts."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import textwrap
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from headrace.previewing.batch import Item, Preview
from headrace.previewing.panels import pictures_of, value_range
from headrace.previewing.table import row_of

_MARGIN, _GAP, _LINE = 16, 10, 16
_INK, _PALE, _PAPER, _FRAME = (24, 24, 27), (113, 113, 122), (250, 250, 250), (212, 212, 216)
_BOX = (250, 60, 180)
_PAD, _TOKEN = (253, 224, 71), (255, 255, 255)
_TEXT_WIDTH, _TEXT_COLUMNS = 1100, 150  # pixels of a table of texts, and letters in a row of it
_NARROWEST, _WIDEST = 480, 1100
_FONTS = (
    *(
        "NotoSans-Regular.ttf",
        "DejaVuSans.ttf",
        "LiberationSans-Regular.ttf",
        "Arial.ttf",
        "arial.ttf",
    ),
    *(
        "NotoSansCJK-Regular.ttc",
        "DroidSansFallbackFull.ttf",
        "wqy-microhei.ttc",
        "PingFang.ttc",
        "msyh.ttc",
        "msgothic.ttc",
    ),
)


def draw_sheet(shown: Preview, *, cell: int = 160, columns: int = 6) -> Image.Image:
    """A picture of a preview.

    Args:
        shown: what is drawn.
        cell: pixels of the longer side of a sample's picture.
        columns: samples in a row.
    """
    return _table(shown) if shown.is_text else _contact_sheet(shown, cell, columns)


@functools.cache
def _fonts(size: int) -> list[Any]:
    """The fonts for letters of many languages that the system or matplotlib has, and Pillow's
    own.
    """
    matplotlib = importlib.util.find_spec("matplotlib")
    places = [*_FONTS]
    if matplotlib is not None and matplotlib.origin is not None:
        places.append(
            os.path.join(
                os.path.dirname(matplotlib.origin), "mpl-data", "fonts", "ttf", "DejaVuSans.ttf"
            )
        )
    fonts = list[Any]()
    for place in places:
        with contextlib.suppress(OSError):
            fonts.append(ImageFont.truetype(place, size))
    return [*fonts, ImageFont.load_default(size)]


@functools.lru_cache(maxsize=4096)
def _has(number: int, size: int, letter: str) -> bool:
    """True if a font has a letter: for those that it lacks it draws one and the same box."""
    if letter.isspace() or "!" <= letter <= "~":
        return True
    font = _fonts(size)[number]
    try:
        drawn, box = font.getmask(letter), font.getmask("\U0010ffff")
    except UnicodeError:
        return False
    return (drawn.size, bytes(drawn)) != (box.size, bytes(box))


def _write(
    draw: Any,
    at: tuple[float, float],
    text: str,
    ink: tuple[int, int, int],
    size: int,
    room: float,
) -> None:
    """Draws text in the font that has the most of its letters, each line cut to `room` pixels.

    Letters that this font lacks are escapes such as ``\\u6f22``.
    """
    fonts = _fonts(size)
    counts = [sum(_has(number, size, letter) for letter in text) for number in range(len(fonts))]
    number = counts.index(max(counts))
    lines = list[str]()
    for line in text.split("\n"):
        letters = list(line)
        for place, letter in enumerate(letters):
            if not _has(number, size, letter):
                letters[place] = letter.encode("ascii", "backslashreplace").decode()
        while letters and fonts[number].getlength("".join(letters)) > room:
            letters.pop()
        lines.append("".join(letters))
    draw.text(at, "\n".join(lines), ink, fonts[number])


def _head(shown: Preview, extra: list[str], width: int) -> list[tuple[str, bool]]:
    """The lines above the samples, and whether each is pale."""
    told = [f"{name}: {value}" for name, value in shown.facts.items()] + extra + shown.notes
    letters = max(30, (width - 2 * _MARGIN) // 7)
    lines = [(line, False) for line in textwrap.wrap(shown.title, letters)]
    return lines + [(line, True) for text in told for line in textwrap.wrap(text, letters)]


def _paper(width: int, height: int, lines: list[tuple[str, bool]]) -> tuple[Image.Image, Any, int]:
    head = _MARGIN + len(lines) * (_LINE + 3) + _GAP
    sheet = Image.new("RGB", (width, head + height + _MARGIN), _PAPER)
    draw = ImageDraw.Draw(sheet)
    for number, (line, is_pale) in enumerate(lines):
        at = (_MARGIN, _MARGIN + number * (_LINE + 3))
        if is_pale:
            _write(draw, at, line, _PALE, 13, width - 2 * _MARGIN)
        else:
            _write(draw, at, line, _INK, 15, width - 2 * _MARGIN)
    return sheet, draw, head


def _contact_sheet(shown: Preview, cell: int, columns: int) -> Image.Image:
    values = [item.value for item in shown.items if item.value is not None]
    limits = value_range(values)
    pictures = [_pictures(item, limits) for item in shown.items]
    across = max((len(some) for some in pictures), default=1) or 1
    wide, high = across * cell + (across - 1) * 4, cell + 2 * _LINE + 6
    columns = max(1, min(columns, len(shown.items), _WIDEST // (wide + _GAP)))
    width = max(_NARROWEST, 2 * _MARGIN + columns * wide + (columns - 1) * _GAP)
    extra = [f"shown from {limits[0]:.4g} (black) to {limits[1]:.4g} (white)"] if values else []
    rows = -(-len(shown.items) // columns)
    sheet, draw, head = _paper(width, rows * (high + _GAP), _head(shown, extra, width))
    for number, (item, some) in enumerate(zip(shown.items, pictures, strict=True)):
        left = _MARGIN + number % columns * (wide + _GAP)
        top = head + number // columns * (high + _GAP)
        for place, picture in enumerate(some):
            _paste(
                sheet,
                draw,
                picture,
                left + place * (cell + 4),
                top,
                cell,
                item.boxes if place == 0 else None,
            )
        if not some:
            draw.rectangle((left, top, left + cell - 1, top + cell - 1), outline=_FRAME)
            text = textwrap.fill(item.text or item.caption or "nothing to draw", cell // 7)
            _write(draw, (left + 4, top + 4), text[:300], _INK, 11, cell - 8)
        letters = max(8, wide // 7)
        _write(draw, (left, top + cell + 3), item.caption[:letters], _INK, 12, wide)
        _write(draw, (left, top + cell + _LINE + 2), _place_of(item, letters), _PALE, 11, wide)
    return sheet


def _pictures(item: Item, limits: tuple[float, float]) -> list[Any]:
    if item.value is None:
        return []
    found = pictures_of(item.value, limits)
    return found + (
        pictures_of(item.target, (0.0, 1.0), is_labels=True) if item.target is not None else []
    )


def _paste(
    sheet: Image.Image, draw: Any, picture: Any, left: int, top: int, cell: int, boxes: Any
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
    x, y = left + (cell - size[0]) // 2, top + (cell - size[1]) // 2
    sheet.paste(image, (x, y))
    for x0, y0, x1, y1 in () if boxes is None else boxes * scale:
        draw.rectangle((x + x0, y + y0, x + max(x0, x1 - 1), y + max(y0, y1 - 1)), outline=_BOX)
    draw.rectangle((x - 1, y - 1, x + size[0], y + size[1]), outline=_FRAME)


def _place_of(item: Item, letters: int) -> str:
    number = "" if item.index is None else f"#{item.index:,} "
    where = item.where.replace("\\", "/").rpartition("/")[2]
    room = max(4, letters - len(number))
    return number + (where if len(where) <= room else f"…{where[1 - room :]}")


def _table(shown: Preview) -> Image.Image:
    """A row for each text: its number, target, tokens and padding as a bar, and the text."""
    lines = _head(shown, ["white: tokens; yellow: padding"], _TEXT_WIDTH)
    longest = max((len(item.ids) for item in shown.items if item.ids is not None), default=1) or 1
    cells = [
        textwrap.wrap(row_of(item).text, _TEXT_COLUMNS - 10)[:3] or [""] for item in shown.items
    ]
    height = sum(_LINE * (1 + len(text)) + _GAP + 10 for text in cells)
    sheet, draw, top = _paper(_TEXT_WIDTH, height, lines)
    room = _TEXT_WIDTH - 2 * _MARGIN
    for item, text in zip(shown.items, cells, strict=True):
        row = row_of(item)
        head = "  ".join(filter(None, [row.number, row.caption, row.tokens]))
        _write(draw, (_MARGIN, top), head, _PALE, 12, room)
        y, count = top + _LINE + 1, 0 if item.ids is None else len(item.ids)
        filled = round(room * (count - item.padding) / longest)
        draw.rectangle(
            (_MARGIN, y, _MARGIN + round(room * count / longest), y + 5), fill=_PAD, outline=_FRAME
        )
        draw.rectangle((_MARGIN, y, _MARGIN + filled, y + 5), fill=_TOKEN, outline=_FRAME)
        for number, line in enumerate(text):
            _write(draw, (_MARGIN, y + 8 + number * _LINE), line, _INK, 13, room)
        top = y + 10 + len(text) * _LINE + _GAP
    return sheet
