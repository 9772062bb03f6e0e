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
import numpy.typing as npt
import torch

from headrace.arguments import check_flag, check_integer, checks_keywords
from headrace.collate.fields import Field, FieldPath, Fields, at_path
from headrace.collate.stack import (
    USUAL,
    from_array,
    is_numeric,
    one_dtype,
    owned,
    shape_of,
    stack_inside,
    stack_tree,
)
from headrace.display import short_call
from headrace.errors import CollateError, ConfigError
from headrace.memory.ring import empty
from headrace.memory.tree import like_mapping

Number = bool | int | float | complex
_MASK, _LENGTHS = "attention_mask", "lengths"
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
        for name in ("max_length", "pad_to_multiple_of"):
            check_integer(name, getattr(self, name), 1, optional=True)
        if self.max_length is None and (self.padding == "max_length" or self.truncation):
            asks = "padding='max_length'" if self.padding == "max_length" else "truncation=True"
            raise ConfigError(f"{asks} needs a length: pass max_length=")

    def apply(
        self, rows: list[torch.Tensor], value: Number, path: FieldPath
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pads what `to_rows` gave: [length_i, ...] each.

        Returns:
            A tensor [batch, length, ...] of the rows' dtype, and their lengths, int64 [batch].

        Raises:
            ConfigError: a row is longer than `max_length`, or the value does not fit the dtype.
        """
        check_fits(value, rows[0].dtype, path)
        if self.max_length is not None:
            rows = self._limited(rows, self.max_length, path)
        length = self._length([len(row) for row in rows])
        first = rows[0]
        shape = (len(rows), length, *first.shape[1:])
        out = (
            empty(shape, first.dtype)
            if first.device.type == "cpu"
            else torch.empty(shape, dtype=first.dtype, device=first.device)
        )
        for number, row in enumerate(rows):
            to = out[number]
            start = 0 if self.side == "right" else length - len(row)
            end = start + len(row)
            to[start:end] = row
            to[:start].fill_(value)
            to[end:].fill_(value)
        lengths = empty((len(rows),), torch.int64)
        lengths.copy_(torch.from_numpy(np.array([len(row) for row in rows], np.int64)))
        return out, lengths

    def mask(self, lengths: torch.Tensor, length: int) -> torch.Tensor:
        """int64 [batch, length]: 1 at samples' elements, 0 at padding."""
        positions = torch.arange(length, device=lengths.device)
        ends = lengths[:, None]
        mask = empty((len(lengths), length), torch.int64)
        return mask.copy_(positions < ends if self.side == "right" else positions >= length - ends)

    def join(
        self, ids: npt.NDArray[Any], lengths: npt.NDArray[np.int64], value: int
    ) -> tuple[torch.Tensor, npt.NDArray[Any]] | None:
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
        length = self._length([longest])
        out = empty((len(lengths), length), torch.int64)
        positions, rows, ends = (
            np.arange(length, dtype=np.int32),
            out.numpy(),
            lengths[:, None].astype(np.int32),
        )
        inside = positions < ends if self.side == "right" else positions >= length - ends
        rows.fill(value)
        rows[inside] = ids.astype(np.int64, copy=False)
        return out, inside

    def _limited(self, rows: list[torch.Tensor], limit: int, path: FieldPath) -> list[torch.Tensor]:
        if self.truncation:
            return [row[:limit] for row in rows]
        for number, row in enumerate(rows):
            if len(row) > limit:
                reason = f"{at_path(path)} is {len(row)} long, and max_length is {limit}: "
                raise CollateError(
                    number,
                    reason,
                    "pass truncation=True to have its end cut off, or a larger max_length",
                )
        return rows

    def _length(self, lengths: Sequence[int]) -> int:
        length = max(lengths) if self.padding == "longest" else self.max_length or 0
        return (
            length
            if self.pad_to_multiple_of is None
            else math.ceil(length / self.pad_to_multiple_of) * self.pad_to_multiple_of
        )


_OF_LISTS: dict[str, Any] = {
    "b": np.bool_,
    "i": np.int64,
    "u": np.int64,
    "f": np.float64,
    "c": np.complex128,
}
"""What a list of numbers becomes, by the kind of the numbers."""


def is_sequence(value: Any) -> bool:
    """True for a 1-D tensor or array of numbers, and for a list of numbers (which may be empty)."""
    if isinstance(value, list):
        return all(isinstance(item, (bool, int, float, np.bool_, np.number)) for item in value)
    return (isinstance(value, torch.Tensor) or is_numeric(value)) and value.ndim == 1


def example_of(values: list[Any]) -> Any:
    """The first value that is no empty list, since that may be a list of anything."""
    return next(
        (value for value in values if not (isinstance(value, list) and not value)), values[0]
    )


def to_rows(values: list[Any], path: FieldPath) -> list[torch.Tensor]:
    """Tensors, arrays or lists of numbers as tensors [length_i, ...] of one dtype.

    Lists become int64, float64, complex128 or bool; a list with a float makes all lists of the
    batch float64, and an empty one follows the others.

    Raises:
        ConfigError: something is no sequence, or dtypes or the further dimensions differ; the
            message names sample and place.
    """
    lists = [
        np.asarray(_array_of(value, number, path))
        for number, value in enumerate(values)
        if isinstance(value, list)
    ]
    kinds = [array.dtype for array in lists if array.size]
    made = np.result_type(*kinds) if kinds else None
    rows: list[Any] = []
    for number, value in enumerate(values):
        if isinstance(value, list):
            array = lists.pop(0)
            rows.append(
                from_array(array if made is None else array.astype(made)) if len(array) else None
            )
        elif is_numeric(value):
            rows.append(from_array(value))
        elif isinstance(value, torch.Tensor) and value.layout is torch.strided:
            rows.append(value)
        else:
            raise _unfit(
                number, path, f"is {shape_of(value)}", "a tensor, an array or a list of numbers"
            )
    numbered = ((number, row) for number, row in enumerate(rows) if row is not None)
    of_first, first = next(numbered, (0, torch.empty(0, dtype=torch.int64, device="cpu")))
    rows = [first.new_empty((0, *first.shape[1:])) if row is None else row for row in rows]
    if first.ndim == 0:
        raise _unfit(
            0,
            path,
            f"is {shape_of(first)}",
            "a sequence: it has no length; leave it out of fields to have it stacked",
        )
    for number, row in enumerate(rows):
        if row.dtype != first.dtype or row.shape[1:] != first.shape[1:] or row.ndim != first.ndim:
            parts = (
                number,
                f"{at_path(path)} is {shape_of(row)}, ",
                of_first,
                f" is {shape_of(first)}. ",
            )
            alike = row.dtype == first.dtype
            raise CollateError(
                *parts,
                "Sequences may differ in length only"
                if alike
                else one_dtype(row.dtype, first.dtype),
            )
    return rows


def _array_of(value: list[Any], number: int, path: FieldPath) -> Any:
    try:
        array = np.asarray(value)
    except (ValueError, TypeError):  # lists of different lengths inside
        array = np.empty(0, object)
    if array.size == 0 and array.dtype != object:
        return array.astype(np.int64)
    if array.dtype.kind not in _OF_LISTS:
        raise _unfit(
            number, path, "is a list of something else", "a tensor, an array or a list of numbers"
        )
    if array.dtype == np.uint64 and array.max() > np.iinfo(np.int64).max:
        raise _unfit(
            number, path, f"holds {array.max()}", "of int64, where it is a list of integers"
        )
    return array.astype(_OF_LISTS[array.dtype.kind])


def _unfit(number: int, path: FieldPath, what: str, must: str) -> CollateError:
    return CollateError(number, f"{at_path(path)} {what}: what is to be padded must be {must}")


def check_fits(value: Number, dtype: torch.dtype, path: FieldPath) -> None:
    """Raises a ConfigError where the dtype has no such value."""
    if dtype.is_complex:
        return
    if isinstance(value, complex):
        fits = False
    elif dtype == torch.bool:
        fits = value in (0, 1)
    elif dtype.is_floating_point:
        fits = value != value or abs(value) == math.inf or abs(value) <= torch.finfo(dtype).max
    else:
        limits = torch.iinfo(dtype)
        fits = (
            value == value
            and abs(value) != math.inf
            and int(value) == value
            and limits.min <= value <= limits.max
        )
    if not fits:
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(
            f"pad_value={value!r} is no value of {name}, the dtype of the samples{at_path(path)}: "
            "pass one, or cast them"
        )


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
        try:
            self._fields = None if fields is None else Fields(fields, "fields")
        except ConfigError as error:
            raise ConfigError(
                f"{error} (pad_collate makes a collate function: write collate_fn=pad_collate(), "
                "with brackets)"
            ) from None
        self._padding = Padding(padding, max_length, pad_to_multiple_of, truncation, padding_side)
        given = dict(pad_value) if isinstance(pad_value, Mapping) else {}
        self._valued = Fields(given, "pad_value")
        self._values = {str(name): value for name, value in given.items()}
        self._value: Number = 0 if isinstance(pad_value, Mapping) else pad_value
        for value in (*self._values.values(), self._value):
            if not isinstance(value, numbers.Number):
                raise ConfigError(
                    f"pad_value must be a number, or a mapping from field to number, not {value!r}"
                )

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Collates samples into a batch."""
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
        value = (
            self._values[name]
            if name is not None
            else 0
            if path and _MASK in path[-1].names
            else self._value
        )
        padded, lengths = self._padding.apply(to_rows(values, path), value, path)
        return Padded(padded, self._padding.mask(lengths, padded.shape[1]), lengths)


def variable_length_collate(samples: Sequence[Any]) -> Any:
    """Collates pairs (input, target) to a list of inputs of different lengths, and stacked targets.

    Inputs are tensors, arrays or lists of numbers, of any shape and dtype, and become tensors.
    Targets are stacked like `stack_collate` does. Nothing is padded; use `pad_collate` for that.

    Raises:
        CollateError: a sample is not a pair, an input has another type, or the targets differ in
            shape.
    """
    samples = list(samples)
    for number, sample in enumerate(samples):
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            reason = (
                'variable_length_collate needs pairs (input, target); use collate_fn="list" for '
                "others"
            )
            raise CollateError(number, f" is {shape_of(sample)}: {reason}")

    def special(values: list[Any], path: FieldPath) -> Any:
        is_input = len(path) == 1 and path[0].names[0] == "0"
        return (
            [owned(_tensor_of(value, number)) for number, value in enumerate(values)]
            if is_input
            else USUAL
        )

    return stack_tree(samples, special, 'Give targets of one shape, or use collate_fn="list"')


def _tensor_of(value: Any, number: int) -> torch.Tensor:
    if isinstance(value, list) and is_sequence(value):
        value = np.asarray(value) if value else np.empty(0, np.int64)
    if not isinstance(value, torch.Tensor) and not is_numeric(value):
        raise CollateError(
            number,
            f" at [0] is {shape_of(value)}: an input must be a tensor, an array or a list of "
            "numbers",
        )
    return value if isinstance(value, torch.Tensor) else from_array(value)


def _beside(batch: Any, path: FieldPath) -> Any:
    """A dict whose padded fields have their masks and lengths beside them."""
    padded = [key for key, value in batch.items() if isinstance(value, Padded)]
    if not padded:
        return batch
    leaders = [key for key in padded if key != _MASK] or padded
    leader = next((name for name in _SEQUENCES if name in leaders), leaders[0])
    fields = {key: value.values if key in padded else value for key, value in batch.items()}
    for key in leaders:
        front = "" if key == leader else f"{key}_"
        for name, made in ((_MASK, batch[key].attention_mask), (_LENGTHS, batch[key].lengths)):
            if name == _MASK and not front and _MASK in padded:
                continue
            if front + name in batch:
                raise ConfigError(
                    f"the samples have a field {front + name!r} already{at_path(path)}, where "
                    f"pad_collate puts the {name} of {key!r}: "
                    "rename it, or leave it out"
                    + (", or name it in fields" if name == _MASK else "")
                )
            fields[front + name] = made
    return fields if type(batch) is dict else like_mapping(batch, fields)
