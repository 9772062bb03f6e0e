"""Packs texts as tokens: those of whole documents, which are there already or are made for it."""

from __future__ import annotations

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
from headrace.formats.arrays.packed import PackedInfo
from headrace.formats.files import FilesSource
from headrace.formats.tokens.packed import KIND, STORE, PackedTokens
from headrace.formats.tokens.source import Tokens, TokensSource
from headrace.io.packed_strings import PackedNames
from headrace.memory.per_process import PerProcess
from headrace.packing.columns import as_column, columns_of, names_of
from headrace.packing.options import PackOptions
from headrace.packing.plan import Packing, Plan, checksums_of
from headrace.packing.stream import Spool, groups_of, some_of, without
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
    chosen: IntArray
    tokens: Tokens | None
    end_token: int | None
    fingerprint: str

    def within(self, numbers: range) -> Documents:
        """Some of them."""
        chosen = self.chosen[numbers.start : numbers.stop]
        packed = self.packed
        if packed is not None:
            fingerprint = fingerprint_of_view(packed.info.fingerprint, chosen)
            return self._replace(chosen=chosen, fingerprint=fingerprint)
        view = self.dataset.subset(np.arange(numbers.start, numbers.stop))
        return self._replace(dataset=view, chosen=chosen, fingerprint=view.fingerprint)

    def readable(self, left_out: dict[int, str]) -> Documents:
        """Those that are not left out; see `without`."""
        if not left_out:
            return self
        view = without(self.dataset, left_out)
        chosen = np.delete(self.chosen, list(left_out))
        return self._replace(dataset=view, chosen=chosen, fingerprint=view.fingerprint)

    @property
    def packed(self) -> PackedTokens | None:
        """The tokens, if they are those of packed files."""
        return self.tokens if isinstance(self.tokens, PackedTokens) else None

    @property
    def names(self) -> PackedNames | None:
        """Of those that are or were files."""
        if self.packed is None:
            return names_of(self.dataset)
        return None if self.packed.names is None else self.packed.names.take(self.chosen)

    def info(self) -> PackedInfo:
        """What a packed file says of them; it lacks count and checksums."""
        dataset = self.dataset
        # the first layout that knows marked ids, where there are such
        version = 5 if dataset.is_of_chats else 1
        if self.packed is not None:
            info = self.packed.info
            return replace(info, fingerprint=self.fingerprint, part=None, version=version)
        text = {
            "tokenizer": dataset.tokenizer_identity,
            "class": type(dataset.tokenizer).__qualname__,
            "end_token": self.end_token,
            "unit": dataset.document_unit,
        }
        classes = dataset.classes or None
        return PackedInfo(KIND, STORE, 0, self.fingerprint, classes, text=text, version=version)

    def targets(self) -> Any:
        """Class numbers of folders, or a field of each record; None: there are none."""
        if self.packed is not None:
            return None if self.packed.targets is None else self.packed.targets[self.chosen]
        if self.dataset.targets is not None:
            return self.dataset.targets
        return self.dataset.record_targets()

    def sizes(self) -> IntArray:
        """Bytes of each where it lies: of a text, or of its tokens where these are there ([n]
        int64).
        """
        if self.tokens is None:
            return self.dataset.text_nbytes(self.chosen)
        edges: IntArray = self.tokens.short[0]
        return (edges[self.chosen + 1] - edges[self.chosen]) * self.tokens.dtype.itemsize

    @property
    def are_files(self) -> bool:
        """True if each is a file that is read when it is packed: another job may meet another
        one.
        """
        return self.tokens is None and isinstance(self.dataset.sample_source, FilesSource)

    def packing(
        self,
        lengths: IntArray,
        dtype: np.dtype[Any],
        prepare: Callable[[range], list[npt.NDArray[Any]]],
        left_out: dict[int, str],
        spool: Spool | None = None,
    ) -> Packing:
        """Of these documents, of so many tokens each ([n] int64), which `prepare` gives."""
        targets = self.targets()
        if targets is not None:
            targets = as_column(targets)
        columns = columns_of(lengths, self.names, targets)
        sizes = lengths * dtype.itemsize
        info = replace(self.info(), count=len(lengths), checksums=checksums_of(columns))
        plan = Plan(info, (int(lengths.sum()),), dtype, sizes, sizes, columns)
        return Packing(self.dataset, plan, prepare, left_out, spool=spool)


def is_of_texts(dataset: BaseDataset) -> TypeGuard[TextDataset]:
    """True if a dataset is packed as tokens."""
    return isinstance(dataset, TextDataset)


def documents_of(dataset: TextDataset, options: PackOptions) -> Documents:
    """The documents of a dataset, or of a view of one: of texts, of windows or blocks of them, or
    of packed tokens.

    Raises:
        ConfigError: a view of windows or blocks, which are no documents; an option that is not for
            texts, or an `end_token` that the tokens were not made with.
    """
    if options.is_jpeg:
        raise ConfigError("store='jpeg' is for images: open them with ImageDataset")
    if options.store is not None:
        raise ConfigError(
            f"store={options.store!r} is for images and arrays: texts are packed as tokens"
        )
    if options.is_chunked:
        raise ConfigError(
            f"{options.layout}: tokens lie flat, and are read as they are: leave it out"
        )
    if options.check != "decode":
        raise ConfigError(f"check={options.check!r} is for encoded images: leave it out")
    end_token = options.end_token
    if end_token is not None and dataset.is_of_chats:
        raise ConfigError(
            f"end_token={end_token} can't be given for chats, whose template ends each turn: "
            "leave it out"
        )
    documents = _documents_of(dataset, end_token)
    if end_token not in (None, documents.end_token):
        raise ConfigError(
            f"end_token={end_token}: this dataset has tokens that were made with "
            f"end_token={documents.end_token}: leave it out, or pack the texts"
        )
    return documents


