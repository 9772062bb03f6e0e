from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps, UnidentifiedImageError

from tests.data import make
from tests.data.make import make_bad, make_photos


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_bad(tmp_path_factory.mktemp("bad"))


def _files(folder: Path) -> Iterator[Path]:
    # follows no links
    return (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)


def _digests(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in _files(folder)
    }


def _rgb(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).astype(int)


# --- photographs


def test_photos_are_the_same_each_time(tmp_path):
    first, second = (_digests(make_photos(tmp_path / name)) for name in "ab")
    assert first == second
    assert len(set(first.values())) == len(first) == 24
    assert _digests(make_photos(tmp_path / "c", seed=1)).keys() == first.keys()
    assert not set(_digests(tmp_path / "c").values()) & set(first.values())


def test_an_image_does_not_depend_on_the_others(tmp_path):
    few = _digests(make_photos(tmp_path / "few", classes=("noise", "other"), per_class=2))
    many = _digests(
        make_photos(tmp_path / "many", classes=("circle", "noise", "other"), per_class=3)
    )
    assert few.items() < many.items()


def test_photos_mix_formats_and_cases(tiny_photos, photos):
    images = sorted(_files(photos))
    assert {path.suffix for path in images} == {".jpg", ".PNG", ".JPEG", ".png"}
    assert {path.parent.name for path in images} == {"circle", "gradient", "noise"}
    for path in images:
        with Image.open(path) as image:
            assert (image.size, image.mode) == ((64, 48), "RGB")
            assert image.format == ("JPEG" if path.suffix.lower() in (".jpg", ".jpeg") else "PNG")
    assert len(list(_files(tiny_photos))) == 4


# --- odd files


@pytest.mark.slow
def test_odd_files_are_the_same_each_time(bad, tmp_path):
    make_bad(tmp_path / "again")
    make_bad(tmp_path / "again")  # over what is there
    assert _digests(tmp_path / "again") == _digests(bad["bmp"].parent)


def test_every_kind_is_made_under_a_name_of_its_own(bad):
    assert bad.keys() == make.UNREADABLE.keys() | make.READABLE.keys() | make.NO_IMAGE.keys()
    assert len(set(bad.values())) == len(bad)


@pytest.mark.parametrize("kind", make.READABLE)
def test_readable(bad, kind):
    with Image.open(bad[kind]) as image:
        image.load()


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("truncated_jpeg", OSError),
        ("empty_jpeg", UnidentifiedImageError),
        ("text_as_jpeg", UnidentifiedImageError),
        ("bomb_png", Image.DecompressionBombError),
        ("bomb_jpeg", Image.DecompressionBombError),
    ],
)
def test_unreadable(bad, kind, error):
    with pytest.raises(error), Image.open(bad[kind]) as image:
        image.load()


@pytest.mark.parametrize(
    ("kind", "size"), [("bomb_png", make.BOMB_PNG_SIZE), ("bomb_jpeg", make.BOMB_JPEG_SIZE)]
)
def test_bombs_are_small_files_of_huge_images(bad, kind, size, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert bad[kind].stat().st_size < 200_000
    with Image.open(bad[kind]) as image:
        assert image.size == size


def test_bomb_png_is_a_valid_png(tmp_path):
    make.bomb_png(tmp_path / "small.png", size=(100, 2500))
    with Image.open(tmp_path / "small.png") as image:
        assert np.asarray(image).shape == (2500, 100)
        assert not np.asarray(image).any()


@pytest.mark.parametrize(
    ("kind", "format_", "mode"),
    [
        ("png_as_jpeg", "PNG", "RGB"),
        ("not_utf8_name", "JPEG", "RGB"),
        ("grey16_png", "PNG", "I;16"),
        ("grey_jpeg", "JPEG", "L"),
        ("cmyk_jpeg", "JPEG", "CMYK"),
        ("rgba_png", "PNG", "RGBA"),
        ("palette_png", "PNG", "P"),
        ("la_png", "PNG", "LA"),
        ("animated_gif", "GIF", None),
        ("multipage_tiff", "TIFF", "RGB"),
        ("webp", "WEBP", "RGB"),
        ("bmp", "BMP", "RGB"),
    ],
)
def test_kind_is_what_it_says(bad, kind, format_, mode):
    with Image.open(bad[kind]) as image:
        assert image.format == format_
        assert mode in (None, image.mode)
        assert image.size == make.SIZE


def test_16_bit_grey_spans_the_range(bad):
    with Image.open(bad["grey16_png"]) as image:
        values = np.asarray(image)
    assert (values.dtype, values.min(), values.max()) == (np.uint16, 0, 65535)


def test_palette_has_a_transparent_entry(bad):
    with Image.open(bad["palette_png"]) as image:
        assert image.info["transparency"] == 0
    assert (_rgb(bad["palette_png"]) == make.corners()).all()


@pytest.mark.parametrize("kind", ["webp", "bmp"])
def test_lossless(bad, kind):
    assert (_rgb(bad[kind]) == make.corners()).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_undone_is_upright(bad, orientation):
    with Image.open(bad[f"exif_{orientation}_jpeg"]) as image:
        assert image.getexif()[0x0112] == orientation
        assert image.size == (make.SIZE if orientation <= 4 else make.SIZE[::-1])
        upright = np.asarray(ImageOps.exif_transpose(image)).astype(int)
    assert np.abs(upright - make.corners()).max() < 16


@pytest.mark.parametrize("kind", ["animated_gif", "multipage_tiff"])
def test_first_of_two_frames_is_red(bad, kind):
    with Image.open(bad[kind]) as image:
        assert image.n_frames == 2
        frames = []
        for number in range(2):
            image.seek(number)
            frames.append(image.convert("RGB").getpixel((5, 5)))
    assert frames == [(255, 0, 0), (0, 0, 255)]


def test_name_is_not_utf8(bad):
    assert os.fsencode(bad["not_utf8_name"].name) == b"caf\xe9.jpg"
    with pytest.raises(UnicodeEncodeError):
        bad["not_utf8_name"].name.encode()


def test_link_leads_back_to_its_folder(bad):
    assert (bad["link_loop"] / "again").is_symlink()
    assert (bad["link_loop"] / "again" / "again").samefile(bad["link_loop"])


def test_command_line(tmp_path):
    subprocess.run([sys.executable, make.__file__, str(tmp_path)], check=True, capture_output=True)
    assert len(_digests(tmp_path / "photos")) == 24
    assert (tmp_path / "bad" / "truncated.jpg").exists()
