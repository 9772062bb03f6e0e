"""Batches of texts padded all at once are, bit for bit, those of their single samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import (
    CharTokenizer,
    FileChangedError,
    SampleError,
    TextCollator,
    TextDataset,
    create_dataloader,
)
from headrace.core.batcher import Batcher, Collating
from headrace.order import BatchRequest
from headrace.testing.contract import same

pytestmark = pytest.mark.usefixtures("own_cache")

LINES = ["one", "", "a longer line of text", "dúo, três", "\U0001f600 wide", "nul \0 inside"]
TEXT = "\n".join([*LINES, "x" * 300, "end"]) + "\n\nlast, without an end"


def in_fives(text: str) -> list[int]:
    """A tokenizer of somebody else's."""
    return [5 + ord(character) % 91 for character in text[::5]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text(TEXT, "utf-8")
    (tmp_path / "b.txt").write_bytes(b"of a second file\r\n\r\nhere\rand there\n")
    return tmp_path


def made(dataset: TextDataset, collate: Any, indices: list[int]) -> Any:
    return Batcher(dataset, Collating(collate)).make(BatchRequest(indices)).batch


def check(dataset: TextDataset, indices: list[int], **options: Any) -> None:
    """As plainly made, and by a loader."""
    collate = TextCollator(**options)
    plain = collate(dataset.__getitems__(indices))
    assert same(made(dataset, collate, indices), plain), options
    (batch,) = create_dataloader(
        dataset, batch_size=len(indices), sampler=indices, collate_fn=collate, num_workers=0
    )
    assert same(batch, plain), options


@pytest.mark.parametrize("how", [{}, {"max_length": 3}, {"unit": "file"}])
def test_as_the_single_samples(folder: Path, how: dict[str, Any]) -> None:
    padding: list[dict[str, Any]] = [
        {},
        {"labels": None},
        {"pad_to_multiple_of": 8, "padding_side": "left"},
        {"padding": "max_length", "max_length": 400, "pad_token_id": 7},
    ]
    for tokenizer in (None, CharTokenizer("abcdeflnort"), in_fives):
        options: Any = {"tokenizer": tokenizer, "unit": "line", **how}
        with TextDataset(folder, **options) as dataset:
            for collating in padding:
                check(dataset, [*reversed(range(len(dataset))), 0, 0], **collating)


def test_what_a_collator_must_see(folder: Path) -> None:
    with TextDataset(folder, unit="line") as dataset:
        check(dataset, [2, 1, 0], truncation=True, max_length=4)
        check(dataset, [2, 1, 0], pad_values={"attention_mask": 3})
        check(dataset, [2, 1, 0], pad_token_id=1 << 62)
    collate = TextCollator(CharTokenizer(), labels="masked", mask_token_id=1)
    assert collate.join(np.array([2, 3]), np.array([2])) is None


def test_texts_of_any_bytes_and_encodings(tmp_path: Path) -> None:
    """In cp864 even a percent sign is another character."""
    plain = "one\n\ntwo words\nlast, without an end"
    contents = [plain, "\n", "\n\n\n", plain.replace("\n", "\r\n"), "a\rb\n", "\0\n\0\0"]
    given = [(content.encode(), "utf-8") for content in contents]
    percent = "50 percent\nand 50 %"
    given += [(percent.encode(name), name) for name in ("latin-1", "utf-16", "ascii")]
    given.append((percent.encode(), "cp864"))
    for data, encoding in given:
        (tmp_path / "a.txt").write_bytes(data)
        with TextDataset(tmp_path / "a.txt", unit="line", encoding=encoding) as dataset:
            for index in range(len(dataset)):
                check(dataset, [index])
            check(dataset, list(range(len(dataset))))


def test_what_is_held_and_views_windows_and_records(folder: Path) -> None:
    for mode in ("eager", "cached"):
        with TextDataset(folder, unit="line", loading_mode=mode, progress=False) as dataset:
            for _ in range(2):
                check(dataset, [5, 2, 2, 9])
    with TextDataset(folder, max_length=20, stride=10) as windows:
        check(windows, list(range(len(windows))))
    with TextDataset(folder, unit="line") as lines:
        check(lines.subset([3, 8, 1]), [2, 0, 1])
    (folder / "c.jsonl").write_text('{"text": "a"}\n\n{"text": "dúo"}\n')
    with TextDataset(folder / "c.jsonl", unit="record") as records:
        check(records, [1, 0])


def test_what_is_not_ids_alone_is_made_one_by_one(folder: Path) -> None:
    class Marked(TextDataset):
        def to_input(self, value: Any) -> Any:
            return {"input_ids": super().to_input(value)["input_ids"] + 1}

    class Shouted(TextDataset):
        def decode(self, record: bytes) -> Any:
            return super().decode(record.upper())

    shouted = Shouted(folder, unit="line")
    for dataset in (
        TextDataset(folder, unit="line", transform=dict),
        TextDataset(folder, unit="line", return_index=True),
        TextDataset(folder, max_length=8, packing=True),
        Marked(folder, unit="line"),
        shouted,
    ):
        assert Batcher(dataset, Collating(TextCollator())).explain() == "sample by sample"
    assert CharTokenizer().decode(shouted[0]["input_ids"]) == "ONE"


@pytest.mark.falls_back
def test_bad_lines_are_named_skipped_or_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good\nbad \xff\nfine\n")
    collate = TextCollator()
    with TextDataset(tmp_path, unit="line") as dataset:
        with pytest.raises(SampleError) as plain:
            dataset.__getitems__([0, 1, 2])
        with pytest.raises(SampleError, match=r"line 2.*offset 9") as filled:
            made(dataset, collate, [0, 1, 2])
        assert str(plain.value) == str(filled.value)
    with TextDataset(tmp_path, unit="line", on_error="skip") as dataset:
        loader = create_dataloader(dataset, batch_size=3, shuffle=False, num_workers=0)
        (batch,) = loader
        assert batch["input_ids"].tolist() == [[ord(c) + 2 for c in w] for w in ("good", "fine")]
        stats = loader.get_stats()
        assert (stats["skipped"], stats["errors"], stats["samples"]) == (1, 1, 2)
        with pytest.raises(SampleError, match="none of the 1 samples"):
            made(dataset, collate, [1])
    stand_in = {"input_ids": torch.tensor([3])}
    with TextDataset(tmp_path, unit="line", on_error=lambda *_: stand_in) as dataset:
        check(dataset, [0, 1, 2])
    with TextDataset(tmp_path, unit="line") as dataset:
        (tmp_path / "a.txt").write_bytes(b"good\nand other\nfine\n")
        with pytest.raises(FileChangedError):
            made(dataset, collate, [0])
