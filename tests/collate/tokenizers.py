"""Tokenizers with the faces of well-known ones, of which a word is a token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [*SPECIAL, "the", "mill", "wheel", "turns", "in", "river"]
IDS = {word: number for number, word in enumerate(WORDS)}
PAD, UNK, CLS, SEP, MASK = range(5)
TEXTS = ["the mill wheel turns", "the river", ""]


def encode(text: str) -> list[int]:
    """A callable, as tiktoken's `encode`."""
    return [IDS.get(word, UNK) for word in text.split()]


class Counting:
    """Notes the texts that it is given."""

    def __init__(self, fingerprint: str = "counting") -> None:
        self.fingerprint, self.made = fingerprint, list[str]()

    def __call__(self, text: str) -> list[int]:
        self.made.append(text)
        return list(text.encode())


class HuggingFace:
    """What `PreTrainedTokenizerBase` has."""

    pad_token_id, mask_token_id, eos_token_id = PAD, MASK, None
    all_special_ids = (PAD, UNK, CLS, SEP, MASK)
    padding_side = "right"

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __len__(self) -> int:
        return len(WORDS)

    def __call__(
        self,
        texts: list[str],
        padding: bool,
        return_special_tokens_mask: bool,
        truncation: bool = False,
        max_length: int | None = None,
    ) -> dict[str, list[list[int]]]:
        assert isinstance(texts, list) and not padding and return_special_tokens_mask
        self.calls.append((len(texts), truncation, max_length))
        bodies = [
            encode(text)[: max_length - 2 if truncation and max_length else None] for text in texts
        ]
        ids = [[CLS, *body, SEP] for body in bodies]
        return {
            "input_ids": ids,
            "token_type_ids": [[0] * len(row) for row in ids],
            "attention_mask": [[1] * len(row) for row in ids],
            "special_tokens_mask": [[int(token <= MASK) for token in row] for row in ids],
        }


class Tokenizers:
    """What `tokenizers.Tokenizer` has; not callable."""

    def __init__(self, pads: bool = False) -> None:
        self.padding = {"pad_id": 77, "direction": "left"} if pads else None

    def encode_batch(self, texts: list[str]) -> list[Any]:
        rows = [[CLS, *encode(text), SEP] for text in texts]
        longest = max(map(len, rows)) if self.padding else 0
        made = []
        for row in rows:
            pad = [77] * max(0, longest - len(row))
            one = SimpleNamespace(ids=pad + row, attention_mask=[0] * len(pad) + [1] * len(row))
            one.special_tokens_mask = [int(token <= MASK) for token in one.ids]
            made.append(one)
        return made

    def token_to_id(self, word: str) -> int | None:
        return IDS.get(word)

    def get_vocab_size(self) -> int:
        return len(WORDS)

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        special, plain = SimpleNamespace(special=True), SimpleNamespace(special=False)
        return {CLS: special, SEP: special, 9: plain}


class Tiktoken:
    """What tiktoken's `Encoding` has."""

    n_vocab = len(WORDS)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [encode(text) for text in texts]


class SentencePiece:
    """What `SentencePieceProcessor` has: an `encode`, and numbers that are methods."""

    def encode(self, text: str) -> list[int]:
        return encode(text)

    def pad_id(self) -> int:
        return -1

    def vocab_size(self) -> int:
        return len(WORDS)
