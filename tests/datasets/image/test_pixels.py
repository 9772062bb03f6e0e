"""Decoding images: each is what Pillow says it is, and each bad one is refused in one clear
line.
"""

from __future__ import annotations

import io
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import EpsImagePlugin, Image, ImageOps

from headrace.casting import dtype_named
from headrace.datasets.image import pixels as pixels_module
from headrace.datasets.image import sizing
from headrace.datasets.image.claims import Claim
from headrace.datasets.image.pixels import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    decode_image,
    normalize,
    resize_image,
    to_channels_first,
    to_channels_last,
)
from headrace.datasets.image.sizing import image_shape, load_image
from headrace.datasets.shards.members import DECODERS
from headrace.errors import FormatError
from headrace.storage.kinds import EXTENSIONS
from tests.data.make import READABLE, SIZE, UNREADABLE, corners, make_bad

COLORS = ["RGB", "L"]


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_bad(tmp_path_factory.mktemp("bad"))


def by_pillow(data: bytes, color: str) -> np.ndarray[Any, Any]:
    """What Pillow gives, turned upright."""
    with Image.open(io.BytesIO(data)) as image:
        array = np.asarray(ImageOps.exif_transpose(image).convert(color))
    return array if array.ndim == 3 else array[:, :, None]


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def tiff(values: np.ndarray[Any, Any], bits: int | None = None, white: int | None = None) -> bytes:
    """Grey without compression as a TIFF, written by hand: [H, W] integers of 16 or 32 bits, or
    uint16 packed to 12.
    """
    height, width = values.shape
    pixels = values.astype(values.dtype.newbyteorder("<")).tobytes()
    if bits == 12:
        pairs = values.reshape(-1, 2).astype(int)
        pixels = b"".join(bytes([a >> 4, (a & 15) << 4 | b >> 8, b & 255]) for a, b in pairs)
    tags = {
        256: width,
        257: height,
        258: bits or values.itemsize * 8,
        259: 1,
        262: 1,
        273: 0,
        277: 1,
        278: height,
        279: len(pixels),
    }
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
    @pytest.mark.parametrize("color", COLORS)
    @pytest.mark.parametrize("channels", [3, 1])
    @given(
        width=st.integers(1, 70),
        height=st.integers(1, 70),
        quality=st.integers(1, 100),
        subsampling=st.sampled_from([0, 1, 2]),
        progressive=st.booleans(),
    )
    @settings(max_examples=60, deadline=None)
    def test_is_bit_for_bit_what_pillow_gives(
        self,
        channels: int,
        color: str,
        width: int,
        height: int,
        quality: int,
        subsampling: int,
        progressive: bool,
    ) -> None:
        data = encoded(
            picture(width, height, channels),
            "JPEG",
            quality=quality,
            subsampling=subsampling,
            progressive=progressive,
        )
        decoded = pixels_module._decode_jpeg(data, color, Claim(None), None)
        assert decoded is not None  # by simplejpeg, and not by Pillow
        assert decoded.shape == (height, width, len(color)) and decoded.dtype == np.uint8
        np.testing.assert_array_equal(decoded, by_pillow(data, color))

    @pytest.mark.parametrize("color", COLORS)
    @pytest.mark.parametrize(
        "options",
        [
            {"keep_rgb": True},
            {"optimize": True},
            {"comment": b"Exif\0\0 is no tag here"},
            {"dpi": (300, 300)},
            {"restart_marker_blocks": 3},
            {"exif": Image.Exif()},
            {"icc_profile": bytes(3000)},
            {"qtables": [[9] * 64] * 2},
        ],
        ids=[
            "keep_rgb",
            "optimize",
            "comment",
            "dpi",
            "restarts",
            "exif",
            "icc_profile",
            "qtables",
        ],
    )
    def test_of_all_kinds(self, color: str, options: dict[str, Any]) -> None:
        data = encoded(picture(67, 35), "JPEG", **options)
        np.testing.assert_array_equal(decode_image(data, color), by_pillow(data, color))

    @pytest.mark.parametrize("color", COLORS)
    def test_with_four_channels(self, color: str) -> None:
        data = encoded(picture(31, 17).convert("CMYK"), "JPEG")
        np.testing.assert_array_equal(decode_image(data, color), by_pillow(data, color))

    def test_with_bytes_after_its_end(self) -> None:
        data = encoded(picture(40, 30), "JPEG")
        np.testing.assert_array_equal(
            decode_image(data + b"trailing garbage" * 50), by_pillow(data, "RGB")
        )

    @pytest.mark.parametrize(
        "kind", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, np.uint8)]
    )
    @pytest.mark.parametrize("form", ["JPEG", "PNG"])
    def test_from_all_that_holds_bytes(self, kind: Any, form: str) -> None:
        data = encoded(picture(20, 10), form)
        np.testing.assert_array_equal(decode_image(kind(data)), by_pillow(data, "RGB"))


