"""Rows of whole chats and documents (``packing="bfd"``): what is in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import ConfigError, HeadraceWarning, SampleError, TextDataset
from headrace.collate import document_mask
from headrace.testing.contract import same
from tests.datasets.text.chat_tokenizer import chat_tokenizer
from tests.datasets.text.test_chats import USER, answer, loader_of, opened, write

pytestmark = pytest.mark.usefixtures("own_cache")

LENGTH, CHATS = 220, 40
_RANDOM = np.random.default_rng(3)
ANSWERS = [f"{number} " + "so " * int(_RANDOM.integers(1, 30)) for number in range(CHATS)]
COLUMNS = {
    "input_ids": torch.int64,
    "labels": torch.int64,
    "document_ids": torch.int32,
    "position_ids": torch.int64,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path, *([USER, answer(content)] for content in ANSWERS))


def rows_of(path: Path, **options: Any) -> TextDataset:
    return opened(path, **{"packing": "bfd", "max_length": LENGTH, **options})


def rows_in(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [
        {name: column[n] for name, column in batch.items()} for n in range(len(batch["labels"]))
    ]


def chats_in(row: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    assert {name: column.dtype for name, column in row.items()} == COLUMNS
    assert {len(column) for column in row.values()} == {LENGTH}
    documents, found = row["document_ids"], []
    for number in range(int(documents.max()) + 1):
        at = (documents == number).nonzero().flatten()
        assert torch.equal(at, torch.arange(int(at[0]), int(at[-1]) + 1))
        assert torch.equal(row["position_ids"][at], torch.arange(len(at)))
        found.append({"input_ids": row["input_ids"][at], "labels": row["labels"][at]})
    padding = documents == -1
    size = int(padding.sum())
    assert not padding[: LENGTH - size].any()
    assert (row["input_ids"][padding] == 0).all()
    assert (row["labels"][padding] == -100).all()
    assert torch.equal(row["position_ids"][padding], torch.arange(size))
    return found


def said(chat: dict[str, torch.Tensor]) -> str:
    text = chat_tokenizer().decode(chat["labels"][chat["labels"] != -100])
    return str(text).removesuffix("<|im_end|>")


def test_rows_hold_whole_chats_with_their_labels(path: Path) -> None:
    chats, rows = opened(path), rows_of(path)
    found = {said(chat): chat for row in rows for chat in chats_in(row)}
    assert found.keys() == set(ANSWERS)
    assert all(same(found[content], chats[n]) for n, content in enumerate(ANSWERS))
    tokens = sum(len(chats[number]["input_ids"]) for number in range(CHATS))
    assert rows.lengths().sum() == tokens
    filled = tokens / len(rows) / LENGTH
    assert filled > 0.9
    assert f"{filled:.2%}" in rows.explain()


def test_batches_are_the_samples(path: Path) -> None:
    rows = rows_of(path)
    loader = loader_of(rows, 4)
    assert "rows of documents straight from storage" in loader.explain()
    cached = loader_of(rows_of(path, loading_mode="cached"), 4)
    number = 0
    for batch, other in zip(loader, cached, strict=True):
        assert same(batch, other)
        for row in rows_in(batch):
            assert same(row, rows[number])
            number += 1
    assert number == len(rows)
    documents = rows[0]["document_ids"][None]
    mask = document_mask(documents)[0, 0]
    assert mask.diagonal().all()
    assert not mask[documents[0] == 1][:, documents[0] == 0].any()


def test_a_long_chat_is_cut_at_its_end(tmp_path: Path) -> None:
    long, late = ([{**USER, "content": "x " * n}, answer("yes " * 99)] for n in (2, 300))
    path = write(tmp_path, [USER, answer("no")], long)
    rows, chats = rows_of(path), opened(path, max_length=LENGTH)
    assert len(rows) == 2
    assert same(chats_in(rows[1]), [chats[1]])
    path = write(tmp_path, [USER, answer("no")], late, name="b.jsonl")
    with pytest.raises(SampleError, match=r"b.jsonl, line 2: its first 220 tokens"):
        rows_of(path)
    with pytest.warns(HeadraceWarning, match=r"1 of 2 chats .*line 2"):
        rows = rows_of(path, on_error="skip")
    assert [said(chat) for row in rows for chat in chats_in(row)] == ["no"]


def test_rows_of_texts(tmp_path: Path) -> None:
    """The first token of each has no label: it follows from nothing."""
    (tmp_path / "a.txt").write_text("one\n\ntwo two\nthree\n")
    rows = TextDataset(tmp_path / "a.txt", unit="line", packing="bfd", max_length=12)
    texts = [rows.tokenizer.decode(row["input_ids"][row["document_ids"] >= 0]) for row in rows]
    assert texts == ["one", "two twothree"]
    for row in rows:
        is_learned = (row["document_ids"] >= 0) & (row["position_ids"] > 0)
        assert torch.equal(row["labels"], torch.where(is_learned, row["input_ids"], -100))
    with pytest.raises(ConfigError, match="of no one text"):
        rows.text_of(0)
