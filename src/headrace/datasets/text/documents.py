"""What datasets of texts have in common: documents that become tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.construction import describe_held
from headrace.core.dataset import BaseDataset
from headrace.core.values import Access, Decoded, Records
from headrace.core.views import targets_of_view
from headrace.datasets.text.opening import unit_of_tokens
from headrace.datasets.text.options import TextOptions
from headrace.datasets.text.tokenizing import tokens_of
from headrace.datasets.text.units import RecordTexts, TextUnit, TokenizedTexts
from headrace.dtypes import IntArray
from headrace.errors import ConfigError
from headrace.storage.tokens.source import Tokens
from headrace.tokenizer import identity_of

_TOGETHER = 1024  # records that are read at a time


class TokenizedDataset(BaseDataset):
    """A dataset whose samples are tokens of texts, or may be.

    Attributes:
        tokenizer: as it is used.
        classes: names of the classes of targets.
    """

    tokenizer: Any
    classes: list[str]
    collate: Callable[[list[Any]], Any] | str | None
    _documents: TokenizedDataset | None = None
    """Of windows and blocks of texts: the whole documents."""
    _texts: TextUnit | None = None
    """What is tokenised, or is tokens."""

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Numbers of the classes by name."""
        return {name: number for number, name in enumerate(self.classes)}

    @property
    def has_texts(self) -> bool:
        """True if samples have tokens, alone or together with other columns."""
        return self._texts is not None

    @property
    def is_of_texts(self) -> bool:
        """True if samples are tokens, and nothing beside them."""
        return isinstance(self._decoder, TextUnit)

    @property
    def is_of_chats(self) -> bool:
        """True if the documents are chats, of which the assistant's tokens are labels."""
        return self._texts is not None and self._texts.is_marked

    @property
    def tokenizer_identity(self) -> str | None:
        """What the tokenizer, and of chats its template, are known by at another start; None:
        they can't be known again.
        """
        documents = self if self._documents is None else self._documents
        texts = documents._texts
        return texts.identity if isinstance(texts, TokenizedTexts) else identity_of(self.tokenizer)

    @property
    def document_unit(self) -> str:
        """What a document is: "file", "line", "record" or "chat"."""
        assert self._texts is not None
        return self._texts.name

    @property
    def _tokenized(self) -> TokenizedTexts:
        texts = self._decoder
        assert isinstance(texts, TokenizedTexts)
        return texts

    def text_of(self, index: int) -> str:
        """Returns the text of a sample before tokenisation; for a chat the rendered text, for a
        window the text of its document.

        Raises:
            SampleError: the text can't be read.
            ConfigError: there are no texts; or, with `packing`, a block belongs to no single
                one.
        """
        if self._texts is None:
            raise ConfigError("text_of: no column of texts is named: pass text_column=")
        whole = int(self.whole_indices(range(len(self))[index]))
        return self._texts.text_of(whole, self.sample_reader)

    def lengths(self) -> npt.NDArray[np.int64] | None:
        """Number of tokens of each sample ([n] int64), or None if samples are not tokens alone.

        For texts that are not tokenised yet, another measure is used: characters of the texts for
        records and rows of tables, which are all read for it, and bytes for files, lines and chats
        in text files.
        """
        texts = self._decoder
        if not isinstance(texts, TextUnit):
            return None
        with self.block_memory.in_order():
            lengths = texts.lengths(self.sample_reader)
        return lengths if self._chosen is None else lengths[self._chosen]

    def held_as(self) -> str:
        if self._arguments.get("tokenizer") is None:
            return super().held_as()
        tokenizer = self.tokenizer_identity or self.tokenizer
        return describe_held(type(self), {**self._arguments, "tokenizer": tokenizer})

    def _cut(self, documents: TokenizedDataset, options: TextOptions) -> tuple[TextUnit, Any]:
        """Makes this a dataset of windows or blocks of other documents; returns what its
        samples are, and their targets.
        """
        unit = unit_of_tokens(
            documents.tokens(options.end_token),
            documents.sample_source.location,
            documents.document_unit,
            documents.text_of,
            options,
        )
        self._documents = documents
        self._texts = unit
        self.classes = documents.classes
        return unit, self._targets_of_parts(documents.targets, unit, options)

    def _targets_of_parts(self, targets: Any, unit: TextUnit, options: TextOptions) -> Any:
        """Of the targets of documents those of the samples: a window has that of its document, a
        block has none.
        """
        if options.packing:
            self.collate = None
            return None
        if options.stride is None:
            return targets
        numbers = unit.source.document_of(np.arange(len(unit.source)))
        return targets_of_view(targets, numbers)

    # -- what is packed

    def tokens(self, end_token: int | None = None) -> tuple[Tokens, str]:
        """All tokens of all whole documents, and a fingerprint of them: what is packed. Not of
        windows, blocks and packed files, which have them already.

        Raises:
            SampleError: a document can't be read, or tokenised.
            BudgetError: the tokens can't be kept on disk, and don't fit the memory budget.
        """
        with self.block_memory.in_order():
            return tokens_of(self._tokenized, self.sample_reader.another(), end_token, self.budget)

    def ids_of(self, numbers: list[int]) -> list[Any]:
        """The ids of whole documents by their number in the source; a SampleError for each that
        can't be read.
        """
        documents = Decoded(Records(self.sample_source))
        return documents.read(
            numbers, Access(self.sample_reader.another(), self._tokenized.uncut())
        )

    def text_nbytes(self, numbers: npt.NDArray[np.int64]) -> IntArray:
        """About how many bytes the text of each of some documents has, by its number in the
        source ([n] int64).
        """
        return self._tokenized.nbytes(numbers, self.sample_reader)

    def record_targets(self) -> list[Any] | None:
        """The target of each record, where they are of several kinds; None: there are none."""
        texts = self._decoder
        if not isinstance(texts, RecordTexts) or not texts.splits_targets:
            return None
        targets: list[Any] = []
        whole = self.whole_indices(np.arange(len(self)))
        for start in range(0, len(whole), _TOGETHER):
            numbers = whole[start : start + _TOGETHER].tolist()
            records = self.sample_reader.records(numbers, texts.source.read)
            for number, record in zip(numbers, records, strict=True):
                targets.append(texts.text_and_target(number, record)[1])
        return targets
