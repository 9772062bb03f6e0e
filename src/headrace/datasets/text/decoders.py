"""What a sample of a `TextDataset` is: a text, tokenised when it is read; or tokens that are there
already, as documents, windows or blocks.

Ids of chats are marked: an id that is supervised stands for itself, another one is stored as
-1 - id. So ids and labels are cut, cached and packed as ids alone are.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.core.batcher import BatchReader, Collating
from headrace.core.decoder import Decoder, Failed
from headrace.core.reader import SampleReader
from headrace.datasets.text.batches import reader_of_blocks, reader_of_ids, unmark
from headrace.datasets.text.options import CHAT, TextOptions
from headrace.dtypes import ArraySpec, IntArray
from headrace.errors import ConfigError, FormatError, SampleError
from headrace.formats.text import records
from headrace.formats.text.chats import ASSISTANT, Chat, are_messages, chat_field, chat_of
from headrace.formats.text.plain import undecodable
from headrace.formats.tokens.source import BlocksSource, TokensSource
from headrace.tokenizer import identity_of, token_arrays

_TOGETHER = 1024  # texts that are read at a time
_MARKS = re.compile(r"\{%[-+]?\s*generation\b")
_LARGEST = (1 << 31) - 1  # id


class TextDecoder(Decoder):
    """Samples ``{"input_ids": ...}``, with "labels" where there are targets, or marks.

    Attributes:
        name: "file", "line", "record" or "chat": what the documents are.
        source: the stored documents, or their tokens.
    """

    makes_plain_samples = False
    name: str
    source: Any

    @property
    def is_marked(self) -> bool:
        """True if the ids are those of chats, and have marks."""
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

    @abstractmethod
    def text_of(self, index: int, reader: SampleReader) -> str:
        """The text of a sample before it is tokenised, by its number in the source.

        Raises:
            SampleError: it can't be read.
            ConfigError: it has none.
        """

    def lengths(self, reader: SampleReader) -> IntArray:
        """How long each sample of the source is, in tokens or what stands for them."""
        found: IntArray = self.source.lengths()
        return found


# -- texts that are tokenised when they are read


class Texts(TextDecoder):
    """Documents whose ids are made when they are read, a batch at a time, as tokenizers like it.

    Args:
        source: whose `row` gives a text, or an object with fields; or whose records are values of a
            column, or dicts of several.
        options: of the dataset.
        name: what a document is.
        value_of: decodes the records of a column; None: they are values.
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
        self.source = source
        self.options = options
        self.name = name
        self._value_of = value_of

    @property
    def identity(self) -> str | None:
        """What the way from a text to ids is known by at another start; None: it can't be known
        again.
        """
        return identity_of(self.options.tokenizer)

    def row(self, index: int, record: Any) -> Any:
        """What a record says: a text, ids, or an object with fields.

        Raises:
            FormatError: its bytes are no text of the encoding, or no such record.
        """
        column = self.options.column
        if column is None:
            return self.source.row(index, record)
        if self._value_of is not None:
            record = self._value_of(record)
        value = record.get(column) if isinstance(record, dict) else record
        if value is None:
            raise FormatError(f"column {column!r} has no value (null) there")
        if isinstance(value, bytes):
            try:
                return value.decode(self.options.encoding, self.options.errors)
            except UnicodeDecodeError as error:
                raise undecodable(error, 0) from None
        return record if self.name == CHAT else value

    def text_and_target(self, index: int, record: Any) -> tuple[Any, Any]:
        """Text (or ids) of a document, and its target as it stands there.

        Raises:
            FormatError: there is no text, or no target.
        """
        if self.options.column is not None:
            return _text_or_ids(self.row(index, record), self.options.column), None
        row = self.source.row(index, record)
        if self.name != "record":
            return row, None
        try:
            text = records.text_of(row, self.options.text_field)
        except FormatError as error:
            name = chat_field(row)
            if name is None or callable(self.options.text_field):
                raise
            # no flags: none exist
            raise FormatError(
                f"{error}; {name!r} holds a chat: from Python its unit is 'chat', with a "
                "HuggingFace tokenizer that has a chat template"
            ) from None
        field = self.options.target_field
        if field is None:
            return text, None
        target = records.field_of(row, field)
        if isinstance(target, str) and not target.strip() and self.is_cell(index):
            raise FormatError(f"its field {field!r} is empty, so it has no target")
        return text, target

    def is_cell(self, index: int) -> bool:
        """True if a record is a row of a CSV or TSV file, whose fields are all texts."""
        return self.source.kinds[self.source.file_of(index)] in self.source.delimiters

    def uncut(self) -> Texts:
        """The same texts as whole documents, whose values are ids alone: what is packed, and
        what windows and blocks are made of.
        """
        whole = copy.copy(self)
        whole.options = self.options.of_documents()
        whole.splits_targets = whole.always_pairs = False
        return whole

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

    def read_each(
        self,
        numbers: IntArray,
        reader: SampleReader,
        expect: Callable[[range], None] = lambda _: None,
    ) -> Iterator[tuple[int, Any, Any]]:
        """Reads documents in order, without those that can't be read and may be left out.

        Args:
            numbers: of the documents in the source.
            reader: reads them.
            expect: is told which ones of these are read next.

        Yields:
            The position of each among `numbers`, its text (or ids), and its target as it stands
            there.

        Raises:
            SampleError: one can't be read, or has no text or target, and may not be left out.
        """
        for start in range(0, len(numbers), _TOGETHER):
            some = range(start, min(start + _TOGETHER, len(numbers)))
            expect(some)
            indices = numbers[some.start : some.stop].tolist()
            found = reader.records(indices, self.source.read)
            for position, index, record in zip(some, indices, found, strict=True):
                if isinstance(record, SampleError):
                    continue
                try:
                    text, target = self.text_and_target(index, record)
                except Exception as error:
                    reader.failed(index, "can't be decoded", error)
                    continue
                yield position, text, target

    def text_of(self, index: int, reader: SampleReader) -> str:
        strict = copy.copy(reader)
        strict.on_error = "raise"
        for _, text, _ in self.read_each(np.array([index]), strict):
            if isinstance(text, str):
                return text
        raise ConfigError(f"text_of: column {self.options.column!r} holds ids, and no texts")

    def lengths(self, reader: SampleReader) -> IntArray:
        if self.name == "record":
            return self._characters(np.arange(len(self.source)), reader)
        return self.nbytes(np.arange(len(self.source)), reader)

    def nbytes(self, numbers: IntArray, reader: SampleReader) -> IntArray:
        """About how many bytes each of some texts has ([n] int64), by its number in the source."""
        if self.options.column is not None:
            return self._characters(numbers, reader)
        found: IntArray = self.source.sizes(None if len(numbers) == len(self.source) else numbers)
        return found

    def _characters(self, numbers: IntArray, reader: SampleReader) -> IntArray:
        """Characters (or ids) of each of some texts, or of chats as they are rendered; 0 of those
        that are left out ([n] int64).
        """
        lengths = np.zeros(len(numbers), np.int64)
        for position, text, _ in self.read_each(numbers, reader):
            lengths[position] = len(text)
        return lengths

    def own_reader(self, dataset: Any, collating: Collating) -> BatchReader | None:
        if self.splits_targets:
            return None
        options = self.options
        return reader_of_ids(
            dataset, collating, options.tokenizer, options.max_length, self.is_marked
        )


