"""Adapts tokenizers of other libraries, and defines a character tokenizer.

No tokenizer library is imported: a tokenizer is recognised by its attributes. HuggingFace
tokenizers (slow and fast) and those with ``encode_batch`` (`tokenizers.Tokenizer`, tiktoken) are
called with all texts at once. Any other callable, or an object with ``encode``, is called text by
text.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.arguments import checks_keywords
from headrace.errors import ConfigError

# encodings whose first 128 bytes are those characters
_ASCII_FIRST = ("utf-8", "ascii", "iso8859-1")
_PAD_WORDS = ("[PAD]", "<pad>", "<|pad|>")
_SHOWN = 40
"""Characters that a `CharTokenizer` shows of itself."""
_MASK_WORDS = ("[MASK]", "<mask>", "<|mask|>")
_COLUMNS = ("input_ids", "special_tokens_mask", "token_type_ids")
REMEDY = (
    "it must be a callable from a text to a list of ids, a HuggingFace tokenizer, or an object "
    "with encode_batch or encode"
)


@dataclass(frozen=True)
class Vocabulary:
    """What a tokenizer says of its ids; None, where it says nothing.

    Attributes:
        pad: the id of padding, or else of the end of a text.
        mask: the id of the mask token.
        size: number of ids.
        special: ids of special tokens.
        side: "right" or "left": where it pads.
    """

    pad: int | None = None
    mask: int | None = None
    size: int | None = None
    special: tuple[int, ...] = ()
    side: str | None = None


class CharTokenizer:
    """A tokenizer with one token per character. Id 0 is padding, 1 an unknown character.

    >>> CharTokenizer("abc")("bad").tolist()
    [3, 2, 1]

    Args:
        characters: the characters that have an id. Ids start at 2, in the order of code points.
            None: all characters; the id of a character is then its code point + 2, and none is
            unknown.

    Attributes:
        characters: the sorted characters, or None.
        pad_token_id, unk_token_id: 0 and 1.
    """

    pad_token_id: int = 0
    unk_token_id: int = 1

    @checks_keywords
    def __init__(self, characters: Iterable[str] | None = None) -> None:
        self.characters: str | None = (
            None if characters is None else "".join(sorted(set("".join(characters))))
        )
        self._codes = None if self.characters is None else _codes_of(self.characters)

    def __call__(self, text: str) -> npt.NDArray[np.int32]:
        """Returns the ids of a text, int32 [characters]."""
        codes = _codes_of(text)
        if self._codes is None:
            return codes + np.int32(2)
        places = np.searchsorted(self._codes, codes)
        known = np.append(self._codes, -1)[places] == codes
        return np.where(known, places + 2, self.unk_token_id).astype(np.int32)

    def encode_together(self, texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        """Returns the ids of many texts, as slices of one array of the smallest dtype that fits
        all ids.
        """
        ids = self("".join(texts)).astype(smallest_dtype(self.vocab_size), copy=False)
        ends = list(itertools.accumulate(map(len, texts), initial=0))
        return [ids[begin:end] for begin, end in itertools.pairwise(ends)]

    def encode_bytes(
        self,
        joined: bytes,
        lengths: npt.NDArray[np.int64],
        encoding: str,
        errors: str,
        max_length: int | None,
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Returns the ids of many concatenated texts, given as encoded bytes, each cut at
        `max_length`.

        Args:
            joined: the encoded texts, concatenated.
            lengths: number of bytes of each text ([n] int64).
            encoding, errors: encoding of the texts and its error handling, as in Python.
            max_length: maximum number of ids per text. None: no limit.

        Returns:
            The concatenated ids, and the number of ids of each text ([n] int64).

        Raises:
            UnicodeDecodeError: a text is not in this encoding.
        """
        is_cut = max_length is not None and int(lengths.max(initial=0)) > max_length
        if is_cut or not (encoding in _ASCII_FIRST and joined.isascii()):
            ends = [0, *np.cumsum(lengths).tolist()]
            texts = [
                joined[begin:end].decode(encoding, errors)[:max_length]
                for begin, end in itertools.pairwise(ends)
            ]
            return self("".join(texts)), np.fromiter(map(len, texts), np.int64, len(texts))
        codes = np.frombuffer(joined, np.uint8)  # a byte is a character
        return codes + np.int64(2) if self._codes is None else self._of_ascii.take(codes), lengths

    @functools.cached_property
    def _of_ascii(self) -> npt.NDArray[np.int64]:
        """The ids of the first 128 characters."""
        return self(bytes(range(128)).decode("ascii")).astype(np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids. Padding is dropped, and unknown characters are U+FFFD."""
        given = np.asarray(ids, np.int64).reshape(-1)
        given = given[given != self.pad_token_id]
        codes = np.full(given.shape, 0xFFFD, np.int64)
        known = given >= 2
        codes[known] = given[known] - 2 if self._codes is None else self._codes[given[known] - 2]
        return codes.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")

    @property
    def vocab_size(self) -> int:
        """Number of ids, including the two special ones."""
        return 2 + (0x110000 if self.characters is None else len(self.characters))

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def identity(self) -> str:
        """The constructor call with all characters, which identifies the tokenizer."""
        return f"CharTokenizer({'' if self.characters is None else repr(self.characters)})"

    def __repr__(self) -> str:
        many = self.characters is not None and len(self.characters) > _SHOWN
        return f"CharTokenizer(<{self.vocab_size - 2:,} characters>)" if many else self.identity


def _codes_of(text: str) -> npt.NDArray[np.int32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<i4").astype(
        np.int32, copy=False
    )


def identity_of(tokenizer: Any) -> str | None:
    """A text by which a tokenizer is known again at another start, so that what it made can be
    kept; None: it can't be.

    Known are ours, `tokenizers.Tokenizer`, HuggingFace's fast ones, and what has a ``fingerprint``
    of its own (str).
    """
    name = type(tokenizer).__qualname__
    if isinstance(tokenizer, CharTokenizer):
        return tokenizer.identity
    own = getattr(tokenizer, "fingerprint", None)
    if isinstance(own, str):
        return f"{name}:{own}"
    inner = getattr(tokenizer, "backend_tokenizer", tokenizer)
    tell = _method(inner, "to_str") if _method(inner, "encode_batch") else None
    if tell is None:
        return None
    text = str(tell())
    # these two are what HuggingFace's last call left there, and don't concern the next one
    if inner is not tokenizer:
        text = json.dumps(
            {
                name: value
                for name, value in json.loads(text).items()
                if name not in ("truncation", "padding")
            }
        )
    bos = getattr(tokenizer, "add_bos_token", None)
    eos = getattr(tokenizer, "add_eos_token", None)
    parts = f"{text}|{bos}|{eos}"
    return f"{name}:{hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()}"


def shown_tokenizer(tokenizer: Any) -> str:
    """A tokenizer on one short line: others show their whole vocabulary."""
    if tokenizer is None or isinstance(tokenizer, CharTokenizer) or inspect.isroutine(tokenizer):
        return repr(tokenizer)
    size = vocabulary_of(tokenizer).size
    return f"<{type(tokenizer).__qualname__}{'' if size is None else f' of {size:,} tokens'}>"


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """Looks at a tokenizer's attributes; nothing is encoded.

    Raises:
        ConfigError: it is none.
    """
    if tokenizer is None:
        return Vocabulary()
    encodes = (
        callable(tokenizer) or _method(tokenizer, "encode_batch") or _method(tokenizer, "encode")
    )
    # the name of a model can encode too: itself
    if isinstance(tokenizer, (type, str)) or not encodes:
        raise ConfigError(f"tokenizer is {_name(tokenizer)}: {REMEDY}")
    set_up = getattr(tokenizer, "padding", None)  # of a tokenizers.Tokenizer
    set_up = set_up if isinstance(set_up, Mapping) else {}
    pad = _first(
        _number(tokenizer, "pad_token_id"),
        _number(tokenizer, "eos_token_id"),
        set_up.get("pad_id"),
        _word(tokenizer, _PAD_WORDS),
        _number(tokenizer, "pad_id"),
    )
    mask = _first(_number(tokenizer, "mask_token_id"), _word(tokenizer, _MASK_WORDS))
    length = len(tokenizer) if hasattr(tokenizer, "__len__") else None
    size = _first(
        length, *(_number(tokenizer, name) for name in ("get_vocab_size", "vocab_size", "n_vocab"))
    )
    special = {
        *getattr(tokenizer, "all_special_ids", ()),
        *_added(tokenizer),
        *(token for token in (mask,) if token is not None),
    }
    side = getattr(tokenizer, "padding_side", None) or set_up.get("direction")
    return Vocabulary(
        pad, mask, size, tuple(sorted(special)), side if side in ("right", "left") else None
    )


def encode_texts(
    tokenizer: Any, texts: Sequence[str], max_length: int | None = None
) -> list[dict[str, list[int]]]:
    """Encodes texts, without padding.

    Args:
        tokenizer: see above; special tokens are added where it does so by itself.
        texts: the texts.
        max_length: what is longer is truncated, where the special tokens at its end stay.

    Returns:
        For each text "input_ids", and, where the tokenizer gives them, "special_tokens_mask" and
        "token_type_ids".

    Raises:
        ConfigError: what the tokenizer gives are no ids.
    """
    texts = list(texts)
    if callable(tokenizer) and hasattr(tokenizer, "all_special_ids"):
        options = {} if max_length is None else {"truncation": True, "max_length": max_length}
        made = tokenizer(texts, padding=False, return_special_tokens_mask=True, **options)
        return [
            {name: _ids(made[name][number]) for name in _COLUMNS if name in made}
            for number in range(len(texts))
        ]
    batched = _method(tokenizer, "encode_batch")
    one: Callable[[str], Any] | None = (
        tokenizer if callable(tokenizer) else _method(tokenizer, "encode")
    )
    encodings = (
        batched(texts)
        if batched is not None
        else [one(text) for text in texts]
        if one is not None
        else []
    )
    return [_cut(_record(encoding), max_length) for encoding in encodings]


def token_arrays(
    tokenizer: Any, texts: Sequence[str], max_length: int | None = None
) -> list[npt.NDArray[Any]]:
    """The ids of texts as arrays of the smallest dtype, which is the same for all where the
    tokenizer says how many ids there are.

    Args:
        tokenizer, texts, max_length: as for `encode_texts`.

    Returns:
        For each text its ids: uint16 [tokens], or int32 where that is too small.

    Raises:
        ConfigError: what the tokenizer gives are no ids, or they don't fit int32.
    """
    if type(tokenizer) is CharTokenizer:  # what a subclass makes of a text may depend on all of it
        return tokenizer.encode_together(
            texts if max_length is None else [text[:max_length] for text in texts]
        )
    arrays = [
        np.array(record["input_ids"], np.int64)
        for record in encode_texts(tokenizer, texts, max_length)
    ]
    if len(arrays) != len(texts):
        raise ConfigError(
            f"the tokenizer was given {len(texts):,} texts and gave ids of {len(arrays):,}: "
            f"{REMEDY}"
        )
    size, narrow = vocabulary_of(tokenizer).size or 0, []
    for ids in arrays:
        narrow.append(ids.astype(smallest_dtype(max(size, _largest(ids) + 1))))
    return narrow


def _largest(ids: npt.NDArray[np.int64]) -> int:
    """The largest id; 0 where there are none."""
    largest = int(ids.max(initial=0))
    if largest >= 2**31 or ids.min(initial=0) < 0:
        raise ConfigError(
            f"the tokenizer gave ids from {ids.min()} to {ids.max()}: they must be at least 0, "
            "and fit int32"
        )
    return largest


def smallest_dtype(size: int) -> str:
    """The dtype that so many ids fit."""
    return "uint16" if size <= 1 << 16 else "int32"


def dtype_for(least: int, most: int) -> str:
    """The dtype that ids from `least` to `most` fit; below 0 are those that carry a mark."""
    return "int32" if least < 0 else smallest_dtype(most + 1)


def _record(encoding: Any) -> dict[str, list[int]]:
    """Of a list of ids, a mapping that holds one, or a `tokenizers.Encoding`."""
    if not (isinstance(encoding, Mapping) and "input_ids" in encoding):
        masks = {
            name: getattr(encoding, name)
            for name in ("special_tokens_mask", "attention_mask")
            if hasattr(encoding, name)
        }
        encoding = (
            {"input_ids": encoding.ids, **masks}
            if hasattr(encoding, "ids")
            else {"input_ids": encoding}
        )
    record = {name: _ids(encoding[name]) for name in _COLUMNS if name in encoding}
    attended = _ids(encoding["attention_mask"]) if "attention_mask" in encoding else [1]
    if not all(attended):  # the tokenizer pads by itself: its padding is not the text's
        record = {
            name: [value for value, counts in zip(values, attended, strict=True) if counts]
            for name, values in record.items()
        }
    return record


def _cut(record: dict[str, list[int]], max_length: int | None) -> dict[str, list[int]]:
    ids = record["input_ids"]
    if max_length is None or len(ids) <= max_length:
        return record
    special = record.get("special_tokens_mask", [0])
    ending = next(
        (number for number, is_special in enumerate(reversed(special)) if not is_special), 0
    )
    ending = ending if ending < max_length else 0
    return {
        name: values[: max_length - ending] + values[len(values) - ending :]
        for name, values in record.items()
    }


def _ids(value: Any) -> list[int]:
    """Integers in a list; of a batch of one the one."""
    try:
        array = np.asarray(value)
    except (ValueError, TypeError):  # lists of different lengths, or what is no number at all
        array = np.empty(0, object)
    array = array[0] if array.ndim == 2 and len(array) == 1 else array
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu") or array.dtype.kind == "O":
        raise ConfigError(
            f"the tokenizer gave a {type(value).__name__} for a text that is no list of ids: "
            f"{REMEDY}"
        )
    ids: list[int] = array.astype(np.int64).tolist()
    return ids


def _method(tokenizer: Any, name: str) -> Callable[..., Any] | None:
    method = getattr(tokenizer, name, None)
    return method if callable(method) else None


def _number(tokenizer: Any, name: str) -> int | None:
    """An attribute, or what a method of that name gives; None, where there is none, or no id."""
    value = getattr(tokenizer, name, None)
    value = value() if callable(value) else value
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _word(tokenizer: Any, words: Sequence[str]) -> int | None:
    id_of = _method(tokenizer, "token_to_id")
    return None if id_of is None else _first(*(id_of(word) for word in words))


def _added(tokenizer: Any) -> list[int]:
    added = _method(tokenizer, "get_added_tokens_decoder")  # of a tokenizers.Tokenizer
    return (
        []
        if added is None
        else [number for number, token in added().items() if getattr(token, "special", False)]
    )


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def _name(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
