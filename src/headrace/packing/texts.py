"""Packs texts as tokens: those of whole documents, which are there already or are made for it."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt

from headrace.core.dataset import BaseDataset
from headrace.core.views import fingerprint_of_view
from headrace.datasets.text.text import TextDataset
from headrace.dtypes import IntArray
from headrace.errors import ConfigError, SampleError
from headrace.io.packed_strings import PackedNames
from headrace.memory.per_process import PerProcess
from headrace.memory.whole import read_full, write_full
from headrace.packing.beside.targets import as_column
from headrace.packing.plan import Packing, Plan, checksums_of, columns_of, names_of
from headrace.packing.samples import groups_of, some_of, without
from headrace.storage.arrays.packed import PackedInfo, crc_of
from headrace.storage.files import FilesSource
from headrace.storage.tokens.joined import PackedTexts
from headrace.storage.tokens.packed import KIND, STORE
from headrace.storage.tokens.source import Tokens, TokensSource
from headrace.tokenizer import dtype_for

_TOGETHER = 1024  # documents that are looked at at a time
_ENOUGH = 4 << 20  # bytes of text by which the number of tokens is estimated
# threads may pack several parts at once, and few tokenizers are thread-safe
_TOKENISING = PerProcess(threading.Lock)


class Documents(NamedTuple):
    """The documents of a dataset, which are what is packed of it.

    Attributes:
        dataset: has one sample for each of them; of packed tokens it is the dataset that was given.
        chosen: [n] int64, the number of each in the source, or among the tokens.
        tokens: of the source, if they are there already.
        end_token: that is put behind each, or is there already.
        fingerprint: of these documents.
    """

    dataset: TextDataset
    chosen: npt.NDArray[np.int64]
    tokens: Tokens | None
    end_token: int | None
    fingerprint: str

    def within(self, numbers: range) -> Documents:
        """Some of them."""
        chosen = self.chosen[numbers.start : numbers.stop]
        if self.packed is not None:
            return self._replace(
                chosen=chosen, fingerprint=fingerprint_of_view(self.packed.info.fingerprint, chosen)
            )
        view = self.dataset.subset(np.arange(numbers.start, numbers.stop))
        return self._replace(dataset=view, chosen=chosen, fingerprint=view.fingerprint)

    @property
    def packed(self) -> PackedTexts | None:
        """The tokens, if they are those of packed files."""
        return self.tokens if isinstance(self.tokens, PackedTexts) else None

    @property
    def names(self) -> PackedNames | None:
        """Of those that are or were files."""
        if self.packed is None:
            return names_of(self.dataset)
        return None if self.packed.names is None else self.packed.names.take(self.chosen)

    def info(self) -> PackedInfo:
        """What a packed file says of them; it lacks count and checksums."""
        if self.packed is not None:
            return replace(
                self.packed.info, fingerprint=self.fingerprint, part=None, version=self.version
            )
        text = {
            "tokenizer": self.dataset.tokenizer_identity,
            "class": type(self.dataset.tokenizer).__qualname__,
            "end_token": self.end_token,
            "unit": self.dataset.document_unit,
        }
        classes = self.dataset.classes or None
        return PackedInfo(
            kind=KIND,
            store=STORE,
            count=0,
            fingerprint=self.fingerprint,
            classes=classes,
            text=text,
            version=self.version,
        )

    @property
    def version(self) -> int:
        """Of the layout: the first that knows marked ids, where there are such."""
        return 5 if self.dataset.is_of_chats else 1

    def targets(self) -> Any:
        """Class numbers of folders, or a field of each record; None: there are none."""
        if self.packed is not None:
            return None if self.packed.targets is None else self.packed.targets[self.chosen]
        return (
            self.dataset.targets
            if self.dataset.targets is not None
            else self.dataset.record_targets()
        )

    def sizes(self) -> IntArray:
        """Bytes of each where it lies: of a text, or of its tokens where these are there ([n]
        int64).
        """
        if self.tokens is not None:
            edges: IntArray = self.tokens.short[0]
            return (edges[self.chosen + 1] - edges[self.chosen]) * self.tokens.dtype.itemsize
        return self.dataset.text_nbytes(self.chosen)

    @property
    def are_files(self) -> bool:
        """True if each is a file that is read when it is packed: another job may meet another
        one.
        """
        return self.tokens is None and isinstance(self.dataset.sample_source, FilesSource)


def is_of_texts(dataset: BaseDataset) -> TypeGuard[TextDataset]:
    """True if a dataset is packed as tokens."""
    return isinstance(dataset, TextDataset)


def documents_of(dataset: TextDataset, end_token: int | None = None) -> Documents:
    """The documents of a dataset, or of a view of one.

    Args:
        dataset: texts, windows or blocks of them, or packed tokens.
        end_token: put behind each document; None: nothing is, or what is there already.

    Raises:
        ConfigError: a view of windows or blocks, which are no documents; tokens that were made with
            another `end_token`.
    """
    found = _documents_of(dataset, end_token)
    if end_token is not None and dataset.is_of_chats:
        raise ConfigError(
            f"end_token={end_token} can't be given for chats, whose template ends each turn: "
            "leave it out"
        )
    if end_token not in (None, found.end_token):
        raise ConfigError(
            f"end_token={end_token}: this dataset has tokens that were made with "
            f"end_token={found.end_token}: leave it out, or pack the "
            "texts"
        )
    return found


def _documents_of(dataset: TextDataset, end_token: int | None) -> Documents:
    source: Any = dataset.sample_source
    if not isinstance(source, TokensSource):
        return Documents(
            dataset,
            dataset.whole_indices(np.arange(len(dataset))),
            None,
            end_token,
            dataset.fingerprint,
        )
    if dataset._chosen is not None and (
        dataset._documents is not None or not len(source) == len(source.tokens.short[0]) - 1
    ):
        raise ConfigError(
            "a view of windows or blocks can't be packed: pack the texts, or a view of their "
            "documents"
        )
    tokens = source.tokens
    if isinstance(tokens, PackedTexts):
        chosen = np.arange(tokens.info.count) if dataset._chosen is None else dataset._chosen
        fingerprint = tokens.info.fingerprint if dataset._chosen is None else dataset.fingerprint
        return Documents(dataset, chosen, tokens, tokens.info.text.get("end_token"), fingerprint)
    documents = dataset._documents
    assert documents is not None
    return Documents(
        documents,
        np.arange(len(documents)),
        tokens,
        dataset._arguments.get("end_token"),
        documents.fingerprint,
    )


def packed_texts(dataset: TextDataset, end_token: int | None = None) -> Packing:
    """All documents of a dataset, or of a view of one, as tokens. Where `on_error` is "skip", those
    that can't be read are left out.

    Raises:
        ConfigError: a view of windows or blocks, which are no documents; targets that can't be
            packed.
        SampleError: a document can't be read, or tokenised.
    """
    documents = documents_of(dataset, end_token)
    if documents.tokens is None:
        documents = documents._replace(tokens=documents.dataset.tokens(documents.end_token)[0])
    return _of_tokens(documents)


def packed_part(documents: Documents, folder: str) -> Packing:
    """Some documents as tokens. Where these are not there, the documents are tokenised into a
    temporary file without a name, since their lengths must be known before a packed file is laid
    out: by one thread of a process at a time, since few tokenizers are thread-safe.

    Args:
        documents: see `Documents.within`.
        folder: where that file goes: 4 bytes a token.

    Raises:
        Exception: as `packed_texts`.
    """
    if documents.tokens is not None:
        return _of_tokens(documents)
    lengths, left_out, least, most = (
        np.zeros(len(documents.chosen), np.int64),
        dict[int, str](),
        0,
        0,
    )
    end = np.array([] if documents.end_token is None else [documents.end_token], np.int32)
    with contextlib.ExitStack() as opened:
        spool = opened.enter_context(tempfile.TemporaryFile(dir=folder))
        for group in groups_of(documents.sizes(), _TOGETHER):
            with _TOKENISING.get():
                values = documents.dataset.ids_of(
                    documents.chosen[group.start : group.stop].tolist()
                )
            for number, ids in zip(group, values, strict=True):
                if isinstance(ids, SampleError):
                    left_out[number] = _message(documents, ids)
                    continue
                ids = np.concatenate([ids.astype(np.int32, copy=False), end])
                lengths[number], least, most = (
                    len(ids),
                    min(least, int(ids.min(initial=0))),
                    max(most, int(ids.max(initial=0))),
                )
                write_full(spool.fileno(), ids.tobytes())
        readable = _without(documents, left_out)
        edges = np.concatenate([[0], np.cumsum(np.delete(lengths, list(left_out)))])
        dtype = np.dtype(dtype_for(least, most))
        packing = _packing(
            readable,
            np.diff(edges),
            dtype,
            lambda group: _spooled(spool.fileno(), edges, dtype, group),
            left_out,
        )
        opened.pop_all()  # it is closed when all is written
    return packing._replace(spool=spool)


def _spooled(
    fd: int, edges: npt.NDArray[np.int64], dtype: np.dtype[Any], group: range
) -> list[npt.NDArray[Any]]:
    first, last = int(edges[group.start]), int(edges[group.stop])
    ids = np.empty(last - first, np.int32)
    read_full(fd, [memoryview(ids.view(np.uint8).data)], 4 * first)
    return np.split(ids.astype(dtype), (edges[group.start + 1 : group.stop] - first).tolist())


def _of_tokens(documents: Documents) -> Packing:
    """The packing of documents whose tokens are there."""
    tokens, left_out = documents.tokens, dict[int, str]()
    assert tokens is not None
    if documents.packed is None and documents.dataset.on_error != "raise":
        left_out = _unreadable(documents, tokens)
    readable = _without(documents, left_out)
    chosen, edges = readable.chosen, tokens.short[0]

    def parts(group: range) -> list[npt.NDArray[Any]]:
        part = chosen[group.start : group.stop]
        return tokens.parts(edges[part], edges[part + 1])

    return _packing(readable, edges[chosen + 1] - edges[chosen], tokens.dtype, parts, left_out)


def _packing(
    documents: Documents,
    lengths: npt.NDArray[np.int64],
    dtype: np.dtype[Any],
    parts: Callable[[range], list[npt.NDArray[Any]]],
    left_out: dict[int, str],
) -> Packing:
    """The packing of documents of so many tokens ([n] int64); `parts` gives the tokens of some."""
    targets = documents.targets()
    columns = columns_of(lengths, documents.names, None if targets is None else as_column(targets))
    sizes = lengths * dtype.itemsize
    info = replace(documents.info(), count=len(lengths), checksums=checksums_of(columns))

    def prepare(group: range) -> list[tuple[npt.NDArray[Any], int]]:
        return [(ids, crc_of(ids)) for ids in parts(group)]

    return Packing(
        documents.dataset,
        Plan(info, (int(lengths.sum()),), dtype, sizes, sizes, columns),
        prepare,
        left_out,
    )


def _without(documents: Documents, unreadable: dict[int, str]) -> Documents:
    """Those that can be read; see `without`."""
    if not unreadable:
        return documents
    view = without(documents.dataset, unreadable)
    return documents._replace(
        dataset=view,
        chosen=np.delete(documents.chosen, list(unreadable)),
        fingerprint=view.fingerprint,
    )


def _unreadable(documents: Documents, tokens: Tokens) -> dict[int, str]:
    """What is wrong with the documents that can't be read, by number.

    Raises:
        SampleError: `on_error` is a callable: what it makes up is no matter for a file.
    """
    left_out, chosen = dict[int, str](), documents.chosen
    doubtful = np.flatnonzero(np.isin(chosen, tokens.short[1]))
    for start in range(0, len(doubtful), _TOGETHER):
        part = doubtful[start : start + _TOGETHER]
        for number, value in zip(
            part.tolist(), documents.dataset.ids_of(chosen[part].tolist()), strict=True
        ):
            if isinstance(value, SampleError):
                left_out[number] = _message(documents, value)
    return left_out


def _message(documents: Documents, error: SampleError) -> str:
    if callable(documents.dataset.on_error):
        raise error
    return str(error)


class TokensEstimate(NamedTuple):
    """What the tokens of some documents, evenly spread, say of all."""

    tokens_per_byte: float
    """Bytes of tokens for a byte of text."""
    crc: int
    """Of their tokens, by which another tokenizer is noticed."""


def estimate_tokens(documents: Documents, sizes: npt.NDArray[np.int64]) -> TokensEstimate:
    """Tokenises some documents.

    Args:
        documents: whose tokens are not there.
        sizes: [n] int64, bytes of each.
    """
    before = tokens = least = largest = crc = 0
    for number in some_of(len(sizes)):
        ids = documents.dataset.ids_of([int(documents.chosen[number])])[0]
        if isinstance(ids, SampleError):  # said when it is packed
            continue
        before, tokens = before + int(sizes[number]), tokens + len(ids)
        least, largest = min(least, int(ids.min(initial=0))), max(largest, int(ids.max(initial=0)))
        crc = zlib.crc32(ids.astype("<i4").tobytes(), crc)
        if before >= _ENOUGH:
            break
    return TokensEstimate(
        tokens * np.dtype(dtype_for(least, largest)).itemsize / before if before else 1.0, crc
    )
