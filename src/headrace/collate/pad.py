"""Pads sequences of different lengths to one tensor, and collates samples that contain such
sequences.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from headrace.arguments import check_flag, check_integer, checks_keywords
from headrace.collate.fields import Field, FieldPath, Fields, at_path
from headrace.collate.stack import (
    USUAL,
    check_alike,
    from_array,
    is_numeric,
    shape_of,
    stack_inside,
    stack_tree,
)
from headrace.display import short_call
from headrace.dtypes import AnyArray, IntArray
from headrace.errors import CollateError, ConfigError
from headrace.memory.ring import empty
from headrace.memory.tree import like_mapping

Number = bool | int | float | complex
_NUMBERS = (bool, int, float, np.bool_, np.number)
_MASK = "attention_mask"
_LENGTHS = "lengths"
_SEQUENCES = ("input_ids", "tokens", "token_ids", "sequence")
"""Fields that vary in length by their name. The lengths in a batch don't tell: they may be equal
by chance.
"""
_ONE_SHAPE = (
    "Name the field in fields= to have it padded along its first dimension (without fields= only "
    "1-D sequences are), give all one shape, "
    "or leave the field out"
)


@dataclass(frozen=True)
class Padding:
    """How long the padded sequences of a batch are, and where the padding goes.

    Attributes:
        padding: "longest": as long as the longest one of the batch; "max_length": always
            `max_length`.
        max_length: no sequence may be longer; None: no limit.
        pad_to_multiple_of: the length is rounded up to a multiple of it, beyond `max_length` too;
            None: it is not.
        truncation: what is longer than `max_length` loses its end; False: it is an error.
        side: "right": the padding follows the sequence; "left": it comes before.

    Raises:
        ConfigError: a value that makes no sense; the message names the argument.
    """

    padding: str = "longest"
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    truncation: bool = False
    side: str = "right"

    def __post_init__(self) -> None:
        if self.padding not in ("longest", "max_length"):
            raise ConfigError(f"padding must be 'longest' or 'max_length', not {self.padding!r}")
        if self.side not in ("right", "left"):
            raise ConfigError(f"padding_side must be 'right' or 'left', not {self.side!r}")
        check_flag("truncation", self.truncation)
        check_integer("max_length", self.max_length, 1, optional=True)
        check_integer("pad_to_multiple_of", self.pad_to_multiple_of, 1, optional=True)
        if self.max_length is None and (self.padding == "max_length" or self.truncation):
            raise ConfigError("padding='max_length' and truncation=True need a length: max_length=")

    def apply(
        self, rows: list[torch.Tensor], value: Number, path: FieldPath
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pads what `to_rows` gave: [length_i, ...] each.

        Returns:
            A tensor [batch, length, ...] of the rows' dtype, and their lengths, int64 [batch].

        Raises:
            ConfigError: a row is longer than `max_length`, or the value does not fit the dtype.
        """
        first = rows[0]
        if not _fits(value, first.dtype):
            raise ConfigError(
                f"pad_value={value!r} is no value of {str(first.dtype).removeprefix('torch.')}, "
                f"the dtype of the samples{at_path(path)}: pass one, or cast them"
            )
        if self.truncation:
            rows = [row[: self.max_length] for row in rows]
        lengths = [len(row) for row in rows]
        longest = max(lengths)
        if self.max_length is not None and longest > self.max_length:
            raise CollateError(
                lengths.index(longest),
                f"{at_path(path)} is {longest} long, and max_length is {self.max_length}: pass "
                "truncation=True to have its end cut off, or a larger max_length",
            )
        length = self._length(longest)
        shape = (len(rows), length, *first.shape[1:])
        if first.device.type == "cpu":
            out = empty(shape, first.dtype)
        else:
            out = torch.empty(shape, dtype=first.dtype, device=first.device)
        for number, row in enumerate(rows):
            to = out[number]
            start = 0
            if self.side == "left":
                start = length - len(row)
            end = start + len(row)
            to[start:end] = row
            to[:start].fill_(value)
            to[end:].fill_(value)
        counts = empty((len(rows),), torch.int64)
        return out, counts.copy_(torch.tensor(lengths, dtype=torch.int64, device="cpu"))

    def mask(self, lengths: torch.Tensor, length: int) -> torch.Tensor:
        """int64 [batch, length]: 1 at samples' elements, 0 at padding."""
        positions = torch.arange(length, device=lengths.device)
        if self.side == "left":
            positions = positions.flip(0)
        return empty((len(lengths), length), torch.int64).copy_(positions < lengths[:, None])

    def join(
        self, ids: AnyArray, lengths: IntArray, value: Number
    ) -> tuple[torch.Tensor, AnyArray] | None:
        """What `apply` makes of integers, of rows that lie one behind the other: all at once.

        Args:
            ids: [sum of lengths] any integers.
            lengths: [batch], at least one.
            value: of the padding.

        Returns:
            A tensor int64 [batch, length], and where it holds the rows: bool [batch, length]. None:
                a row is longer than `max_length`.
        """
        longest = int(lengths.max())
        if self.max_length is not None and longest > self.max_length:
            return None
        positions = np.arange(self._length(longest), dtype=np.int32)
        if self.side == "left":
            positions = positions[::-1]
        inside = positions < lengths[:, None].astype(np.int32)
        out = empty(inside.shape, torch.int64)
        rows = out.numpy()
        rows.fill(value)
        rows[inside] = ids.astype(np.int64, copy=False)
        return out, inside

    def _length(self, longest: int) -> int:
        if self.padding == "max_length" and self.max_length is not None:
            longest = self.max_length
        multiple = self.pad_to_multiple_of or 1
        return -(-longest // multiple) * multiple


_OF_LISTS = {"b": np.bool_, "i": np.int64, "f": np.float64, "c": np.complex128}
"""What a list of numbers becomes, by the kind of the numbers."""


def as_row(value: Any) -> torch.Tensor | None:
    """A tensor, an array or a list of numbers as a tensor; None: it is none of these.

    A list becomes int64, float64, complex128 or bool.
    """
    if isinstance(value, list):
        try:
            value = np.asarray(value or np.empty(0, np.int64))
        except (ValueError, TypeError):  # lists of different lengths inside
            return None
        if value.dtype.kind == "u" and value.dtype != np.uint64:
            value = value.astype(np.int64)
        if value.dtype.kind not in _OF_LISTS:  # numbers beyond int64 too
            return None
        value = value.astype(_OF_LISTS[value.dtype.kind])
    if is_numeric(value):
        return from_array(value)
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return value
    return None


def sequence_in(values: list[Any]) -> torch.Tensor | None:
    """The first of the values that is no empty list, which may be a list of anything, if it is a
    sequence of numbers in one dimension.
    """
    value = next((v for v in values if not isinstance(v, list) or v), values[0])
    if isinstance(value, list) and not all(isinstance(item, _NUMBERS) for item in value):
        return None
    row = as_row(value)
    if row is None or row.ndim != 1:
        return None
    return row


def to_rows(values: list[Any], path: FieldPath) -> list[torch.Tensor]:
    """Tensors, arrays or lists of numbers as tensors [length_i, ...] of one dtype.

    Lists become int64, float64, complex128 or bool; a list with a float makes all lists of the
    batch float64, and an empty one follows the others.

    Raises:
        CollateError: something is no sequence, or dtypes or the further dimensions differ; the
            message names sample and place.
    """
    rows: list[torch.Tensor] = []
    list_dtype = torch.bool  # which every other is wider than
    filled: list[int] = []
    for number, value in enumerate(values):
        row = as_row(value)
        if row is None or row.ndim == 0:
            raise CollateError(
                number,
                f"{at_path(path)} is {shape_of(value)}: what is to be padded must be a tensor, an "
                "array or a list of numbers, with a length; leave other fields out of fields=",
            )
        rows.append(row)
        if isinstance(value, list) and value:
            list_dtype = torch.promote_types(list_dtype, row.dtype)
        if not isinstance(value, list) or value:
            filled.append(number)
    for number in filled:
        if isinstance(values[number], list):
            rows[number] = rows[number].to(list_dtype)
    first = rows[(filled or [0])[0]]
    for number in set(range(len(rows))).difference(filled):
        rows[number] = first.new_empty((0, *first.shape[1:]))
    check_alike(rows, path, "Sequences may differ in length only", axis=1)
    return rows


def _fits(value: Number, dtype: torch.dtype) -> bool:
    """True if the dtype has such a value, rounded perhaps."""
    try:
        made = torch.full((), value, dtype=dtype, device="cpu").item()
    except (RuntimeError, TypeError, OverflowError):
        return False
    if dtype.is_floating_point or dtype.is_complex:
        return math.isinf(abs(made)) == math.isinf(abs(value))
    return made == value


class Padded(NamedTuple):
    """A padded field that is not in a dict."""

    values: torch.Tensor
    """[batch, length, ...], with the dtype of the samples."""
    attention_mask: torch.Tensor
    """int64 [batch, length]: 1 at elements of samples, 0 at padding."""
    lengths: torch.Tensor
    """int64 [batch]: lengths of the samples."""


class pad_collate:
    """Pads sequences to one length and stacks everything else like `stack_collate`. Use it as
    ``collate_fn=pad_collate()``.

    Sequences [length_i, ...] become a tensor [batch, length, ...] of their dtype. For a padded
    field of a dict, the batch also has ``attention_mask`` (int64 [batch, length], 1 at elements of
    samples) and ``lengths`` (int64 [batch]). If a dict has several padded fields, these two belong
    to "input_ids", "tokens", "token_ids" or "sequence", or else to the first padded field; each
    other field has ``<field>_attention_mask`` and ``<field>_lengths``. An ``attention_mask`` of the
    samples is padded with 0 and kept as the mask. A padded field outside of a dict (in a tuple, or
    the sample itself) becomes a `Padded`: ``for (tokens, mask, lengths), labels in loader``.

    Like HuggingFace's collators, it truncates only on request: without ``truncation=True``, a
    sample longer than `max_length` is an error.

    Args:
        fields: keys or positions of the fields to pad, along their first dimension; "outer.inner"
            for a nested field. None: all 1-D tensors and arrays and all lists of numbers.
        padding: "longest": pad to the longest sequence of the batch. "max_length": pad to
            `max_length`.
        max_length: maximum length of a sequence. None: no limit.
        pad_value: padding value; or a mapping from field to value, with 0 for other fields.
        pad_to_multiple_of: round the length up to a multiple of this, even beyond `max_length`.
        truncation: cut the end of sequences that are longer than `max_length`.
        padding_side: "right": pad after the sequence. "left": pad before it.

    Raises:
        ConfigError: an argument is invalid. In a call: dtypes or numbers of dimensions differ, a
            field is missing, a sample is longer than `max_length`, or `pad_value` does not fit the
            dtype. The message names sample, field and remedy.
    """

    @checks_keywords
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
        self._text = short_call("pad_collate", pad_collate, locals())
        self._fields = None
        if fields is not None:
            try:
                self._fields = Fields(fields, "fields")
            except ConfigError as error:
                raise ConfigError(
                    f"{error} (pad_collate makes a collate function: write "
                    "collate_fn=pad_collate(), with brackets)"
                ) from None
        self._padding = Padding(padding, max_length, pad_to_multiple_of, truncation, padding_side)
        self._value: Number = 0
        self._values: dict[str, Number] = {}
        if isinstance(pad_value, Mapping):
            self._values = {str(name): value for name, value in pad_value.items()}
        else:
            self._value = pad_value
        self._valued = Fields(self._values, "pad_value")
        for value in (*self._values.values(), self._value):
            if not isinstance(value, numbers.Number):
                raise ConfigError(
                    f"pad_value must be a number, or a mapping from field to number, not {value!r}"
                )

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Collates samples into a batch."""
        samples = list(samples)
        if samples:
            self._valued.check(samples[0])
            if self._fields is not None:
                self._fields.check(samples[0])
        return stack_tree(samples, self._special, _ONE_SHAPE)

    def __repr__(self) -> str:
        return self._text

    def _special(self, values: list[Any], path: FieldPath) -> Any:
        if self._fields is None:
            is_padded = sequence_in(values) is not None
        else:
            is_padded = self._fields.find(path) is not None
        if is_padded:
            value = self._value
            if path and _MASK in path[-1].names:
                value = 0
            value = self._values.get(self._valued.find(path) or "", value)
            padded, lengths = self._padding.apply(to_rows(values, path), value, path)
            return Padded(padded, self._padding.mask(lengths, padded.shape[1]), lengths)
        if isinstance(values[0], Mapping):
            batch = stack_inside(values, path, self._special, _ONE_SHAPE)
            return _with_masks(batch, path)
        return USUAL


def _with_masks(batch: Any, path: FieldPath) -> Any:
    """A dict whose padded fields have their masks and lengths beside them."""
    padded = [key for key, value in batch.items() if isinstance(value, Padded)]
    if not padded:
        return batch
    owners = [key for key in padded if key != _MASK] or padded
    leader = next((name for name in _SEQUENCES if name in owners), owners[0])
    fields = dict(batch)
    for key in padded:
        fields[key] = batch[key].values
    for key in owners:
        front = f"{key}_"
        if key == leader:
            front = ""
        added = {front + _MASK: batch[key].attention_mask, front + _LENGTHS: batch[key].lengths}
        if _MASK in padded:
            added.pop(_MASK, None)  # the samples' own
        for name in added:
            if name in batch:
                raise ConfigError(
                    f"the samples have a field {name!r} already{at_path(path)}, where pad_collate "
                    f"puts that of {key!r}: rename it, leave it out, or name a mask in fields"
                )
        fields |= added
    return like_mapping(batch, fields)
