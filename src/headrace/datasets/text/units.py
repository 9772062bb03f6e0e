"""What a sample of a `TextDataset` is: a file, a line, a record, a window of tokens, or a block
of them.
"""

from __future__ import annotations

import contextlib
import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.datasets.core.base import BaseDataset
from headrace.datasets.core.batch import BatchWay
from headrace.datasets.core.format import Failed, SampleFormat
from headrace.datasets.core.reader import SampleReader
from headrace.datasets.text.marked import ids_of, label_rows, labels_of
from headrace.datasets.text.options import TextOptions
from headrace.datasets.text.passes import RecordTargets, record_columns, target_as, targets_in
from headrace.datasets.text.ways import way_of_blocks, way_of_ids
from headrace.dtypes import ArraySpec, IntArray
from headrace.errors import ConfigError, FormatError, SampleError
from headrace.storage.text import records
from headrace.storage.text.chats import chat_field
from headrace.storage.text.files import TextFilesSource
from headrace.storage.text.line_index import Arrays
from headrace.storage.text.source import LinesSource
from headrace.storage.tokens.best_fit import BestFitSource
from headrace.storage.tokens.source import BlocksSource, TokensSource
from headrace.tokenizer import identity_of, token_arrays

_MARK = "\ufeff"


class TextUnit(SampleFormat):
    """Samples ``{"input_ids": ...}``, with "labels" where there are targets, or marks.

    Attributes:
        name: "file", "line", "record" or "chat": what the documents are.
        is_marked: True if the ids have marks, see `headrace.datasets.text.marked`.
    """

    makes_plain_samples = False
    name: str
    is_marked: bool = False
    source: Any

    def to_input(self, value: Any) -> Any:
        return self._as_tensors(value)

    def _as_tensors(self, ids: npt.NDArray[Any]) -> dict[str, torch.Tensor]:
        if not self.is_marked:
            return {"input_ids": _tensor(ids, np.int64)}
        return {
            "input_ids": torch.from_numpy(ids_of(ids)),
            "labels": torch.from_numpy(labels_of(ids)),
        }

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

    @abstractmethod
    def lengths(self, reader: SampleReader) -> npt.NDArray[np.int64]:
        """How long each sample of the source is, in tokens or what stands for them."""


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
        self.source, self.options = source, options

    @property
    def identity(self) -> str | None:
        """What the way from a text to ids is known by at another start; None: it can't be known
        again.
        """
        return identity_of(self.options.tokenizer)

    @abstractmethod
    def text_and_target(self, index: int, record: bytes) -> tuple[str, Any]:
        """Text and target of a document.

        Raises:
            FormatError: its bytes are no text of the encoding, or no such record.
        """

    def uncut(self) -> TokenizedTexts:
        """The same texts as whole documents, whose values are ids alone: what is packed, and
        what windows and blocks are made of.
        """
        whole = copy.copy(self)
        whole.options = replace(self.options, max_length=None, target_field=None)
        return whole

    def decode(self, record: Any) -> Any:
        def raises(_: int, __: str, error: Exception) -> SampleError:
            raise error

        return self.decode_batch([(0, record)], raises)[0]

    def decode_batch(self, items: Sequence[tuple[int, Any]], failed: Failed) -> list[Any]:
        made: list[Any] = [None] * len(items)
        texts: dict[int, str] = {}
        targets: dict[int, Any] = {}
        for number, (index, record) in enumerate(items):
            try:
                text, target = self.text_and_target(index, record)
                targets[number] = self._as_target(index, target)
                texts[number] = text
            except Exception as error:
                made[number] = failed(number, "can't be decoded", error)
        for number, ids in self._ids(texts, failed):
            made[number] = (
                ids if isinstance(ids, SampleError) else self._value(ids, targets[number])
            )
        return made

    def _as_target(self, index: int, target: Any) -> Any:
        return target

    def _value(self, ids: Any, target: Any) -> Any:
        return ids

    def _ids(self, texts: dict[int, str], failed: Failed) -> list[tuple[int, Any]]:
        tokenizer, most = self.options.tokenizer, self.options.max_length
        try:
            return (
                list(zip(texts, token_arrays(tokenizer, [*texts.values()], most), strict=True))
                if texts
                else []
            )
        except Exception:
            pass  # raised again below, by the text that is at fault
        found: list[tuple[int, Any]] = []
        for number, text in texts.items():
            try:
                found.append((number, token_arrays(tokenizer, [text], most)[0]))
            except Exception as error:
                found.append((number, failed(number, "can't be tokenised", error)))
        return found

    def text_of(self, index: int, reader: SampleReader) -> str:
        record = reader.records([index], self.source.read)[0]
        if isinstance(record, SampleError):
            raise record
        try:
            return self.text_and_target(index, record)[0]
        except FormatError as error:
            failure = reader.failed(index, "can't be decoded", error)
            raise failure from error

    def nbytes(self, numbers: IntArray, reader: SampleReader) -> IntArray:
        """About how many bytes each of some texts has ([n] int64), by its number in the source."""
        found: IntArray = self.source.nbytes(numbers)
        return found

    def own_way(self, dataset: Any, collating: Any) -> BatchWay | None:
        return way_of_ids(
            dataset, collating, self.options.tokenizer, self.options.max_length, self.is_marked
        )


