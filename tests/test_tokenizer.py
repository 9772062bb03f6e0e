"""Every kind of tokenizer is understood."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import ConfigError
from headrace.tokenizer import (
    CharTokenizer,
    Vocabulary,
    encode_texts,
    identity_of,
    shown_tokenizer,
    token_arrays,
    vocabulary_of,
)
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


def test_are_shown_on_one_line() -> None:
    class Long(HuggingFace):
        def __repr__(self) -> str:
            return "500 lines\n" * 500

    assert shown_tokenizer(Long()).endswith(f"Long of {len(WORDS)} tokens>") and shown_tokenizer(
        encode
    ) == repr(encode)
    assert (
        shown_tokenizer(None) == "None"
        and shown_tokenizer(CharTokenizer("ab")) == "CharTokenizer('ab')"
    )


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
        # return_tensors=...: a batch of one
        (lambda text: {"input_ids": np.array([encode(text)], np.int64)}, PLAIN),
        (
            lambda text: {
                "input_ids": [5, *encode(text)],
                "attention_mask": [0] + [1] * len(encode(text)),
            },
            PLAIN,
        ),
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
        assert record.get("token_type_ids", record["input_ids"][:0]) in (
            [0] * len(record["input_ids"]),
            [],
        )


@pytest.mark.parametrize("tokenizer", [HuggingFace(), Tokenizers()])
def test_truncated_texts_keep_the_token_at_their_end(tokenizer: Any) -> None:
    long, short, none = encode_texts(tokenizer, TEXTS, 4)
    assert long["input_ids"] == [CLS, IDS["the"], IDS["mill"], SEP] and long[
        "special_tokens_mask"
    ] == [1, 0, 0, 1]
    assert short["input_ids"] == [CLS, IDS["the"], IDS["river"], SEP] and none["input_ids"] == [
        CLS,
        SEP,
    ]


def test_truncated_ids() -> None:
    assert [record["input_ids"] for record in encode_texts(encode, TEXTS, 3)] == [
        PLAIN[0][:3],
        *PLAIN[1:],
    ]
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


@pytest.mark.parametrize(
    "gives", [["a"], "text", None, [1.5], [[1], [1, 2]], [[1, 2], [3, 4]], 7, {"ids": [1]}]
)
def test_what_gives_no_ids(gives: Any) -> None:
    with pytest.raises(ConfigError, match="no list of ids"):
        encode_texts(lambda text: gives, ["text"])


class TestCharTokenizer:
    @settings(max_examples=60, deadline=None)
    @given(text=st.text(st.characters(exclude_categories=[]), max_size=20))
    def test_every_character_has_an_id_and_comes_back(self, text: str) -> None:
        """Lone surrogates and NUL too; none is padding or unknown."""
        ids = CharTokenizer()(text)
        assert ids.dtype == np.int32 and ids.tolist() == [ord(character) + 2 for character in text]
        assert CharTokenizer().decode([0, *ids.tolist(), 0]) == text

    @settings(max_examples=60, deadline=None)
    @given(
        characters=st.text("abcé\U0001f600\ud800", max_size=6),
        text=st.text("abcdé\U0001f600\ud800", max_size=12),
    )
    def test_of_some_characters(self, characters: str, text: str) -> None:
        known, tokenizer = sorted(set(characters)), CharTokenizer(characters)
        assert tokenizer(text).tolist() == [known.index(c) + 2 if c in known else 1 for c in text]
        assert tokenizer.decode(tokenizer(text)) == "".join(
            c if c in known else "\ufffd" for c in text
        )
        assert tokenizer.vocab_size == len(tokenizer) == len(known) + 2

    def test_what_it_says_of_itself(self) -> None:
        assert vocabulary_of(CharTokenizer("abc")) == Vocabulary(pad=0, size=5)
        assert vocabulary_of(CharTokenizer()).size == 0x110000 + 2
        assert (
            repr(eval(repr(CharTokenizer(["b", "ca"])))) == "CharTokenizer('abc')"
            and repr(CharTokenizer()) == "CharTokenizer()"
        )
        many = CharTokenizer(map(chr, range(5000)))
        assert (
            repr(many) == "CharTokenizer(<5,000 characters>)"
            and eval(many.identity).characters == many.characters
        )


class TestIdentity:
    def test_of_what_can_be_known_again(self) -> None:
        class Own:
            fingerprint = "own 1"

        class Rust:
            def __init__(self, said: dict[str, Any]) -> None:
                self.said = said

            def encode_batch(self, texts: list[str]) -> Any: ...

            def to_str(self) -> str:
                return json.dumps(self.said)

        class Fast:
            def __init__(self, said: dict[str, Any], **options: Any) -> None:
                self.backend_tokenizer = Rust(said)
                vars(self).update(options)

        known = [
            *(CharTokenizer(), CharTokenizer("ab"), CharTokenizer("abc"), Own()),
            *(Rust({"model": 1}), Rust({"model": 2}), Rust({"model": 1, "truncation": 5})),
            *(Fast({"model": 1}), Fast({"model": 2}), Fast({"model": 1}, add_bos_token=True)),
        ]
        found = [identity_of(tokenizer) for tokenizer in known]
        assert all(isinstance(identity, str) for identity in found) and len(set(found)) == len(
            found
        )
        assert found == [identity_of(tokenizer) for tokenizer in known]
        # what its last call left there
        used = Fast({"model": 1, "truncation": {"max_length": 5}, "padding": None})
        assert identity_of(used) == identity_of(known[7])

    @pytest.mark.parametrize(
        "tokenizer", [encode, HuggingFace(), Tokenizers(), Tiktoken(), SentencePiece()]
    )
    def test_of_what_can_not(self, tokenizer: Any) -> None:
        assert identity_of(tokenizer) is None


class TestArrays:
    def test_of_the_smallest_dtype_that_fits_all_ids(self) -> None:
        assert [ids.dtype for ids in token_arrays(CharTokenizer("abc"), ["a", ""])] == [
            np.uint16
        ] * 2
        # of which there are a million
        assert [ids.dtype for ids in token_arrays(CharTokenizer(), ["a", ""])] == [np.int32] * 2
        assert [ids.dtype for ids in token_arrays(encode, TEXTS)] == [np.uint16] * 3
        found = token_arrays(lambda text: [int(text)], ["65535", "65536", "2147483647"])
        assert [(ids.dtype, ids.tolist()) for ids in found] == [
            (np.uint16, [65535]),
            (np.int32, [65536]),
            (np.int32, [2**31 - 1]),
        ]

    @pytest.mark.parametrize(
        "tokenizer", [CharTokenizer(), encode, HuggingFace(), Tokenizers(), Tiktoken()]
    )
    def test_truncated(self, tokenizer: Any) -> None:
        whole = token_arrays(tokenizer, TEXTS)
        for length in (1, 3, 100):
            cut = (
                token_arrays(tokenizer, TEXTS, length)
                if length > 2 or not isinstance(tokenizer, HuggingFace)
                else whole[:0]
            )
            assert all(len(a) == min(length, len(b)) for a, b in zip(cut, whole, strict=False))

    @pytest.mark.parametrize("gives", [[-1], [2**31], [-(2**40)]])
    def test_ids_that_do_not_fit(self, gives: Any) -> None:
        with pytest.raises(ConfigError, match="must be at least 0, and fit int32"):
            token_arrays(lambda text: gives, ["a"])

    def test_as_many_as_there_are_texts(self) -> None:
        class More:
            def encode_batch(self, texts: list[str]) -> list[list[int]]:
                return [[1]] * 3

        with pytest.raises(ConfigError, match="given 2 texts and gave ids of 3"):
            token_arrays(More(), ["a", "b"])


@pytest.mark.parametrize("characters", [None, "abcé\ud83d"])
@pytest.mark.parametrize("max_length", [None, 2])
def test_encoding_together_and_alone_agree(characters: str | None, max_length: int | None) -> None:
    """Also where the end of one and the beginning of the next would be one character in UTF-16."""
    tokenizer, texts = CharTokenizer(characters), ["abc", "", "\ud83d", "\ude00é", "", "😀bc", ""]
    found = token_arrays(tokenizer, texts, max_length)
    assert [ids.tolist() for ids in found] == [
        tokenizer(text[:max_length]).tolist() for text in texts
    ]
    assert {ids.dtype.name for ids in found} == {
        "int32" if characters is None else "uint16"
    } and token_arrays(tokenizer, []) == []