class TestFormats:
    @pytest.mark.parametrize("color", COLORS)
    @pytest.mark.parametrize("kind", [k for k in READABLE if k != "grey16_png"])
    def test_are_what_pillow_gives(self, bad: dict[str, Path], kind: str, color: str) -> None:
        data = bad[kind].read_bytes()
        decoded = decode_image(data, color)
        assert (
            decoded.dtype == np.uint8
            and decoded.flags.c_contiguous
            and decoded.shape == (SIZE[1], SIZE[0], len(color))
        )
        np.testing.assert_array_equal(decoded, by_pillow(data, color))

    @pytest.mark.parametrize("form", ["PNG", "TIFF"])
    def test_16_bit_grey_is_scaled_and_not_clipped(self, form: str) -> None:
        values = np.arange(65536, dtype=np.uint16).reshape(256, 256)
        data = encoded(Image.fromarray(values), form)
        wanted = np.rint(values / 257)
        for color in COLORS:
            decoded = decode_image(data, color)
            assert decoded.shape == (256, 256, len(color))
            assert all((decoded[:, :, c] == wanted).all() for c in range(len(color)))

    def test_16_bit_grey_of_the_other_byte_order(self) -> None:
        values = np.arange(65536, dtype=">u2").reshape(256, 256)
        data = encoded(Image.frombytes("I;16B", (256, 256), values.tobytes()), "TIFF")
        assert (decode_image(data, "L")[:, :, 0] == np.rint(values / 257)).all()

    def test_lab_becomes_grey(self) -> None:
        image = picture(20, 10).convert("RGB")
        lab = Image.merge("LAB", image.split())
        data = encoded(lab, "TIFF")
        assert (decode_image(data, "L") == by_pillow(encoded(lab.convert("RGB"), "PNG"), "L")).all()

    @pytest.mark.parametrize("tag", ["BitsPerSample", "MaxSampleValue"])
    def test_12_bit_grey_of_tiff_is_scaled_by_its_tag(self, tag: str) -> None:
        values = np.array([[0, 1, 1000, 4094, 4095, 2048]], np.uint16)
        data = tiff(values, bits=12) if tag == "BitsPerSample" else tiff(values, white=4095)
        assert (
            decode_image(data, "L")[0, :, 0].tolist() == np.rint(values[0] * (255 / 4095)).tolist()
        )

    def test_a_tag_of_white_that_is_too_low(self) -> None:
        values = np.array([[0, 4095, 8190]], np.uint16)
        assert decode_image(tiff(values, white=4095), "L")[0, :, 0].tolist() == [0, 128, 255]

    @pytest.mark.parametrize(
        ("values", "grey"),
        [
            ([0, 0.5, 1], [0, 128, 255]),
            ([0, 0.5, 255], [0, 0, 255]),
            ([0, 128, 255], [0, 128, 255]),
        ],
    )
    def test_grey_of_floats(self, values: list[float], grey: list[int]) -> None:
        data = encoded(Image.fromarray(np.array([values], np.float32)), "TIFF")
        assert (
            decode_image(data, "L")[0, :, 0].tolist() == grey
            and (decode_image(data) == decode_image(data, "L")).all()
        )

    @pytest.mark.parametrize("values", [[-0.1, 0.5], [0, 300], [0.5, np.nan]])
    def test_floats_without_a_white_are_refused(self, values: list[float]) -> None:
        with pytest.raises(
            FormatError, match=r"grey of floats .* which of them is white.*scale the files"
        ):
            decode_image(encoded(Image.fromarray(np.array([values], np.float32)), "TIFF"))

    @pytest.mark.parametrize("dtype", [np.int16, np.int32])
    def test_grey_of_signed_integers(self, dtype: Any) -> None:
        sound = tiff(np.array([[0, 7, 255]], dtype))
        assert decode_image(sound, "L")[0, :, 0].tolist() == [0, 7, 255]
        with pytest.raises(
            FormatError, match=r"grey of signed or 32-bit integers from -1000 to 3000"
        ):
            decode_image(tiff(np.array([[-1000, 0, 3000]], dtype)))

    def test_alpha_is_dropped_and_not_blended(self, bad: dict[str, Path]) -> None:
        assert (decode_image(bad["rgba_png"].read_bytes()) == corners()).all()
        assert (decode_image(bad["palette_png"].read_bytes()) == corners()).all()

    @pytest.mark.parametrize("kind", ["animated_gif", "multipage_tiff"])
    def test_the_first_frame_counts(self, bad: dict[str, Path], kind: str) -> None:
        assert (decode_image(bad[kind].read_bytes()) == (255, 0, 0)).all()

    @pytest.mark.parametrize("color", COLORS)
    @pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
    def test_every_mode_of_png(self, mode: str, color: str) -> None:
        data = encoded(picture(30, 20).convert(mode), "PNG")
        np.testing.assert_array_equal(decode_image(data, color), by_pillow(data, color))