def _documents_of(dataset: TextDataset, end_token: int | None) -> Documents:
    source: Any = dataset.sample_source
    if not isinstance(source, TokensSource):
        chosen = dataset.whole_indices(np.arange(len(dataset)))
        return Documents(dataset, chosen, None, end_token, dataset.fingerprint)
    tokens = source.tokens
    documents = dataset._documents
    is_view = dataset._chosen is not None
    if is_view and (documents is not None or len(source) != len(tokens.short[0]) - 1):
        raise ConfigError(
            "a view of windows or blocks can't be packed: pack the texts, or a view of their "
            "documents"
        )
    if isinstance(tokens, PackedTokens):
        info = tokens.info
        made_with = info.text.get("end_token")
        if dataset._chosen is not None:
            return Documents(dataset, dataset._chosen, tokens, made_with, dataset.fingerprint)
        return Documents(dataset, np.arange(info.count), tokens, made_with, info.fingerprint)
    assert documents is not None
    chosen = np.arange(len(documents))
    made_with = dataset._arguments.get("end_token")
    return Documents(documents, chosen, tokens, made_with, documents.fingerprint)


def packed_texts(documents: Documents, folder: str | None) -> Packing:
    """Documents as tokens. Where `on_error` is "skip", those that can't be read are left out.

    Args:
        documents: of a dataset, or of a part of one.
        folder: for a temporary file of tokens that are not there yet, 4 bytes each, whose number
            must be known before a file is laid out; they are made by one thread of a process at a
            time. None: they are made by the dataset, which keeps them.

    Raises:
        ConfigError: targets that can't be packed.
        SampleError: a document can't be read, or tokenised.
    """
    tokens = documents.tokens
    if tokens is None and folder is not None:
        return _spooled(documents, folder)
    if tokens is None:
        tokens = documents.dataset.tokens(documents.end_token)[0]
    left_out = dict[int, str]()
    if documents.packed is None and documents.dataset.on_error != "raise":
        doubtful = np.flatnonzero(np.isin(documents.chosen, tokens.short[1]))
        for start in range(0, len(doubtful), _TOGETHER):
            part = doubtful[start : start + _TOGETHER]
            _ids_of(documents, part, left_out)
    readable = documents.readable(left_out)
    chosen = readable.chosen
    edges = tokens.short[0]

    def prepare(group: range) -> list[npt.NDArray[Any]]:
        part = chosen[group.start : group.stop]
        return tokens.parts(edges[part], edges[part + 1])

    lengths = edges[chosen + 1] - edges[chosen]
    return readable.packing(lengths, tokens.dtype, prepare, left_out)


def _ids_of(
    documents: Documents, numbers: npt.NDArray[Any], left_out: dict[int, str]
) -> list[npt.NDArray[Any]]:
    """The ids of some documents that can be read; the others are added to `left_out`.

    Raises:
        SampleError: `on_error` is a callable: what it makes up is no matter for a file.
    """
    values = documents.dataset.ids_of(documents.chosen[numbers].tolist())
    for number, value in zip(numbers.tolist(), values, strict=True):
        if isinstance(value, SampleError):
            if callable(documents.dataset.on_error):
                raise value
            left_out[number] = str(value)
    return [value for value in values if not isinstance(value, SampleError)]


def _spooled(documents: Documents, folder: str) -> Packing:
    left_out = dict[int, str]()
    least = most = 0
    end = np.array([] if documents.end_token is None else [documents.end_token], np.int32)
    spool = Spool(folder)
    try:
        for group in groups_of(documents.sizes(), _TOGETHER):
            with _TOKENISING.get():
                values = _ids_of(documents, np.asarray(group), left_out)
            for value in values:
                ids = np.concatenate([value.astype(np.int32, copy=False), end])
                least = min(least, int(ids.min(initial=0)))
                most = max(most, int(ids.max(initial=0)))
                spool.append(ids.tobytes())
        dtype = np.dtype(dtype_for(least, most))
        read = spool.reader()

        def prepare(group: range) -> list[npt.NDArray[Any]]:
            return [data.view(np.int32).astype(dtype) for data in read(group)]

        readable = documents.readable(left_out)
        return readable.packing(spool.sizes // 4, dtype, prepare, left_out, spool)
    except BaseException:
        spool.close()
        raise


class TokensEstimate(NamedTuple):
    """What the tokens of some documents, evenly spread, say of all."""

    tokens_per_byte: float
    """Bytes of tokens for a byte of text."""
    crc: int
    """Of their tokens, by which another tokenizer is noticed."""


def estimate_tokens(documents: Documents, sizes: IntArray) -> TokensEstimate:
    """Tokenises some documents, whose tokens are not there; `sizes`: bytes of each ([n] int64)."""
    before = tokens = least = largest = crc = 0
    for number in some_of(len(sizes)):
        ids = documents.dataset.ids_of([int(documents.chosen[number])])[0]
        if isinstance(ids, SampleError):  # said when it is packed
            continue
        before += int(sizes[number])
        tokens += len(ids)
        least = min(least, int(ids.min(initial=0)))
        largest = max(largest, int(ids.max(initial=0)))
        crc = zlib.crc32(ids.astype("<i4").tobytes(), crc)
        if before >= _ENOUGH:
            break
    width = np.dtype(dtype_for(least, largest)).itemsize
    return TokensEstimate(tokens * width / before if before else 1.0, crc)
