"""Resizing while decoding gives what decoding and resizing give."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from PIL import Image

from headrace.datasets import pixels as pixels_module
from headrace.datasets.pixels import decode_image, image_shape
from headrace.datasets.resizing import Box, resize_image
from tests.data.make import READABLE, image_bytes, make_bad, turned

Pixels = np.ndarray[Any, Any]


def jpeg(size: tuple[int, int], seed: int = 0, mode: str = "RGB", **options: Any) -> bytes:
    """A JPEG of smooth colours, with some noise."""
    height, width = size
    rng = np.random.default_rng(seed)
    ramp = np.linspace(0, 255, height * width * 3).reshape(height, width, 3)
    pixels = np.clip(ramp + rng.normal(0, 10, ramp.shape), 0, 255).astype(np.uint8)
    return image_bytes(Image.fromarray(pixels).convert(mode), "JPEG", quality=92, **options)


def plainly(
    data: bytes, color: str, size: tuple[int, int], box: Box | None = None, flip: bool = False
) -> Pixels:
    """The plain twin: [H, W, C]."""
    pixels = decode_image(data, color)
    if box is not None:
        part = pixels[box.top : box.top + box.height, box.left : box.left + box.width]
        pixels = np.ascontiguousarray(part)
    pixels = resize_image(pixels, size)
    return pixels[:, ::-1] if flip else pixels


def difference(data: bytes, size: tuple[int, int], box: Box | None = None) -> float:
    """From the plain twin, in grey levels a pixel."""
    found = decode_image(data, "RGB", size, False, box)
    return float(np.abs(found.astype(int) - plainly(data, "RGB", size, box)).mean())


class TestTwins:
    def test_of_every_kind_of_file(self, tmp_path: Path) -> None:
        bad = make_bad(tmp_path)
        for name in READABLE:
            data = bad[name].read_bytes()
            height, width = decode_image(data).shape[:2]
            assert image_shape(data) == (height, width)
            for size in ((height, width), (height + 7, width - 3)):
                found = decode_image(data, "RGB", size, False)
                assert np.array_equal(found, plainly(data, "RGB", size)), name

    @given(st.data())
    def test_any_part_at_any_size(self, data: st.DataObject) -> None:
        height, width = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 60))
        top, left = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
        sides = data.draw(st.integers(1, height - top)), data.draw(st.integers(1, width - left))
        box = Box(top, left, *sides)
        size = data.draw(st.integers(box.height // 2 + 1, 90)), data.draw(st.integers(1, 90))
        flip, color = data.draw(st.booleans()), data.draw(st.sampled_from(["RGB", "L"]))
        encoded = jpeg((height, width), seed=height, subsampling=data.draw(st.integers(0, 2)))
        wanted = plainly(encoded, color, size, box, flip)
        assert np.array_equal(decode_image(encoded, color, size, False, box, flip), wanted)
        first = decode_image(encoded, color, size, True, box, flip)
        assert first.flags.c_contiguous
        assert np.array_equal(first.transpose(1, 2, 0), wanted)

    def test_parts_of_turned_images_are_those_that_people_see(self) -> None:
        for orientation in range(1, 9):
            data = jpeg((40, 60), exif=turned(orientation))
            assert image_shape(data) == decode_image(data).shape[:2]
            for size in ((25, 25), (10, 6)):  # the second is decoded at half its size
                assert difference(data, size, Box(4, 6, 20, 12)) < 4, orientation


class TestScaled:
    def test_decoded_at_the_smallest_size_that_is_enough(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data, decode = jpeg((400, 300)), pixels_module.simplejpeg.decode_jpeg
        shapes: list[Any] = []

        def noted(*args: Any, **options: Any) -> Any:
            made = decode(*args, **options)
            shapes.append(made.shape[:2])
            return made

        monkeypatch.setattr(pixels_module.simplejpeg, "decode_jpeg", noted)
        for factor, size in (
            (1, (201, 10)),
            (2, (200, 150)),
            (2, (101, 76)),
            (4, (100, 75)),
            (8, (50, 37)),
            (8, (6, 5)),
        ):
            shapes.clear()
            assert decode_image(data, "RGB", size, False).shape == (*size, 3)
            assert shapes == [(-(-400 // factor), -(-300 // factor))], size
            assert difference(data, size) < 3
        assert difference(jpeg((401, 307)), (50, 40)) < 3  # sides that do not divide

    def test_a_part_counts_and_not_the_image(self) -> None:
        data, box = jpeg((400, 300)), Box(100, 20, 90, 60)
        assert difference(data, (64, 64), box) == 0
        assert 0 < difference(data, (45, 30), box) < 4


class TestMemory:
    def test_threads_have_memory_of_their_own(self) -> None:
        data = [jpeg((48 + seed, 64), seed) for seed in range(8)]
        wanted = [decode_image(one, "RGB", (50, 40), True) for one in data]
        wrong: list[int] = []

        def work(number: int) -> None:
            for _ in range(50):
                if (decode_image(data[number], "RGB", (50, 40), True) != wanted[number]).any():
                    wrong.append(number)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
