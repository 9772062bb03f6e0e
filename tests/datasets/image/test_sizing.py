"""Resizing while decoding gives what decoding and resizing give."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from headrace.datasets.image import sizing
from headrace.datasets.image.pixels import decode_image, resize_image
from headrace.datasets.image.sizing import Box, image_shape, load_image
from headrace.errors import FormatError
from tests.data.make import READABLE, UNREADABLE, make_bad, noise

SIZES = [(8, 8), (30, 50), (48, 64), (70, 31), (96, 128), (1, 1), (48, 20)]


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_bad(tmp_path_factory.mktemp("bad"))


def jpeg(size: tuple[int, int], seed: int = 0, mode: str = "RGB", **options: Any) -> bytes:
    """A JPEG of smooth colours, with some noise."""
    height, width = size
    rng = np.random.default_rng(seed)
    ramp = np.linspace(0, 255, height * width * 3).reshape(height, width, 3)
    pixels = np.clip(ramp + rng.normal(0, 10, ramp.shape), 0, 255).astype(np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(stream, "JPEG", quality=92, **options)
    return stream.getvalue()


def plainly(
    data: bytes, color: str, size: tuple[int, int], box: Box | None = None, flip: bool = False
) -> np.ndarray[Any, Any]:
    """The plain twin: [H, W, C]."""
    pixels = decode_image(data, color)
    if box is not None:
        pixels = np.ascontiguousarray(
            pixels[box.top : box.top + box.height, box.left : box.left + box.width]
        )
    pixels = resize_image(pixels, size)
    return pixels[:, ::-1] if flip else pixels


class TestTwins:
    @pytest.mark.parametrize("size", [s for s in SIZES if 2 * s[0] > 48 or 2 * s[1] > 64], ids=str)
    @pytest.mark.parametrize("color", ["RGB", "L"])
    @pytest.mark.parametrize("flip", [False, True])
    def test_equal_bytes_where_nothing_is_scaled(
        self, size: tuple[int, int], color: str, flip: bool
    ) -> None:
        data = jpeg((48, 64))
        wanted = plainly(data, color, size, flip=flip)
        assert (load_image(data, color, size, False, flip=flip) == wanted).all()
        first = load_image(data, color, size, True, flip=flip)
        assert first.flags.c_contiguous and (first.transpose(1, 2, 0) == wanted).all()

    @pytest.mark.parametrize("name", sorted(READABLE))
    def test_of_every_kind_of_file(self, bad: dict[str, Path], name: str) -> None:
        data = bad[name].read_bytes()
        shape = decode_image(data).shape[:2]
        for size in ((shape[0], shape[1]), (shape[0] + 7, shape[1] - 3)):
            assert (load_image(data, "RGB", size, False) == plainly(data, "RGB", size)).all()
        assert image_shape(data) == shape

    @pytest.mark.parametrize("name", sorted(UNREADABLE))
    def test_bad_files_are_refused_in_the_same_words(self, bad: dict[str, Path], name: str) -> None:
        data = bad[name].read_bytes()
        with pytest.raises(FormatError) as plain:
            decode_image(data)
        with pytest.raises(FormatError) as fast:
            load_image(data, "RGB", (8, 8), True)
        assert str(fast.value) == str(plain.value)

    @settings(max_examples=60, deadline=None)
    @given(st.data())
    def test_any_part_at_any_size(self, data: st.DataObject) -> None:
        height, width = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 60))
        top, left = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
        box = Box(
            top,
            left,
            data.draw(st.integers(1, height - top)),
            data.draw(st.integers(1, width - left)),
        )
        size = data.draw(st.integers(box.height // 2 + 1, 90)), data.draw(st.integers(1, 90))
        flip, encoded = data.draw(st.booleans()), jpeg((height, width), seed=height)
        assert (
            load_image(encoded, "RGB", size, False, box, flip)
            == plainly(encoded, "RGB", size, box, flip)
        ).all()

    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_parts_of_turned_images_are_those_that_people_see(self, orientation: int) -> None:
        exif = Image.Exif()
        exif[0x0112] = orientation
        data, box = jpeg((40, 60), exif=exif), Box(4, 6, 20, 12)
        assert image_shape(data) == decode_image(data).shape[:2]
        for size in ((25, 25), (10, 6)):  # the second is decoded at half its size
            fast, plain = load_image(data, "RGB", size, False, box), plainly(data, "RGB", size, box)
            assert np.abs(fast.astype(int) - plain).mean() < 4

    def test_the_planes_of_the_other_byte_order(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 4), dtype=np.uint8)
        here = sizing._planes(pixels)
        monkeypatch.setattr(sizing.sys, "byteorder", "big")
        assert (sizing._planes(pixels) == here).all() and (
            here == pixels[..., :3].transpose(2, 0, 1)
        ).all()


class TestScaled:
    @pytest.mark.parametrize(
        ("factor", "size"),
        [
            (1, (201, 10)),
            (2, (200, 150)),
            (2, (101, 76)),
            (4, (100, 75)),
            (8, (50, 37)),
            (8, (6, 5)),
        ],
    )
    def test_decoded_at_the_largest_fraction_that_is_no_smaller(
        self, monkeypatch: pytest.MonkeyPatch, factor: int, size: tuple[int, int]
    ) -> None:
        data, decode, shapes = jpeg((400, 300)), sizing.simplejpeg.decode_jpeg, []

        def noted(*args: Any, **options: Any) -> Any:
            made = decode(*args, **options)
            shapes.append(made.shape[:2])
            return made

        monkeypatch.setattr(sizing.simplejpeg, "decode_jpeg", noted)
        found = load_image(data, "RGB", size, False)
        assert shapes == [(-(-400 // factor), -(-300 // factor))]
        assert found.shape == (*size, 3)
        assert np.abs(found.astype(int) - plainly(data, "RGB", size)).mean() < 3

    @pytest.mark.parametrize("odd", [(401, 307), (403, 305)])
    def test_sides_that_do_not_divide(self, odd: tuple[int, int]) -> None:
        data = jpeg(odd)
        assert (
            np.abs(
                load_image(data, "RGB", (50, 40), False).astype(int)
                - plainly(data, "RGB", (50, 40))
            ).mean()
            < 3
        )

    def test_a_part_counts_and_not_the_image(self) -> None:
        data, box = jpeg((400, 300)), Box(100, 20, 90, 60)
        assert (
            load_image(data, "RGB", (64, 64), False, box) == plainly(data, "RGB", (64, 64), box)
        ).all()
        half = load_image(data, "RGB", (45, 30), False, box)
        assert np.abs(half.astype(int) - plainly(data, "RGB", (45, 30), box)).mean() < 4


class TestMemory:
    def test_nothing_is_overwritten_by_the_next_image(self) -> None:
        data = [jpeg((48, 64), seed) for seed in range(4)]
        made = [load_image(d, "RGB", (50, 40), first) for d in data for first in (True, False)]
        kept = [m.copy() for m in made]
        for d in data:
            load_image(d, "RGB", (50, 40), True)
        assert all(
            (m == k).all() and m.flags.owndata and m.flags.writeable
            for m, k in zip(made, kept, strict=True)
        )

    def test_threads_have_memory_of_their_own(self) -> None:
        data = [jpeg((48 + seed, 64), seed) for seed in range(8)]
        wanted, wrong = [load_image(d, "RGB", (50, 40), True) for d in data], []

        def work(number: int) -> None:
            for _ in range(50):
                if (load_image(data[number], "RGB", (50, 40), True) != wanted[number]).any():
                    wrong.append(number)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    def test_the_pixels_of_a_large_image_are_not_kept(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sizing, "_scratch", sizing._Scratch())
        monkeypatch.setattr(sizing, "_KEPT", 1000 * 4)
        data = jpeg((48, 64))
        assert (load_image(data, "RGB", (50, 40), False) == plainly(data, "RGB", (50, 40))).all()
        assert sizing._scratch.pixels.nbytes == 0

    def test_data_of_any_bytes_like_type(self) -> None:
        data = jpeg((48, 64))
        for kind in (bytearray, memoryview, lambda d: np.frombuffer(d, np.uint8)):
            assert (
                load_image(kind(data), "RGB", (30, 50), True)
                == load_image(data, "RGB", (30, 50), True)
            ).all()
            assert image_shape(kind(data)) == (48, 64)


def test_noise_too(tmp_path: Path) -> None:
    path = tmp_path / "x.jpg"
    Image.fromarray(noise(np.random.default_rng(0), (53, 40))).save(
        path, quality=100, subsampling=0
    )
    assert (
        load_image(path.read_bytes(), "RGB", (224, 224), False)
        == plainly(path.read_bytes(), "RGB", (224, 224))
    ).all()


@pytest.mark.parametrize("nbytes", [1, 31, 1000, sizing._KEPT + 1])
def test_jpegs_are_decoded_between_multiples_of_32(nbytes: int) -> None:
    pixels = sizing._Scratch().of_pixels(nbytes)
    assert len(pixels) == nbytes and pixels.ctypes.data % 32 == 16