def turned(orientation: int, form: str) -> bytes:
    """A picture without any symmetry, with an orientation tag."""
    array = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)
    exif = Image.Exif()
    exif[0x0112] = orientation
    lossless = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}}.get(
        form, {}
    )
    options = {"tiffinfo": {0x0112: orientation}} if form == "TIFF" else {"exif": exif, **lossless}
    return encoded(Image.fromarray(array), form, **options)


class TestOrientation:
    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_a_photograph_stands_upright(self, bad: dict[str, Path], orientation: int) -> None:
        decoded = decode_image(bad[f"exif_{orientation}_jpeg"].read_bytes()).astype(int)
        assert np.abs(decoded - corners()).mean() < 4

    @pytest.mark.parametrize(
        ("form", "orientation"),
        [
            (form, orientation)
            for form in ("JPEG", "PNG", "WEBP", "TIFF")
            for orientation in (*range(9), 9, 700)
        ],
    )
    def test_is_what_pillow_makes_of_it(self, form: str, orientation: int) -> None:
        data = turned(orientation, form)
        for color in COLORS:
            decoded = decode_image(data, color)
            assert decoded.flags.c_contiguous
            np.testing.assert_array_equal(decoded, by_pillow(data, color))

    @pytest.mark.parametrize("where", ["late", "xmp"])
    @pytest.mark.parametrize(
        "kind", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, np.uint8)]
    )
    def test_late_exif_and_xmp_count(self, where: str, kind: Any) -> None:
        if where == "late":  # behind a colour profile of 130 kB
            exif = Image.Exif()
            exif[0x0112] = 6
            data = encoded(picture(31, 17), "JPEG", exif=exif)
            at = data.index(b"\xff\xe1")
            data = data[:at] + (b"\xff\xe2\xff\xff" + bytes(65533)) * 2 + data[at:]
        else:
            data = encoded(
                picture(31, 17),
                "JPEG",
                xmp=b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>',
            )
        assert by_pillow(data, "RGB").shape == (31, 17, 3)
        np.testing.assert_array_equal(decode_image(kind(data)), by_pillow(data, "RGB"))
        assert image_shape(kind(data)) == (31, 17)


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
        for read in (decode_image, image_shape, lambda data: load_image(data, "RGB", (8, 8), True)):
            with pytest.raises(FormatError, match="the content is no image"):
                read(EPS)
        assert DECODERS["jpg"] is not None
        with pytest.raises(FormatError, match="the content is no image"):
            DECODERS["jpg"](EPS)
        assert not started.exists()

    @pytest.mark.parametrize(
        "read", [decode_image, image_shape, lambda data: load_image(data, "RGB", (8, 8), True)]
    )
    def test_a_warning_raised_is_the_images_fault(
        self, read: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data = encoded(picture(40, 30), "PNG")
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(FormatError, match="exceeds limit"):
                read(data)

    def test_running_out_of_memory_is_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def resize(*_: Any) -> None:
            raise RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate "
                "9 bytes."
            )

        monkeypatch.setattr(sizing, "resize_image", resize)
        with pytest.raises(RuntimeError, match="allocate"):
            load_image(encoded(picture(40, 30), "PNG"), "RGB", (8, 8), True)

    @pytest.mark.parametrize("color", COLORS)
    @pytest.mark.parametrize(
        ("kind", "message"),
        [
            ("truncated_jpeg", "broken image: .*truncated"),
            ("empty_jpeg", "empty"),
            ("text_as_jpeg", "the content is no image"),
            ("bomb_png", r"decompression bomb.*900000000.*MAX_IMAGE_PIXELS"),
            ("bomb_jpeg", r"decompression bomb.*65000 x 65000.*MAX_IMAGE_PIXELS"),
        ],
    )
    def test_is_refused_in_one_line(
        self, bad: dict[str, Path], kind: str, message: str, color: str
    ) -> None:
        with pytest.raises(FormatError, match=message) as caught:
            decode_image(bad[kind].read_bytes(), color)
        assert "\n" not in str(caught.value) and isinstance(caught.value, ValueError)

    def test_all_kinds_are_looked_at(self) -> None:
        assert set(UNREADABLE) == {
            "truncated_jpeg",
            "empty_jpeg",
            "text_as_jpeg",
            "bomb_png",
            "bomb_jpeg",
        }

    @pytest.mark.parametrize("form", ["JPEG", "PNG", "BMP", "TIFF", "WEBP", "GIF"])
    def test_cut_anywhere_it_is_refused_or_whole(self, form: str) -> None:
        """Never half a picture and grey below."""
        data = encoded(picture(64, 48), form)
        whole = by_pillow(data, "RGB")
        for cut in np.linspace(0, len(data) - 1, 40).astype(int).tolist():
            try:
                decoded = decode_image(data[:cut])
            except FormatError:
                continue
            np.testing.assert_array_equal(decoded, whole)

    @given(
        st.integers(0, 10_000),
        st.integers(0, 255),
        st.sampled_from(["JPEG", "PNG", "TIFF", "WEBP", "GIF", "BMP"]),
    )
    @settings(max_examples=150, deadline=None)
    def test_a_wrong_byte_is_refused_or_read_as_an_image(
        self, position: int, value: int, form: str
    ) -> None:
        data = bytearray(encoded(picture(24, 16), form))
        data[position % len(data)] = value
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                decoded = decode_image(bytes(data))
            except FormatError as error:
                assert str(error)
            else:
                assert decoded.ndim == 3 and decoded.shape[2] == 3

    @pytest.mark.parametrize("form", ["JPEG", "PNG"])
    def test_the_limit_is_pillows(self, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
        data = encoded(picture(40, 30), form)
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 599)
        with pytest.raises(FormatError, match="bomb"):
            decode_image(data)
        for limit in (1200, None):
            monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
            assert decode_image(data).shape == (30, 40, 3)

    @pytest.mark.parametrize("progressive", [False, True])
    def test_a_cut_jpeg_with_an_end_marker_is_refused_too(self, progressive: bool) -> None:
        data = encoded(picture(200, 150), "JPEG", progressive=progressive)
        with pytest.raises(FormatError):
            decode_image(data[: len(data) // 2] + b"\xff\xd9")

    @pytest.mark.parametrize("mode", ["L", "CMYK"])
    def test_and_one_of_other_colours(self, mode: str) -> None:
        data = encoded(picture(200, 150).convert(mode), "JPEG")
        np.testing.assert_array_equal(decode_image(data), by_pillow(data, "RGB"))
        with pytest.raises(FormatError, match="premature end"):
            decode_image(data[: len(data) // 2] + b"\xff\xd9")

    def test_a_cut_photograph_with_exif_is_refused(self) -> None:
        exif = Image.Exif()
        exif[0x0112] = 6
        data = encoded(picture(200, 150), "JPEG", exif=exif)
        with pytest.raises(FormatError, match="premature end"):
            decode_image(data[: len(data) // 2] + b"\xff\xd9")

    def test_extraneous_bytes_do_no_harm(self) -> None:
        data = encoded(picture(200, 150), "JPEG")
        np.testing.assert_array_equal(
            decode_image(data[:-2] + bytes(9) + data[-2:]), by_pillow(data, "RGB")
        )

    @pytest.mark.parametrize(
        "block", [b"", b"MM", b"MM\0*\0\0\0\x08\xff\xff", b"II*\0" + b"\xff" * 40, b"nonsense"]
    )
    def test_a_broken_exif_block_turns_nothing(self, block: bytes) -> None:
        data = encoded(picture(20, 10), "JPEG")
        segment = b"Exif\0\0" + block
        marked = data[:2] + b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + data[2:]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            np.testing.assert_array_equal(decode_image(marked), decode_image(data))

    def test_a_jpeg_that_claims_to_be_larger_is_refused(self) -> None:
        data = bytearray(encoded(picture(40, 30), "JPEG"))
        struct.pack_into(">HH", data, data.index(b"\xff\xc0") + 5, 300, 400)
        with pytest.raises(FormatError):
            decode_image(bytes(data))


def apart(pixels: Any, image: Image.Image) -> int:
    """Grey levels, at most."""
    return int(np.abs(pixels.astype(int) - np.asarray(image).reshape(pixels.shape)).max())


class TestResize:
    @given(
        st.integers(1, 60),
        st.integers(1, 60),
        st.integers(1, 60),
        st.integers(1, 60),
        st.sampled_from([1, 3]),
    )
    @settings(max_examples=100, deadline=None)
    @example(20, 20, 42, 42, 3)  # two grey levels, at one pixel
    @example(12, 52, 50, 50, 3)
    def test_is_pillows_within_a_grey_level_a_direction(
        self, h: int, w: int, to_h: int, to_w: int, channels: int
    ) -> None:
        """Both make two passes, and round to grey levels after each. Exact halves, and what is as
        near to one as torch's weights of 16 bits are rough, torch may round down where Pillow
        rounds up. So a pass differs by a level at most; and after both it may be two: at 20 x 20 ->
        42 x 42 two neighbours of the first pass are 218.5 and 253.5, torch goes on with 218 and
        253, Pillow with 219 and 254; of these the second pass makes 230.5 and 231.5, and so 230 and
        232. Nothing here is random, or depends on threads.

        Not compared with torch's own floating-point path, which is wrong for images that are one
        pixel wide (2.13).
        """
        image = picture(w, h, channels)
        found = resize_image(np.asarray(image).reshape(h, w, channels), (to_h, to_w))
        assert (
            found.shape == (to_h, to_w, channels)
            and found.dtype == np.uint8
            and found.flags.c_contiguous
        )
        between = resize_image(np.asarray(image).reshape(h, w, channels), (h, to_w))
        assert np.array_equal(resize_image(between, (to_h, to_w)), found)
        along_rows = image.resize((to_w, h), Image.Resampling.BILINEAR)
        assert apart(between, along_rows) <= 1
        second = resize_image(np.asarray(along_rows).reshape(h, to_w, channels), (to_h, to_w))
        assert apart(second, along_rows.resize((to_w, to_h), Image.Resampling.BILINEAR)) <= 1
        assert apart(found, image.resize((to_w, to_h), Image.Resampling.BILINEAR)) <= 2

    def test_so_it_is_at_usual_sizes(self) -> None:
        image = picture(201, 150)
        for size in [(224, 224), (64, 64), (33, 190), (299, 20)]:
            wanted = np.asarray(image.resize(size[::-1], Image.Resampling.BILINEAR)).astype(int)
            assert np.abs(resize_image(np.asarray(image), size).astype(int) - wanted).max() <= 1

    def test_of_its_own_size_it_is_itself(self) -> None:
        pixels = np.asarray(picture(8, 6))
        assert resize_image(pixels, (6, 8)) is pixels

    def test_a_tall_strip_is_never_widened_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked, interpolate = list[Any](), torch.nn.functional.interpolate
        monkeypatch.setattr(
            torch.nn.functional,
            "interpolate",
            lambda *a, size, **k: asked.append(size) or interpolate(*a, size=size, **k),
        )
        strip = np.repeat(np.linspace(0, 255, 100_000).astype(np.uint8), 3).reshape(-1, 1, 3)
        found = resize_image(strip, (8, 300))
        assert asked == [(8, 1), (8, 300)] and found.shape == (8, 300, 3)
        assert np.abs(found[:, 0, 0].astype(int) - [18, 47, 79, 111, 143, 175, 207, 236]).max() <= 1

    def test_warns_of_nothing(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            resize_image(np.asarray(picture(8, 6)), (3, 3))
            normalize(to_channels_first(np.asarray(picture(8, 6))))


class TestLayoutAndValues:
    def test_channels(self) -> None:
        pixels = np.asarray(picture(8, 6))
        first = to_channels_first(pixels)
        assert (
            first.shape == (3, 6, 8)
            and first.flags.c_contiguous
            and (first[1] == pixels[:, :, 1]).all()
        )
        assert (to_channels_last(first) == pixels).all() and to_channels_last(
            first
        ).flags.c_contiguous

    def test_normalize(self) -> None:
        pixels = to_channels_first(np.asarray(picture(16, 16)))
        before = pixels.copy()
        found = normalize(pixels)
        mean, std = (
            torch.tensor(v, dtype=torch.float64).view(3, 1, 1)
            for v in (IMAGENET_MEAN, IMAGENET_STD)
        )
        wanted = (torch.from_numpy(pixels).double() / 255 - mean) / std
        assert found.dtype is torch.float32 and found.is_contiguous()
        assert (found.double() - wanted).abs().max() < 1e-6
        assert (pixels == before).all()

    def test_normalize_grey(self) -> None:
        pixels = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
        mean, std = sum(IMAGENET_MEAN) / 3, sum(IMAGENET_STD) / 3
        wanted = (torch.from_numpy(pixels.copy()).double() / 255 - mean) / std
        assert (normalize(pixels).double() - wanted).abs().max() < 1e-6

    @pytest.mark.parametrize("channels", [1, 3])
    @pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("threads", [1, 2])
    def test_16_bits_are_the_nearest_of_each_value(
        self, channels: int, half: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        pixels = np.tile(np.arange(256, dtype=np.uint8).reshape(1, 16, 16), (channels, 1, 1))
        values = normalize(pixels)
        # none lies halfway between two of bfloat16
        assert not (values.view(torch.int32) & 0xFFFF == 0x8000).any()
        assert torch.equal(normalize(pixels, dtype_named(half)), values.to(half))

    def test_extensions(self) -> None:
        assert set(EXTENSIONS) == {
            ".jpg",
            ".jpeg",
            ".png",
            ".bmp",
            ".tiff",
            ".tif",
            ".webp",
            ".gif",
            ".avif",
            ".heic",
            ".heif",
            ".jxl",
        }
