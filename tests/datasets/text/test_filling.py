"""Batches of texts padded all at once are, bit for bit, what collating their single samples
gives.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import (
    CharTokenizer,
    FileChangedError,
    SampleError,
    TextCollator,
    TextDataset,
    create_dataloader,
)
from headrace.datasets.core.batch import Collating
from headrace.datasets.core.ways import choose_way
from headrace.order import BatchRequest

LINES = [
    "one",
    "",
    "a longer line of text",
    "dúo, três",
    "\U0001f600 wide",
    "nul \0 inside",
    "x" * 300,
    "end",
]
TEXT = "\n".join(LINES) + "\n\nlast, without an end"
ASCII = "one\n\ntwo words\nlast, without an end"


def in_fives(text: str) -> list[int]:
    """A tokenizer of somebody else's."""
    return [5 + ord(character) % 91 for character in text[::5]]


def equal(one: Any, other: Any) -> bool:
    same = list(one) == list(other) and all(one[name].dtype == other[name].dtype for name in one)
    return same and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text(TEXT, "utf-8")
    (tmp_path / "b.txt").write_bytes(b"of a second file\r\n\r\nhere\rand there\n")
    return tmp_path


def made(dataset: TextDataset, collate: Any, indices: list[int]) -> Any:
    return choose_way(dataset, Collating(collate)).make(BatchRequest(indices)).batch


def check(dataset: TextDataset, collate: TextCollator, indices: list[int]) -> None:
    """As plainly made, and by a loader."""
    plain = collate(dataset.__getitems__(indices))
    assert equal(made(dataset, collate, indices), plain)
    (batch,) = create_dataloader(
        dataset, batch_size=len(indices), sampler=indices, collate_fn=collate, num_workers=0
    )
    assert equal(batch, plain)


COLLATORS: list[dict[str, Any]] = [
    {},
    {"labels": None},
    {"pad_to_multiple_of": 8, "padding_side": "left"},
    {"padding": "max_length", "max_length": 400, "pad_token_id": 7},
]


WAYS: list[dict[str, Any]] = [
    {},
    {"newline": "\n"},
    {"newline": "\r"},
    {"newline": "\r\n"},
    {"max_length": 3},
    {"unit": "file"},
]
SEEN: list[dict[str, Any]] = [
    {"truncation": True, "max_length": 4},
    {"pad_values": {"attention_mask": 3}},
    {"pad_token_id": 1 << 62},
]


@pytest.mark.quick_every(6)
@pytest.mark.parametrize("options", COLLATORS)
@pytest.mark.parametrize(
    "tokenizer", [None, CharTokenizer("abcdeflnort"), in_fives], ids=["all", "some", "foreign"]
)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"newline": "\n"},
        {"newline": "\r"},
        {"newline": "\r\n"},
        {"max_length": 3},
        {"unit": "file"},
    ],
    ids=str,
)
def test_as_the_single_samples(
    folder: Path, tokenizer: Any, options: dict[str, Any], how: dict[str, Any]
) -> None:
    with TextDataset(
        folder, tokenizer=tokenizer, **{"unit": "line", "max_length": None, **how}
    ) as dataset:
        indices = [*reversed(range(len(dataset))), 0, 0]
        check(dataset, TextCollator(**options), indices)


