"""Four methods are enough for a source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from headrace import Source
from headrace.dtypes import ArraySpec
from headrace.errors import FormatError
from headrace.formats.source import RowSource


class Words(Source):
    """The least that a source can be."""

    words = ("one", "two", "three")

    def __len__(self) -> int:
        return len(self.words)

    def read(self, indices: Sequence[int]) -> list[str]:
        return [self.words[i] for i in indices]

    def fingerprint(self) -> str:
        return "words"


def test_the_rest_follows() -> None:
    assert Source.__abstractmethods__ == {"__len__", "read", "fingerprint"}
    source = Words()
    assert source.blocks() is None and source.location(1) == "Words[1]"
    assert source.describe().ways == {} and source.block_nbytes == 0 and source.take_counts() == {}
    assert source.run(str, 3) == ["0", "1", "2"]
    source.hold_chunks(5)
    source.close()


class Numbers(Words, RowSource):
    @property
    def array_spec(self) -> ArraySpec:
        return ArraySpec((2,), np.dtype(np.int16))

    def read(self, indices: Sequence[int]) -> list[Any]:
        return [np.array([i, -i], np.int16) if i < 2 else np.array([i, 0.5]) for i in indices]


def test_records_of_one_shape_are_copied_to_their_rows() -> None:
    """Where a source has no better way; and what is of another kind is not made to fit."""
    rows = np.zeros((2, 2), np.int16)
    Numbers().read_into([1, 0], rows)
    assert rows.tolist() == [[1, -1], [0, 0]]
    with pytest.raises(FormatError, match=r"record 2 .*float64 \[2\].*int16 \[2\]"):
        Numbers().read_into([0, 2], rows)
    with pytest.raises(ValueError, match="shorter"):
        Numbers().read_into([0, 1, 0], rows)