class FileTexts(TokenizedTexts):
    """Each file is a document."""

    name = "file"
    source: TextFilesSource

    def text_and_target(self, index: int, record: bytes) -> tuple[str, Any]:
        data = self.source.content(index, record)
        return decoded(data, self.options.encoding, self.options.errors, lambda: 0).removeprefix(
            _MARK
        ), None

    def lengths(self, reader: SampleReader) -> npt.NDArray[np.int64]:
        return self.source.sizes()

    def nbytes(self, numbers: IntArray, reader: SampleReader) -> IntArray:
        return self.source.sizes(numbers)


class LineTexts(TokenizedTexts):
    """Each line is a document."""

    name = "line"
    source: LinesSource

    def text_and_target(self, index: int, record: bytes) -> tuple[str, Any]:
        return decoded(record, *self.source.codec, lambda: self.source.offset_of(index)), None

    def decode_batch(self, items: Sequence[tuple[int, Any]], failed: Failed) -> list[Any]:
        with contextlib.suppress(UnicodeDecodeError):  # which is told below, with its offset
            texts = [line.decode(*self.source.codec) for _, line in items]
            return [ids for _, ids in self._ids(dict(enumerate(texts)), failed)]
        return super().decode_batch(items, failed)

    def lengths(self, reader: SampleReader) -> npt.NDArray[np.int64]:
        return self.source.nbytes()


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
        self.targets: RecordTargets | None = None
        field = options.target_field
        if field is not None:
            self._columns = record_columns(self, reader, is_opening=True)
            self.targets = targets_in(self._columns, field)
        self._numbers = {
            name: number for number, name in enumerate(self.targets.classes if self.targets else ())
        }
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
            if (name := chat_field(row)) is None or callable(self.options.text_field):
                raise
            # no flags: none exist
            remedy = (
                "from Python its unit is 'chat', with a HuggingFace tokenizer that has a chat "
                "template"
            )
            raise FormatError(f"{error}; {name!r} holds a chat: {remedy}") from None
        return text, None if field is None else records.target_of(
            row, field, source.is_of_table(index)
        )

    def _as_target(self, index: int, target: Any) -> Any:
        targets = self.targets
        if targets is None or targets.kind is None or self.options.target_field is None:
            return target
        return target_as(targets.kind, target, self.source.is_of_table(index), self._numbers)

    def _value(self, ids: Any, target: Any) -> Any:
        return ids if self.options.target_field is None else (ids, target)

    def split_target(self, value: Any, index: int, dataset: BaseDataset) -> tuple[Any, Any]:
        return value if self.splits_targets else super().split_target(value, index, dataset)

    def lengths(self, reader: SampleReader) -> npt.NDArray[np.int64]:
        if self._columns is None:
            self._columns = record_columns(self, reader, is_opening=False)
        return self._columns.long

    def own_way(self, dataset: Any, collating: Any) -> BatchWay | None:
        return None if self.splits_targets else super().own_way(dataset, collating)


