"""Rows of whole chats and documents (``packing="bfd"``): what is in them, each once an epoch,
and resumed elsewhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import (
    ConfigError,
    HeadraceWarning,
    SampleError,
    TextDataset,
    create_dataloader,
    document_mask,
    pack,
)
from headrace.testing.contract import same
from tests.datasets.text.chat_tokenizer import MARKED, ChatTokenizer
from tests.datasets.text.test_chats import USER, opened, write

LENGTH, CHATS = 220, 60
_RANDOM = np.random.default_rng(3)
ANSWERS = [f"{number} " + "so " * int(_RANDOM.integers(1, 30)) for number in range(CHATS)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(
        tmp_path, *([USER, {"role": "assistant", "content": answer}] for answer in ANSWERS)
    )


def rows_of(path: Path, tmp_path: Path, **options: Any) -> TextDataset:
    return opened(
        path, **{"packing": "bfd", "max_length": LENGTH, "cache_dir": tmp_path / "cache", **options}
    )


def chats_in(row: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The ids and labels of each document of a row, which must be as `TextDataset` says."""
    assert list(row) == ["input_ids", "labels", "document_ids", "position_ids"] and {
        len(column) for column in row.values()
    } == {LENGTH}
    assert [row[name].dtype for name in row] == [torch.int64, torch.int64, torch.int32, torch.int64]
    documents, found = row["document_ids"], []
    for number in range(int(documents.max()) + 1):
        at = (documents == number).nonzero().flatten()
        assert torch.equal(at, torch.arange(int(at[0]), int(at[-1]) + 1))
        assert torch.equal(row["position_ids"][at], torch.arange(len(at)))
        found.append({"input_ids": row["input_ids"][at], "labels": row["labels"][at]})
    padding = documents == -1
    assert not padding[: LENGTH - int(padding.sum())].any()
    assert (row["input_ids"][padding] == 0).all() and (row["labels"][padding] == -100).all()
    assert torch.equal(row["position_ids"][padding], torch.arange(int(padding.sum())))
    return found


def said(chat: dict[str, torch.Tensor]) -> str:
    return ChatTokenizer().decode(chat["labels"][chat["labels"] != -100]).removesuffix("<|im_end|>")


def unpacked(batches: list[Any]) -> list[str]:
    """What the assistant says in each chat of some batches, in order."""
    rows = [
        {name: column[n] for name, column in batch.items()}
        for batch in batches
        for n in range(len(batch["labels"]))
    ]
    return [said(chat) for row in rows for chat in chats_in(row)]


def test_rows_hold_whole_chats_with_their_labels(path: Path, tmp_path: Path) -> None:
    for tokenizer in (ChatTokenizer(MARKED), ChatTokenizer()):
        chats, rows = (
            opened(path, tokenizer=tokenizer),
            rows_of(path, tmp_path, tokenizer=tokenizer),
        )
        found = {said(chat): chat for row in rows for chat in chats_in(row)}
        assert len(found) == CHATS and all(
            same(found[answer], chats[number]) for number, answer in enumerate(ANSWERS)
        )
        tokens = sum(len(chats[number]["input_ids"]) for number in range(CHATS))
        assert rows.lengths().sum() == tokens > 0.9 * len(
            rows
        ) * LENGTH and f"{tokens / len(rows) / LENGTH:.2%}" in str(rows.explain())


def test_batches_are_the_samples(path: Path, tmp_path: Path) -> None:
    rows = rows_of(path, tmp_path)
    loader = create_dataloader(rows, batch_size=4, num_workers=0, shuffle=False)
    assert "rows of documents straight from storage" in str(loader.explain())
    for step, batch in enumerate(loader):
        assert all(
            same({name: column[n] for name, column in batch.items()}, rows[4 * step + n])
            for n in range(len(batch["labels"]))
        )
    cached = create_dataloader(
        rows_of(path, tmp_path, loading_mode="cached"), batch_size=4, num_workers=0, shuffle=False
    )
    assert all(same(one, other) for one, other in zip(cached, loader, strict=True))


