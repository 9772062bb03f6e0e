"""Texts are tokenised once, cached only where they can be known again, and never half."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.datasets.text.tokenizing import Tokenising
from headrace.errors import BudgetError, HeadraceWarning, SampleError
from headrace.io.array_file import FileArrays
from headrace.memory.budget import MemoryBudget
from headrace.memory.limits import Limit
from headrace.tokenizer import CharTokenizer, identity_of

DOCUMENTS = [np.arange(3), np.empty(0, np.int64), np.arange(5) + 60_000, np.array([7])]


class Unknown:
    """A tokenizer that can't be known again."""

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


class Making:
    """Counts what is read."""

    def __init__(
        self,
        folder: Path,
        documents: Any = DOCUMENTS,
        tokenizer: Any = None,
        end: int | None = None,
        about: Any = "these",
    ) -> None:
        self.folder, self.documents, self.read = folder, documents, 0
        self.tokenizer, self.end, self.about = tokenizer or CharTokenizer(), end, about
        self.budget = MemoryBudget("100MB", limits=[Limit("a machine", 10**9, 0)])

    def _read(self, indices: Any) -> list[Any]:
        self.read += len(indices)
        return [self.documents[n] for n in indices]

    @property
    def tokenising(self) -> Tokenising:
        return Tokenising(
            self._read,
            len(self.documents),
            self.about,
            self.tokenizer,
            identity_of(self.tokenizer),
            self.end,
            False,
        )

    def tokens(self) -> Any:
        return self.tokenising.tokens(self.folder, self.budget)


def rows(tokens: Any) -> list[list[int]]:
    edges = tokens.short[0].tolist()
    return [tokens.long[a:b].tolist() for a, b in zip(edges[:-1], edges[1:], strict=True)]  # noqa: RUF007


@pytest.mark.parametrize("tokenizer", [CharTokenizer("abc"), Unknown()])
@pytest.mark.parametrize("end", [None, 2])
@pytest.mark.parametrize("many", [1, 200])
def test_all_of_them_in_their_order(
    tokenizer: Any, end: int | None, many: int, tmp_path: Path
) -> None:
    making = Making(tmp_path, DOCUMENTS * many, tokenizer, end)
    tokens, again = making.tokens(), making.tokens()
    is_kept = isinstance(tokenizer, CharTokenizer)
    assert isinstance(tokens, FileArrays) == is_kept
    assert (
        rows(tokens)
        == [[*row.tolist(), *([] if end is None else [end])] for row in DOCUMENTS] * many
        == rows(again)
    )
    assert tokens.long.dtype == np.uint16
    assert making.read == len(DOCUMENTS) * many * (1 if is_kept else 2)
    assert bool(making.tokenising.fingerprint) == is_kept


@pytest.mark.parametrize("tokenizer", [CharTokenizer(), Unknown()])
def test_ids_that_need_more_than_16_bits(tokenizer: Any, tmp_path: Path) -> None:
    for most, dtype in [(65_535, np.uint16), (65_536, np.int32), (2**31 - 1, np.int32)]:
        tokens = Making(
            tmp_path, [np.array([1, most]), np.array([5])], tokenizer, about=most
        ).tokens()
        assert tokens.long.dtype == dtype and rows(tokens) == [[1, most], [5]]


@pytest.mark.parametrize("tokenizer", [CharTokenizer(), Unknown()])
@pytest.mark.parametrize("documents", [[], [np.empty(0, np.int64)] * 3])
def test_nothing(tokenizer: Any, documents: Any, tmp_path: Path) -> None:
    tokens = Making(tmp_path, documents, tokenizer).tokens()
    assert rows(tokens) == [[]] * len(documents) and not len(tokens.long)


def test_cached_tokens_fit_tokenizer_texts_and_end_token(tmp_path: Path) -> None:
    given: list[dict[str, Any]] = [
        {},
        {"tokenizer": CharTokenizer("ab")},
        {"end": 1},
        {"about": "others"},
    ]
    makings = [Making(tmp_path, **some) for some in given]
    assert len({making.tokens().path for making in makings}) == 4
    assert [making.read for making in makings] == [4] * 4


def test_documents_that_are_left_out_are_noted(tmp_path: Path) -> None:
    bad = SampleError("sample 1 can't be read")
    for tokenizer in (CharTokenizer(), Unknown()):
        making = Making(tmp_path, [DOCUMENTS[0], bad, np.empty(0, np.int64), bad], tokenizer, end=9)
        for tokens in (making.tokens(), making.tokens()):
            assert tokens.short[1].tolist() == [1, 3] and rows(tokens) == [
                [0, 1, 2, 9],
                [],
                [9],
                [],
            ]


def test_document_error_is_raised_once_and_caches_nothing(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    making = Making(tmp_path)

    def fail(indices: Any) -> Any:
        making.read += 1
        raise SampleError("sample 2 can't be tokenised")

    making._read = fail  # type: ignore[method-assign]
    with pytest.raises(SampleError, match="sample 2"):
        making.tokens()
    # an empty file, of which the kernel locks bytes
    left = [name for name in os.listdir(tmp_path) if not name.endswith(".lock")]
    assert making.read == 1 and not left and not len(recwarn)


def test_where_nothing_can_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.warns(
        HeadraceWarning, match=r"cache_dir=.*file.*tokens are not kept.*held in memory"
    ):
        tokens = Making(tmp_path / "file").tokens()
    assert rows(tokens) == [row.tolist() for row in DOCUMENTS]


def test_a_damaged_file_is_made_anew(tmp_path: Path) -> None:
    making = Making(tmp_path)
    path = Path(making.tokens().path)
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    assert rows(making.tokens()) == [row.tolist() for row in DOCUMENTS] and making.read == 8


def test_held_tokens_count_in_the_budget(tmp_path: Path) -> None:
    making = Making(tmp_path, [np.arange(1_000_000) % 100] * 3, Unknown())
    tokens = making.tokens()
    assert making.budget.reserved == 3_000_000 * 2 + 4 * 8
    other = pickle.loads(pickle.dumps(tokens))
    assert np.array_equal(other.long, tokens.long)
    del tokens
    assert making.budget.reserved == 0
    making.budget = MemoryBudget("8MB", limits=[Limit("a machine", 10**9, 0)])
    with pytest.raises(
        BudgetError, match=r"tokens of 3 documents don't fit memory.*fingerprint.*max_memory_usage"
    ):
        making.tokens()
    assert making.budget.reserved == 0
