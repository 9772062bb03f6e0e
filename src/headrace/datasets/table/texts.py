"""A column of texts, or of chats, as documents, tokenised as those of `TextDataset` are."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.datasets.core.reader import SampleReader
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
        return _characters(self, reader, np.arange(len(self.source)))

    def nbytes(self, numbers: IntArray, reader: SampleReader) -> IntArray:
        return _characters(self, reader, numbers)


class ColumnChats(ChatTexts):
    """The chats of a column, one a row.

    Args:
        source: whose records are the chats; of several columns, dicts with them.
        column: its name.
        options: of the dataset.

    Attributes:
        fields: the columns that are read, the first is that of the chats.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """

    def __init__(self, source: TableSource, column: str, options: TextOptions) -> None:
        super().__init__(source, options)
        self.column, self.fields = column, (column, *columns_along(source.first.schema))

    def chat(self, index: int, record: Any) -> Chat:
        row = record if isinstance(record, dict) else {self.column: record}
        if row[self.column] is None:
            raise FormatError(f"column {self.column!r} has no chat (null) there")
        return chat_of(
            {name: _plain(row[name]) for name in self.fields if name in row}, self.column
        )

    def lengths(self, reader: SampleReader) -> npt.NDArray[np.int64]:
        return _characters(self, reader, np.arange(len(self.source)))

    def nbytes(self, numbers: IntArray, reader: SampleReader) -> IntArray:
        return _characters(self, reader, numbers)


def _characters(texts: TokenizedTexts, reader: SampleReader, numbers: IntArray) -> IntArray:
    """Characters of each of some texts, or of chats as they are rendered; 0 of those that can't be
    read, and are left out ([n] int64).

    Raises:
        SampleError: one can't be read, and may not be left out.
    """
    found = np.zeros(len(numbers), np.int64)
    for start in range(0, len(found), _TOGETHER):
        some = numbers[start : start + _TOGETHER].tolist()
        for at, (number, record) in enumerate(
            zip(some, reader.records(some, texts.source.read), strict=True), start
        ):
            try:
                found[at] = (
                    0
                    if isinstance(record, SampleError)
                    else len(texts.text_and_target(number, record)[0])
                )
            except FormatError as error:
                reader.failed(number, "can't be decoded", error)
    return found


def _plain(value: Any) -> Any:
    """A value of a table as JSON has it: what is null in a struct, as fields are that other rows
    have, is left out.
    """
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items() if one is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else value