def _text_or_ids(value: Any, column: str) -> Any:
    """A value of a column of texts or ids."""
    if isinstance(value, str):
        return value
    if isinstance(value, (list, np.ndarray)):
        ids = np.asarray(value)
        if ids.ndim == 1 and (ids.dtype.kind in "iu" or not len(ids)):
            if len(ids) and (ids.min() < 0 or ids.max() > _LARGEST):
                raise FormatError(
                    f"column {column!r} has ids from {ids.min()} to {ids.max()}: they must be at "
                    "least 0, and fit int32"
                )
            return ids.astype(np.int32)
    hint = ""
    if are_messages(value):
        hint = ": it holds chats: pass unit='chat', and a tokenizer that has a chat template"
    raise FormatError(f"column {column!r} has a {type(value).__name__}, no text and no ids{hint}")


class Chats(Texts):
    """Each record is a chat, which the tokenizer's chat template renders.

    Args:
        source, options, value_of: as for `Texts`.

    Raises:
        ConfigError: the tokenizer has no chat template, or one that doesn't mark the assistant's
            turns; or an option has no meaning for chats.
    """

    def __init__(
        self, source: Any, options: TextOptions, value_of: Callable[[Any], Any] | None = None
    ) -> None:
        super().__init__(source, options, CHAT, value_of)
        options.check_chats()
        tokenizer = options.tokenizer
        _check_template(tokenizer, options.chat_template)
        self._reserved = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters)
        about = json.dumps([tokenizer.chat_template, options.chat_template], default=repr)
        self._template_identity = hashlib.blake2b(about.encode(), digest_size=16).hexdigest()

    @property
    def identity(self) -> str | None:
        known = super().identity
        return None if known is None else f"{known}|chat:{self._template_identity}"

    def _chat(self, index: int, record: Any) -> Chat:
        row = self.row(index, record)
        column = self.options.column
        if column is not None and not isinstance(row, dict):
            row = {column: row}
        return chat_of(_plain(row), self.options.text_field if column is None else column)

    def text_and_target(self, index: int, record: Any) -> tuple[Any, Any]:
        return self._applied(self._chat(index, record), tokenize=False), None

    def decode_batch(self, items: Sequence[tuple[int, Any]], failed: Failed) -> list[Any]:
        made: list[Any] = []
        for number, (index, record) in enumerate(items):
            try:
                made.append(self._cut(self._encoded(self._chat(index, record))))
            except Exception as error:
                made.append(failed(number, "can't be decoded", error))
        return made

    def _applied(self, chat: Chat, **how: Any) -> Any:
        """What the tokenizer's template makes of a chat."""
        reserved = self._reserved & chat.options.keys()
        if reserved:
            raise FormatError(
                f"its chat_template_kwargs hold {', '.join(sorted(reserved))}, which is not the "
                "template's: leave it out"
            )
        given = {**chat.options, **how}
        if self.options.chat_template is not None:
            given["chat_template"] = self.options.chat_template
        apply = self.options.tokenizer.apply_chat_template
        try:
            return apply(chat.messages, tools=chat.tools, **given)
        except MemoryError:
            raise
        except Exception as error:
            raise FormatError(
                f"the chat template can't render it: {error or type(error).__name__}"
            ) from error

    def _encoded(self, chat: Chat) -> npt.NDArray[np.int32]:
        """The ids of a chat with their marks: int32 [tokens]."""
        made = self._applied(chat, return_dict=True, return_assistant_tokens_mask=True)
        is_supervised = np.array(made["assistant_masks"], bool)
        if not is_supervised.any():
            raise FormatError(
                "the chat template marks no token of it as the assistant's: its {% generation %} "
                "must enclose each turn"
            )
        turns = [
            is_trained
            for is_trained, message in zip(chat.is_trained, chat.messages, strict=True)
            if message["role"] == ASSISTANT
        ]
        if not all(turns):
            begins = np.diff(is_supervised, prepend=False) & is_supervised
            if begins.sum() != len(turns):
                raise FormatError(
                    f"the chat template marks {begins.sum()} stretches of tokens in it, of "
                    f"{len(turns)} assistant's turns, so it can't be told which of them have the "
                    "weight 0: leave 'weight' out, or pass chat_template= one that marks each turn"
                )
            is_supervised &= np.array(turns)[np.cumsum(begins) - 1]
        ids = np.array(made["input_ids"]).astype(np.int32)
        return np.where(is_supervised, ids, ~ids)

    def _cut(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        most = self.options.max_length
        if most is None or len(ids) <= most:
            return ids
        _check_supervised(ids[:most])
        return ids[:most].copy()  # a view would hold all of it


def _check_supervised(ids: npt.NDArray[Any]) -> None:
    if not (ids >= 0).any():
        raise FormatError(
            f"its first {len(ids):,} tokens hold none of the assistant's: raise max_length"
        )


def _plain(value: Any) -> Any:
    """A value as JSON has it: what is null in a struct of a table, as fields are that other rows
    have, is left out.
    """
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items() if one is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return value


def has_template(tokenizer: Any) -> bool:
    """True if a tokenizer has a chat template of its own."""
    applies = callable(getattr(tokenizer, "apply_chat_template", None))
    return applies and bool(getattr(tokenizer, "chat_template", None))


def _check_template(tokenizer: Any, template: str | None) -> None:
    """Raises a ConfigError unless a tokenizer's template, or one for it, can say which tokens are
    the assistant's.
    """
    needs = (
        f"chats need a tokenizer with a chat template, and the {type(tokenizer).__name__} has no"
    )
    if not callable(getattr(tokenizer, "apply_chat_template", None)):
        raise ConfigError(f"{needs} apply_chat_template: pass tokenizer= one of HuggingFace's")
    if template is None and not has_template(tokenizer):
        raise ConfigError(
            f"{needs} chat template: pass chat_template=, or tokenizer= of a chat model"
        )
    if not tokenizer.is_fast:
        raise ConfigError(f"{needs} offsets of tokens: pass tokenizer= a fast one of HuggingFace's")
    try:
        source = tokenizer.get_chat_template(template)
    except ValueError as error:  # of several templates none is the default
        raise ConfigError(f"chat_template={template!r}: {error}") from error
    if not _MARKS.search(source):
        raise ConfigError(
            "the chat template doesn't mark the assistant's turns, so it can't be told which "
            "tokens are labels: pass chat_template= a copy of it that writes each of these turns "
            "between {% generation %} and {% endgeneration %}"
        )


# -- texts that are tokens already


class TokensDecoder(TextDecoder):
    """Whole documents of a packed file, or windows over documents, as ids; or blocks of tokens over
    all documents, and the number of each token's document.

    Args:
        source: the tokens.
        name: what a document is.
        documents: says what the text of a document is; None: nobody can.
    """

    def __init__(
        self, source: TokensSource, name: str, documents: Callable[[int], str] | None
    ) -> None:
        self.source = source
        self.name = name
        self._documents = documents
        self._are_blocks = isinstance(source, BlocksSource)
        self.stores_values: bool = not self.is_marked or self._are_blocks

    def decode(self, record: Any) -> Any:
        if self.is_marked and not self._are_blocks:
            _check_supervised(record)
        return record

    def to_input(self, value: Any) -> Any:
        if not self._are_blocks:
            return super().to_input(value)
        documents = torch.from_numpy(value["document_ids"].astype(np.int32))
        return {**super().to_input(value["input_ids"]), "document_ids": documents}

    def text_of(self, index: int, reader: SampleReader) -> str:
        if self._are_blocks:
            raise ConfigError("text_of: with packing=True a sample is a block, of no one text")
        if self._documents is None:
            raise ConfigError(
                "text_of: a packed file holds tokens and no texts; what its tokenizer decodes "
                "comes close"
            )
        return self._documents(int(self.source.document_of(np.array([index]))[0]))

    def sample_nbytes(self) -> int | None:
        if not self._are_blocks:
            return None
        length: int = self.source.length
        return length * (8 + 8 * self.is_marked + 4)

    def own_reader(self, dataset: Any, collating: Collating) -> BatchReader | None:
        if self._are_blocks:
            return reader_of_blocks(dataset, collating, self.is_marked)
        return reader_of_ids(dataset, collating, None, None, self.is_marked)
