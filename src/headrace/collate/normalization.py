"""Normalises images: pixels become floats around 0, on the host or on a device."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from headrace.arguments import described
from headrace.errors import ConfigError

STATISTICS = {  # mean and standard deviation of red, green and blue, where pixels are in [0, 1]
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}
WHITE = 255
"""The value of white of uint8."""


@dataclass(frozen=True)
class Normalization:
    """The statistics of images that are normalised: ``(pixel - mean) / std`` of pixels in [0, 1].

    Attributes:
        means, stds: a number for each channel, or one for all.
        fits_grey: True if an image of one channel takes the means of the channels' numbers.
        dtype: of the result.
    """

    means: tuple[float, ...]
    stds: tuple[float, ...]
    fits_grey: bool = False
    dtype: torch.dtype = torch.float32

    def factors(self, channels: int, white: int = WHITE) -> tuple[torch.Tensor, torch.Tensor]:
        """What pixels from 0 to `white` are multiplied with, and what is added then: float32 [C, 1,
        1] each. Two roundings, which are the same everywhere.

        Raises:
            ConfigError: the statistics are of another number of channels.
        """
        if len(self.means) == 1 or len(self.means) == channels:
            scale = [1 / (white * std) for std in self.stds]
            shift = [-mean / std for mean, std in zip(self.means, self.stds, strict=True)]
        elif channels == 1 and self.fits_grey:
            scale = [len(self.stds) / (white * sum(self.stds))]
            shift = [-sum(self.means) / sum(self.stds)]
        else:
            raise ConfigError(
                f"images have {channels} channels, and the statistics have {len(self.means)}: "
                "convert them (ImageDataset: color=) or pass mean= and std= for as many channels"
            )
        return _factor(scale), _factor(shift)

    def normalized(
        self, pixels: torch.Tensor, memory_format: torch.memory_format | None = None
    ) -> torch.Tensor:
        """Images uint8 [C, H, W] or [batch, C, H, W], normalised on the device where they are: of
        this `dtype`, in two passes.

        Each pass rounds to float32, as on the host, so devices whose arithmetic is IEEE's give the
        host's values. Nothing waits for the device but the first call there, which copies the
        factors.

        Args:
            pixels: of as many channels as there are statistics.
            memory_format: of the result, where there is a batch; None: contiguous.
        """
        scale, shift = _factors_on(self, pixels.shape[-3], pixels.device)
        if memory_format is None or pixels.ndim != 4:
            memory_format = torch.contiguous_format
        made = torch.empty(
            pixels.shape, dtype=torch.float32, device=pixels.device, memory_format=memory_format
        )
        torch.mul(pixels, scale, out=made)
        out = made
        if self.dtype is not torch.float32:
            out = torch.empty_like(made, dtype=self.dtype)
        return torch.add(made, shift, out=out)


def _factor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device="cpu").reshape(-1, 1, 1)


def check_normalize(value: object) -> None:
    """Raises a ConfigError for what is no `normalize=`: True, False or "host"."""
    if not isinstance(value, bool) and value != "host":
        raise ConfigError(f"normalize must be True, False or 'host', not {described(value)}")


@functools.lru_cache(64)
def _factors_on(
    normalization: Normalization, channels: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors on a device: kept, since copying them from memory that is not pinned waits for
    the copies before.
    """
    scale, shift = normalization.factors(channels)
    return scale.to(device), shift.to(device)
