"""Decoded images are what Pillow says they are, and bad ones are refused in one clear line."""

from __future__ import annotations

import io
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from PIL import EpsImagePlugin, Image, ImageOps

from headrace.datasets import pixels as pixels_module
from headrace.datasets.columns import DECODERS
from headrace.datasets.pixels import decode_image, image_shape
from headrace.datasets.resizing import resize_image
from headrace.errors import FormatError
from tests.data.make import (
    READABLE,
    SIZE,
    UNREADABLE,
    corners,
    image_bytes as encoded,
    larger_jpeg,
    make_bad,
    turned,
)

COLORS = ["RGB", "L"]
SIDES = st.integers(1, 60)
FORMS = ["JPEG", "PNG", "BMP", "TIFF", "WEBP", "GIF"]


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_bad(tmp_path_factory.mktemp("bad"))


def by_pillow(data: bytes, color: str = "RGB") -> np.ndarray[Any, Any]:
    """What Pillow gives, turned upright."""
    with Image.open(io.BytesIO(data)) as image:
        array = np.asarray(ImageOps.exif_transpose(image).convert(color))
    return array if array.ndim == 3 else array[:, :, None]


def assert_as_pillow(data: bytes, what: Any = None) -> None:
    for color in COLORS:
        decoded = decode_image(data, color)
        assert decoded.dtype == np.uint8
        assert decoded.flags.c_contiguous
        np.testing.assert_array_equal(decoded, by_pillow(data, color), err_msg=f"{what}, {color}")


def tiff(values: np.ndarray[Any, Any], bits: int | None = None, white: int | None = None) -> bytes:
    """Grey as a TIFF without compression: integers of 16 or 32 bits, or uint16 packed to 12."""
    height, width = values.shape
    pixels = values.astype(values.dtype.newbyteorder("<")).tobytes()
    if bits == 12:
        pairs = values.reshape(-1, 2).astype(int)
        pixels = b"".join(bytes([a >> 4, (a & 15) << 4 | b >> 8, b & 255]) for a, b in pairs)
    depth = bits or values.itemsize * 8
    tags = {256: width, 257: height, 258: depth, 259: 1, 262: 1, 273: 0, 277: 1, 278: height}
    tags[279] = len(pixels)
    tags |= {281: white} if white is not None else {}
    tags |= {339: 2} if values.dtype.kind == "i" else {}
    tags[273] = 8 + 2 + 12 * len(tags) + 4
    entries = b"".join(
        struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(tags.items())
    )
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + pixels


def picture(width: int, height: int, channels: int = 3, seed: int = 0) -> Image.Image:
    """Noise over a ramp: sharp and smooth parts, all colours."""
    rng = np.random.default_rng(seed)
    ramp = np.linspace(0, 255, width * height * channels).reshape(height, width, channels)
    array = np.clip(ramp + rng.normal(0, 40, ramp.shape), 0, 255).astype(np.uint8)
    return Image.fromarray(array if channels > 1 else array[:, :, 0])


