"""A packed file of tokens as a dataset of texts, which are tokenised already."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from headrace.datasets.core.construction import describe_argument
from headrace.datasets.kinds import TEXTS
from headrace.datasets.text.tokenizing import way_fingerprint
from headrace.errors import ConfigError
from headrace.io.paths import redact
from headrace.io.remote.options import RemoteOptions
from headrace.io.resolve.file_set import FileSet
from headrace.io.resolve.resolver import kind_of
from headrace.storage.hdf5.files import HDF5
from headrace.storage.hdf5.rows import open_files
from headrace.storage.tokens.packed import PackedDocuments, PackedTokens
from headrace.storage.tokens.source import BlocksSource, DocumentsSource, Tokens
from headrace.tokenizer import CharTokenizer

_CHARACTERS = "CharTokenizer("


def packed_tokens(data_path: Any, given: dict[str, Any], reach: RemoteOptions) -> PackedTokens | None:
    """The tokens of a packed file, local or remote; None where the path is none.

    Args:
        data_path: of the dataset.
        given: arguments of which a packed file has decided already, those that were given.
        reach: how a URL is reached.

    Raises:
        ConfigError: there are such; or several URLs of packed files.
        FormatError, AccessError: the file is damaged, was not packed from texts, or can't be read.
        DataNotFoundError, RemoteError: there is nothing at a URL, or its server does not give it.
    """
    tokens = _opened(data_path, reach)
    if tokens is not None and given:
        tokens.files.close()
        said = ", ".join(describe_argument(name, value) for name, value in given.items())
        raise ConfigError(
            f"{said}: {redact(tokens.path)} holds tokens, so packing has decided this: leave it out, or open the texts themselves"
        )
    return tokens


def _opened(data_path: Any, reach: RemoteOptions) -> PackedTokens | None:
    if not isinstance(data_path, FileSet) and kind_of(data_path, (TEXTS, HDF5)) is not HDF5:
        return None
    paths, opened = open_files(data_path, reach)
    try:
        if len(paths) > 1:
            raise ConfigError(
                f"{redact(paths[0])} is one of {len(paths):,} files that are named, and packed tokens are read from one: pack the texts "
                "into one file, or make a dataset of each"
            )
        hdf5 = opened.hdf5
        return hdf5.read_each(paths, lambda path: PackedTokens(path, hdf5))[0]
    except BaseException:
        opened.close()
        raise


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
        return PackedDocuments(tokens, tokens.info.fingerprint, tokens.location, max_length)
    way = way_fingerprint(text.get("tokenizer"), text.get("end_token"))
    return source_over(tokens, f"{tokens.info.fingerprint}:{way}", tokens.location, max_length, stride, packing)
