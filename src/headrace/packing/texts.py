"""Tokenizes texts for packing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.datasets.text.text import TextDataset
from headrace.errors import ConfigError, SampleError
from headrace.io.packed_strings import PackedNames
from headrace.packing.plan import Packing, Plan, checksums_of, columns_of, names_of
from headrace.storage.arrays.packed import PackedInfo, crc_of
from headrace.storage.tokens.packed import KIND, STORE, PackedTokens
from headrace.storage.tokens.source import Tokens, TokensSource
from headrace.tokenizer import identity_of

_TOGETHER = 1024  # documents that are looked at at a time


def packed_texts(dataset: TextDataset) -> Packing:
    """Whole documents of a dataset, or of a view of one, as tokens. Where `on_error` is "skip", those that can't be read are left out.

    Raises:
        ConfigError: a view of windows or blocks, which are no documents; targets that can't be packed.
        SampleError: a document can't be read, or tokenised.
    """
    source: Any = dataset.sample_source
    if isinstance(source, TokensSource):
        if dataset._chosen is not None and (dataset._documents is not None or not len(source) == len(source.tokens.short[0]) - 1):
            raise ConfigError("a view of windows or blocks can't be packed: pack the texts, or a view of their documents")
        tokens = source.tokens
        if isinstance(tokens, PackedTokens):
            return _packed_again(dataset, tokens)
        assert dataset._documents is not None
        documents, end_token = dataset._documents, dataset._arguments.get("end_token")
    else:
        documents, end_token = dataset, None
        tokens = dataset.tokens()[0]
    chosen = np.arange(len(documents)) if documents._chosen is None else documents._chosen
    left_out: list[str] = []
    is_readable = np.ones(len(chosen), bool)
    if dataset.on_error != "raise":
        left_out, is_readable = _unreadable(documents, chosen, tokens)
    if len(chosen) and not is_readable.any():
        raise SampleError(f"none of {len(chosen):,} samples can be read; the first: {left_out[0]}")
    packed = documents if is_readable.all() else documents.subset(np.flatnonzero(is_readable))
    text = {
        "tokenizer": identity_of(dataset.tokenizer), "class": type(dataset.tokenizer).__qualname__, "end_token": end_token,
        "unit": dataset.document_unit,
    }  # fmt: skip
    info = PackedInfo(kind=KIND, store=STORE, count=0, fingerprint=packed.fingerprint, classes=dataset.classes or None, text=text)
    return _packing(packed, tokens, chosen[is_readable], _targets(packed), names_of(packed), info, left_out)


def _packed_again(dataset: TextDataset, tokens: PackedTokens) -> Packing:
    chosen = np.arange(tokens.info.count) if dataset._chosen is None else dataset._chosen
    fingerprint = tokens.info.fingerprint if dataset._chosen is None else dataset.fingerprint
    targets = None if tokens.targets is None else tokens.targets[chosen]
    names = None if tokens.names is None else tokens.names.take(chosen)
    return _packing(dataset, tokens, chosen, targets, names, replace(tokens.info, fingerprint=fingerprint), [])


def _packing(
    dataset: TextDataset,
    tokens: Tokens,
    chosen: npt.NDArray[np.int64],
    targets: Any,
    names: PackedNames | None,
    info: PackedInfo,
    left_out: list[str],
) -> Packing:
    """The packing of the chosen documents ([n] int64) of some tokens; `info` lacks count and checksums."""
    edges = tokens.short[0]
    lengths = edges[chosen + 1] - edges[chosen]
    columns, sizes = columns_of(lengths, names, targets), lengths * tokens.dtype.itemsize
    info = replace(info, count=len(lengths), checksums=checksums_of(columns))

    def prepare(group: range) -> list[tuple[npt.NDArray[Any], int]]:
        part = chosen[group.start : group.stop]
        return [(ids, crc_of(ids)) for ids in tokens.parts(edges[part], edges[part + 1])]

    return Packing(dataset, Plan(info, (int(lengths.sum()),), tokens.dtype, sizes, sizes, columns), prepare, left_out)


def _unreadable(documents: TextDataset, chosen: npt.NDArray[np.int64], tokens: Tokens) -> tuple[list[str], npt.NDArray[np.bool_]]:
    """What is wrong with the documents that can't be read; and which can.

    Raises:
        SampleError: `on_error` is a callable: what it makes up is no matter for a file.
    """
    is_readable, left_out = np.ones(len(chosen), bool), []
    doubtful = np.flatnonzero(np.isin(chosen, tokens.short[1]))
    for start in range(0, len(doubtful), _TOGETHER):
        part = doubtful[start : start + _TOGETHER]
        for number, value in zip(part.tolist(), documents.ids_of(chosen[part].tolist()), strict=True):
            if isinstance(value, SampleError):
                if callable(documents.on_error):
                    raise value
                is_readable[number] = False
                left_out.append(str(value))
    return left_out, is_readable


def _targets(documents: TextDataset) -> Any:
    """Of a view: class numbers of folders, or a field of each record."""
    return documents.targets if documents.targets is not None else documents.record_targets()
