"""A column of texts as documents, tokenised as those of `TextDataset` are."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.datasets.core.reader import SampleReader
from headrace.datasets.text.options import TextOptions
from headrace.datasets.text.units import TokenizedTexts
from headrace.errors import FormatError
from headrace.storage.table.source import TableSource

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
