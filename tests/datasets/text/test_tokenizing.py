"""Tokens of a tokenizer that can't be known again are held in memory, within the budget."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.datasets.text.tokenizing import Tokenising
from headrace.errors import BudgetError
from headrace.memory.budget import MemoryBudget
from headrace.memory.limits import Limit


def tokens_of(documents: Any, budget: MemoryBudget, folder: Path) -> Any:
    def read(indices: Any) -> list[Any]:
        return [documents[index] for index in indices]

    made = Tokenising(read, len(documents), "these", list, None, None, False)
    return made.tokens(folder, budget)


def test_held_tokens_count_in_the_budget(tmp_path: Path) -> None:
    budget = MemoryBudget("20MB", limits=[Limit("a machine", 10**9, 0)])
    documents = [np.arange(1_000_000) % 100] * 3
    tokens = tokens_of(documents, budget, tmp_path)
    assert budget.reserved == 3_000_000 * 2 + 4 * 8
    assert tokens.long.dtype == np.uint16
    assert np.array_equal(tokens.long, np.concatenate(documents))
    del tokens
    gc.collect()
    assert budget.reserved == 0
    with pytest.raises(BudgetError, match="tokens of 20 documents"):
        tokens_of(documents[:1] * 20, budget, tmp_path)
    assert budget.reserved == 0
    wide = tokens_of([np.array([1, 65_536]), np.array([5])], budget, tmp_path)
    assert wide.long.dtype == np.int32
    assert wide.long.tolist() == [1, 65_536, 5]
