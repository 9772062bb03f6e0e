"""Images are normalised on a device as on the host, in whatever layout and dtype."""

import pytest
import torch

from headrace.collate.vision import Normalization
from headrace.datasets.resizing import IMAGENET
from headrace.testing.contract import same


def images(channels: int) -> torch.Tensor:
    """uint8 [2, C, 16, 16], each with all values in each channel."""
    ramp = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    rolled = [ramp.roll(7 * c + i) for i in range(2) for c in range(channels)]
    return torch.stack(rolled).reshape(2, channels, 16, 16)


def test_values_are_those_of_the_host_bit_for_bit() -> None:
    for memory_format in (None, torch.channels_last):
        for channels in (1, 3):
            pixels = images(channels)
            made = IMAGENET.normalized(pixels, memory_format)
            expected = torch.empty(pixels.shape)
            for image, out in zip(pixels.numpy(), expected.numpy(), strict=True):
                IMAGENET.write(image, out)
            assert same(made, expected)
            assert made.is_contiguous(memory_format=memory_format or torch.contiguous_format)
            # one image, without a batch
            assert torch.equal(IMAGENET.normalized(pixels[1], memory_format), expected[1])


# the most that rounding to the nearest is off, relatively
@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_half_precision_is_rounded_once(dtype: torch.dtype, most: float) -> None:
    pixels = images(3)
    half = Normalization(IMAGENET.means, IMAGENET.stds, dtype=dtype)
    made = half.normalized(pixels, torch.channels_last)
    single = IMAGENET.normalized(pixels)
    assert made.is_contiguous(memory_format=torch.channels_last)
    assert made.dtype == dtype and torch.equal(made, single.to(dtype))
    assert ((made.double() - single.double()).abs() <= most * single.double().abs()).all()


def test_a_crop_of_a_larger_batch_and_an_empty_one() -> None:
    pixels = images(3)
    crop = IMAGENET.normalized(pixels[:, :, 3:9, ::2])
    assert torch.equal(crop, IMAGENET.normalized(pixels)[:, :, 3:9, ::2])
    assert IMAGENET.normalized(pixels[:0]).shape == (0, 3, 16, 16)
