"""Collating texts and tokens into what a language model is trained on."""

from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from headrace import CollateError, ConfigError, TextCollator
from headrace.collate import document_mask
from headrace.testing.contract import same
from tests.collate.tokenizers import (
    CLS,
    IDS,
    MASK,
    PAD,
    SEP,
    TEXTS,
    HuggingFace,
    SentencePiece,
    Tiktoken,
    Tokenizers,
    encode,
)


def masked(**options: Any) -> TextCollator:
    return TextCollator(
        labels="masked",
        mask_token_id=MASK,
        vocab_size=1000,
        special_token_ids=[CLS, SEP, MASK],
        **options,
    )


def test_causal() -> None:
    batch = TextCollator()([{"input_ids": [5, 6, 7], "id": "a"}, {"input_ids": [0], "id": "b"}])
    assert list(batch) == ["input_ids", "id", "attention_mask", "labels"]
    assert batch["input_ids"].tolist() == [[5, 6, 7], [0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    # a token of the padding's id has a label
    assert batch["labels"].tolist() == [[5, 6, 7], [0, -100, -100]]
    assert batch.pop("id") == ["a", "b"]
    assert {value.dtype for value in batch.values()} == {torch.int64}


TOKENIZERS = [encode, HuggingFace(), Tokenizers(), Tokenizers(True), Tiktoken(), SentencePiece()]


def test_texts_are_tokenised() -> None:
    for tokenizer in TOKENIZERS:
        collate = TextCollator(tokenizer, padding_side="right", pad_token_id=PAD)
        batch = collate([{"text": text, "n": n} for n, text in enumerate(TEXTS)])
        added = [CLS] if isinstance(tokenizer, (HuggingFace, Tokenizers)) else []
        ends = [SEP] if added else []
        rows = [[*added, *encode(text), *ends] for text in TEXTS]
        assert batch["attention_mask"].sum(1).tolist() == list(map(len, rows))
        assert batch["input_ids"].shape == (3, len(rows[0]))
        assert batch["input_ids"][0].tolist() == rows[0] and batch["n"].tolist() == [0, 1, 2]
        types = {"token_type_ids"} if isinstance(tokenizer, HuggingFace) else set()
        assert set(batch) == {"input_ids", "attention_mask", "labels", "n"} | types
        plain = collate(TEXTS)
        assert all(same(plain[name], batch[name]) for name in ("input_ids", "labels"))


def test_fields_with_one_number_a_token() -> None:
    names = ("input_ids", "token_type_ids", "attention_mask", "parts")
    values: list[tuple[Any, ...]] = [
        ([1, 2, 3], [0, 1, 1], [True, True, False], [7, 8, 9]),
        (np.array([4], "u2"), [1], [True], torch.tensor([1])),
    ]
    first, second = (dict(zip(names, row, strict=True)) for row in values)
    batch = TextCollator(pad_values={"parts": -1, "token_type_ids": 3})([first, UserDict(second)])
    assert batch["token_type_ids"].tolist() == [[0, 1, 1], [1, 3, 3]]
    assert batch["parts"].tolist() == [[7, 8, 9], [1, -1, -1]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 0, 0]]
    assert batch["attention_mask"].dtype == torch.int64
    # the sample's own padding has no label either
    assert batch["labels"].tolist() == [[1, 2, -100], [4, -100, -100]]


def test_targets() -> None:
    batch = TextCollator(encode)([("the mill", 1), ("river", 0)])
    assert batch["labels"].tolist() == [1, 0] and batch["input_ids"].shape == (2, 2)
    batch = TextCollator()([([1, 2], [3, 4]), ([5], [6])])  # one a token
    assert batch["labels"].tolist() == [[3, 4], [6, -100]]
    # of a decoder
    longer = {"input_ids": [1], "labels": [-100, 3, 4]}
    batch = TextCollator()([longer, {"input_ids": [1, 2], "labels": [5]}])
    assert batch["labels"].tolist() == [[-100, 3, 4], [5, -100, -100]]
    assert batch["input_ids"].shape == (2, 2)


def test_a_class_label_becomes_labels() -> None:
    samples = [{"text": "the mill", "label": 1, "n": 7}, {"text": "river", "label": 0, "n": 8}]
    for collate in (TextCollator(encode), TextCollator(encode, labels=None)):
        batch = collate(samples)
        assert batch["labels"].tolist() == [1, 0] and batch["n"].tolist() == [7, 8]
        assert "label" not in batch and samples[0]["label"] == 1, "the samples stay as they were"
    classes = [{"text": "the mill", "label": torch.tensor([0.0, 1.0])}]
    assert TextCollator(encode)(classes)["labels"].tolist() == [[0.0, 1.0]]


def test_the_tokenizer_says_where_and_with_what_to_pad() -> None:
    batch = TextCollator(Tokenizers(pads=True))([[5, 6], [7]])
    assert batch["input_ids"].tolist() == [[5, 6], [77, 7]]
    assert batch["labels"].tolist() == [[5, 6], [-100, 7]]
    assert batch["attention_mask"].tolist() == [[1, 1], [0, 1]]
    batch = TextCollator(Tokenizers(pads=True), padding_side="right", pad_token_id=3)([[5, 6], [7]])
    assert batch["input_ids"].tolist() == [[5, 6], [7, 3]]


def test_eighty_ten_ten() -> None:
    torch.manual_seed(5)
    ids = torch.arange(100_000) % 900 + 100
    ids[::10] = CLS
    before = ids.reshape(10, -1)
    batch = masked()(list(before))
    after, labels = batch["input_ids"], batch["labels"]
    chosen, special = labels != -100, before == CLS
    assert not (chosen & special).any()
    assert torch.equal(after[~chosen], before[~chosen])
    assert torch.equal(labels[chosen], before[chosen])
    assert chosen[~special].float().mean().item() == pytest.approx(0.15, abs=0.005)
    became, was = after[chosen], before[chosen]
    assert (became == MASK).float().mean().item() == pytest.approx(0.8, abs=0.015)
    assert (became == was).float().mean().item() == pytest.approx(0.1, abs=0.015)
    words = became[(became != MASK) & (became != was)]
    assert len(words) / len(became) == pytest.approx(0.1, abs=0.015)
    # of the whole vocabulary
    assert words.min() < 50 and words.max() > 950 and len(words.unique()) > 500


@given(
    st.lists(st.lists(st.integers(0, 20), max_size=12), min_size=1, max_size=4),
    st.integers(0, 2**40),
    st.sampled_from(["right", "left"]),
)
def test_the_seed_decides_labels_are_what_was(ids: list[list[int]], seed: int, side: str) -> None:
    collate = masked(mlm_probability=0.5, padding_side=side)
    torch.manual_seed(seed)
    batch = collate(ids)
    plain = TextCollator(padding_side=side)(ids)
    chosen = batch["labels"] != -100
    assert torch.equal(batch["attention_mask"], plain["attention_mask"])
    assert not (chosen & (plain["attention_mask"] == 0)).any()
    assert not (chosen & torch.isin(plain["input_ids"], torch.tensor([CLS, SEP, MASK]))).any()
    assert torch.equal(batch["input_ids"].where(~chosen, batch["labels"]), plain["input_ids"])
    torch.manual_seed(seed)
    assert same(collate(ids), batch)


def test_a_mask_of_special_tokens_counts() -> None:
    collate = masked(mlm_probability=1)
    special = {"input_ids": [10, 11, 12], "special_tokens_mask": [0, 1, 0]}
    batch = collate([special, {"input_ids": [13]}])
    assert batch["labels"].tolist() == [[10, -100, 12], [13, -100, -100]]
    assert "special_tokens_mask" not in batch
    padded = collate([{"input_ids": [10, 0], "attention_mask": [1, 0]}])
    assert padded["labels"].tolist() == [[10, -100]]


def test_labels_of_the_samples_and_none() -> None:
    assert list(TextCollator(encode, labels=None)(["river"])) == ["input_ids", "attention_mask"]
    samples = [{"text": "the mill", "label": 1}, {"text": "river", "label": 0}]
    for collate in (TextCollator(encode, labels="causal"), masked(tokenizer=encode)):
        batch = collate(samples)
        assert batch["label"].tolist() == [1, 0]
        assert batch["labels"].shape == batch["input_ids"].shape
        assert collate(["", "the mill"])["labels"][0].tolist() == [-100, -100]
        assert collate([""])["input_ids"].shape == (1, 0)
    batch = TextCollator(Tokenizers(), labels="masked")([{"text": "river"}, {"input_ids": [5, 6]}])
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    batch = TextCollator(HuggingFace(), labels="masked", mlm_probability=1)(TEXTS)
    assert batch["labels"][0].tolist() == [-100, *encode(TEXTS[0]), -100]
    assert "special_tokens_mask" not in batch


def test_truncation() -> None:
    batch = TextCollator(HuggingFace(), max_length=4, truncation=True)(TEXTS)
    assert batch["input_ids"][0].tolist() == [CLS, IDS["the"], IDS["mill"], SEP]
    assert batch["input_ids"].shape == (3, 4)
    sample = {"input_ids": [1, 2, 3], "token_type_ids": [4, 5, 6], "labels": [7, 8, 9]}
    cut = TextCollator(max_length=2, truncation=True)([sample])
    assert [cut[name].tolist() for name in sample] == [[[1, 2]], [[4, 5]], [[7, 8]]]


REFUSED: list[tuple[TextCollator, list[Any], str]] = [
    (TextCollator(), [{"input_ids": [1]}, {"text": "a"}], "sample 1"),
    (TextCollator(encode), [{"body": "a"}], "'body'"),
    (TextCollator(encode), ["a", 5], "sample 1 is 'int'"),
    (TextCollator(), [torch.zeros(1, 4, dtype=torch.int64)], "int64 [1, 4]"),
    (TextCollator(), [torch.zeros(4)], "['input_ids'] is float32 [4]"),
    (TextCollator(), [[2**63]], "sample 0"),
    (TextCollator(), [{"input_ids": [1, 2], "token_type_ids": [0]}], "['token_type_ids']"),
    (TextCollator(), [{"input_ids": [1], "attention_mask": 1}], "['attention_mask']"),
    (TextCollator(), [{"input_ids": [1], "n": 1}, {"input_ids": [1]}], "sample 1"),
    (TextCollator(encode), [{"text": "river", "label": 1, "labels": 2}], "'label'"),
    (TextCollator(encode, labels="causal"), [("river", 2)], "'labels'"),
    (masked(), [([1], [2])], "labels='masked'"),
    (TextCollator(), [], ""),
]


def test_what_can_not_be_collated() -> None:
    for collate, samples, named in REFUSED:
        with pytest.raises((CollateError, ConfigError)) as refused:
            collate(samples)
        assert named in str(refused.value) and "\n" not in str(refused.value)


BAD_OPTIONS: list[dict[str, Any]] = [
    {"labels": "mlm"},
    {"mlm_probability": 0},
    {"tokenizer": "bert-base-uncased"},
    {"pad_token_id": -1},
    {"pad_token_id": "[PAD]"},
    {"vocab_size": 0},
    {"special_token_ids": ["[CLS]"]},
    {"pad_values": {"parts": "x"}},
    {"pad_values": ["parts"]},
    {"padding": "yes"},
]


def test_bad_arguments() -> None:
    for options in BAD_OPTIONS:
        with pytest.raises(ConfigError, match=next(iter(options))):
            TextCollator(**options)


def test_masking_needs_a_mask_token() -> None:
    for options, named in (
        ({}, "mask_token_id"),
        ({"mask_token_id": 4}, "vocab_size"),
        ({"tokenizer": Tiktoken()}, "Tiktoken"),
    ):
        with pytest.raises(ConfigError, match=named):
            TextCollator(labels="masked", **options)


def test_document_mask_isolates_documents() -> None:
    rows = [[0, 0, 0, 1, 1, 2, 3], [0, 0, 0, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5, 6]]
    for dtype in (torch.int32, torch.int64):
        ids = torch.tensor(rows, dtype=dtype)
        mask = document_mask(ids)
        assert mask.shape == (3, 1, 7, 7) and mask.dtype == torch.bool
        is_same = ids[:, :, None] == ids[:, None, :]
        assert torch.equal(mask[:, 0], is_same.tril())
    bad: list[Any] = [
        torch.zeros(4, dtype=torch.int64),
        torch.zeros(2, 4),
        torch.zeros(2, 4, dtype=torch.bool),
        [[0, 1]],
    ]
    for ids in bad:
        with pytest.raises(ConfigError):
            document_mask(ids)
