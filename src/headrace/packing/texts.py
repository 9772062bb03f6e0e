"""Packs texts as the tokens of whole documents."""

from __future__ import annotations

import copy
import functools
import threading
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from headrace.core.views import fingerprint_of_view
from headrace.datasets.text.decoders import CHAT
from headrace.datasets.text.passes import read_targets
from headrace.datasets.text.text import TextDataset
from headrace.dtypes import AnyArray, IntArray
from headrace.errors import ConfigError, SampleError
from headrace.formats.arrays.packed import TARGETS, PackedInfo
from headrace.formats.files import FilesSource
from headrace.formats.resolve.file_set import PackedNames
from headrace.formats.tokens import KIND, STORE, PackedTokens, TokensSource
from headrace.io.array_file import FileArrays
from headrace.memory.processes import PerProcess
from headrace.packing.contents import Contents, as_column
from headrace.packing.destination import PartFile
from headrace.packing.plan import (
    PackOptions,
    PackPlan,
    Plan,
    Rows,
    Spool,
    chunks_for,
    groups_of,
    some_of,
)
from headrace.tokenizer import dtype_for

_TOGETHER = 1024  # documents that are tokenised at a time
_ENOUGH = 4 << 20  # bytes of text by which the number of tokens is estimated
# threads may pack several parts at once, and few tokenizers are thread-safe
_TOKENISING = PerProcess(threading.Lock)


