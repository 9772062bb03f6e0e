"""Built-in random crops and flips of images.

They are callables and can be used anywhere. At the head of ``ImageDataset(transform=[...])`` they
work on the encoded image: pixels outside of the crop are not resized, and in a large image not even
decoded.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from headrace.arguments import checks_keywords
from headrace.core.decoder import chained
from headrace.datasets.resizing import Box, resize_image, to_channels_first
from headrace.errors import ConfigError

_ATTEMPTS = 10


class RandomResizedCrop:
    """Crops a random part of an image and resizes it.

    This is the usual augmentation for ImageNet (Szegedy et al., Going deeper with convolutions,
    2015). The area of the part is drawn uniformly from `scale` times the area of the image, the
    logarithm of its aspect ratio (width / height) uniformly from `ratio`, and its position
    uniformly. After 10 draws that don't fit, the largest centred part with a permitted aspect ratio
    is used. Resizing is bilinear and antialiased.

    Random numbers come from Python's `random`, which headrace seeds for each sample.

    Args:
        size: (height, width) of the result, or one int for both.
        scale: smallest and largest area of the part, as fractions of the image's area.
        ratio: smallest and largest aspect ratio of the part.

    Raises:
        ConfigError: a value is invalid.
    """

    @checks_keywords
    def __init__(
        self,
        size: int | tuple[int, int],
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
    ) -> None:
        self.size: tuple[int, int] = image_sides(size, "size")
        if not 0 < scale[0] <= scale[1] <= 1:
            raise ConfigError(f"scale must be two ascending fractions of the area, not {scale!r}")
        if not 0 < ratio[0] <= ratio[1] < math.inf:
            raise ConfigError(f"ratio must be two ascending aspect ratios, not {ratio!r}")
        self.scale: tuple[float, float] = (float(scale[0]), float(scale[1]))
        self.ratio: tuple[float, float] = (float(ratio[0]), float(ratio[1]))

    def draw(self, height: int, width: int) -> Box:
        """Draws the part to crop from an image of the given size."""
        narrowest, widest = self.ratio
        for _ in range(_ATTEMPTS):
            area = height * width * random.uniform(*self.scale)
            aspect = math.exp(random.uniform(math.log(narrowest), math.log(widest)))
            h = round(math.sqrt(area / aspect))
            w = round(math.sqrt(area * aspect))
            if 0 < h <= height and 0 < w <= width:
                return Box(random.randint(0, height - h), random.randint(0, width - w), h, w)
        aspect = min(max(width / height, narrowest), widest)
        h = max(1, min(height, round(width / aspect)))
        w = max(1, min(width, round(height * aspect)))
        return Box((height - h) // 2, (width - w) // 2, h, w)

    def __call__(self, image: Any) -> Any:
        """Crops a PIL image, an array [H, W, C] or a tensor [C, H, W] of uint8, and returns the
        same type.
        """
        return _on_pixels(
            image,
            lambda pixels: resize_image(
                np.ascontiguousarray(self.draw(*pixels.shape[:2]).of(pixels)), self.size
            ),
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.size}, scale={self.scale}, ratio={self.ratio})"


class RandomHorizontalFlip:
    """Mirrors an image left to right with probability `p`.

    Random numbers come from Python's `random`, which headrace seeds for each sample.

    Raises:
        ConfigError: `p` is not a probability.
    """

    @checks_keywords
    def __init__(self, p: float = 0.5) -> None:
        if not 0 <= p <= 1:
            raise ConfigError(f"p must be a probability between 0 and 1, not {p!r}")
        self.p: float = float(p)

    def draw(self) -> bool:
        """True if the next image is to be mirrored."""
        return random.random() < self.p

    def __call__(self, image: Any) -> Any:
        """Mirrors, or returns unchanged, a PIL image, an array [H, W, C] or a tensor [C, H, W]."""
        if not self.draw():
            return image
        if isinstance(image, torch.Tensor):  # of any dtype, on any device
            return image.flip(-1)
        return _on_pixels(image, lambda pixels: np.ascontiguousarray(pixels[:, ::-1]))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(p={self.p})"


class Drawn(NamedTuple):
    """The draws for a sample: the part of the image (None: all), and whether to mirror it."""

    box: Box | None
    flip: bool


class Augment(NamedTuple):
    """A crop, a flip, or both, which the dataset applies itself; or a size alone, without draws.

    Attributes:
        crop, flip: the steps. None: there is no such step.
        size: (height, width) of the result. None: unchanged.
    """

    crop: RandomResizedCrop | None = None
    flip: RandomHorizontalFlip | None = None
    size: tuple[int, int] | None = None

    def draw(self, height: int, width: int) -> Drawn:
        """Draws for an image of that size, in the order of the two steps."""
        box = None if self.crop is None else self.crop.draw(height, width)
        return Drawn(box, self.flip is not None and self.flip.draw())


def split_augment(transform: Any, name: str = "transform") -> tuple[Augment, Any]:
    """Splits a built-in crop, a built-in flip, or a crop and a flip off the head of `transform`;
    returns them, and the rest as one callable or None. (`name`: see `chained`.)

    Raises:
        ConfigError: `transform` is not a callable, a list or tuple of callables, or None.
    """
    augment = Augment()
    if transform is None:
        return augment, None
    steps = list(transform) if isinstance(transform, (list, tuple)) else [transform]
    if steps and type(steps[0]) is RandomResizedCrop:
        crop = steps.pop(0)
        augment = Augment(crop, None, crop.size)
    if steps and type(steps[0]) is RandomHorizontalFlip:
        augment = augment._replace(flip=steps.pop(0))
    return augment, chained(steps, name)


def image_sides(value: Any, name: str, otherwise: str = "") -> tuple[int, int]:
    """Height and width of a size that is given as a pair or one int.

    Raises:
        ConfigError: it is neither.
    """
    sides = value
    if not isinstance(value, (tuple, list)):
        sides = (value, value)
    are_sides = all(
        isinstance(side, (int, np.integer)) and not isinstance(side, bool) and side >= 1
        for side in sides
    )
    if len(sides) != 2 or not are_sides:
        raise ConfigError(
            f"{name} must be (height, width), one int for both{otherwise}, not {value!r}"
        )
    return int(sides[0]), int(sides[1])


def _on_pixels(image: Any, function: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> Any:
    """Applies a function of [H, W, C] arrays to a PIL image, an array or a tensor."""
    from PIL import Image  # here, so that importing headrace takes less time

    if isinstance(image, Image.Image):
        array = np.asarray(image)
        if array.ndim == 3:
            return Image.fromarray(function(array))
        return Image.fromarray(function(array[:, :, None])[:, :, 0])
    if isinstance(image, torch.Tensor):
        pixels = np.ascontiguousarray(image.permute(1, 2, 0))
        return torch.from_numpy(to_channels_first(function(pixels)))
    if isinstance(image, np.ndarray) and image.ndim == 3:
        return function(image)
    what = type(image).__name__
    raise TypeError(f"pass a PIL image, an array [H, W, C] or a tensor [C, H, W], not {what}")