class TestJPEG:
    @given(
        channels=st.sampled_from([3, 1]),
        color=st.sampled_from(COLORS),
        width=st.integers(1, 70),
        height=st.integers(1, 70),
        quality=st.integers(1, 100),
        subsampling=st.sampled_from([0, 1, 2]),
        progressive=st.booleans(),
    )
    @settings(max_examples=100)
    def test_is_bit_for_bit_what_pillow_gives(
        self, channels: int, color: str, width: int, height: int, **options: Any
    ) -> None:
        data = encoded(picture(width, height, channels), "JPEG", **options)
        decoded = pixels_module._decode_jpeg(data, color, None, None, True, None)
        assert decoded is not None  # by simplejpeg, and not by Pillow
        assert decoded.shape == (height, width, len(color))
        np.testing.assert_array_equal(decoded, by_pillow(data, color))

    def test_of_all_kinds(self) -> None:
        options: dict[str, Any]
        for options in (
            {"keep_rgb": True},
            {"optimize": True},
            {"comment": b"Exif\0\0 is no tag here"},
            {"dpi": (300, 300)},
            {"restart_marker_blocks": 3},
            {"exif": Image.Exif()},
            {"icc_profile": bytes(3000)},
            {"qtables": [[9] * 64] * 2},
        ):
            assert_as_pillow(encoded(picture(67, 35), "JPEG", **options), options)
        assert_as_pillow(encoded(picture(31, 17).convert("CMYK"), "JPEG"), "CMYK")
        data = encoded(picture(200, 150), "JPEG")
        for odd in (data + b"trailing garbage" * 50, data[:-2] + bytes(9) + data[-2:]):
            np.testing.assert_array_equal(decode_image(odd), by_pillow(data))

    def test_cut_before_an_end_marker_is_refused(self) -> None:
        whole = picture(200, 150)
        for image, options in (
            (whole, {}),
            (whole, {"progressive": True}),
            (whole, {"exif": turned(6)}),
            (whole.convert("L"), {}),
            (whole.convert("CMYK"), {}),
        ):
            data = encoded(image, "JPEG", **options)
            with pytest.raises(FormatError):
                decode_image(data[: len(data) // 2] + b"\xff\xd9")
        with pytest.raises(FormatError):
            decode_image(larger_jpeg(encoded(picture(40, 30), "JPEG"), 400, 300))


def floats(*values: float) -> bytes:
    return encoded(np.array([values], np.float32), "TIFF")


class TestFormats:
    def test_are_what_pillow_gives(self, bad: dict[str, Path]) -> None:
        for kind in READABLE:
            data = bad[kind].read_bytes()
            assert decode_image(data).shape == (SIZE[1], SIZE[0], 3)
            if kind != "grey16_png":
                assert_as_pillow(data, kind)
        for mode in ("1", "L", "LA", "P", "RGB", "RGBA"):
            assert_as_pillow(encoded(picture(30, 20).convert(mode), "PNG"), mode)
        for kind in ("rgba_png", "palette_png"):  # alpha is dropped, and not blended
            assert (decode_image(bad[kind].read_bytes()) == corners()).all()
        for kind in ("animated_gif", "multipage_tiff"):  # the first frame counts
            assert (decode_image(bad[kind].read_bytes()) == (255, 0, 0)).all()
        lab = Image.merge("LAB", picture(20, 10).split())
        grey = by_pillow(encoded(lab.convert("RGB"), "PNG"), "L")
        assert np.array_equal(decode_image(encoded(lab, "TIFF"), "L"), grey)

    def test_16_bit_grey_is_scaled_and_not_clipped(self) -> None:
        values = np.arange(65536, dtype=np.uint16).reshape(256, 256)
        other_order = Image.frombytes("I;16B", (256, 256), values.astype(">u2").tobytes())
        wanted = np.rint(values / 257)[:, :, None]
        for data in (
            encoded(Image.fromarray(values), "PNG"),
            encoded(Image.fromarray(values), "TIFF"),
            encoded(other_order, "TIFF"),
        ):
            assert np.array_equal(decode_image(data, "L"), wanted)
            assert np.array_equal(decode_image(data), wanted.repeat(3, 2))

    def test_other_grey_is_scaled_by_what_is_white(self) -> None:
        twelve = np.array([[0, 1, 1000, 4094, 4095, 2048]], np.uint16)
        scaled = np.rint(twelve[0] * (255 / 4095)).tolist()
        for data, grey in (
            (tiff(twelve, bits=12), scaled),
            (tiff(twelve, white=4095), scaled),
            (tiff(np.array([[0, 4095, 8190]], np.uint16), white=4095), [0, 128, 255]),
            (tiff(np.array([[0, 7, 255]], np.int16)), [0, 7, 255]),
            (tiff(np.array([[0, 7, 255]], np.int32)), [0, 7, 255]),
            (floats(0, 0.5, 1), [0, 128, 255]),
            (floats(0, 0.5, 255), [0, 0, 255]),
        ):
            assert decode_image(data, "L")[0, :, 0].tolist() == grey
            assert (decode_image(data) == decode_image(data, "L")).all()
        for data in (
            *(floats(*values) for values in ((-0.1, 0.5), (0, 300), (0.5, np.nan))),
            *(tiff(np.array([[-1000, 0, 3000]], kind)) for kind in (np.int16, np.int32)),
        ):
            with pytest.raises(FormatError, match="grey of "):
                decode_image(data)


class TestOrientation:
    def test_is_what_pillow_makes_of_it(self, bad: dict[str, Path]) -> None:
        for orientation in range(1, 9):
            upright = decode_image(bad[f"exif_{orientation}_jpeg"].read_bytes()).astype(int)
            assert np.abs(upright - corners()).mean() < 4, orientation
        # a picture without any symmetry
        image = Image.fromarray(np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3))
        for orientation in (*range(10), 700):
            exif = turned(orientation)
            for data in (
                encoded(image, "JPEG", exif=exif, quality=100, subsampling=0),
                encoded(image, "PNG", exif=exif),
                encoded(image, "WEBP", exif=exif, lossless=True),
                encoded(image, "TIFF", tiffinfo={0x0112: orientation}),
            ):
                assert_as_pillow(data, orientation)

    def test_late_exif_and_xmp_count(self) -> None:
        late = encoded(picture(31, 17), "JPEG", exif=turned(6))
        at = late.index(b"\xff\xe1")  # behind a colour profile of 130 kB
        late = late[:at] + (b"\xff\xe2\xff\xff" + bytes(65533)) * 2 + late[at:]
        tag = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
        for data in (late, encoded(picture(31, 17), "JPEG", xmp=tag)):
            for held in (data, bytearray(data), memoryview(data), np.frombuffer(data, np.uint8)):
                assert image_shape(held) == (31, 17)
                np.testing.assert_array_equal(decode_image(held), by_pillow(data))

    def test_a_broken_exif_block_turns_nothing(self) -> None:
        data = encoded(picture(20, 10), "JPEG")
        for block in (b"", b"MM", b"MM\0*\0\0\0\x08\xff\xff", b"II*\0" + b"\xff" * 40):
            segment = b"Exif\0\0" + block
            header = b"\xff\xe1" + struct.pack(">H", len(segment) + 2)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                marked = decode_image(data[:2] + header + segment + data[2:])
            np.testing.assert_array_equal(marked, decode_image(data), err_msg=str(block))


EPS = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 20 10
%%EndComments
showpage
%%EOF
"""


class TestBad:
    def test_an_eps_named_jpg_starts_no_ghostscript(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        started = tmp_path / "started"
        gs = tmp_path / "gs"
        gs.write_text(f"#!/bin/sh\ntouch {started}\nexit 1\n")
        gs.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
        for read in (decode_image, image_shape, small_of, DECODERS["jpg"]):
            assert read is not None
            with pytest.raises(FormatError):
                read(EPS)
        assert not started.exists()

    def test_running_out_of_memory_is_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def resize(*_: Any) -> None:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes")

        monkeypatch.setattr(pixels_module, "resize_image", resize)
        with pytest.raises(RuntimeError, match="allocate"):
            small_of(encoded(picture(40, 30), "PNG"))

    def test_is_refused_in_one_line(self, bad: dict[str, Path]) -> None:
        messages = {
            "truncated_jpeg": "truncated",
            "empty_jpeg": "empty",
            "text_as_jpeg": "not an image",
            "bomb_png": "900000000.*MAX_IMAGE_PIXELS",
            "bomb_jpeg": "65000 x 65000.*MAX_IMAGE_PIXELS",
        }
        assert messages.keys() == UNREADABLE.keys()
        for kind, message in messages.items():
            data = bad[kind].read_bytes()
            with pytest.raises(FormatError, match=message) as caught:
                decode_image(data)
            assert "\n" not in str(caught.value)
            assert isinstance(caught.value, ValueError)
            for other in (lambda data: decode_image(data, "L"), small_of):
                with pytest.raises(FormatError) as again:
                    other(data)
                assert str(again.value) == str(caught.value)

    def test_cut_anywhere_it_is_refused_or_whole(self) -> None:
        """Never half a picture and grey below."""
        for form in FORMS:
            data = encoded(picture(64, 48), form)
            whole = by_pillow(data)
            for cut in np.linspace(0, len(data) - 1, 40).astype(int).tolist():
                try:
                    decoded = decode_image(data[:cut])
                except FormatError:
                    continue
                np.testing.assert_array_equal(decoded, whole, err_msg=f"{form}, {cut}")

    @given(st.integers(0, 10_000), st.integers(0, 255), st.sampled_from(FORMS))
    def test_a_wrong_byte_is_refused_or_read(self, position: int, value: int, form: str) -> None:
        data = bytearray(encoded(picture(24, 16), form))
        data[position % len(data)] = value
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                decoded = decode_image(bytes(data))
            except FormatError as error:
                assert str(error)
            else:
                assert decoded.ndim == 3
                assert decoded.shape[2] == 3

    def test_the_limit_is_pillows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        data = encoded(picture(40, 30), "PNG")
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
        assert decode_image(data).shape == (30, 40, 3)
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # of which Pillow warns
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for read in (decode_image, image_shape, small_of):
                with pytest.raises(FormatError, match="exceeds limit"):
                    read(data)


def small_of(data: bytes) -> Any:
    return decode_image(data, "RGB", (8, 8), True)


def apart(pixels: Any, image: Image.Image) -> int:
    """Grey levels, at most."""
    return int(np.abs(pixels.astype(int) - np.asarray(image).reshape(pixels.shape)).max())


class TestResize:
    @given(SIDES, SIDES, SIDES, SIDES, st.sampled_from([1, 3]))
    @example(20, 20, 42, 42, 3)  # two grey levels, at one pixel
    @example(12, 52, 50, 50, 3)
    def test_is_pillows_within_a_grey_level_a_direction(
        self, h: int, w: int, to_h: int, to_w: int, channels: int
    ) -> None:
        """Both make two passes, and round after each; torch, of weights of 16 bits, may round a
        half down where Pillow rounds up. So a pass differs by a level at most, and both by two.

        Torch's own floating-point path is wrong for images that are one pixel wide (2.13).
        """
        image = picture(w, h, channels)
        found = resize_image(np.asarray(image).reshape(h, w, channels), (to_h, to_w))
        assert found.shape == (to_h, to_w, channels)
        assert found.dtype == np.uint8
        assert found.flags.c_contiguous
        between = resize_image(np.asarray(image).reshape(h, w, channels), (h, to_w))
        assert np.array_equal(resize_image(between, (to_h, to_w)), found)
        along_rows = image.resize((to_w, h), Image.Resampling.BILINEAR)
        assert apart(between, along_rows) <= 1
        second = resize_image(np.asarray(along_rows).reshape(h, to_w, channels), (to_h, to_w))
        assert apart(second, along_rows.resize((to_w, to_h), Image.Resampling.BILINEAR)) <= 1
        assert apart(found, image.resize((to_w, to_h), Image.Resampling.BILINEAR)) <= 2
