"""Images are normalised on a device as on the host: the same arithmetic, in whatever layout and
dtype.
"""

from typing import Any

import pytest
import torch

from headrace.collate.normalization import Normalization
from headrace.datasets.image.pixels import IMAGENET, normalize

# the most that rounding to the nearest is off, relatively
HALVES = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


def images(channels: int) -> torch.Tensor:
    """uint8 [2, C, 16, 16], each with all values in each channel."""
    ramp = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    return torch.stack(
        [torch.stack([ramp.roll(7 * c + i) for c in range(channels)]) for i in range(2)]
    )


@pytest.mark.parametrize("memory_format", [None, torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("channels", [1, 3])
def test_values_are_those_of_the_host_bit_for_bit(channels: int, memory_format: Any) -> None:
    pixels = images(channels)
    made = IMAGENET.normalized(pixels, memory_format)
    expected = torch.stack([normalize(image.numpy()) for image in pixels])
    assert (
        torch.equal(made.view(torch.int32), expected.view(torch.int32))
        and made.dtype == torch.float32
    )
    assert made.is_contiguous(memory_format=memory_format or torch.contiguous_format)
    assert torch.equal(IMAGENET.normalized(pixels[1], memory_format), expected[1]), (
        "one image, without a batch"
    )


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("memory_format", [None, torch.channels_last])
def test_half_precision_is_rounded_once(dtype: torch.dtype, memory_format: Any) -> None:
    pixels = images(3)
    made = Normalization(IMAGENET.means, IMAGENET.stds, dtype=dtype).normalized(
        pixels, memory_format
    )
    single = IMAGENET.normalized(pixels)
    assert made.dtype == dtype and torch.equal(made, single.to(dtype))
    assert made.is_contiguous(memory_format=memory_format or torch.contiguous_format)
    assert ((made.double() - single.double()).abs() <= HALVES[dtype] * single.double().abs()).all()


def test_a_crop_of_a_larger_batch_and_an_empty_one() -> None:
    pixels = images(3)
    assert torch.equal(
        IMAGENET.normalized(pixels[:, :, 3:9, ::2]), IMAGENET.normalized(pixels)[:, :, 3:9, ::2]
    )
    assert IMAGENET.normalized(pixels[:0]).shape == (0, 3, 16, 16)
