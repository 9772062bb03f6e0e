"""Texts are tokenised once, cached only where they can be known again, and never half."""

from __future__ import annotations

import os
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.datasets.text.tokenizing import Tokenising
from headrace.errors import BudgetError, SampleError
from headrace.io.array_file import FileArrays
from headrace.memory.budget import MemoryBudget
from headrace.memory.limits import Limit
from headrace.tokenizer import CharTokenizer, identity_of

DOCUMENTS = [np.arange(3), np.empty(0, np.int64), np.arange(5) + 60_000, np.array([7])]


class Unknown:
    """A tokenizer that can't be known again."""

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


KNOWN = CharTokenizer("abc")
TOKENIZERS = (KNOWN, Unknown())


def budget_of(size: str) -> MemoryBudget:
    return MemoryBudget(size, limits=[Limit("a machine", 10**9, 0)])


class Making:
    """Counts what is read; a document may be an error."""

    def __init__(self, folder: Path, documents: Any = DOCUMENTS, tokenizer: Any = KNOWN) -> None:
        self.folder, self.documents, self.tokenizer, self.read = folder, documents, tokenizer, 0
        self.budget = budget_of("100MB")

    def _read(self, indices: Any) -> list[Any]:
        self.read += len(indices)
        if isinstance(self.documents, Exception):
            raise self.documents
        return [self.documents[n] for n in indices]

    def tokens(self, end: int | None = None, about: Any = "these") -> Any:
        count, known = len(DOCUMENTS), identity_of(self.tokenizer)
        if not isinstance(self.documents, Exception):
            count = len(self.documents)
        made = Tokenising(self._read, count, about, self.tokenizer, known, end, False)
        return made.tokens(self.folder, self.budget)


def rows(tokens: Any) -> list[list[int]]:
    return [tokens.long[a:b].tolist() for a, b in pairwise(tokens.short[0].tolist())]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_all_of_them_in_their_order(tokenizer: Any, tmp_path: Path) -> None:
    for end, many in ((None, 1), (2, 200)):
        making = Making(tmp_path, DOCUMENTS * many, tokenizer)
        is_kept = tokenizer is KNOWN
        expected = [row.tolist() + ([] if end is None else [end]) for row in DOCUMENTS] * many
        for tokens in (making.tokens(end), making.tokens(end)):
            assert rows(tokens) == expected
            assert isinstance(tokens, FileArrays) == is_kept
            assert tokens.long.dtype == np.uint16
        assert making.read == len(expected) * (1 if is_kept else 2)
    for most, dtype in [(65_535, np.uint16), (65_536, np.int32), (2**31 - 1, np.int32)]:
        making = Making(tmp_path, [np.array([1, most]), np.array([5])], tokenizer)
        tokens = making.tokens(about=most)
        assert tokens.long.dtype == dtype
        assert rows(tokens) == [[1, most], [5]]
    for documents in ([], [np.empty(0, np.int64)] * 3):
        tokens = Making(tmp_path, documents, tokenizer).tokens(about=len(documents))
        assert rows(tokens) == [[]] * len(documents)


def test_cached_tokens_fit_tokenizer_texts_and_end_token(tmp_path: Path) -> None:
    making, other = Making(tmp_path), Making(tmp_path, tokenizer=CharTokenizer("ab"))
    made = [making.tokens(), making.tokens(end=1), making.tokens(about="others"), other.tokens()]
    assert len({tokens.path for tokens in made}) == 4
    assert (making.read, other.read) == (12, 4)


def test_an_error_is_raised_once_and_caches_nothing(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    making = Making(tmp_path, SampleError("sample 2 can't be tokenised"))
    with pytest.raises(SampleError, match="sample 2"):
        making.tokens()
    # an empty file, of which the kernel locks bytes
    left = [name for name in os.listdir(tmp_path) if not name.endswith(".lock")]
    assert (making.read, left, len(recwarn)) == (len(DOCUMENTS), [], 0)


def test_a_damaged_file_is_made_anew(tmp_path: Path) -> None:
    making = Making(tmp_path)
    path = Path(making.tokens().path)
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    assert rows(making.tokens()) == [row.tolist() for row in DOCUMENTS]
    assert making.read == 8


def test_held_tokens_count_in_the_budget(tmp_path: Path) -> None:
    making = Making(tmp_path, [np.arange(1_000_000) % 100] * 3, Unknown())
    tokens = making.tokens()
    assert making.budget.reserved == 3_000_000 * 2 + 4 * 8
    assert np.array_equal(pickle.loads(pickle.dumps(tokens)).long, tokens.long)
    del tokens
    assert making.budget.reserved == 0
    making.budget = budget_of("8MB")
    with pytest.raises(BudgetError, match="tokens of 3 documents"):
        making.tokens()
    assert making.budget.reserved == 0
