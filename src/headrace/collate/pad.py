"""Collates samples whose sequences have different lengths."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from headrace.collate.fields import Field, FieldPath, Fields, at_path
from headrace.collate.padding import Number, Padding, example_of, is_sequence, to_rows
from headrace.collate.stack import USUAL, from_array, is_numeric, owned, shape_of, stack_inside, stack_tree
from headrace.display import short_call
from headrace.errors import CollateError, ConfigError
from headrace.memory.tree import like_mapping

_MASK, _LENGTHS = "attention_mask", "lengths"
_ONE_SHAPE = (
    "Name the field in fields= to have it padded along its first dimension (without fields= only 1-D sequences are), give all one shape, "
    "or leave the field out"
)


class Padded(NamedTuple):
    """A padded field that lies in no dict."""

    values: torch.Tensor
    """[batch, length, ...], of the samples' dtype."""
    attention_mask: torch.Tensor
    """int64 [batch, length]: 1 at samples' elements, 0 at padding."""
    lengths: torch.Tensor
    """int64 [batch]: of the samples."""


class PadCollator:
    """Pads sequences to one length; everything else is stacked as `stack_collate` does it. ``collate_fn=pad_collate()``.

    Sequences [length_i, ...] become a tensor [batch, length, ...] of their dtype. Beside a padded field of a dict stand
    ``attention_mask`` (int64 [batch, length], 1 at samples' elements) and ``lengths`` (int64 [batch]). Where a dict has several padded
    fields, these two belong to "input_ids", or else to the first of them, and each other one has ``<field>_attention_mask`` and
    ``<field>_lengths``. An ``attention_mask`` that the samples bring along is padded with 0 and stays the mask. A padded field that
    lies elsewhere (a tuple's, or the sample itself) becomes a `Padded`: ``for (tokens, mask, lengths), labels in loader``.

    Like HuggingFace's, it cuts nothing unless it is told to: a sample longer than `max_length` is an error without ``truncation=True``.

    Args:
        fields: keys or positions of what is padded, along the first dimension; "outer.inner" for a field inside of another. None:
            every 1-D tensor or array and every list of numbers.
        padding: "longest": as long as the longest one of the batch; "max_length": always `max_length`.
        max_length: no sequence may be longer.
        pad_value: what is filled in; or a mapping from field to value, where others get 0.
        pad_to_multiple_of: the length is rounded up to a multiple of it, beyond `max_length` too.
        truncation: what is longer than `max_length` loses its end.
        padding_side: "right": the padding follows the sequence; "left": it comes before.

    Raises:
        ConfigError: an argument makes no sense; in a call: dtypes or ranks differ, a field is missing, a sample is longer than
            `max_length`, `pad_value` is no value of the dtype. The message names sample, place and remedy.
    """

    def __init__(
        self,
        fields: Field | Iterable[Field] | None = None,
        padding: str = "longest",
        max_length: int | None = None,
        pad_value: Number | Mapping[Field, Number] = 0,
        pad_to_multiple_of: int | None = None,
        *,
        truncation: bool = False,
        padding_side: str = "right",
    ) -> None:
        self._text = short_call("pad_collate", PadCollator, locals())
        try:
            self._fields = None if fields is None else Fields(fields, "fields")
        except ConfigError as error:
            raise ConfigError(f"{error} (pad_collate makes a collate function: write collate_fn=pad_collate(), with brackets)") from None
        self._padding = Padding(padding, max_length, pad_to_multiple_of, truncation, padding_side)
        given = dict(pad_value) if isinstance(pad_value, Mapping) else {}
        self._valued = Fields(given, "pad_value")
        self._values = {str(name): value for name, value in given.items()}
        self._value: Number = 0 if isinstance(pad_value, Mapping) else pad_value
        for value in (*self._values.values(), self._value):
            if not isinstance(value, numbers.Number):
                raise ConfigError(f"pad_value must be a number, or a mapping from field to number, not {value!r}")

    def __call__(self, samples: Sequence[Any]) -> Any:
        """The batch of the samples."""
        samples = list(samples)
        met: set[str] = set()

        def special(values: list[Any], path: FieldPath) -> Any:
            if self._is_padded(values, path, met):
                return self._padded(values, path, met)
            if isinstance(values[0], Mapping):
                return _beside(stack_inside(values, path, special, _ONE_SHAPE), path)
            return USUAL

        try:
            batch = stack_tree(samples, special, _ONE_SHAPE)
        except (CollateError, ConfigError):
            if samples:
                self._check_names(samples[0])  # a name that means nothing is the nearer cause
            raise
        for fields in (self._fields, self._valued):
            if fields is not None:
                fields.check(met, samples[0])
        return batch

    def __repr__(self) -> str:
        return self._text

    def _check_names(self, sample: Any) -> None:
        met: set[str] = set()

        def note(values: list[Any], path: FieldPath) -> Any:
            return values if self._is_padded(values, path, met) else USUAL

        stack_tree([sample], note)
        if self._fields is not None:
            self._fields.check(met, sample)

    def _is_padded(self, values: list[Any], path: FieldPath, met: set[str]) -> bool:
        if self._fields is None:
            return is_sequence(example_of(values))
        return self._fields.find(path, met) is not None

    def _padded(self, values: list[Any], path: FieldPath, met: set[str]) -> Padded:
        name = self._valued.find(path, met)
        value = self._values[name] if name is not None else 0 if path and _MASK in path[-1].names else self._value
        padded, lengths = self._padding.apply(to_rows(values, path), value, path)
        return Padded(padded, self._padding.mask(lengths, padded.shape[1]), lengths)


