"""Records that hold conversations, as ids of which the assistant's are supervised."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.datasets.core.format import Failed
from headrace.datasets.core.reader import SampleReader
from headrace.datasets.text.chat_template import ChatTemplate
from headrace.datasets.text.options import CHAT, TextOptions
from headrace.datasets.text.units import TokenizedTexts, decoded
from headrace.errors import FormatError
from headrace.storage.text.chats import Chat, chat_field, chat_of
from headrace.storage.text.source import LinesSource

_LOOKED_AT = 8  # records by which the kind of all is told


class ChatTexts(TokenizedTexts):
    """Each record is a chat.

    Args:
        source: the records' bytes.
        options: of the dataset.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """

    name = CHAT
    is_marked = True
    source: Any

    def __init__(self, source: Any, options: TextOptions) -> None:
        super().__init__(source, options)
        self.template = ChatTemplate(options.tokenizer, options.chat_template)

    @property
    def identity(self) -> str | None:
        known = super().identity
        return None if known is None else f"{known}|chat:{self.template.identity}"

    def uncut(self) -> TokenizedTexts:
        whole = copy.copy(self)
        whole.options = replace(self.options, max_length=None)
        return whole

    def chat(self, index: int, record: Any) -> Chat:
        """The chat of a record.

        Raises:
            FormatError: it holds none.
        """
        encoding, errors = self.source.codec
        row = self.source.fields(
            index, decoded(record, encoding, errors, lambda: self.source.offset_of(index))
        )
        return chat_of(row, self.options.text_field)

    def text_and_target(self, index: int, record: Any) -> tuple[str, Any]:
        return self.template.text_of(self.chat(index, record)), None

    def decode_batch(self, items: Sequence[tuple[int, Any]], failed: Failed) -> list[Any]:
        made: list[Any] = []
        for number, (index, record) in enumerate(items):
            try:
                made.append(self._marked(self.chat(index, record)))
            except Exception as error:
                made.append(failed(number, "can't be decoded", error))
        return made

    def _marked(self, chat: Chat) -> npt.NDArray[np.int32]:
        ids, most = self.template.encode(chat), self.options.max_length
        # a view would hold all of it
        cut = ids if most is None or len(ids) <= most else ids[:most].copy()
        if not (cut >= 0).any():
            if not (ids >= 0).any():
                raise FormatError(
                    "no token of it is the assistant's: the tokenizer gives none for its turns"
                )
            first = int(np.argmax(ids >= 0))
            raise FormatError(
                f"its first {most:,} tokens hold none of the assistant's, which begin at token "
                f"{first:,}: raise max_length above {first:,}"
            )
        return cut

    def lengths(self, reader: SampleReader) -> npt.NDArray[np.int64]:
        nbytes: npt.NDArray[np.int64] = self.source.nbytes()
        return nbytes


def hold_chats(source: LinesSource) -> bool:
    """True if the first of some records that can be read holds a chat."""
    for index in range(min(len(source), _LOOKED_AT)):
        try:
            return (
                chat_field(source.fields(index, source.read([index])[0].decode(*source.codec)))
                is not None
            )
        except (FormatError, UnicodeDecodeError):
            continue  # which is an error of that sample
    return False