def test_no_token_attends_to_another_chat(path: Path, tmp_path: Path) -> None:
    documents = rows_of(path, tmp_path)[0]["document_ids"][None]
    mask = document_mask(documents)[0, 0]
    assert mask.diagonal().all() and not mask[documents[0] == 1][:, documents[0] == 0].any()


@pytest.mark.parametrize("shuffle", [True, "block"])
def test_resumed_on_other_workers_and_ranks(shuffle: Any, path: Path, tmp_path: Path) -> None:
    def loader(rank: int, world: int, workers: int) -> Any:
        return create_dataloader(
            rows_of(path, tmp_path),
            batch_size=4 // world,
            num_workers=workers,
            shuffle=shuffle,
            seed=5,
            rank=rank,
            world_size=world,
        )

    whole = loader(0, 1, 0)
    whole.set_epoch(3)
    batches = list(whole)
    assert sorted(unpacked(batches)) == sorted(ANSWERS)
    first = loader(0, 1, 2)
    first.set_epoch(3)
    received = iter(first)
    assert all(same(next(received), batch) for batch in batches[:3])
    state = first.state_dict()
    first.close()
    ranks = []
    for rank in range(2):
        later = loader(rank, 2, 1)
        later.load_state_dict(state)
        ranks.append([{name: column.clone() for name, column in batch.items()} for batch in later])
        later.close()
    for step, (even, odd) in enumerate(zip(*ranks, strict=True), 3):
        for name, column in batches[step].items():
            count = len(column)
            assert torch.equal(even[name], column[::2]) and torch.equal(
                odd[name][: count // 2], column[1::2]
            )


def test_a_long_chat_is_cut_at_its_end(tmp_path: Path) -> None:
    long, late = (
        [{**USER, "content": "x " * n}, {"role": "assistant", "content": "yes " * 99}]
        for n in (2, 300)
    )
    path = write(tmp_path, [USER, {"role": "assistant", "content": "no"}], long)
    rows, chats = rows_of(path, tmp_path), opened(path, max_length=LENGTH)
    assert len(rows) == 2 and same(chats_in(rows[1]), [chats[1]])
    path = write(tmp_path, [USER, {"role": "assistant", "content": "no"}], late, name="b.jsonl")
    with pytest.raises(
        SampleError,
        match=(
            r"b.jsonl, line 2: its first 220 tokens hold none of the assistant's: raise "
            r"max_length, or pass"
        ),
    ):
        rows_of(path, tmp_path)
    with pytest.warns(HeadraceWarning, match=r"1 of 2 chats are left out; the first: .*line 2"):
        assert unpacked(
            list(create_dataloader(rows_of(path, tmp_path, on_error="skip"), num_workers=0))
        ) == ["no"]


def test_packed_chats_make_the_same_rows(path: Path, tmp_path: Path) -> None:
    rows = rows_of(path, tmp_path)
    with TextDataset(
        pack(opened(path), tmp_path / "chats.h5", progress=False), packing="bfd", max_length=LENGTH
    ) as packed:
        assert packed.fingerprint == rows.fingerprint and all(
            same(packed[n], rows[n]) for n in range(len(rows))
        )
        assert np.array_equal(packed.blocks(), rows.blocks())
    other = rows_of(path, tmp_path, max_length=LENGTH + 1)
    assert (
        other.fingerprint != rows.fingerprint != rows_of(path, tmp_path, packing=True).fingerprint
    )


def test_rows_of_texts(tmp_path: Path) -> None:
    """The first token of each has no label: it follows from nothing."""
    (tmp_path / "a.txt").write_text("one\n\ntwo two\nthree\n")
    rows = TextDataset(
        tmp_path / "a.txt", unit="line", packing="bfd", max_length=12, cache_dir=tmp_path / "cache"
    )
    texts = [
        "".join(
            map(
                rows.tokenizer.decode,
                [row["input_ids"][row["document_ids"] == n] for n in range(2)],
            )
        )
        for row in rows
    ]
    assert texts == ["one", "two twothree"]
    for row in rows:
        is_learned = (row["document_ids"] >= 0) & (row["position_ids"] > 0)
        assert torch.equal(row["labels"], torch.where(is_learned, row["input_ids"], -100))
    with pytest.raises(ConfigError, match="a sample is a row of several texts"):
        rows.text_of(0)
