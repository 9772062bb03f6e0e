"""Every kind of tokenizer is understood."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from headrace import ConfigError
from headrace.tokenizer import (
    CharTokenizer,
    Vocabulary,
    encode_texts,
    identity_of,
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


def test_what_tokenizers_say_of_their_ids() -> None:
    special = (PAD, UNK, CLS, SEP, MASK)
    for tokenizer, known in (
        (None, Vocabulary()),
        (encode, Vocabulary()),
        (HuggingFace(), Vocabulary(PAD, MASK, len(WORDS), special, "right")),
        (Tokenizers(), Vocabulary(PAD, MASK, len(WORDS), special[2:])),
        (Tokenizers(pads=True), Vocabulary(77, MASK, len(WORDS), special[2:], "left")),
        (Tiktoken(), Vocabulary(size=len(WORDS))),
        (SentencePiece(), Vocabulary(size=len(WORDS))),
        (CharTokenizer("abc"), Vocabulary(pad=0, size=5)),
    ):
        assert vocabulary_of(tokenizer) == known
    tokenizer = HuggingFace()
    tokenizer.pad_token_id, tokenizer.eos_token_id = None, 7  # type: ignore[assignment]
    assert vocabulary_of(tokenizer).pad == 7  # the end of a text pads
    for wrong in (3, "bert-base", HuggingFace, []):
        with pytest.raises(ConfigError, match="callable from a text to a list of ids"):
            vocabulary_of(wrong)


def test_ids() -> None:
    def masked(text: str) -> dict[str, Any]:
        ids = encode(text)
        return {"input_ids": [5, *ids], "attention_mask": [0] + [1] * len(ids)}

    plain: list[Any] = [encode, Tiktoken(), SentencePiece(), masked]
    plain.append(lambda text: np.array(encode(text), np.int32))
    plain.append(lambda text: torch.tensor(encode(text)))
    plain.append(lambda text: {"input_ids": encode(text)})
    # return_tensors=...: a batch of one
    plain.append(lambda text: {"input_ids": np.array([encode(text)], np.int64)})
    for tokenizer in plain:
        records = encode_texts(tokenizer, TEXTS)
        assert [record["input_ids"] for record in records] == PLAIN
        assert all(type(token) is int for record in records for token in record["input_ids"])
    cut = encode_texts(encode, TEXTS, 3)
    assert [record["input_ids"] for record in cut] == [PLAIN[0][:3], *PLAIN[1:]]
    for gives in (["a"], "text", None, [1.5], [[1], [1, 2]], [[1, 2], [3, 4]], 7, {"ids": [1]}):
        with pytest.raises(ConfigError, match="not a list of ids"):
            encode_texts(lambda text: gives, ["text"])  # noqa: B023


def test_special_tokens() -> None:
    """Texts that are cut keep the one at their end."""
    wrapped = [[CLS, *row[:2], SEP] for row in PLAIN]
    known = HuggingFace()
    for tokenizer in (known, Tokenizers(), Tokenizers(pads=True)):
        whole, cut = encode_texts(tokenizer, TEXTS), encode_texts(tokenizer, TEXTS, 4)
        assert [record["input_ids"] for record in whole] == WRAPPED
        assert [record["input_ids"] for record in cut] == wrapped
        for record in (*whole, *cut):
            size = len(record["input_ids"])
            assert record["special_tokens_mask"] == [1, *[0] * (size - 2), 1]
            assert record.get("token_type_ids", []) in ([0] * size, [])
    assert known.calls == [(3, False, None), (3, True, 4)]  # all texts at once
    assert encode_texts(Tokenizers(), TEXTS[:1], 1)[0]["input_ids"] == [CLS]


class TestCharTokenizer:
    @settings(max_examples=60)
    @given(text=st.text(st.characters(exclude_categories=[]), max_size=20))
    def test_every_character_has_an_id_and_comes_back(self, text: str) -> None:
        """Lone surrogates and NUL too; none is padding or unknown."""
        ids = CharTokenizer()(text)
        assert ids.dtype == np.int32
        assert ids.tolist() == [ord(character) + 2 for character in text]
        assert CharTokenizer().decode([0, *ids.tolist(), 0]) == text

    @settings(max_examples=60)
    @given(
        characters=st.text("abcé\U0001f600\ud800", max_size=6),
        text=st.text("abcdé\U0001f600\ud800", max_size=12),
    )
    def test_of_some_characters(self, characters: str, text: str) -> None:
        known, tokenizer = sorted(set(characters)), CharTokenizer(characters)
        assert tokenizer(text).tolist() == [known.index(c) + 2 if c in known else 1 for c in text]
        came_back = "".join(c if c in known else "\ufffd" for c in text)
        assert tokenizer.decode(tokenizer(text)) == came_back
        assert tokenizer.vocab_size == len(tokenizer) == len(known) + 2

    @settings(max_examples=80)
    @given(
        st.lists(st.text(st.characters(codec="utf-8"), max_size=6) | st.text("abc"), max_size=6),
        st.sampled_from([None, 0, 2]),
        st.sampled_from([None, "abü"]),
    )
    def test_ids_of_bytes_are_those_of_texts(
        self, texts: list[str], most: int | None, characters: str | None
    ) -> None:
        tokenizer, lines = CharTokenizer(characters), [text.encode() for text in texts]
        sizes = np.array(list(map(len, lines)), np.int64)
        ids, lengths = tokenizer.encode_bytes(b"".join(lines), sizes, "utf-8", "strict", most)
        found = [part.tolist() for part in np.split(ids, np.cumsum(lengths))[:-1]]
        assert found == [tokenizer(text[:most]).tolist() for text in texts]

    def test_encoding_together_and_alone_agree(self) -> None:
        """Also where the end of one and the beginning of the next would be one character in
        UTF-16.
        """
        texts = ["abc", "", "\ud83d", "\ude00é", "", "😀bc", ""]
        for characters, dtype in ((None, "int32"), ("abcé\ud83d", "uint16")):
            tokenizer = CharTokenizer(characters)
            for most in (None, 2):
                found = token_arrays(tokenizer, texts, most)
                for ids, text in zip(found, texts, strict=True):
                    assert ids.tolist() == tokenizer(text[:most]).tolist()
                    assert ids.dtype == dtype
            assert token_arrays(tokenizer, []) == []


def test_identity_is_of_what_can_be_known_again() -> None:
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
    assert {type(identity) for identity in found} == {str}
    assert len(set(found)) == len(found)
    assert found == [identity_of(tokenizer) for tokenizer in known]
    # what its last call left there
    used = Fast({"model": 1, "truncation": {"max_length": 5}, "padding": None})
    assert identity_of(used) == identity_of(known[7])
    for unknown in (encode, HuggingFace(), Tokenizers(), Tiktoken(), SentencePiece()):
        assert identity_of(unknown) is None


class TestArrays:
    def test_of_the_smallest_dtype_that_fits_all_ids(self) -> None:
        found = token_arrays(lambda text: [int(text)], ["65535", "65536", "2147483647"])
        assert [ids.dtype for ids in found] == [np.uint16, np.int32, np.int32]
        assert [ids.tolist() for ids in found] == [[65535], [65536], [2**31 - 1]]

    def test_what_tokenizers_must_not_give(self) -> None:
        for gives in ([-1], [2**31], [-(2**40)]):
            with pytest.raises(ConfigError, match="must be at least 0, and fit int32"):
                token_arrays(lambda text: gives, ["a"])  # noqa: B023

        class More:
            def encode_batch(self, texts: list[str]) -> list[list[int]]:
                return [[1]] * 3

        with pytest.raises(ConfigError, match="ids of 3 texts for 2"):
            token_arrays(More(), ["a", "b"])
