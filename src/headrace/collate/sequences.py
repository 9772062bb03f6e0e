"""Pads sequences of different lengths, and collates samples that contain such sequences, and texts
or tokens for language models and text classifiers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from headrace.arguments import check_choice, check_flag, check_integer, checks_keywords
from headrace.collate.stack import (
    USUAL,
    Field,
    FieldPath,
    at_path,
    check_alike,
    field_names,
    from_array,
    is_numeric,
    named_paths,
    shape_of,
    shown_fields,
    stack_inside,
    stack_tree,
)
from headrace.display import short_call
from headrace.dtypes import AnyArray, IntArray
from headrace.errors import CollateError, ConfigError
from headrace.memory.ring import empty
from headrace.memory.tree import like_mapping
from headrace.tokenizer import encode_texts, vocabulary_of

Number = bool | int | float | complex
_NUMBERS = (bool, int, float, complex, np.bool_, np.number)
_MASK = "attention_mask"
_LENGTHS = "lengths"
_SEQUENCES = ("input_ids", "tokens", "token_ids", "sequence")
"""Names of fields that vary in length. (The lengths in one batch may be equal by chance.)"""
_ONE_SHAPE = "Give all one shape, or name the field in fields= to pad it along its first dimension"


@dataclass(frozen=True)
class Padding:
    """Length of the padded sequences of a batch, and side of the padding; see `pad_collate`.

    Raises:
        ConfigError: a value is invalid; the message names the argument.
    """

    padding: str = "longest"
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    truncation: bool = False
    side: str = "right"

    def __post_init__(self) -> None:
        check_choice("padding", self.padding, ("longest", "max_length"))
        check_choice("padding_side", self.side, ("right", "left"))
        check_flag("truncation", self.truncation)
        check_integer("max_length", self.max_length, 1, optional=True)
        check_integer("pad_to_multiple_of", self.pad_to_multiple_of, 1, optional=True)
        if self.max_length is None and (self.padding == "max_length" or self.truncation):
            raise ConfigError(
                "padding='max_length' and truncation=True need a length: pass max_length="
            )

    def apply(
        self, values: list[Any], value: Number, path: FieldPath
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pads tensors, arrays or lists of numbers, [length_i, ...] each.

        Returns:
            A tensor [batch, length, ...], and the lengths, int64 [batch].

        Raises:
            ConfigError: the value does not fit the dtype.
            CollateError: see `_to_rows`; or a sequence is longer than `max_length`.
        """
        rows = _to_rows(values, path)
        first = rows[0]
        if not _fits(value, first.dtype):
            dtype = str(first.dtype).removeprefix("torch.")
            of = f"{dtype}, the dtype of the samples{at_path(path)}"
            raise ConfigError(f"pad_value={value!r} does not fit {of}: pass one that does")
        if self.truncation:
            rows = [row[: self.max_length] for row in rows]
        lengths = [len(row) for row in rows]
        longest = max(lengths)
        if self.max_length is not None and longest > self.max_length:
            has = f"{at_path(path)} has length {longest}, and max_length is {self.max_length}"
            advice = "pass truncation=True, or a larger max_length"
            raise CollateError(lengths.index(longest), f"{has}: {advice}")
        length = self.length_for(longest)
        shape = (len(rows), length, *first.shape[1:])
        if first.device.type == "cpu":
            out = empty(shape, first.dtype)
        else:
            out = torch.empty(shape, dtype=first.dtype, device=first.device)
        out.fill_(value)
        for number, row in enumerate(rows):
            start = 0
            if self.side == "left":
                start = length - len(row)
            out[number, start : start + len(row)] = row
        counts = empty((len(rows),), torch.int64)
        return out, counts.copy_(torch.tensor(lengths, dtype=torch.int64, device="cpu"))

    def inside(self, lengths: IntArray, length: int) -> npt.NDArray[np.bool_]:
        """bool [batch, length]: True at elements of samples, False at padding."""
        positions = np.arange(length, dtype=np.int32)
        if self.side == "left":
            positions = positions[::-1]
        return positions < lengths[:, None].astype(np.int32)

    def length_for(self, longest: int) -> int:
        """The padded length of a batch."""
        if self.padding == "max_length" and self.max_length is not None:
            longest = self.max_length
        multiple = self.pad_to_multiple_of or 1
        return -(-longest // multiple) * multiple


_OF_LISTS = {"b": np.bool_, "i": np.int64, "u": np.int64, "f": np.float64, "c": np.complex128}
"""The dtype of a list of numbers, by NumPy's kind of the numbers."""


def as_row(value: Any) -> torch.Tensor | None:
    """A tensor, array or list of numbers as a tensor (a list: `_OF_LISTS`). None: it is something
    else.
    """
    if isinstance(value, list):
        try:
            value = np.asarray(value or np.empty(0, np.int64))
        except (ValueError, TypeError):  # lists of different lengths inside
            return None
        if value.dtype == np.uint64 or value.dtype.kind not in _OF_LISTS:
            return None
        value = value.astype(_OF_LISTS[value.dtype.kind])
    if is_numeric(value):
        return from_array(value)
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return value
    return None


def sequence_in(values: list[Any]) -> torch.Tensor | None:
    """The first value that is not an empty list, if it is a 1-D sequence of numbers; else None."""
    value = next((v for v in values if not isinstance(v, list) or v), values[0])
    if isinstance(value, list) and not all(isinstance(item, _NUMBERS) for item in value):
        return None
    row = as_row(value)
    if row is None or row.ndim != 1:
        return None
    return row


def _to_rows(values: list[Any], path: FieldPath) -> list[torch.Tensor]:
    """Tensors, arrays or lists of numbers as tensors [length_i, ...] of one dtype.

    All lists of a batch get the widest of their dtypes; empty ones that of the others.

    Raises:
        CollateError: a value is not a sequence, or dtypes or other dimensions differ; the message
            names the sample and the field.
    """
    rows: list[torch.Tensor] = []
    list_dtype = torch.bool  # the narrowest
    for number, value in enumerate(values):
        row = as_row(value)
        if row is None or row.ndim == 0:
            is_ = f"{at_path(path)} is {shape_of(value)}, not a sequence of numbers"
            raise CollateError(number, f"{is_}: leave it out of fields=")
        rows.append(row)
        if isinstance(value, list) and value:
            list_dtype = torch.promote_types(list_dtype, row.dtype)
    are_empty = [isinstance(value, list) and not value for value in values]
    for number, value in enumerate(values):
        if isinstance(value, list) and value:
            rows[number] = rows[number].to(list_dtype)
    if not all(are_empty):
        nothing = rows[are_empty.index(False)][:0]
        rows = [nothing if empty else row for row, empty in zip(rows, are_empty, strict=True)]
    check_alike(rows, path, "Sequences may differ in length only", axis=1)
    return rows


def _fits(value: Number, dtype: torch.dtype) -> bool:
    """True if the dtype can represent the value, possibly rounded."""
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
        ConfigError: an argument is invalid; in a call: a named field is missing, or `pad_value`
            does not fit the dtype.
        CollateError: in a call: dtypes or numbers of dimensions differ, or a sample is longer than
            `max_length`. The message names sample, field and remedy.
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
            self._fields = field_names(fields, "fields")
        self._padding = Padding(padding, max_length, pad_to_multiple_of, truncation, padding_side)
        self._value: Number = 0
        self._values: dict[str, Number] = {}
        if isinstance(pad_value, _NUMBERS):
            self._value = pad_value
        else:
            self._values = _values_by_field("pad_value", pad_value)

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Collates samples into a batch."""
        samples = list(samples)
        fields: Collection[FieldPath] | None = None
        pads: dict[FieldPath, str] = {}
        for sample in samples[:1]:
            pads = named_paths(sample, self._values, "pad_value")
            if self._fields is not None:
                fields = named_paths(sample, self._fields, "fields")

        def special(values: list[Any], path: FieldPath) -> Any:
            is_sequence = fields is None and sequence_in(values) is not None
            if is_sequence or path in (fields or ()):
                value = self._value
                if path and _MASK in path[-1].names:
                    value = 0
                if path in pads:
                    value = self._values[pads[path]]
                padded, lengths = self._padding.apply(values, value, path)
                inside = self._padding.inside(lengths.numpy(), padded.shape[1])
                return Padded(padded, _mask_of(inside), lengths)
            if isinstance(values[0], Mapping):
                return _with_masks(stack_inside(values, path, special, _ONE_SHAPE), path)
            return USUAL

        return stack_tree(samples, special, _ONE_SHAPE)

    def __repr__(self) -> str:
        return self._text


def _mask_of(inside: npt.NDArray[np.bool_]) -> torch.Tensor:
    mask = empty(inside.shape, torch.int64)
    np.copyto(mask.numpy(), inside)
    return mask


def _values_by_field(name: str, given: Any) -> dict[str, Number]:
    if isinstance(given, Mapping) and all(isinstance(value, _NUMBERS) for value in given.values()):
        return {str(field): value for field, value in given.items()}
    raise ConfigError(f"{name} must map fields to numbers (pad_collate: or be one), not {given!r}")


def _with_masks(batch: Any, path: FieldPath) -> Any:
    """A dict with the masks and lengths of its padded fields added."""
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
                    f"the samples have a field {name!r}{at_path(path)}, which pad_collate adds for "
                    f"{key!r}: rename it, or name a mask in fields="
                )
        fields |= added
    return like_mapping(batch, fields)


IGNORED = -100
"""The label that torch's cross entropy ignores."""
_ALIGNED = "Give all one shape, or name a field with one number per token in pad_values="
_ALONG = {"attention_mask": 0, "token_type_ids": 0, "special_tokens_mask": 1, "position_ids": 0}
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
_INTEGERS = (*_SIGNED, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_MASKED, _RANDOM = 0.8, 0.1  # fractions of the chosen tokens; the rest is unchanged


def document_mask(document_ids: torch.Tensor) -> torch.Tensor:
    """Attention mask for packed blocks: a token may attend to itself and to earlier tokens of its
    document.

    Pass it as ``attn_mask`` to ``torch.nn.functional.scaled_dot_product_attention``. It has length
    x length entries per block, 1 MiB for length 1,024.

    Args:
        document_ids: integer tensor [batch, length] on any device, as returned by `TextDataset`
            with ``packing=True``.

    Returns:
        bool [batch, 1, length, length] on the same device: [b, 0, i, j] is True if token i of block
            b may attend to token j.

    Raises:
        ConfigError: it is not such a tensor.
    """
    if getattr(document_ids, "dtype", None) not in _INTEGERS or document_ids.ndim != 2:
        is_ = shape_of(document_ids)
        raise ConfigError(f"document_ids must be a tensor of integers [batch, length], not {is_}")
    positions = torch.arange(document_ids.shape[1], device=document_ids.device)
    is_same = document_ids[:, :, None] == document_ids[:, None, :]
    return is_same.logical_and_(positions[:, None] >= positions).unsqueeze(1)


class TextCollator:
    """Collates texts or tokens to a dict of padded tensors, for a language model or a text
    classifier.

    A sample is a text, a sequence of ids (1-D tensor or array of integers, list of ints), a dict
    with "input_ids" or with a text, or a pair of one of these and a target, which becomes "labels".
    Texts are tokenised here, all texts of a batch at once. The batch contains

    * ``input_ids``: int64 [batch, length];
    * ``attention_mask``: int64 [batch, length], 1 at tokens, 0 at padding; or the mask of the
      samples, padded;
    * ``token_type_ids``, ``position_ids``, and the fields in `pad_values`: [batch, length], if
      samples have them;
    * ``labels``: int64 [batch, length], or as described below;
    * all other fields, stacked like `stack_collate` does. A text that was tokenised here and
      ``special_tokens_mask`` are removed.

    Labels of the samples are kept, at "labels", at "label" (a class, which becomes "labels"), or as
    the target of a pair. Sequences of integers (one per token) are padded with -100, everything
    else is stacked. Samples without labels get those of a causal model.

    ``labels="causal"`` and ``labels="masked"`` request the labels of a language model; a class then
    stays at "label". Causal: the ids, with -100 at padding (models shift them themselves), or the
    samples' own labels, one per token. Masked: 15 % of the tokens are chosen, never special tokens
    or padding. Of these 80 % become the mask token, 10 % a random token, and 10 % stay; labels are
    -100 elsewhere (Devlin et al., BERT, 2019). They are drawn from torch's global generator, which
    headrace's loader seeds by (seed, epoch, step).

    Like HuggingFace's collators, it truncates only on request: without ``truncation=True``, a
    sample longer than `max_length` is an error. Truncated texts keep the special tokens at their
    end; ids lose their end.

    Args:
        tokenizer: a callable from a text to a list of ids (tiktoken's ``encode``), a HuggingFace
            tokenizer, slow or fast, a `tokenizers.Tokenizer`, or an object with ``encode_batch`` or
            ``encode``. None: samples are ids already.
        labels: "auto": the samples' own labels, or else those of a causal model. "causal" or
            "masked": as above. None: only the samples' own.
        mlm_probability: fraction of tokens that "masked" chooses.
        padding, max_length, pad_to_multiple_of, truncation: see `pad_collate`.
        padding_side: "right" or "left". None: the tokenizer's, else "right".
        text_field: key of the text in a dict.
        pad_values: additional fields with one number per token, and their padding values; or other
            padding values for the fields above.
        pad_token_id: id of padding. None: the tokenizer's, else its end-of-text id, else 0. Padding
            is masked, so any id works.
        mask_token_id, vocab_size, special_token_ids: for "masked". None: the tokenizer's.

    Raises:
        ConfigError: an argument is invalid.
        CollateError: in a call: a sample is none of the above or too long, its fields don't fit
            each other, or it is a text and there is no tokenizer. The message names sample, field
            and remedy.
    """

    @checks_keywords
    def __init__(
        self,
        tokenizer: Any = None,
        *,
        labels: str | None = "auto",
        mlm_probability: float = 0.15,
        padding: str = "longest",
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        truncation: bool = False,
        padding_side: str | None = None,
        text_field: str = "text",
        pad_values: Mapping[str, Number] | None = None,
        pad_token_id: int | None = None,
        mask_token_id: int | None = None,
        vocab_size: int | None = None,
        special_token_ids: Iterable[int] | None = None,
    ) -> None:
        self._text = short_call("TextCollator", TextCollator, locals())
        check_choice("labels", labels, ("auto", "causal", "masked", None))
        if not isinstance(mlm_probability, (int, float)) or not 0 < mlm_probability <= 1:
            raise ConfigError(
                f"mlm_probability must be above 0 and at most 1, not {mlm_probability!r}"
            )
        known = vocabulary_of(tokenizer)
        self.tokenizer: Any = tokenizer
        self.mlm_probability: float = mlm_probability
        self.text_field: str = text_field
        self.labels = labels
        self.pad_token_id: int = _known("pad_token_id", pad_token_id, known.pad) or 0
        self.mask_token_id: int | None = _known("mask_token_id", mask_token_id, known.mask)
        self.vocab_size: int | None = _known("vocab_size", vocab_size, known.size, least=1)
        for name in ("mask_token_id", "vocab_size"):
            if labels == "masked" and getattr(self, name) is None:
                has_no = f"{type(tokenizer).__name__} has no {name}"
                raise ConfigError(f"labels='masked': {has_no}: pass another tokenizer, or {name}=")
        side = padding_side or known.side or "right"
        self._padding = Padding(padding, max_length, pad_to_multiple_of, truncation, side)
        if special_token_ids is None:
            special_token_ids = known.special
        special = [check_integer("special_token_ids", number) for number in special_token_ids]
        self._special = torch.tensor(special, dtype=torch.int64, device="cpu")
        pads = _values_by_field("pad_values", pad_values or {})
        self._values: dict[str, Number] = {"input_ids": self.pad_token_id, **_ALONG, **pads}
        self._joins = labels != "masked" and not pads

    def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
        """Collates samples into a batch."""
        records = [self._record(sample, number) for number, sample in enumerate(samples)]
        self._tokenise(records)
        for number, record in enumerate(records):
            self._check(record, number)
        batch: dict[str, Any] = stack_tree(records, self._padded, _ALIGNED)
        if self.labels == "masked":
            may_be_chosen = (batch["attention_mask"] != 0) & (batch.pop("special_tokens_mask") == 0)
            batch["labels"] = self._mask(batch["input_ids"], may_be_chosen)
        elif self.labels is not None and "labels" not in batch:
            batch["labels"] = _labels(batch["input_ids"], batch["attention_mask"] != 0)
        return batch

    def __repr__(self) -> str:
        return self._text

    def join(
        self,
        ids: AnyArray,
        lengths: IntArray,
        own: IntArray | None = None,
    ) -> dict[str, Any] | None:
        """Collates concatenated ids without other fields, with the same result as a call, bit for
        bit.

        Args:
            ids: [sum of lengths] any integers.
            lengths: [batch] length of each sample, at least 1.
            own: [sum of lengths] labels of the samples. None: they have none.

        Returns:
            The batch. None: the collator needs the samples themselves (to mask or truncate them, to
                pad labels differently, or to raise an error).
        """
        longest = int(lengths.max())
        most = self._padding.max_length
        if not self._joins or (most is not None and longest > most):
            return None
        inside = self._padding.inside(lengths, self._padding.length_for(longest))

        def padded(values: AnyArray, pad: int) -> torch.Tensor:
            out = empty(inside.shape, torch.int64)
            rows = out.numpy()
            rows.fill(pad)
            rows[inside] = values.astype(np.int64, copy=False)
            return out

        batch = {"input_ids": padded(ids, self.pad_token_id), "attention_mask": _mask_of(inside)}
        if own is not None:
            batch["labels"] = padded(own, IGNORED)
        elif self.labels is not None:
            batch["labels"] = padded(ids, IGNORED)
        return batch

    # -- samples to records: dicts of sequences

    def _record(self, sample: Any, number: int) -> dict[str, Any]:
        target = None
        if isinstance(sample, tuple) and len(sample) == 2:
            sample, target = sample
        if isinstance(sample, Mapping):
            record = dict(sample)
        elif isinstance(sample, str):
            record = {self.text_field: sample}
        elif isinstance(sample, (torch.Tensor, np.ndarray, list)):
            record = {"input_ids": sample}
        else:
            raise CollateError(
                number,
                f" is {shape_of(sample)}: TextCollator takes texts, ids, dicts with 'input_ids' or "
                f"{self.text_field!r}, and pairs of one of these and a target",
            )
        if target is not None:
            record["labels"] = target
        if self.labels in ("auto", None) and "label" in record:
            if "labels" in record:
                advice = "leave one out, or pass labels='causal' for a language model"
                raise CollateError(number, f" has 'label' and 'labels': {advice}")
            record["labels"] = record.pop("label")
        elif self.labels == "masked" and "labels" in record:
            raise CollateError(number, " has labels, which labels='masked' makes: pass labels=None")
        elif (
            self.labels == "causal"
            and "labels" in record
            and sequence_in([record["labels"]]) is None
        ):
            advice = "leave labels='causal' out for a classifier, or call the class 'label'"
            raise CollateError(number, f" has a class at 'labels': {advice}")
        return record

    def _tokenise(self, records: list[dict[str, Any]]) -> None:
        texts: dict[int, str] = {}
        for number, record in enumerate(records):
            if "input_ids" in record:
                continue
            text = record.pop(self.text_field, None)
            if not isinstance(text, str):
                has_no = f" has no 'input_ids' and no text at {self.text_field!r}, but "
                raise CollateError(number, f"{has_no}{shown_fields(record)}: pass text_field=")
            if self.tokenizer is None:
                advice = "pass TextCollator(tokenizer=...), or let the dataset return 'input_ids'"
                raise CollateError(number, f" is a text: {advice}")
            texts[number] = text
        if texts:
            limit = None
            if self._padding.truncation:
                limit = self._padding.max_length
            encoded = encode_texts(self.tokenizer, list(texts.values()), limit)
            for number, fields in zip(texts, encoded, strict=True):
                records[number] = {**fields, **records[number]}

    def _check(self, record: dict[str, Any], number: int) -> None:
        """Checks that fields have one number per token, and adds a mask if there is none."""
        ids = sequence_in([record["input_ids"]])
        if ids is None or ids.dtype not in _INTEGERS:
            is_ = f" at ['input_ids'] is {shape_of(record['input_ids'])}"
            raise CollateError(number, f"{is_}: it must be a 1-D sequence of integers")
        record.setdefault("attention_mask", torch.ones_like(ids, dtype=torch.int64))
        if self.labels == "masked":
            record.setdefault("special_tokens_mask", torch.zeros_like(ids, dtype=torch.int64))
        else:
            record.pop("special_tokens_mask", None)
        for name in self._values.keys() & record.keys():
            row = sequence_in([record[name]])
            if row is None or len(row) != len(ids):
                has = f" has {len(ids)} ids, and {shape_of(record[name])} at [{name!r}]"
                raise CollateError(number, f"{has}: give it one number per token")
            if name == "input_ids" or name in _ALONG:
                record[name] = row.to(torch.int64)

    # -- records to a batch

    def _padded(self, values: list[Any], path: FieldPath) -> Any:
        if len(path) != 1:
            return USUAL
        name = path[0].names[0]
        pad = self._values.get(name)
        if pad is None and name == "labels":
            labels = sequence_in(values)
            if labels is not None and labels.dtype in _INTEGERS:
                pad = IGNORED
        if pad is None:
            return USUAL
        padded, _ = self._padding.apply(values, pad, path)
        return padded

    def _mask(self, ids: torch.Tensor, may: torch.Tensor) -> torch.Tensor:
        """Masks some of the ids in place, and returns the labels."""
        assert self.mask_token_id is not None and self.vocab_size is not None
        drawn = torch.rand(ids.shape, dtype=torch.float32, device="cpu")
        fate = torch.rand(ids.shape, dtype=torch.float32, device="cpu")
        chosen = may & ~torch.isin(ids, self._special) & (drawn < self.mlm_probability)
        words = torch.randint(self.vocab_size, ids.shape, device="cpu")
        labels = _labels(ids, chosen)
        ids[chosen & (fate < _MASKED)] = self.mask_token_id
        is_random = chosen & (fate >= _MASKED) & (fate < _MASKED + _RANDOM)
        ids[is_random] = words[is_random]
        return labels


def _labels(ids: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return empty(tuple(ids.shape), torch.int64).copy_(ids).masked_fill_(~counts, IGNORED)


def _known(name: str, given: int | None, of_tokenizer: int | None, least: int = 0) -> int | None:
    if given is None:
        return of_tokenizer
    return check_integer(name, given, least)
