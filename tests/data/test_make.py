"""Odd files that tests are made of are what they are called."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.data import make
from tests.data.make import make_bad

KINDS = {
    "png_as_jpeg": ("PNG", "RGB"),
    "not_utf8_name": ("JPEG", "RGB"),
    "grey16_png": ("PNG", "I;16"),
    "grey_jpeg": ("JPEG", "L"),
    "cmyk_jpeg": ("JPEG", "CMYK"),
    "rgba_png": ("PNG", "RGBA"),
    "palette_png": ("PNG", "P"),
    "la_png": ("PNG", "LA"),
    "multipage_tiff": ("TIFF", "RGB"),
    "webp": ("WEBP", "RGB"),
    "bmp": ("BMP", "RGB"),
}
"""Format and mode."""


def test_odd_files_are_what_they_are_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = make_bad(tmp_path)
    assert bad.keys() == make.UNREADABLE.keys() | make.READABLE.keys() | make.NO_IMAGE.keys()
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    for kind, size in (("bomb_png", make.BOMB_PNG_SIZE), ("bomb_jpeg", make.BOMB_JPEG_SIZE)):
        with Image.open(bad[kind]) as image:
            assert image.size == size and bad[kind].stat().st_size < 200_000
    for kind, (form, mode) in KINDS.items():
        with Image.open(bad[kind]) as image:
            assert (image.format, image.mode, image.size) == (form, mode, make.SIZE), kind
    for orientation in range(1, 9):
        with Image.open(bad[f"exif_{orientation}_jpeg"]) as image:
            assert image.getexif()[0x0112] == orientation
            upright = np.asarray(ImageOps.exif_transpose(image)).astype(int)
        assert np.abs(upright - make.corners()).max() < 16
    assert os.fsencode(bad["not_utf8_name"].name) == b"caf\xe9.jpg"
    assert (bad["link_loop"] / "again" / "again").samefile(bad["link_loop"])