pad_collate = PadCollator
"""Its name as a maker of collate functions."""


def variable_length_collate(samples: Sequence[Any]) -> Any:
    """Collates pairs (input, target) to a list of the inputs, each a tensor of its own length, and the stacked targets.

    Inputs are tensors, arrays or lists of numbers, of any shape and dtype; targets are stacked as `stack_collate` does it. Nothing is
    padded; `pad_collate` does that.

    Raises:
        CollateError: a sample is no pair, an input is something else, or the targets differ in shape.
    """
    samples = list(samples)
    for number, sample in enumerate(samples):
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            reason = 'variable_length_collate needs pairs (input, target); use collate_fn="list" for others'
            raise CollateError(number, f" is {shape_of(sample)}: {reason}")

    def special(values: list[Any], path: FieldPath) -> Any:
        is_input = len(path) == 1 and path[0].names[0] == "0"
        return [owned(_tensor_of(value, number)) for number, value in enumerate(values)] if is_input else USUAL

    return stack_tree(samples, special, 'Give targets of one shape, or use collate_fn="list"')


def _tensor_of(value: Any, number: int) -> torch.Tensor:
    if isinstance(value, list) and is_sequence(value):
        value = np.asarray(value) if value else np.empty(0, np.int64)
    if not isinstance(value, torch.Tensor) and not is_numeric(value):
        raise CollateError(number, f" at [0] is {shape_of(value)}: an input must be a tensor, an array or a list of numbers")
    return value if isinstance(value, torch.Tensor) else from_array(value)


def _beside(batch: Any, path: FieldPath) -> Any:
    """A dict whose padded fields have their masks and lengths beside them."""
    padded = [key for key, value in batch.items() if isinstance(value, Padded)]
    if not padded:
        return batch
    leaders = [key for key in padded if key != _MASK] or padded
    leader = "input_ids" if "input_ids" in leaders else leaders[0]
    fields = {key: value.values if key in padded else value for key, value in batch.items()}
    for key in leaders:
        front = "" if key == leader else f"{key}_"
        for name, made in ((_MASK, batch[key].attention_mask), (_LENGTHS, batch[key].lengths)):
            if name == _MASK and not front and _MASK in padded:
                continue
            if front + name in batch:
                raise ConfigError(
                    f"the samples have a field {front + name!r} already{at_path(path)}, where pad_collate puts the {name} of {key!r}: "
                    "rename it, or leave it out" + (", or name it in fields" if name == _MASK else "")
                )
            fields[front + name] = made
    return fields if type(batch) is dict else like_mapping(batch, fields)
