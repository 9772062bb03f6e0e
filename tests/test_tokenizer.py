"""Is every kind of tokenizer understood?"""

from typing import Any

import numpy as np
import pytest
import torch

from headrace import ConfigError
from headrace.tokenizer import Vocabulary, encode_texts, vocabulary_of
from tests.collate.tokenizers import (
    CLS,
    IDS,
    MASK,
    PAD,
    SEP,
    TEXTS,
    UNK,
    WORDS,
    HuggingFace,
    SentencePiece,
    Tiktoken,
    Tokenizers,
    encode,
)

PLAIN = [[IDS["the"], IDS["mill"], IDS["wheel"], IDS["turns"]], [IDS["the"], IDS["river"]], []]
WRAPPED = [[CLS, *row, SEP] for row in PLAIN]


@pytest.mark.parametrize(
    ("tokenizer", "known"),
    [
        (None, Vocabulary()),
        (encode, Vocabulary()),
        (HuggingFace(), Vocabulary(PAD, MASK, len(WORDS), (PAD, UNK, CLS, SEP, MASK), "right")),
        (Tokenizers(), Vocabulary(PAD, MASK, len(WORDS), (CLS, SEP, MASK))),
        (Tokenizers(pads=True), Vocabulary(77, MASK, len(WORDS), (CLS, SEP, MASK), "left")),
        (Tiktoken(), Vocabulary(size=len(WORDS))),
        (SentencePiece(), Vocabulary(size=len(WORDS))),
    ],
)
def test_what_tokenizers_say_of_their_ids(tokenizer: Any, known: Vocabulary) -> None:
    assert vocabulary_of(tokenizer) == known


def test_without_padding_the_end_of_a_text_pads() -> None:
    tokenizer = HuggingFace()
    tokenizer.pad_token_id, tokenizer.eos_token_id = None, 7  # type: ignore[assignment]
    assert vocabulary_of(tokenizer).pad == 7


@pytest.mark.parametrize(
    ("tokenizer", "ids"),
    [
        (encode, PLAIN),
        (HuggingFace(), WRAPPED),
        (Tokenizers(), WRAPPED),
        (Tokenizers(pads=True), WRAPPED),
        (Tiktoken(), PLAIN),
        (SentencePiece(), PLAIN),
        (lambda text: np.array(encode(text), np.int32), PLAIN),
        (lambda text: torch.tensor(encode(text)), PLAIN),
        (lambda text: {"input_ids": encode(text)}, PLAIN),
        (lambda text: {"input_ids": np.array([encode(text)], np.int64)}, PLAIN),  # return_tensors=...: a batch of one
        (lambda text: {"input_ids": [5, *encode(text)], "attention_mask": [0] + [1] * len(encode(text))}, PLAIN),
    ],
)
def test_ids(tokenizer: Any, ids: list[list[int]]) -> None:
    records = encode_texts(tokenizer, TEXTS)
    assert [record["input_ids"] for record in records] == ids
    assert all(type(token) is int for record in records for token in record["input_ids"])


@pytest.mark.parametrize("tokenizer", [HuggingFace(), Tokenizers(), Tokenizers(pads=True)])
def test_special_tokens(tokenizer: Any) -> None:
    for record in encode_texts(tokenizer, TEXTS):
        assert record["special_tokens_mask"] == [1, *[0] * (len(record["input_ids"]) - 2), 1]
        assert record.get("token_type_ids", record["input_ids"][:0]) in ([0] * len(record["input_ids"]), [])


@pytest.mark.parametrize("tokenizer", [HuggingFace(), Tokenizers()])
def test_truncated_texts_keep_the_token_at_their_end(tokenizer: Any) -> None:
    long, short, none = encode_texts(tokenizer, TEXTS, 4)
    assert long["input_ids"] == [CLS, IDS["the"], IDS["mill"], SEP] and long["special_tokens_mask"] == [1, 0, 0, 1]
    assert short["input_ids"] == [CLS, IDS["the"], IDS["river"], SEP] and none["input_ids"] == [CLS, SEP]


def test_truncated_ids() -> None:
    assert [record["input_ids"] for record in encode_texts(encode, TEXTS, 3)] == [PLAIN[0][:3], *PLAIN[1:]]
    assert encode_texts(Tokenizers(), TEXTS[:1], 1)[0]["input_ids"] == [CLS]


def test_all_texts_go_at_once() -> None:
    tokenizer = HuggingFace()
    encode_texts(tokenizer, TEXTS)
    encode_texts(tokenizer, TEXTS, 3)
    assert tokenizer.calls == [(3, False, None), (3, True, 3)]


@pytest.mark.parametrize(
    ("tokenizer", "said"),
    [
        (3, "tokenizer is a int"),
        ("bert-base", "tokenizer is a str"),
        (HuggingFace, "tokenizer is the class HuggingFace"),
        ([], "is a list"),
    ],
)
def test_what_is_none(tokenizer: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"{said}.*callable from a text to a list of ids"):
        vocabulary_of(tokenizer)


@pytest.mark.parametrize("gives", [["a"], "text", None, [1.5], [[1], [1, 2]], [[1, 2], [3, 4]], 7, {"ids": [1]}])
def test_what_gives_no_ids(gives: Any) -> None:
    with pytest.raises(ConfigError, match="no list of ids"):
        encode_texts(lambda text: gives, ["text"])
