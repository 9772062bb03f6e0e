"""What a sample of a `TextDataset` is: a file, a line, a record, a window of tokens, or a block
of them.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from headrace.core.batch import BatchReader, Collating
from headrace.core.dataset import BaseDataset
from headrace.core.decoder import Decoder, Failed
from headrace.core.reader import SampleReader
from headrace.datasets.text.marked import ids_of, labels_of
from headrace.datasets.text.options import CHAT, TextOptions
from headrace.datasets.text.passes import RecordTargets, record_columns, target_as, targets_in
from headrace.datasets.text.ways import reader_of_blocks, reader_of_ids
from headrace.dtypes import ArraySpec, IntArray
from headrace.errors import ConfigError, FormatError, SampleError
from headrace.storage.text import records
from headrace.storage.text.chats import chat_field
from headrace.storage.text.files import TextFilesSource
from headrace.storage.text.line_index import Arrays
from headrace.storage.text.source import LinesSource
from headrace.storage.tokens.source import BlocksSource, TokensSource
from headrace.tokenizer import identity_of, token_arrays

_MARK = "\ufeff"


class TextUnit(Decoder):
    """Samples ``{"input_ids": ...}``, with "labels" where there are targets, or marks.

    Attributes:
        name: "file", "line", "record" or "chat": what the documents are.
    """

    makes_plain_samples = False
    name: str
    source: Any

    @property
    def is_marked(self) -> bool:
        """True if the ids have marks, see `headrace.datasets.text.marked`."""
        return self.name == CHAT

    def to_input(self, value: Any) -> Any:
        if self.is_marked:
            return {
                "input_ids": torch.from_numpy(ids_of(value)),
                "labels": torch.from_numpy(labels_of(value)),
            }
        return {"input_ids": torch.from_numpy(value.astype(np.int64))}

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


class TokenizedTexts(TextUnit):
    """Documents whose ids are made when they are read, a batch at a time, as tokenizers like it.

    Args:
        source: their bytes.
        options: of the dataset.
    """

    decodes_batches = True
    stores_values = False

    def __init__(self, source: Any, options: TextOptions) -> None:
        self.source = source
        self.options = options

    @property
    def identity(self) -> str | None:
        """What the way from a text to ids is known by at another start; None: it can't be known
        again.
        """
        return identity_of(self.options.tokenizer)

    @abstractmethod
    def text_and_target(self, index: int, record: Any) -> tuple[str, Any]:
        """Text and target of a document.

        Raises:
            FormatError: its bytes are no text of the encoding, or no such record.
        """

    def uncut(self) -> TokenizedTexts:
        """The same texts as whole documents, whose values are ids alone: what is packed, and
        what windows and blocks are made of.
        """
        whole = copy.copy(self)
        whole.options = self.options.of_documents()
        return whole

    def decode(self, record: Any) -> Any:
        def raises(_: int, __: str, error: Exception) -> SampleError:
            raise error

        return self.decode_batch([(0, record)], raises)[0]

    def decode_batch(self, items: Sequence[tuple[int, Any]], failed: Failed) -> list[Any]:
        values: list[Any] = [None] * len(items)
        texts: dict[int, str] = {}
        for number, (index, record) in enumerate(items):
            try:
                texts[number], values[number] = self.text_and_target(index, record)
            except Exception as error:
                values[number] = failed(number, "can't be decoded", error)
        tokenizer = self.options.tokenizer
        most = self.options.max_length
        try:
            together = token_arrays(tokenizer, list(texts.values()), most) if texts else []
            made: dict[int, Any] = dict(zip(texts, together, strict=True))
        except Exception:  # one after the other, to tell which text is at fault
            made = {}
            for number, text in texts.items():
                try:
                    made[number] = token_arrays(tokenizer, [text], most)[0]
                except Exception as error:
                    made[number] = failed(number, "can't be tokenised", error)
        for number, ids in made.items():
            is_pair = self.splits_targets and not isinstance(ids, SampleError)
            values[number] = (ids, values[number]) if is_pair else ids
        return values

    def text_of(self, index: int, reader: SampleReader) -> str:
        record = reader.records([index], self.source.read)[0]
        if isinstance(record, SampleError):
            raise record
        try:
            return self.text_and_target(index, record)[0]
        except FormatError as error:
            failure = reader.failed(index, "can't be decoded", error)
            raise failure from error

    def lengths(self, reader: SampleReader) -> IntArray:
        return self.nbytes(None, reader)

    def nbytes(self, numbers: IntArray | None, reader: SampleReader) -> IntArray:
        """About how many bytes each of some texts has ([n] int64), by its number in the source;
        None: all.
        """
        found: IntArray = self.source.nbytes(numbers)
        return found

    def own_reader(self, dataset: Any, collating: Collating) -> BatchReader | None:
        return reader_of_ids(
            dataset, collating, self.options.tokenizer, self.options.max_length, self.is_marked
        )


class FileTexts(TokenizedTexts):
    """Each file is a document."""

    name = "file"
    source: TextFilesSource

    def text_and_target(self, index: int, record: bytes) -> tuple[str, Any]:
        content = self.source.content(index, record)
        text = decoded(content, self.options.encoding, self.options.errors, lambda: 0)
        return text.removeprefix(_MARK), None

    def nbytes(self, numbers: IntArray | None, reader: SampleReader) -> IntArray:
        return self.source.sizes(numbers)


class LineTexts(TokenizedTexts):
    """Each line is a document."""

    name = "line"
    source: LinesSource

    def text_and_target(self, index: int, record: bytes) -> tuple[str, Any]:
        return decoded(record, *self.source.codec, lambda: self.source.offset_of(index)), None


class RecordTexts(TokenizedTexts):
    """Each record is a document, and may hold its target.

    Args:
        source: the records' bytes.
        options: of the dataset.
        reader: reads all records once, where there are targets.

    Attributes:
        targets: what the records' targets are.

    Raises:
        SampleError: a record can't be read, or has no target.
    """

    name = "record"
    source: LinesSource

    def __init__(self, source: LinesSource, options: TextOptions, reader: SampleReader) -> None:
        super().__init__(source, options)
        self._columns: Arrays | None = None
        self._numbers: dict[str, int] = {}
        self.targets: RecordTargets | None = None
        field = options.target_field
        if field is not None:
            self._columns = record_columns(self, reader, is_opening=True)
            self.targets = targets_in(self._columns, field)
            self._numbers = {name: number for number, name in enumerate(self.targets.classes)}
        self.splits_targets = self.always_pairs = field is not None

    def uncut(self) -> TokenizedTexts:
        whole = super().uncut()
        whole.splits_targets = whole.always_pairs = False
        return whole

    def text_and_target(self, index: int, record: bytes) -> tuple[str, Any]:
        source, field = self.source, self.options.target_field
        row = source.fields(index, decoded(record, *source.codec, lambda: source.offset_of(index)))
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
        if field is None:
            return text, None
        is_cell = source.is_of_table(index)
        target = records.target_of(row, field, is_cell)
        if self.targets is not None and self.targets.kind is not None:
            target = target_as(self.targets.kind, target, is_cell, self._numbers)
        return text, target

    def split_target(self, value: Any, index: int, dataset: BaseDataset) -> tuple[Any, Any]:
        return value if self.splits_targets else super().split_target(value, index, dataset)

    def lengths(self, reader: SampleReader) -> IntArray:
        if self._columns is None:
            self._columns = record_columns(self, reader, is_opening=False)
        return self._columns.long

    def own_reader(self, dataset: Any, collating: Collating) -> BatchReader | None:
        return None if self.splits_targets else super().own_reader(dataset, collating)


# -- texts that are tokens already


class TokenWindows(TextUnit):
    """Whole documents of a packed file, or windows over documents, as ids.

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
        self.stores_values: bool = not self.is_marked

    def decode(self, record: Any) -> Any:
        if self.is_marked and not (record >= 0).any():
            raise FormatError(
                f"its first {len(record):,} tokens hold none of the assistant's: raise max_length"
            )
        return record

    def text_of(self, index: int, reader: SampleReader) -> str:
        if self._documents is None:
            raise ConfigError(
                "text_of: a packed file holds tokens and no texts; what its tokenizer decodes "
                "comes close"
            )
        return self._documents(int(self.source.document_of(np.array([index]))[0]))

    def own_reader(self, dataset: Any, collating: Collating) -> BatchReader | None:
        return reader_of_ids(dataset, collating, None, None, self.is_marked)


