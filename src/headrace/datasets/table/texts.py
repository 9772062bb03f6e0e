"""A column of texts, or of chats, as documents, tokenised as those of `TextDataset` are."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.core.reader import SampleReader
from headrace.datasets.text.chats import ChatTexts
from headrace.datasets.text.options import TextOptions
from headrace.datasets.text.units import TokenizedTexts
from headrace.dtypes import IntArray
from headrace.errors import FormatError, SampleError
from headrace.storage.table.columns import is_text
from headrace.storage.table.source import TableSource
from headrace.storage.text.chats import OPTIONS, SYSTEM, TOOLS, Chat, chat_of

_TOGETHER = 4096  # texts that are read at a time


def columns_along(schema: Any) -> list[str]:
    """The columns of a table (pyarrow's schema) that are read with its chats."""
    named = [name for name in (SYSTEM, TOOLS, OPTIONS) if name in schema.names]
    return [name for name in named if name != SYSTEM or is_text(schema.field(name).type)]


class ColumnTexts(TokenizedTexts):
    """The texts of a column, one a row.

    Args:
        source: whose records are the texts; of several columns, dicts with them.
        options: of the dataset.
        column: its name.
    """

    name = "record"
    source: TableSource

    def __init__(self, source: TableSource, options: TextOptions, column: str) -> None:
        super().__init__(source, options)
        self.column = column

    def text_and_target(self, index: int, record: Any) -> tuple[str, Any]:
        text = record[self.column] if isinstance(record, dict) else record
        if not isinstance(text, str):
            raise FormatError(f"column {self.column!r} has no text (null) there")
        return text, None

    def nbytes(self, numbers: IntArray | None, reader: SampleReader) -> IntArray:
        return _characters(self, reader, numbers)


class ColumnChats(ChatTexts):
    """The chats of a column, one a row.

    Args:
        source: whose records are the chats; of several columns, dicts with them.
        options: of the dataset.
        column: its name.

    Attributes:
        fields: the columns that are read, the first is that of the chats.

    Raises:
        ConfigError: the tokenizer has no chat template that says which tokens are the assistant's.
    """

    def __init__(self, source: TableSource, options: TextOptions, column: str) -> None:
        super().__init__(source, options)
        self.column = column
        self.fields = (column, *columns_along(source.first.schema))

    def chat(self, index: int, record: Any) -> Chat:
        row = record if isinstance(record, dict) else {self.column: record}
        if row[self.column] is None:
            raise FormatError(f"column {self.column!r} has no chat (null) there")
        fields = {name: _plain(row[name]) for name in self.fields if name in row}
        return chat_of(fields, self.column)

    def nbytes(self, numbers: IntArray | None, reader: SampleReader) -> IntArray:
        return _characters(self, reader, numbers)


def _characters(
    texts: ColumnTexts | ColumnChats, reader: SampleReader, numbers: IntArray | None
) -> IntArray:
    """Characters of each of some texts, or of chats as they are rendered; 0 of those that can't be
    read, and are left out ([n] int64).

    Raises:
        SampleError: one can't be read, and may not be left out.
    """
    if numbers is None:
        numbers = np.arange(len(texts.source))
    lengths = np.zeros(len(numbers), np.int64)
    for start in range(0, len(lengths), _TOGETHER):
        some = numbers[start : start + _TOGETHER].tolist()
        records = reader.records(some, texts.source.read)
        for position, record in enumerate(records, start):
            if isinstance(record, SampleError):
                continue
            number = int(numbers[position])
            try:
                lengths[position] = len(texts.text_and_target(number, record)[0])
            except FormatError as error:
                reader.failed(number, "can't be decoded", error)
    return lengths


def _plain(value: Any) -> Any:
    """A value of a table as JSON has it: what is null in a struct, as fields are that other rows
    have, is left out.
    """
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items() if one is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return value
