"""Batches of images and the objects in them, whose number differs between images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.arguments import checks_keywords
from headrace.collate.fields import FieldPath
from headrace.collate.stack import USUAL, owned, shape_of, stack_tree
from headrace.errors import CollateError


class DetectionCollator:
    """Collates pairs (image, dict of its objects) to images and a list of dicts, as torchvision's
    detection models take them.

    Args:
        stack: True: stack the images, which must have equal shapes, to [batch, C, H, W]. False:
            return a list of tensors.
    """

    @checks_keywords
    def __init__(self, *, stack: bool = True) -> None:
        self.stack = stack

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Collates samples into a batch.

        Raises:
            CollateError: a sample is not such a pair; or images to be stacked differ in shape.
        """
        for number, sample in enumerate(samples):
            is_pair = isinstance(sample, (tuple, list)) and len(sample) >= 2
            if not is_pair or not isinstance(sample[1], Mapping):
                raise CollateError(
                    number,
                    f" is {shape_of(sample)}: pairs of an image and a dict are needed; use "
                    'collate_fn="list" for others',
                )
        return stack_tree(
            list(samples),
            self._special,
            'Give images one shape (ImageDataset: image_size=), or pass collate_fn="list"',
        )

    def _special(self, values: list[Any], path: FieldPath) -> Any:
        if len(path) == 1 and path[0].names[0] == "1":
            return [{name: owned(value) for name, value in one.items()} for one in values]
        if len(path) == 1 and path[0].names[0] == "0" and not self.stack:
            return [owned(value) for value in values]
        return USUAL

    def __repr__(self) -> str:
        return f"{type(self).__name__}(stack={self.stack})"
