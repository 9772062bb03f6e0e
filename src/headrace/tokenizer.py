"""Adapts tokenizers of other libraries, and defines a character tokenizer.

No tokenizer library is imported: a tokenizer is recognised by its attributes. HuggingFace
tokenizers (slow and fast) and those with ``encode_batch`` (`tokenizers.Tokenizer`, tiktoken) are
called with all texts at once. Any other callable, or an object with ``encode``, is called once per
text.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.arguments import checks_keywords, described
from headrace.errors import ConfigError

# encodings in which a byte below 128 is that character
_ASCII_FIRST = ("utf-8", "ascii", "iso8859-1")
_PAD_WORDS = ("[PAD]", "<pad>", "<|pad|>")
_SHOWN = 40
"""Most characters in the repr of a `CharTokenizer`."""
_MASK_WORDS = ("[MASK]", "<mask>", "<|mask|>")
_COLUMNS = ("input_ids", "special_tokens_mask", "token_type_ids")
_SIZES = ("__len__", "get_vocab_size", "vocab_size", "n_vocab")
REMEDY = (
    "pass a callable from a text to a list of ids, a HuggingFace tokenizer "
    "(AutoTokenizer.from_pretrained), or a tokenizers.Tokenizer (Tokenizer.from_file)"
)


@dataclass(frozen=True)
class Vocabulary:
    """The ids that a tokenizer defines. None: it does not define them.

    Attributes:
        pad: id of padding, else of the end of a text.
        mask: id of the mask token.
        size: number of ids.
        special: ids of special tokens.
        side: side of the padding, "right" or "left".
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
        self.characters: str | None = None
        if characters is not None:
            self.characters = "".join(sorted(set("".join(characters))))
            self._codes = _codes_of(self.characters)

    def __call__(self, text: str) -> npt.NDArray[np.int32]:
        """Returns the ids of a text, int32 [characters]."""
        codes = _codes_of(text)
        if self.characters is None:
            return codes + np.int32(2)
        places = np.searchsorted(self._codes, codes)
        known = np.append(self._codes, -1)[places] == codes
        return np.where(known, places + 2, self.unk_token_id).astype(np.int32)

    def encode_together(self, texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        """Returns the ids of many texts, as slices of one array of the smallest dtype that fits
        all ids.
        """
        ids = self("".join(texts)).astype(dtype_for(0, self.vocab_size - 1), copy=False)
        ends = list(itertools.accumulate(map(len, texts)))
        return np.split(ids, ends)[: len(texts)]

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
        is_short = max_length is None or lengths.max(initial=0) <= max_length
        is_ascii = encoding in _ASCII_FIRST and joined.isascii()
        if self.characters is None and is_ascii and is_short:  # a byte is a character
            return np.frombuffer(joined, np.uint8) + np.int64(2), lengths
        ends = [0, *np.cumsum(lengths).tolist()]
        texts = [
            joined[begin:end].decode(encoding, errors)[:max_length]
            for begin, end in itertools.pairwise(ends)
        ]
        return self("".join(texts)), np.fromiter(map(len, texts), np.int64, len(texts))

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids. Padding is dropped, and unknown characters are U+FFFD."""
        given = np.asarray(ids, np.int64).reshape(-1)
        given = given[given != self.pad_token_id]
        codes = np.full(given.shape, 0xFFFD, np.int64)
        known = given >= 2
        codes[known] = given[known] - 2
        if self.characters is not None:
            codes[known] = self._codes[codes[known]]
        return codes.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")

    @property
    def vocab_size(self) -> int:
        """Number of ids, including the two special ones."""
        if self.characters is None:
            return 2 + 0x110000
        return 2 + len(self.characters)

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def identity(self) -> str:
        """The constructor call with all characters, which identifies the tokenizer."""
        if self.characters is None:
            return "CharTokenizer()"
        return f"CharTokenizer({self.characters!r})"

    def __repr__(self) -> str:
        if self.characters is not None and len(self.characters) > _SHOWN:
            return f"CharTokenizer(<{len(self.characters):,} characters>)"
        return self.identity


def _codes_of(text: str) -> npt.NDArray[np.int32]:
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<i4")
    return codes.astype(np.int32, copy=False)


def identity_of(tokenizer: Any) -> str | None:
    """A string that identifies a tokenizer in later runs, so that its tokens can be cached. None:
    it can't be identified.

    `CharTokenizer`, `tokenizers.Tokenizer` and HuggingFace's fast tokenizers can, and those with
    an attribute ``fingerprint`` (str).
    """
    name = type(tokenizer).__qualname__
    if isinstance(tokenizer, CharTokenizer):
        return tokenizer.identity
    own = getattr(tokenizer, "fingerprint", None)
    if isinstance(own, str):
        return f"{name}:{own}"
    inner = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not (_method(inner, "to_str") and _method(inner, "encode_batch")):
        return None
    text = str(inner.to_str())
    if inner is not tokenizer:
        said = json.loads(text)
        # left there by HuggingFace's last call
        said.pop("truncation", None)
        said.pop("padding", None)
        text = json.dumps(said)
    adds = [getattr(tokenizer, name, None) for name in ("add_bos_token", "add_eos_token")]
    digest = hashlib.blake2b(f"{text}|{adds}".encode(), digest_size=16).hexdigest()
    return f"{name}:{digest}"


def shown_tokenizer(tokenizer: Any) -> str:
    """A tokenizer on one short line. (Some reprs contain the whole vocabulary.)"""
    if tokenizer is None or isinstance(tokenizer, CharTokenizer) or inspect.isroutine(tokenizer):
        return repr(tokenizer)
    return f"<{type(tokenizer).__qualname__}>"


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """Reads a tokenizer's attributes, without encoding anything.

    Raises:
        ConfigError: it is not a tokenizer.
    """
    if tokenizer is None:
        return Vocabulary()
    encodes = _method(tokenizer, "encode_batch") or _method(tokenizer, "encode")
    # a str has a method `encode` too
    if isinstance(tokenizer, (type, str)) or not (callable(tokenizer) or encodes):
        raise ConfigError(f"tokenizer is {described(tokenizer)}: {REMEDY}")
    padding = getattr(tokenizer, "padding", None)  # a tokenizers.Tokenizer has it
    if not isinstance(padding, Mapping):
        padding = {}
    id_of: Callable[[str], int | None] = _method(tokenizer, "token_to_id") or (lambda word: None)
    pad = _first(
        _number(tokenizer, "pad_token_id"),
        _number(tokenizer, "eos_token_id"),
        padding.get("pad_id"),
        *map(id_of, _PAD_WORDS),
        _number(tokenizer, "pad_id"),
    )
    mask = _first(_number(tokenizer, "mask_token_id"), *map(id_of, _MASK_WORDS))
    size = _first(*(_number(tokenizer, name) for name in _SIZES))
    special = set(getattr(tokenizer, "all_special_ids", ()))
    added = _method(tokenizer, "get_added_tokens_decoder")  # a tokenizers.Tokenizer has it
    if added is not None:
        special.update(number for number, token in added().items() if token.special)
    if mask is not None:
        special.add(mask)
    side = getattr(tokenizer, "padding_side", None) or padding.get("direction")
    if side not in ("right", "left"):
        side = None
    return Vocabulary(pad, mask, size, tuple(sorted(special)), side)


def encode_texts(
    tokenizer: Any, texts: Sequence[str], max_length: int | None = None
) -> list[dict[str, list[int]]]:
    """Encodes texts, without padding.

    Args:
        tokenizer: a tokenizer as above, which may add special tokens.
        texts: the texts.
        max_length: maximum number of ids; special tokens at the end are kept. None: no limit.

    Returns:
        For each text "input_ids", and "special_tokens_mask" and "token_type_ids" if the tokenizer
        returns them.

    Raises:
        ConfigError: the tokenizer does not return ids.
    """
    texts = list(texts)
    if callable(tokenizer) and hasattr(tokenizer, "all_special_ids"):
        options: dict[str, Any] = {"padding": False, "return_special_tokens_mask": True}
        if max_length is not None:
            options |= {"truncation": True, "max_length": max_length}
        columns = tokenizer(texts, **options)
        given = [name for name in _COLUMNS if name in columns]
        encodings = [{name: columns[name][i] for name in given} for i in range(len(texts))]
    elif _method(tokenizer, "encode_batch"):
        encodings = list(tokenizer.encode_batch(texts))
    elif callable(tokenizer):
        encodings = [tokenizer(text) for text in texts]
    else:
        encodings = [tokenizer.encode(text) for text in texts]
    if len(encodings) != len(texts):
        got = f"the tokenizer returned ids of {len(encodings):,} texts for {len(texts):,}"
        raise ConfigError(f"{got}: {REMEDY}")
    return [_cut(_record(encoding), max_length) for encoding in encodings]


def token_arrays(
    tokenizer: Any, texts: Sequence[str], max_length: int | None = None
) -> list[npt.NDArray[Any]]:
    """The ids of texts as arrays of the smallest dtype that fits the vocabulary.

    Args:
        tokenizer, texts, max_length: see `encode_texts`.

    Returns:
        For each text its ids: uint16 [tokens], or int32.

    Raises:
        ConfigError: the tokenizer does not return ids, or they don't fit int32.
    """
    if type(tokenizer) is CharTokenizer:  # a subclass may need the whole text
        return tokenizer.encode_together([text[:max_length] for text in texts])
    size = vocabulary_of(tokenizer).size or 0
    arrays = []
    for record in encode_texts(tokenizer, texts, max_length):
        ids = np.array(record["input_ids"], np.int64)
        most = ids.max(initial=0)
        if most >= 2**31 or ids.min(initial=0) < 0:
            raise ConfigError(
                f"the tokenizer returned ids from {ids.min()} to {most}: they must be at least 0, "
                "and fit int32"
            )
        arrays.append(ids.astype(dtype_for(0, max(size - 1, most))))
    return arrays


def dtype_for(least: int, most: int) -> str:
    """The dtype of ids from `least` to `most`; marked ids are below 0."""
    if least < 0 or most >= 1 << 16:
        return "int32"
    return "uint16"


def _record(encoding: Any) -> dict[str, list[int]]:
    """The columns of a list of ids, a mapping with such a list, or a `tokenizers.Encoding`."""
    columns = {"input_ids": encoding}
    if isinstance(encoding, Mapping) and "input_ids" in encoding:
        columns = dict(encoding)
    elif hasattr(encoding, "ids"):
        masks = ("special_tokens_mask", "attention_mask")
        columns = {name: getattr(encoding, name) for name in masks if hasattr(encoding, name)}
        columns["input_ids"] = encoding.ids
    record = {name: _ids(columns[name]) for name in _COLUMNS if name in columns}
    if "attention_mask" in columns:  # padding by the tokenizer is removed
        attended = _ids(columns["attention_mask"])
        if not all(attended):
            for name, values in record.items():
                record[name] = list(itertools.compress(values, attended))
    return record


def _cut(record: dict[str, list[int]], max_length: int | None) -> dict[str, list[int]]:
    ids = record["input_ids"]
    if max_length is None or len(ids) <= max_length:
        return record
    ending = 0  # special tokens at the end
    for is_special in reversed(record.get("special_tokens_mask", ())):
        if not is_special:
            break
        ending += 1
    if ending >= min(max_length, len(ids)):
        ending = 0
    return {
        name: values[: max_length - ending] + values[len(values) - ending :]
        for name, values in record.items()
    }


def _ids(value: Any) -> list[int]:
    """A list of integers, possibly inside a batch of one."""
    try:
        array = np.asarray(value)
    except (ValueError, TypeError):  # lists of different lengths, or not numbers
        array = np.empty(0, object)
    if array.ndim == 2 and len(array) == 1:
        array = array[0]
    is_empty = array.dtype.kind == "f" and not array.size
    if array.ndim != 1 or not (array.dtype.kind in "iu" or is_empty):
        raise ConfigError(f"the tokenizer returned {value!r:.60}, not a list of ids: {REMEDY}")
    ids: list[int] = array.astype(np.int64).tolist()
    return ids


def _method(tokenizer: Any, name: str) -> Callable[..., Any] | None:
    method = getattr(tokenizer, name, None)
    if not callable(method):
        return None
    return method  # type: ignore[no-any-return]


def _number(tokenizer: Any, name: str) -> int | None:
    """An attribute, or the result of a method, of that name. None: it is not an id."""
    value = getattr(tokenizer, name, None)
    if callable(value):
        value = value()
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        return None
    return value


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)
