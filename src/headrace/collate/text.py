"""Collates texts or tokens for a language model or a text classifier."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from headrace.arguments import check_integer, checks_keywords
from headrace.collate.fields import FieldPath, shown_fields
from headrace.collate.pad import Number, Padding, as_row, sequence_in, to_rows
from headrace.collate.stack import USUAL, shape_of, stack_tree
from headrace.display import short_call
from headrace.dtypes import AnyArray, IntArray
from headrace.errors import CollateError, ConfigError
from headrace.memory.ring import empty
from headrace.tokenizer import encode_texts, vocabulary_of

IGNORED = -100
"""The label that torch's cross entropy ignores."""
_ONE_SHAPE = (
    "Give all one shape, or name the field in pad_values= to have it padded, where it has one "
    "number a token"
)
_ALONG = {"attention_mask": 0, "token_type_ids": 0, "special_tokens_mask": 1, "position_ids": 0}
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
_INTEGERS = (*_SIGNED, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_MASKED, _RANDOM = 0.8, 0.1  # of the chosen tokens; the rest stays as it is


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
    is_integer = isinstance(document_ids, torch.Tensor) and document_ids.dtype in _INTEGERS
    if not is_integer or document_ids.ndim != 2:
        raise ConfigError(
            f"document_ids is {shape_of(document_ids)}: it must be a tensor of integers [batch, "
            "length]"
        )
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
        ConfigError: an argument is invalid, or a tokenizer is needed and missing. In a call: a
            sample is none of the above or too long, or its fields don't fit each other. The message
            names sample, field and remedy.
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
        if labels not in ("auto", "causal", "masked", None):
            raise ConfigError(f"labels must be 'auto', 'causal', 'masked' or None, not {labels!r}")
        is_number = isinstance(mlm_probability, (int, float)) and mlm_probability is not True
        if not is_number or not 0 < mlm_probability <= 1:
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
                raise ConfigError(
                    f"labels='masked' needs {name}, which a tokenizer of type "
                    f"{type(tokenizer).__name__} does not have: pass a tokenizer with a mask "
                    f"token, or {name}="
                )
        side = padding_side or known.side or "right"
        self._padding = Padding(padding, max_length, pad_to_multiple_of, truncation, side)
        if special_token_ids is None:
            special_token_ids = known.special
        special = [check_integer("special_token_ids", number) for number in special_token_ids]
        self._special = torch.tensor(special, dtype=torch.int64, device="cpu")
        pads = pad_values or {}
        if not isinstance(pads, Mapping) or not all(
            isinstance(value, numbers.Number) for value in pads.values()
        ):
            raise ConfigError(
                f"pad_values must be a mapping from field to number, not {pad_values!r}"
            )
        self._values: dict[str, Number] = {"input_ids": self.pad_token_id, **_ALONG, **pads}
        self._pad = self._values["input_ids"]
        is_plain = type(self._pad) is int and abs(self._pad) < 1 << 63
        has_others = "labels" in pads or self._values["attention_mask"] != 0
        self._joins = is_plain and labels != "masked" and not has_others

    def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
        """Collates samples into a batch."""
        records = [self._record(sample, number) for number, sample in enumerate(samples)]
        self._tokenise(records)
        for number, record in enumerate(records):
            self._check(record, number)
        batch: dict[str, Any] = stack_tree(records, self._padded, _ONE_SHAPE)
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
        joined = None
        if self._joins:
            joined = self._padding.join(ids, lengths, self._pad)
        if joined is None:
            return None
        rows, inside = joined
        mask = empty(inside.shape, torch.int64)
        np.copyto(mask.numpy(), inside)
        batch = {"input_ids": rows, "attention_mask": mask}
        if own is None and self.labels is not None:
            own = ids
        if own is not None:
            labels = batch["labels"] = empty(inside.shape, torch.int64)
            marked = labels.numpy()
            marked.fill(IGNORED)
            marked[inside] = own.astype(np.int64, copy=False)
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
                f" is {shape_of(sample)}: TextCollator takes texts, sequences of ids, dicts with "
                f"'input_ids' or {self.text_field!r}, and pairs of one of these and a target",
            )
        if target is not None:
            record["labels"] = target
        if self.labels in ("auto", None) and "label" in record:
            if "labels" in record:
                raise CollateError(
                    number,
                    " has 'label' and 'labels', and either may be its labels: leave one out for a "
                    "classifier, or pass labels='causal' for a language model, which keeps both",
                )
            record["labels"] = record.pop("label")
        elif self.labels == "masked" and "labels" in record:
            raise CollateError(
                number,
                " has labels, and labels='masked' makes its own: leave them out of the samples, or "
                "pass labels=None",
            )
        elif (
            self.labels == "causal"
            and "labels" in record
            and sequence_in([record["labels"]]) is None
        ):
            raise CollateError(
                number,
                " has a class at 'labels', and labels='causal' makes labels of the tokens: leave "
                "labels= out for a classifier; for a language model leave the class out, or have "
                "it at 'label'",
            )
        return record

    def _tokenise(self, records: list[dict[str, Any]]) -> None:
        texts: dict[int, str] = {}
        for number, record in enumerate(records):
            if "input_ids" in record:
                continue
            text = record.pop(self.text_field, None)
            if not isinstance(text, str):
                raise CollateError(
                    number,
                    f" has neither 'input_ids' nor a text at {self.text_field!r}, but "
                    f"{shown_fields(record)}: pass text_field=",
                )
            if self.tokenizer is None:
                raise CollateError(
                    number,
                    " is a text, and there is no tokenizer: pass TextCollator(tokenizer=...), any "
                    "callable from a text to a list of ids does; or have the dataset give "
                    "'input_ids'",
                )
            texts[number] = text
        if texts:
            limit = None
            if self._padding.truncation:
                limit = self._padding.max_length
            encoded = encode_texts(self.tokenizer, list(texts.values()), limit)
            for number, fields in zip(texts, encoded, strict=True):
                records[number] = {**fields, **records[number]}

    def _check(self, record: dict[str, Any], number: int) -> None:
        """One number a token, in each field that has them; a mask where there is none."""
        ids = _sequence(record["input_ids"])
        if ids is None or ids.dtype not in _INTEGERS:
            raise CollateError(
                number,
                f" at ['input_ids'] is {shape_of(record['input_ids'])}: it must be a sequence of "
                "integers, without a batch axis",
            )
        record.setdefault("attention_mask", torch.ones_like(ids, dtype=torch.int64))
        if self.labels == "masked":
            record.setdefault("special_tokens_mask", torch.zeros_like(ids, dtype=torch.int64))
        else:
            record.pop("special_tokens_mask", None)
        for name in self._values.keys() & record.keys():
            row = _sequence(record[name])
            if row is None or len(row) != len(ids):
                has = shape_of(record[name])
                raise CollateError(
                    number,
                    f" has {len(ids)} ids, and {has} at [{name!r}]: give it one number a token",
                )
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
        padded, _ = self._padding.apply(to_rows(values, path), pad, path)
        return padded

    def _mask(self, ids: torch.Tensor, may: torch.Tensor) -> torch.Tensor:
        """Masks some of the ids, and gives the labels."""
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


def _sequence(value: Any) -> torch.Tensor | None:
    """A sequence of numbers as a 1-D tensor; None, where it is none."""
    row = as_row(value)
    if row is None or row.ndim != 1:
        return None
    return row


def _known(name: str, given: int | None, of_tokenizer: int | None, least: int = 0) -> int | None:
    if given is None:
        return of_tokenizer
    return check_integer(name, given, least)
