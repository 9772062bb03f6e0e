"""A column of texts, or of chats, as documents, tokenised as those of `TextDataset` are."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.datasets.core.reader import SampleReader
from headrace.datasets.text.chats import ChatTexts
from headrace.datasets.text.options import TextOptions
from headrace.datasets.text.units import TokenizedTexts
from headrace.errors import FormatError
from headrace.storage.table.source import TableSource
from headrace.storage.text.chats import OPTIONS, TOOLS, Chat, chat_of

ALONG = (TOOLS, OPTIONS)
"""Columns that are read with chats, where there are such."""
_TOGETHER = 4096  # texts that are read at a time


class ColumnTexts(TokenizedTexts):
    """The texts of a column, one a row.

    Args:
        source: whose records are the texts; of several columns, dicts with them.
        column: its name.
        options: of the dataset.
    """

    name = "record"
    source: TableSource

    def __init__(self, source: TableSource, column: str, options: TextOptions) -> None:
        super().__init__(source, options)
        self.column = column

    def text_and_target(self, index: int, record: Any) -> tuple[str, Any]:
        text = record[self.column] if isinstance(record, dict) else record
        if not isinstance(text, str):
            raise FormatError(f"column {self.column!r} has no text (null) there")
        return text, None

    def lengths(self, reader: SampleReader) -> npt.NDArray[np.int64]:
        found: list[int] = []
        for start in range(0, len(self.source), _TOGETHER):
            numbers = list(range(start, min(start + _TOGETHER, len(self.source))))
            found += [len(self.text_and_target(0, record)[0]) for record in reader.records(numbers, self.source.read)]
        return np.array(found, np.int64)


class ColumnChats(ChatTexts):
    """The chats of a column, one a row.

    Args:
        source: whose records are the chats; of several columns, dicts with them.
        column: its name.
        options: of the dataset.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """

    def __init__(self, source: TableSource, column: str, options: TextOptions) -> None:
        super().__init__(source, options)
        self.column = column

    def chat(self, index: int, record: Any) -> Chat:
        row = record if isinstance(record, dict) else {self.column: record}
        if row[self.column] is None:
            raise FormatError(f"column {self.column!r} has no chat (null) there")
        return chat_of({name: _plain(row[name]) for name in (self.column, *ALONG) if name in row}, self.column)

    def lengths(self, reader: SampleReader) -> npt.NDArray[np.int64]:
        """Characters of the rendered chats."""
        found: list[int] = []
        for start in range(0, len(self.source), _TOGETHER):
            numbers = list(range(start, min(start + _TOGETHER, len(self.source))))
            for number, record in zip(numbers, reader.records(numbers, self.source.read), strict=True):
                try:
                    found.append(len(self.text_and_target(number, record)[0]))
                except FormatError as error:
                    reader.failed(number, "can't be decoded", error)
                    found.append(0)  # it is left out
        return np.array(found, np.int64)


def _plain(value: Any) -> Any:
    """A value of a table as JSON has it: what is null in a struct, as fields are that other rows have, is left out; but a content."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items() if one is not None or name == "content"}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else value