@pytest.mark.parametrize(
    "text", [ASCII, "", "\n", "\n\n\n", ASCII.replace("\n", "\r\n"), "a\rb\n", "no end", "\0\n\0\0"]
)
def test_ascii(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(text.encode())
    with TextDataset(tmp_path, unit="line") as dataset:
        for index in range(len(dataset)):
            check(dataset, TextCollator(), [index])
        if len(dataset):
            check(dataset, TextCollator(), list(range(len(dataset))))


@pytest.mark.parametrize("encoding", ["latin-1", "cp864", "utf-16", "ascii"])
def test_other_encodings(encoding: str, tmp_path: Path) -> None:
    """In cp864 even a percent sign is another character."""
    (tmp_path / "a.txt").write_bytes(
        "50 percent\nand more".encode(encoding) + (b"" if encoding == "utf-16" else b"\n50 %")
    )
    with TextDataset(
        tmp_path, unit="line", encoding=encoding, cache_dir=tmp_path / "kept"
    ) as dataset:
        check(dataset, TextCollator(), list(range(len(dataset))))


@pytest.mark.parametrize("mode", ["eager", "cached"])
def test_held_ones(folder: Path, mode: str) -> None:
    with TextDataset(folder, unit="line", loading_mode=mode, progress=False) as dataset:
        for _ in range(2):
            check(dataset, TextCollator(), [5, 2, 2, 9])


def test_windows_and_views_and_records(folder: Path) -> None:
    with TextDataset(
        folder, max_length=20, stride=10, cache_dir=folder / "kept", progress=False
    ) as windows:
        check(windows, TextCollator(), list(range(len(windows))))
    with TextDataset(folder, unit="line") as lines:
        check(lines.subset([3, 8, 1]), TextCollator(), [2, 0, 1])
    (folder / "c.jsonl").write_text('{"text": "a"}\n\n{"text": "dúo"}\n')
    with TextDataset(folder / "c.jsonl", unit="record") as records:
        check(records, TextCollator(), [1, 0])


@pytest.mark.parametrize(
    "options",
    [
        {"truncation": True, "max_length": 4},
        {"pad_values": {"attention_mask": 3}},
        {"pad_token_id": 1 << 62},
    ],
)
def test_what_a_collator_must_see(folder: Path, options: dict[str, Any]) -> None:
    with TextDataset(folder, unit="line") as dataset:
        check(dataset, TextCollator(**options), [2, 1, 0])


def test_random_masks_are_drawn_by_the_collator(folder: Path) -> None:
    collate = TextCollator(CharTokenizer(), labels="masked", mask_token_id=1)
    assert collate.join(np.array([2, 3]), np.array([2])) is None
    with TextDataset(folder, unit="line") as dataset:
        loader = create_dataloader(dataset, batch_size=4, collate_fn=collate, num_workers=0)
        assert equal(
            next(iter(loader)),
            next(iter(create_dataloader(dataset, batch_size=4, collate_fn=collate, num_workers=0))),
        )


def test_what_is_not_ids_alone_is_made_one_by_one(folder: Path) -> None:
    class Marked(TextDataset):
        def to_input(self, value: Any) -> Any:
            return {"input_ids": super().to_input(value)["input_ids"] + 1}

    class Shouted(TextDataset):
        def decode(self, record: bytes) -> Any:
            return super().decode(record.upper())

    collating = Collating(TextCollator())
    for dataset in (
        TextDataset(folder, unit="line", transform=dict),
        TextDataset(folder, unit="line", return_index=True),
        Marked(folder, unit="line"),
        TextDataset(folder, max_length=8, packing=True, cache_dir=folder / "kept", progress=False),
        Shouted(folder, unit="line"),
    ):
        assert choose_way(dataset, collating).name == "sample by sample"
    shouted = Shouted(folder, unit="line")
    assert (
        shouted[0]["input_ids"].tolist()
        == TextDataset(folder, unit="line")
        ._format.options.tokenizer(shouted.text_of(0).upper())
        .tolist()
    )


@pytest.mark.falls_back
class TestErrors:
    @pytest.fixture
    def broken(self, tmp_path: Path) -> Path:
        (tmp_path / "a.txt").write_bytes(b"good\nbad \xff\nfine\n")
        return tmp_path

    def test_named(self, broken: Path) -> None:
        with TextDataset(broken, unit="line") as dataset:
            with pytest.raises(SampleError) as plain:
                dataset.__getitems__([0, 1, 2])
            with pytest.raises(SampleError) as filled:
                made(dataset, TextCollator(), [0, 1, 2])
            assert str(plain.value) == str(filled.value) and "offset 9" in str(filled.value)

    def test_skipped_and_counted_once(self, broken: Path) -> None:
        with TextDataset(broken, unit="line", on_error="skip") as dataset:
            loader = create_dataloader(dataset, batch_size=3, shuffle=False, num_workers=0)
            (batch,) = loader
            assert batch["input_ids"].tolist() == [
                [ord(c) + 2 for c in word] for word in ("good", "fine")
            ]
            stats = loader.get_stats()
            assert (stats["skipped"], stats["errors"], stats["samples"]) == (1, 1, 2)
            with pytest.raises(SampleError, match="none of the 1 samples"):
                made(dataset, TextCollator(), [1])

    def test_a_stand_in(self, broken: Path) -> None:
        with TextDataset(
            broken, unit="line", on_error=lambda *_: {"input_ids": torch.tensor([3])}
        ) as dataset:
            check(dataset, TextCollator(), [0, 1, 2])

    def test_a_file_that_changed(self, broken: Path) -> None:
        with TextDataset(broken, unit="line") as dataset:
            (broken / "a.txt").write_bytes(b"good\nand other\nfine\n")
            with pytest.raises(FileChangedError, match="has been changed since it was opened"):
                made(dataset, TextCollator(), [0])

    def test_a_file_that_became_shorter_while_it_is_read(
        self, broken: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with TextDataset(broken, unit="line") as dataset:
            monkeypatch.setattr("headrace.io.local.files.LocalFiles.check_open", lambda *_: None)
            (broken / "a.txt").write_bytes(b"good\nb")
            with pytest.raises(SampleError, match="ends before byte"):
                made(dataset, TextCollator(), [0, 2])


def test_in_workers(folder: Path) -> None:
    """And what was counted."""
    found = []
    for workers in (0, 2):
        with TextDataset(folder, unit="line", max_length=40) as dataset:
            loader = create_dataloader(dataset, batch_size=4, num_workers=workers)
            found.append(
                [{name: tensor.clone() for name, tensor in batch.items()} for batch in loader]
            )
            stats, nbytes = (
                loader.get_stats(),
                sum(map(len, dataset.sample_source.read(range(len(dataset))))),
            )
            assert (
                stats["samples"] == stats["cache_misses"] == len(dataset)
                and stats["bytes_read"] == nbytes
            )
    assert len(found[0]) == 4 and all(map(equal, *found))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 1 << 31), max_size=9), min_size=1, max_size=6),
    st.sampled_from(["right", "left"]),
    st.sampled_from([None, 4]),
    st.sampled_from(["causal", None]),
    st.integers(-5, 5),
    st.sampled_from(["uint16", "int32", "int64", "uint8"]),
)
def test_any_ids(
    samples: list[list[int]],
    side: str,
    multiple: int | None,
    labels: str | None,
    pad: int,
    dtype: str,
) -> None:
    collate = TextCollator(
        padding_side=side, pad_to_multiple_of=multiple, labels=labels, pad_values={"input_ids": pad}
    )
    arrays = [(np.array(ids, np.int64) & 255).astype(dtype) for ids in samples]
    joined = collate.join(np.concatenate(arrays), np.array(list(map(len, arrays))))
    assert joined is not None and equal(
        joined, collate([{"input_ids": torch.from_numpy(ids.astype(np.int64))} for ids in arrays])
    )


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.text(st.characters(codec="utf-8"), max_size=6) | st.text("abc", max_size=6), max_size=6
    ),
    st.sampled_from([None, 0, 2]),
    st.sampled_from([None, "abü"]),
)
def test_ids_of_bytes_are_those_of_texts(
    texts: list[str], most: int | None, characters: str | None
) -> None:
    tokenizer, lines = CharTokenizer(characters), [text.encode() for text in texts]
    ids, lengths = tokenizer.encode_bytes(
        b"".join(lines), np.array(list(map(len, lines)), np.int64), "utf-8", "strict", most
    )
    expected = [tokenizer(text[:most]).tolist() for text in texts]
    assert [part.tolist() for part in np.split(ids, np.cumsum(lengths))[:-1]] == expected
