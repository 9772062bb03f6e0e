"""What datasets of texts have in common: documents that become tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.datasets.core.base import BaseDataset
from headrace.datasets.core.reader import Access
from headrace.datasets.text.passes import tokens_of
from headrace.datasets.text.units import RecordTexts, TextUnit, TokenizedTexts
from headrace.dtypes import IntArray
from headrace.modes.lazy import Lazy
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

    @property
    def _unit(self) -> TextUnit:
        texts = self._format
        assert isinstance(texts, TextUnit)
        return texts

    @property
    def _tokenized(self) -> TokenizedTexts:
        texts = self._format
        assert isinstance(texts, TokenizedTexts)
        return texts

    @property
    def is_of_texts(self) -> bool:
        """True if samples are tokens, and nothing beside them."""
        return isinstance(self._format, TextUnit)

    @property
    def is_of_chats(self) -> bool:
        """True if the documents are chats, of which the assistant's tokens are labels."""
        return self._unit.is_marked

    @property
    def tokenizer_identity(self) -> str | None:
        """What the tokenizer, and of chats its template, are known by at another start; None:
        they can't be known again.
        """
        documents = self if self._documents is None else self._documents
        texts = documents._format
        return texts.identity if isinstance(texts, TokenizedTexts) else identity_of(self.tokenizer)

    @property
    def document_unit(self) -> str:
        """What a document is: "file", "line", "record" or "chat"."""
        return self._unit.name

    def tokens(self, end_token: int | None = None) -> tuple[Tokens, str]:
        """All tokens of all whole documents, and a fingerprint of them: what is packed. Not of
        windows, blocks and packed files, which have them already.

        Raises:
            SampleError: a document can't be read, or tokenised.
            ConfigError: `end_token` is given, and the documents are chats.
            BudgetError: the tokens can't be kept on disk, and don't fit the memory budget.
        """
        texts = self._tokenized
        with self.block_memory.in_order():
            return tokens_of(
                texts, texts.uncut(), self.sample_reader.another(), end_token, self.budget
            )

    def ids_of(self, numbers: list[int]) -> list[Any]:
        """The ids of whole documents by their number in the source; a SampleError for each that
        can't be read.
        """
        return self.sample_reader.another().values(
            numbers, Access(self._tokenized.uncut(), Lazy(), False)
        )

    def text_nbytes(self, numbers: npt.NDArray[np.int64]) -> IntArray:
        """About how many bytes the text of each of some documents has, by its number in the
        source ([n] int64).
        """
        return self._tokenized.nbytes(numbers, self.sample_reader)

    def record_targets(self) -> list[Any] | None:
        """The target of each record, where they are of several kinds; None: there are none."""
        texts = self._format
        if not isinstance(texts, RecordTexts) or not texts.splits_targets:
            return None
        targets: list[Any] = []
        whole = self.whole_indices(np.arange(len(self)))
        for start in range(0, len(whole), _TOGETHER):
            numbers = whole[start : start + _TOGETHER].tolist()
            found = self.sample_reader.records(numbers, texts.source.read)
            targets += [
                texts.text_and_target(number, record)[1]
                for number, record in zip(numbers, found, strict=True)
            ]
        return targets