class TokenBlocks(TextUnit):
    """Blocks of tokens over all documents, and the number of each token's document.

    Args:
        source: the blocks.
        name: what a document is.
    """

    def __init__(self, source: BlocksSource, name: str) -> None:
        self.source = source
        self.name = name

    def to_input(self, value: Any) -> Any:
        documents = torch.from_numpy(value["document_ids"].astype(np.int32))
        return {**super().to_input(value["input_ids"]), "document_ids": documents}

    def text_of(self, index: int, reader: SampleReader) -> str:
        raise ConfigError("text_of: with packing=True a sample is a block, of no one text")

    def sample_nbytes(self) -> int | None:
        length: int = self.source.length
        return length * (8 + 8 * self.is_marked + 4)

    def own_reader(self, dataset: Any, collating: Collating) -> BatchReader | None:
        return reader_of_blocks(dataset, collating, self.is_marked)


def decoded(data: bytes, encoding: str, errors: str, begins: Callable[[], int]) -> str:
    """The text of some bytes. (`begins`: the offset of the first in its file.)

    Raises:
        FormatError: they are not of the encoding; the message names the offset.
    """
    try:
        return data.decode(encoding, errors)
    except UnicodeDecodeError as error:
        offset = begins() + error.start
        remedy = "pass encoding= or errors="
        if offset == 0 and data.startswith((b"\xff\xfe", b"\xfe\xff")):
            remedy = "it begins as UTF-16 does: pass encoding='utf-16'"
        raise FormatError(
            f"byte 0x{data[error.start]:02x} at offset {offset:,} is no {encoding} "
            f"({error.reason}); {remedy}"
        ) from None