class TextContents(Contents):
    """The documents of a text dataset or of a view of one. They may be tokens already, packed or
    cached.

    Raises:
        ConfigError: a view of windows or blocks, which are no documents; an option that is not for
            texts, or an `end_token` that the tokens were not made with.
    """

    dataset: TextDataset
    group_samples = 4096
    _tokens: FileArrays | PackedTokens | None = None
    """The tokens, if the source has them."""
    _pack: PackedTokens | None = None
    """The same, if they are packed: the dataset then has no sample for each document."""

    def __init__(self, dataset: TextDataset, options: PackOptions) -> None:
        self._end_token = options.end_token  # that is put behind each, or is there already
        source: Any = dataset.sample_source
        if not isinstance(source, TokensSource):
            super().__init__(dataset, options)
            self._chosen = dataset.whole_indices(np.arange(len(dataset)))
            return
        self._tokens = source.tokens
        documents = dataset._documents
        view = dataset._chosen
        super().__init__(documents or dataset, options)
        count = len(source.tokens.short[0]) - 1
        if view is not None and (documents is not None or len(source) != count):
            raise ConfigError(
                "a view of windows or blocks can't be packed: pack the texts, or a view of their "
                "documents"
            )
        self._chosen = np.arange(count) if view is None else view
        self._end_token = dataset._arguments.get("end_token")
        if isinstance(source.tokens, PackedTokens):
            self._pack = source.tokens
            self._end_token = self._pack.info.text.get("end_token")
        if options.end_token not in (None, self._end_token):
            raise ConfigError(
                f"end_token={options.end_token}: this dataset has tokens that were made with "
                f"end_token={self._end_token}: leave it out, or pack the texts"
            )

    def check_options(self) -> None:
        options = self.options
        if options.store is not None:
            raise ConfigError(
                f"store={options.store!r} is for images and arrays: texts are packed as tokens"
            )
        super().check_options()
        chunks_for(options, Rows(STORE, np.dtype(np.int32), ()), 0)
        if options.end_token is not None and self.dataset.document_unit == CHAT:
            raise ConfigError(
                f"end_token={options.end_token} can't be given for chats, whose template ends each "
                "turn: leave it out"
            )

    @property
    def names(self) -> PackedNames | None:
        if self._pack is None:
            return super().names
        return None if self._pack.names is None else self._pack.names.take(self._chosen)

    @property
    def fingerprint(self) -> str:
        if self._pack is None:
            return self.dataset.fingerprint
        info = self._pack.info
        if np.array_equal(self._chosen, np.arange(info.count)):
            return info.fingerprint
        return fingerprint_of_view(info.fingerprint, self._chosen)

    def view(self, numbers: IntArray) -> TextContents:
        some = copy.copy(self) if self._pack is not None else super().view(numbers)
        vars(some).pop("source_sizes", None)
        some._chosen = self._chosen[numbers]
        return some

    @functools.cached_property
    def source_sizes(self) -> IntArray:
        """Bytes of each document in the source: of its text, or its tokens."""
        if self._tokens is None:
            texts = self.dataset._tokenized
            return texts.nbytes(self._chosen, self.dataset.sample_reader)
        edges: IntArray = self._tokens.short[0]
        return (edges[self._chosen + 1] - edges[self._chosen]) * self._tokens.dtype.itemsize

    def _targets(self) -> Any:
        """Class numbers of folders, or a field of each record. None: there are none."""
        if self._pack is not None:
            targets: Any = self._pack.targets
            if targets is not None:
                targets = targets[self._chosen]
        else:
            dataset = self.dataset
            targets = dataset.targets
            if dataset._tokenized.splits_targets:  # they are of several types
                numbers = dataset.whole_indices(np.arange(len(dataset)))
                targets = read_targets(dataset._tokenized, dataset.sample_reader, numbers)
        return None if targets is None else as_column(targets)

    def _about(self, targets: Any) -> dict[str, Any]:
        if self._pack is not None:
            info = self._pack.info
            return {"kind": KIND, "classes": info.classes, "text": info.text}
        dataset = self.dataset
        text = {
            "tokenizer": dataset.tokenizer_identity,
            "class": type(dataset.tokenizer).__qualname__,
            "end_token": self._end_token,
            "unit": dataset.document_unit,
        }
        return {"kind": KIND, "classes": dataset.classes or None, "text": text}

    def _annotations(self) -> dict[str, AnyArray]:
        # of all: each part alone might seem to have targets of one kind
        targets = self._targets()
        is_of_files = self._tokens is None and isinstance(self.dataset.sample_source, FilesSource)
        return {} if targets is None or is_of_files else {TARGETS: targets}

    def plan_parts(self) -> PackPlan:
        """Cuts parts by the bytes of the texts, so that each job tokenises only its own."""
        sizes = self.source_sizes
        about = self._about(None)
        options = dict(about["text"])
        if self._tokens is None:
            # estimated from evenly spread documents, whose tokens reveal another tokenizer
            before = 0
            made = [np.empty(0, np.int32)]
            for number in some_of(len(sizes)):
                [ids] = self._whole_ids([number])
                if isinstance(ids, SampleError):  # said when it is packed
                    continue
                before += int(sizes[number])
                made.append(ids)
                if before >= _ENOUGH:
                    break
            tokens = np.concatenate(made)
            options["tokens"] = zlib.crc32(tokens.astype("<i4").tobytes())
            if before:
                dtype = dtype_for(tokens.min(initial=0), tokens.max(initial=0))
                ratio = len(tokens) * np.dtype(dtype).itemsize / before
                sizes = (sizes * ratio).astype(np.int64)
        info = PackedInfo(store=STORE, count=0, fingerprint=self.fingerprint, **about)
        return self._parts(info, sizes, options)

    def plan_file(self, part: PartFile | None) -> Plan:
        """Packs documents as tokens; unreadable ones are left out if `on_error` is "skip". For a
        single file, the dataset makes missing tokens and caches them.

        Raises:
            ConfigError: targets that can't be packed.
            SampleError: a document can't be read, or tokenised.
        """
        tokens = self._tokens
        if tokens is None and self.options.shard_size is not None:
            assert part is not None
            return self._tokenised(part)
        if tokens is None:
            tokens = self.dataset.tokens(self._end_token)[0]
        left_out = dict[int, str]()
        if self._pack is None and self.dataset.on_error != "raise":
            doubtful = np.flatnonzero(np.isin(self._chosen, tokens.short[1])).tolist()
            for number in doubtful:
                [ids] = self._ids_of([number])
                if isinstance(ids, SampleError):
                    left_out[number] = str(ids)
        readable = self.without(left_out)
        chosen = readable._chosen
        edges = tokens.short[0]

        def prepare(group: range) -> list[AnyArray]:
            some = chosen[group.start : group.stop]
            return tokens.parts(edges[some], edges[some + 1])

        lengths = edges[chosen + 1] - edges[chosen]
        plan = readable._plan(Rows(STORE, tokens.dtype, ()), lengths, readable._targets())
        return replace(plan, prepare=prepare, left_out=left_out)

    def _ids_of(self, numbers: Sequence[int]) -> list[Any]:
        """The ids of documents; a SampleError for each that may be left out.

        Raises:
            SampleError: `on_error` is a callable: what it makes up is not packed.
        """
        with _TOKENISING.get():
            values = self._whole_ids(numbers)
        for value in values:
            if isinstance(value, SampleError) and callable(self.dataset.on_error):
                raise value
        return values

    def _whole_ids(self, numbers: Sequence[int]) -> list[Any]:
        dataset = self.dataset
        chosen = self._chosen[numbers].tolist()
        return dataset._tokenized.whole_ids(chosen, dataset.sample_reader.another())

    def _tokenised(self, part: PartFile) -> Plan:
        """Tokens go through a spool, 4 bytes each, since their number must be known before the file
        is laid out. One thread of a process makes them.
        """
        end = np.array([] if self._end_token is None else [self._end_token], np.int32)
        least = 0
        most = 0
        spool = Spool(part)
        left_out = dict[int, str]()
        groups = groups_of(self.source_sizes, _TOGETHER)
        for _, ids in self.readable(self._ids_of, groups, "tokenising", left_out, workers=0):
            ids = np.concatenate([ids.astype(np.int32, copy=False), end])
            least = min(least, int(ids.min(initial=0)))
            most = max(most, int(ids.max(initial=0)))
            spool.append(ids.tobytes())
        dtype = np.dtype(dtype_for(least, most))

        def prepare(group: range) -> list[AnyArray]:
            return [data.view(np.int32).astype(dtype) for data in spool.read(group)]

        readable = self.without(left_out)
        plan = readable._plan(Rows(STORE, dtype, ()), spool.sizes // 4, readable._targets())
        return replace(plan, prepare=prepare, left_out=left_out)
