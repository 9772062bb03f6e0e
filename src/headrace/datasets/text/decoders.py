"""Decodes texts to token ids: texts are tokenised when they are read; stored tokens are cut into
documents, windows or blocks.

Batches are made without a tensor per sample, bit-equal to those of single samples (law 1). Blocks
have one length and are read into their batch. Other ids are concatenated and padded at once.
"""

from __future__ import annotations

import copy
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.arguments import check_choice, check_integer
from headrace.collate.sequences import IGNORED, TextCollator
from headrace.core.batcher import BatchReader, Collating, ColumnReader, MadeBatch
from headrace.core.dataset import BaseDataset
from headrace.core.decoder import Decoder, Failed
from headrace.core.reader import SampleReader
from headrace.core.values import Access, Decoded, Records
from headrace.dtypes import ArraySpec, IntArray
from headrace.errors import ConfigError, FormatError, SampleError
from headrace.formats.text import records
from headrace.formats.text.plain import undecodable
from headrace.formats.text.source import LinesSource
from headrace.order.ranks import BatchRequest
from headrace.tokenizer import CharTokenizer, identity_of, token_arrays, vocabulary_of

CHAT = "chat"
_CHOICES: dict[str, tuple[Any, ...]] = {
    "unit": (None, "file", "line", "record", CHAT),
    "labels": (None, "folders"),
    "packing": (True, False),
}
_OF_FILES = ("text_field", "labels", "delimiter")
"""Options that don't apply to a column of another container."""
OF_DOCUMENTS = (
    *("unit", "column", "text_field", "target_field", "labels"),
    *("encoding", "errors", "chat_template", "delimiter"),
)
"""Options that decide which documents there are."""
CHAT_FIELDS = ("messages", "conversations")
"""The fields that may hold a chat; the first one that is not null counts."""
_TOGETHER = 1024  # texts that are read at a time
_LARGEST = (1 << 31) - 1  # id


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """The options of `TextDataset` that define texts, ids and samples.

    Raises:
        ConfigError: an option is invalid, or excludes another one.
    """

    tokenizer: Any
    max_length: int | None = None
    unit: str | None = None
    column: str | None = None
    text_field: str | Callable[[Any], str] = records.TEXT_FIELD
    target_field: str | None = None
    labels: str | None = None
    stride: int | None = None
    packing: bool = False
    end_token: int | None = None
    encoding: str = "utf-8"
    errors: str = "strict"
    chat_template: str | None = None
    delimiter: str | None = None
    cache_dir: str | os.PathLike[str] | None = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        vocabulary_of(self.tokenizer)  # checks it
        records.delimiters_of(self.delimiter)  # checks it
        for name, least in (("max_length", 1), ("stride", 1), ("end_token", 0)):
            check_integer(name, getattr(self, name), least, optional=True)
        for name, allowed in _CHOICES.items():
            check_choice(name, getattr(self, name), allowed)
        if not isinstance(self.text_field, str) and not callable(self.text_field):
            raise ConfigError(
                "text_field must be the name of one field, or a callable from a record to its text "
                f"(for several fields), not {self.text_field!r}"
            )
        for name in ("column", "target_field", "chat_template"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise ConfigError(f"{name} must be a string, and not empty, not {value!r}")
        self._check_together()

    def _check_together(self) -> None:
        """Raises a ConfigError for options that exclude, or need, each other."""
        if self.packing and self.stride is not None:
            raise ConfigError("packing and stride can't be given together: leave one out")
        if not self.is_in_parts and self.end_token is not None:
            raise ConfigError("end_token needs stride or packing: leave it out without these")
        if self.is_in_parts and self.max_length is None:
            raise ConfigError("stride and packing need max_length=, such as max_length=1024")
        if self.stride and self.max_length and self.stride > self.max_length:
            raise ConfigError(
                f"stride={self.stride} is larger than max_length={self.max_length}, so tokens "
                "between windows would be lost: use a smaller stride"
            )
        if self.unit == CHAT:
            self.check_chats()
        elif self.chat_template is not None:
            raise ConfigError(f"chat_template needs unit='chat', not unit={self.unit!r}")
        if self.column is not None:
            given = self.given(_OF_FILES)
            if given or self.unit in ("file", "line"):
                what = ", ".join(given) or f"unit={self.unit!r}"
                raise ConfigError(f"{what} does not apply to column=: leave it out")
            if self.target_field is not None and self.packing:
                raise ConfigError("target_field and packing can't be given together: leave one out")
            return
        is_plain = self.unit not in ("record", CHAT)
        if is_plain and self.text_field != records.TEXT_FIELD:
            raise ConfigError(f"text_field={self.text_field!r} needs unit='record' or unit='chat'")
        has_other_labels = is_plain or self.is_in_parts or self.labels is not None
        if self.target_field is not None and has_other_labels:
            raise ConfigError(
                "target_field needs unit='record', without stride, packing and labels"
            )

    @property
    def is_in_parts(self) -> bool:
        """True if samples are windows or blocks, which need all tokens in advance."""
        return self.packing or self.stride is not None

    def check_chats(self) -> None:
        """Raises a ConfigError for options that don't apply to chats. (Their files may be the
        first to say that they are chats.)
        """
        for name in ("target_field", "labels", "stride", "end_token"):
            value = getattr(self, name)
            if value is not None:
                raise ConfigError(f"{name}={value!r} does not apply to chats: leave it out")

    def given(self, names: Sequence[str] = (*OF_DOCUMENTS, "end_token")) -> dict[str, Any]:
        """The options among `names` that were given. Default: those that packing has decided."""
        usual = {field.name: field.default for field in fields(self)}
        return {name: getattr(self, name) for name in names if getattr(self, name) != usual[name]}


# -- decoders


class TextDecoder(Decoder):
    """Samples ``{"input_ids": ...}``, with "labels" if there are targets or marks.

    Args:
        source: the stored documents, or their tokens.
        name: "file", "line", "record" or "chat": what the documents are.
    """

    makes_plain_samples = False

    def __init__(self, source: Any, name: str) -> None:
        self.source = source
        self.name = name

    @property
    def is_marked(self) -> bool:
        """True if the ids are those of chats, which have marks."""
        return self.name == CHAT

    def to_input(self, value: Any) -> Any:
        ids = value.astype(np.int64)
        made = {"input_ids": torch.from_numpy(ids)}
        if self.is_marked:
            labels = np.empty_like(ids)
            unmark(ids, labels)
            made["labels"] = torch.from_numpy(labels)
        return made

    def make_sample(self, value: Any, target: Any, has_target: bool) -> Any:
        if not has_target:
            return value
        return {**value, "labels": target} if isinstance(value, dict) else (value, target)

    def input_spec(self, value: ArraySpec) -> ArraySpec | None:
        return None

    def own_reader(self, dataset: Any, collating: Collating) -> BatchReader | None:
        function = collating.function
        if type(function) is not TextCollator or not collating.calls(function):
            return None
        if dataset.targets is not None or self.splits_targets:
            return None
        return JoinedIds(dataset, collating, self.is_marked)

    def lengths(self, reader: SampleReader) -> IntArray:
        """Length of each sample of the source, in tokens or a similar measure."""
        found: IntArray = self.source.lengths()
        return found


# -- texts that are tokenised when they are read


class Texts(TextDecoder):
    """Documents that are tokenised when they are read, a batch at a time.

    Args:
        source: its `row` gives a text, or an object with fields; or its records are values of a
            column, or dicts of several columns.
        options: the options of the dataset.
        name: what a document is.
        value_of: decodes the records of a column. None: records are values.
    """

    decodes_batches = True
    stores_values = False

    def __init__(
        self,
        source: Any,
        options: TextOptions,
        name: str,
        value_of: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(source, name)
        self.options = options
        self._value_of = value_of

    @property
    def identity(self) -> str | None:
        """Identifies in later runs how texts become ids. None: that can't be identified."""
        return identity_of(self.options.tokenizer)

    def row(self, index: int, record: Any) -> Any:
        """The content of a record: a text, ids, or an object with fields.

        Raises:
            FormatError: its bytes are not a text in the encoding, or not such a record.
        """
        column = self.options.column
        if column is None:
            return self.source.row(index, record)
        if self._value_of is not None:
            record = self._value_of(record)
        value = record.get(column) if isinstance(record, dict) else record
        if value is None:
            raise FormatError(f"column {column!r} is null there")
        if isinstance(value, bytes):
            try:
                return value.decode(self.options.encoding, self.options.errors)
            except UnicodeDecodeError as error:
                raise undecodable(error, 0) from None
        return record if self.name == CHAT else value

    def text_and_target(self, index: int, record: Any) -> tuple[Any, Any]:
        """Text (or ids) of a document, and its target as stored.

        Raises:
            FormatError: the text or the target is missing.
        """
        if self.options.column is not None:
            return _text_or_ids(self.row(index, record), self.options.column), None
        row = self.source.row(index, record)
        if self.name != "record":
            return row, None
        text = records.text_of(row, self.options.text_field)
        field = self.options.target_field
        if field is None:
            return text, None
        target = records.field_of(row, field)
        if isinstance(target, str) and not target.strip() and self.is_cell(index):
            raise FormatError(f"its field {field!r} is empty, so it has no target")
        return text, target

    def is_cell(self, index: int) -> bool:
        """True if a record is a row of a CSV or TSV file, whose fields are all texts."""
        return self.source.texts[self.source.number_of(index)].delimiter is not None

    def whole_ids(self, numbers: Sequence[int], reader: SampleReader) -> list[Any]:
        """The ids, or a SampleError, of each of some whole documents, by their numbers in the
        source.
        """
        whole = copy.copy(self)
        whole.options = replace(self.options, max_length=None, target_field=None)
        whole.splits_targets = whole.always_pairs = False
        return Decoded(Records(self.source)).read(numbers, Access(reader, whole))

    def decode(self, record: Any) -> Any:
        def raises(_: int, __: str, error: Exception) -> SampleError:
            raise error

        return self.decode_batch([(0, record)], raises)[0]

    def decode_batch(self, items: Sequence[tuple[int, Any]], failed: Failed) -> list[Any]:
        values: list[Any] = [None] * len(items)
        targets: list[Any] = [None] * len(items)
        texts: dict[int, str] = {}
        most = self.options.max_length
        for number, (index, record) in enumerate(items):
            try:
                text, targets[number] = self.text_and_target(index, record)
            except Exception as error:
                values[number] = failed(number, "can't be decoded", error)
                continue
            if isinstance(text, str):
                texts[number] = text
            else:
                values[number] = text[:most]
        tokenizer = self.options.tokenizer
        try:
            together = token_arrays(tokenizer, list(texts.values()), most) if texts else []
            for number, ids in zip(texts, together, strict=True):
                values[number] = ids
        except Exception:  # one after the other, to tell which text is at fault
            for number, text in texts.items():
                try:
                    values[number] = token_arrays(tokenizer, [text], most)[0]
                except Exception as error:
                    values[number] = failed(number, "can't be tokenised", error)
        if self.splits_targets:
            for number, ids in enumerate(values):
                if not isinstance(ids, SampleError):
                    values[number] = (ids, targets[number])
        return values

    def split_target(self, value: Any, index: int, dataset: Any) -> tuple[Any, Any]:
        return value if self.splits_targets else super().split_target(value, index, dataset)

    def read_each(self, numbers: IntArray, reader: SampleReader) -> Iterator[tuple[int, Any, Any]]:
        """Reads documents in order, without those that can't be read and may be skipped.

        Args:
            numbers: numbers of the documents in the source.
            reader: reads them.

        Yields:
            The position of each document among `numbers`, its text (or ids), and its target as
            stored.

        Raises:
            SampleError: a document can't be read, or has no text or target, and may not be skipped.
        """
        for start in range(0, len(numbers), _TOGETHER):
            indices = numbers[start : start + _TOGETHER].tolist()
            found = zip(indices, reader.records(indices, self.source.read), strict=True)
            for position, (index, record) in enumerate(found, start):
                if isinstance(record, SampleError):
                    continue
                try:
                    text, target = self.text_and_target(index, record)
                except Exception as error:
                    reader.failed(index, "can't be decoded", error)
                    continue
                yield position, text, target

    def text_of(self, index: int, reader: SampleReader) -> str:
        """The text of a document before tokenisation, by its number in the source.

        Raises:
            SampleError: it can't be read.
            ConfigError: the column holds ids.
        """
        strict = copy.copy(reader)
        strict.on_error = "raise"
        [(_, text, _)] = self.read_each(np.array([index]), strict)
        if not isinstance(text, str):
            raise ConfigError(f"text_of: column {self.options.column!r} holds ids, not texts")
        return text

    def lengths(self, reader: SampleReader) -> IntArray:
        everything = np.arange(len(self.source))
        if self.name == "record":
            return self._characters(everything, reader)
        return self.nbytes(everything, reader)

    def nbytes(self, numbers: IntArray, reader: SampleReader) -> IntArray:
        """Approximate bytes of some texts ([n] int64), by their numbers in the source."""
        if self.options.column is not None:
            return self._characters(numbers, reader)
        sizes: IntArray = self.source.sizes(numbers)
        return sizes

    def _characters(self, numbers: IntArray, reader: SampleReader) -> IntArray:
        """Characters (or ids) of texts or rendered chats ([n] int64); 0 for skipped ones."""
        lengths = np.zeros(len(numbers), np.int64)
        for position, text, _ in self.read_each(numbers, reader):
            lengths[position] = len(text)
        return lengths

    def own_reader(self, dataset: Any, collating: Collating) -> BatchReader | None:
        reader = super().own_reader(dataset, collating)
        source = self.source
        if (
            isinstance(reader, JoinedIds)
            and isinstance(source, LinesSource)
            and not source.has_records
            and type(self.options.tokenizer) is CharTokenizer
            and dataset.value_source.is_direct
            and not source.files.is_remote
        ):
            reader.name = "lines straight from storage, and padded at once"
            reader.lines = self._encoded_lines
        return reader

    def _encoded_lines(self, whole: IntArray, counts: Counter[str]) -> tuple[Any, IntArray]:
        """The concatenated ids of some lines, and the number of ids of each."""
        joined, sizes = self.source.read_joined(whole)
        counts["bytes_read"] += len(joined)
        start = time.perf_counter()
        tokenizer = self.options.tokenizer
        most = self.options.max_length
        encoded = tokenizer.encode_bytes(joined, sizes, *self.source.codec, most)
        seconds: Any = time.perf_counter() - start
        counts["decode_seconds"] += seconds
        counts["read_seconds"] -= seconds
        return encoded  # type: ignore[no-any-return]


def _text_or_ids(value: Any, column: str) -> Any:
    """A value of a column of texts or ids."""
    if isinstance(value, str):
        return value
    if isinstance(value, (list, np.ndarray)):
        ids = np.asarray(value)
        if ids.ndim == 1 and (ids.dtype.kind in "iu" or not len(ids)):
            if len(ids) and (ids.min() < 0 or ids.max() > _LARGEST):
                has = f"column {column!r} has ids from {ids.min()} to {ids.max()}"
                raise FormatError(f"{has}: they must be at least 0, and fit int32")
            return ids.astype(np.int32)
    raise FormatError(f"column {column!r} has a {type(value).__name__}, not a text or ids")


def has_role(message: Any) -> bool:
    """True if a value may be a message of a chat."""
    return isinstance(message, Mapping) and ("role" in message or "from" in message)


def holds_chat(value: Any) -> bool:
    """True if a value is a list of messages, or a record with such a field and no text field."""
    if isinstance(value, Mapping):
        has_text = isinstance(value.get(records.TEXT_FIELD), str)
        return not has_text and any(holds_chat(value.get(name)) for name in CHAT_FIELDS)
    return isinstance(value, list) and bool(value) and all(map(has_role, value))


def has_template(tokenizer: Any) -> bool:
    """True if a tokenizer has a chat template of its own."""
    applies = callable(getattr(tokenizer, "apply_chat_template", None))
    return applies and bool(getattr(tokenizer, "chat_template", None))


def check_supervised(ids: npt.NDArray[Any]) -> None:
    """Raises a FormatError if no id of a chat is supervised."""
    if not (ids >= 0).any():
        raise FormatError(
            f"none of its first {len(ids):,} tokens is the assistant's: raise max_length"
        )


# -- stored tokens


class TokensDecoder(TextDecoder):
    """Documents of a packed file, or windows over documents, as ids."""

    @property
    def stores_values(self) -> bool:  # type: ignore[override]
        return not self.is_marked

    def decode(self, record: Any) -> Any:
        if self.is_marked:
            check_supervised(record)
        return record


class BlocksDecoder(TextDecoder):
    """Blocks over all documents, with the number of each token's document."""

    def to_input(self, value: Any) -> Any:
        documents = torch.from_numpy(value["document_ids"].astype(np.int32))
        return {**super().to_input(value["input_ids"]), "document_ids": documents}

    def sample_nbytes(self) -> int:
        length: int = self.source.length
        return length * (8 + 8 * self.is_marked + 4)

    def own_reader(self, dataset: Any, collating: Collating) -> BatchReader | None:
        source = self.source
        if not collating.stacks or not dataset.value_source.is_direct:
            return None
        long = ArraySpec((source.length,), np.dtype(np.int64))
        columns = {"input_ids": long}
        if self.is_marked:
            columns["labels"] = long
        columns["document_ids"] = ArraySpec((source.length,), np.dtype(np.int32))

        def read_blocks(indices: npt.NDArray[np.int64], outs: dict[str, Any]) -> int:
            source.read_into(indices.tolist(), outs["input_ids"], outs["document_ids"])
            if self.is_marked:
                unmark(outs["input_ids"], outs["labels"])
            nbytes: int = outs["input_ids"].size * source.dtype.itemsize
            return nbytes

        return ColumnReader("blocks straight from storage", dataset, columns, read_blocks)


# -- batches


def unmark(ids: npt.NDArray[np.int64], labels: npt.NDArray[np.int64]) -> None:
    """Turns marked ids into ids, in place, and writes their labels into an array of that shape."""
    np.copyto(labels, ids)
    is_marked = ids < 0
    labels[is_marked] = IGNORED
    np.invert(ids, out=ids, where=is_marked)


class JoinedIds(BatchReader):
    """Reads and tokenises the texts of a batch together, and pads them at once. If tokens are
    characters, the bytes of all lines are concatenated and mapped to ids at once.

    Args:
        dataset: a dataset whose values are ids.
        collating: calls a `TextCollator`.
        is_marked: True if the ids have marks.

    Attributes:
        lines: returns the concatenated ids of lines and the number of ids of each, given the lines'
            numbers and the counters. None: values are read.
    """

    name = "tokenised together, and padded at once"
    writes_in_place = False
    lines: Callable[[IntArray, Counter[str]], tuple[Any, IntArray]] | None = None

    def __init__(self, dataset: BaseDataset, collating: Collating, is_marked: bool) -> None:
        self._dataset = dataset
        self._collating = collating
        self._is_marked = is_marked

    def read(self, request: BatchRequest) -> MadeBatch | None:
        dataset = self._dataset
        collator: Any = self._collating.function
        if dataset.targets is not None:
            return None
        whole = dataset.whole_indices(request)
        if self.lines is not None:
            with dataset.sample_reader.reading_together(len(whole)) as counts:
                ids, lengths = self.lines(whole, counts)
            batch = collator.join(ids, lengths)
            if batch is not None:  # else the collator must see the samples
                return MadeBatch(batch, len(request))
        values = dataset.value_source.read(whole.tolist(), dataset.access())
        if all(type(value) is np.ndarray for value in values):
            start = time.perf_counter()
            ids = np.concatenate(values)
            lengths = np.fromiter(map(len, values), np.int64, len(values))
            labels = None
            if self._is_marked:
                ids = ids.astype(np.int64)
                labels = np.empty_like(ids)
                unmark(ids, labels)
            batch = collator.join(ids, lengths, labels)
            dataset.sample_reader.count_seconds("collate_seconds", start)
            if batch is not None:
                return MadeBatch(batch, len(request))
        samples, made_of = dataset.finish(request, values)
        return self._collating.batch_of(dataset, samples, made_of, request)