# -- texts that are tokens already


class TokenWindows(TextUnit):
    """Whole documents of a packed file, or windows over documents, as ids.

    Args:
        source: the tokens.
        name: what a document is.
        documents: says what the text of a document is; None: nobody can.
        is_marked: see `TextUnit`.
    """

    def __init__(
        self,
        source: TokensSource,
        name: str,
        documents: Callable[[int], str] | None,
        is_marked: bool = False,
    ) -> None:
        self.source, self.name, self._documents, self.is_marked = source, name, documents, is_marked
        self.stores_values: bool = not is_marked

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

    def lengths(self, reader: SampleReader) -> npt.NDArray[np.int64]:
        found: npt.NDArray[np.int64] = self.source.lengths()
        return found

    def own_way(self, dataset: Any, collating: Any) -> BatchWay | None:
        return way_of_ids(dataset, collating, None, None, self.is_marked)


class TokenBlocks(TextUnit):
    """Blocks of tokens over all documents, and the number of each token's document.

    Args:
        source: the blocks.
        name: what a document is.
        is_marked: see `TextUnit`.
    """

    def __init__(
        self, source: BlocksSource | BestFitSource, name: str, is_marked: bool = False
    ) -> None:
        self.source, self.name, self.is_marked = source, name, is_marked

    def to_input(self, value: Any) -> Any:
        return {
            **self._as_tensors(value["input_ids"]),
            "document_ids": _tensor(value["document_ids"], np.int32),
        }

    def text_of(self, index: int, reader: SampleReader) -> str:
        raise ConfigError(
            "text_of: with packing=True a sample is a block of tokens, of no one text"
        )

    def lengths(self, reader: SampleReader) -> npt.NDArray[np.int64]:
        found: npt.NDArray[np.int64] = self.source.lengths()
        return found

    def sample_nbytes(self) -> int | None:
        length: int = self.source.length
        return length * (8 + 8 * self.is_marked + 4)

    def own_way(self, dataset: Any, collating: Any) -> BatchWay | None:
        return way_of_blocks(dataset, collating, self.is_marked)


class TokenRows(TokenBlocks):
    """Rows of whole documents with padding, the number of each token's document, and its place
    there.
    """

    def to_input(self, value: Any) -> Any:
        ids, documents, positions = (
            value["input_ids"].copy(),
            value["document_ids"].copy(),
            value["position_ids"].copy(),
        )
        labels = np.empty_like(ids)
        label_rows(ids, positions, documents, labels, self.is_marked)
        named = {
            "input_ids": ids,
            "labels": labels,
            "document_ids": documents,
            "position_ids": positions,
        }
        return {name: torch.from_numpy(column) for name, column in named.items()}

    def text_of(self, index: int, reader: SampleReader) -> str:
        raise ConfigError("text_of: with packing='bfd' a sample is a row of several texts")

    def sample_nbytes(self) -> int | None:
        length: int = self.source.length
        return length * (8 + 8 + 4 + 8)


def _tensor(ids: npt.NDArray[Any], dtype: type) -> torch.Tensor:
    return torch.from_numpy(ids.astype(dtype))


def decoded(data: bytes, encoding: str, errors: str, begins: Callable[[], int]) -> str:
    """The text of some bytes. (`begins`: the offset of the first in its file.)

    Raises:
        FormatError: they are not of the encoding; the message names the offset.
    """
    try:
        return data.decode(encoding, errors)
    except UnicodeDecodeError as error:
        at = begins() + error.start
        what = f"byte 0x{data[error.start]:02x} at offset {at:,} is no {encoding} ({error.reason})"
        is_utf16 = at == 0 and data.startswith((b"\xff\xfe", b"\xfe\xff"))
        remedy = (
            "it begins as UTF-16 does: pass encoding='utf-16'"
            if is_utf16
            else "pass encoding= or errors="
        )
        raise FormatError(f"{what}; {remedy}") from None
