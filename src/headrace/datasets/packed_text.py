"""What is a packed file of tokens to a dataset of texts?

Texts that are tokenised already: which arguments still have a meaning, and which tokenizer is it that can be known again?
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from typing import Any

from headrace.datasets.tokenizing import way_fingerprint
from headrace.errors import ConfigError
from headrace.storage.hdf5_files import is_far_hdf5, is_hdf5
from headrace.storage.packed_tokens import PackedDocuments, PackedTokens
from headrace.storage.paths import redact
from headrace.storage.tokens import BlocksSource, DocumentsSource, Tokens
from headrace.tokenizer import CharTokenizer

_CHARACTERS = "CharTokenizer("


def packed_tokens(data_path: Any, given: dict[str, Any]) -> PackedTokens | None:
    """The tokens of a packed file; None where the path is none.

    Args:
        data_path: of the dataset.
        given: arguments of which a packed file has decided already, those that were given.

    Raises:
        ConfigError: there are such.
        FormatError, AccessError: the file is damaged, was not packed from texts, or can't be read.
    """
    if is_far_hdf5(data_path):
        raise ConfigError(
            f"{redact(data_path)}: packed tokens are mapped, from a local disk: copy the file there, or open the texts by URL"
        )
    if not isinstance(data_path, (str, os.PathLike)) or not is_hdf5(os.path.expanduser(os.fspath(data_path))):
        return None
    tokens = PackedTokens(data_path)
    if given:
        said = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ConfigError(
            f"{said}: {redact(tokens.path)} holds tokens, so packing has decided this: leave it out, or open the texts themselves"
        )
    return tokens


def tokenizer_of(tokens: PackedTokens) -> CharTokenizer | None:
    """The `CharTokenizer` that a file was made with; None: it was another one."""
    said = tokens.info.text.get("tokenizer") or ""
    if not (said.startswith(_CHARACTERS) and said.endswith(")")):
        return None
    inside = said[len(_CHARACTERS) : -1]
    return CharTokenizer(ast.literal_eval(inside) if inside else None)


def source_over(
    tokens: Tokens,
    fingerprint: str,
    where: str | Callable[[int], str],
    max_length: int | None,
    stride: int | None,
    packing: bool,
) -> DocumentsSource | BlocksSource:
    """Documents, windows or blocks of some tokens."""
    if packing:
        return BlocksSource(tokens, fingerprint, where, max_length or 1)
    left_out = tokens.short[1] if len(tokens.short) > 1 else None  # of a packed file none is
    return DocumentsSource(tokens, fingerprint, where, max_length, stride, left_out)


def packed_source(tokens: PackedTokens, max_length: int | None, stride: int | None, packing: bool) -> DocumentsSource | BlocksSource:
    """The same of a packed file, with the fingerprint that the texts themselves would have."""
    text = tokens.info.text
    if not packing and stride is None:
        return PackedDocuments(tokens, max_length)
    way = way_fingerprint(text.get("tokenizer"), text.get("end_token"))
    return source_over(tokens, f"{tokens.info.fingerprint}:{way}", tokens.location, max_length, stride, packing)
