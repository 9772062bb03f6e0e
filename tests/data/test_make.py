"""Files that tests are made of are what they are called, and the same each time."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.data import make
from tests.data.make import make_bad, make_photos

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


def _files(folder: Path) -> Iterator[Path]:
    # follows no links
    return (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)


def _digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in _files(folder)
    }


def test_photos_are_the_same_each_time(tmp_path: Path) -> None:
    first, second = (_digests(make_photos(tmp_path / name)) for name in "ab")
    assert first == second and len(set(first.values())) == len(first) == 24
    few = _digests(make_photos(tmp_path / "few", classes=("noise", "other"), per_class=2))
    classes = ("circle", "noise", "other")
    assert few.items() < _digests(make_photos(tmp_path / "many", classes, per_class=3)).items()
    assert {path.suffix for path in _files(tmp_path / "a")} == {".jpg", ".PNG", ".JPEG", ".png"}


def test_odd_files_are_what_they_are_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = make_bad(tmp_path)
    assert bad.keys() == make.UNREADABLE.keys() | make.READABLE.keys() | make.NO_IMAGE.keys()
    for kind in ("truncated_jpeg", "empty_jpeg", "text_as_jpeg", "bomb_png", "bomb_jpeg"):
        with pytest.raises((OSError, Image.DecompressionBombError)), Image.open(bad[kind]) as image:
            image.load()
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
    for kind in ("animated_gif", "multipage_tiff"):
        with Image.open(bad[kind]) as image:
            assert image.n_frames == 2 and image.convert("RGB").getpixel((5, 5)) == (255, 0, 0)
    assert os.fsencode(bad["not_utf8_name"].name) == b"caf\xe9.jpg"
    assert (bad["link_loop"] / "again" / "again").samefile(bad["link_loop"])
