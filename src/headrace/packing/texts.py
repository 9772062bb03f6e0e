"""Packs texts as tokens: those of whole documents, which are there already or are made for it."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.views import fingerprint_of_view
from headrace.datasets.text.text import TextDataset
from headrace.dtypes import IntArray
from headrace.errors import ConfigError, SampleError
from headrace.formats.arrays.packed import TARGETS, PackedInfo
from headrace.formats.files import FilesSource
from headrace.formats.tokens import KIND, STORE, PackedTokens, Tokens, TokensSource
from headrace.io.packed_strings import PackedNames
from headrace.memory.processes import PerProcess
from headrace.packing.contents import Contents, Survey
from headrace.packing.options import PackOptions
from headrace.packing.part import PartFile
from headrace.packing.plan import (
    Packing,
    Rows,
    Spool,
    as_column,
    crc_of_columns,
    groups_of,
    make_plan,
    names_of,
    some_of,
    without,
)
from headrace.tokenizer import dtype_for

_TOGETHER = 1024  # documents that are tokenised at a time
_ENOUGH = 4 << 20  # bytes of text by which the number of tokens is estimated
# threads may pack several parts at once, and few tokenizers are thread-safe
_TOKENISING = PerProcess(threading.Lock)


class TextContents(Contents):
    """The documents of a dataset, or of a view of one: of texts, of windows or blocks of them, or
    of packed tokens.

    Args:
        dataset: has one sample for each of them; of packed tokens it is the dataset that was given.
        options: how.
        chosen: [n] int64, the number of each in the source, or among the tokens.
        tokens: of the source, if they are there already.
        end_token: that is put behind each, or is there already.
        fingerprint: of these documents.
    """

    dataset: TextDataset

    def __init__(
        self,
        dataset: TextDataset,
        options: PackOptions,
        chosen: IntArray,
        tokens: Tokens | None,
        end_token: int | None,
        fingerprint: str,
    ) -> None:
        super().__init__(dataset, options)
        self._chosen = chosen
        self._tokens = tokens
        self._packed = tokens if isinstance(tokens, PackedTokens) else None
        self._end_token = end_token
        self._fingerprint = fingerprint

    @classmethod
    def of(cls, dataset: TextDataset, options: PackOptions) -> TextContents:
        """All documents of a dataset.

        Raises:
            ConfigError: a view of windows or blocks, which are no documents; an option that is not
                for texts, or an `end_token` that the tokens were not made with.
        """
        _check_options(dataset, options)
        end_token = options.end_token
        source: Any = dataset.sample_source
        if not isinstance(source, TokensSource):
            chosen = dataset.whole_indices(np.arange(len(dataset)))
            return cls(dataset, options, chosen, None, end_token, dataset.fingerprint)
        tokens = source.tokens
        documents = dataset._documents
        view = dataset._chosen
        if view is not None and (documents is not None or len(source) != len(tokens.short[0]) - 1):
            raise ConfigError(
                "a view of windows or blocks can't be packed: pack the texts, or a view of their "
                "documents"
            )
        if isinstance(tokens, PackedTokens):
            made_with = tokens.info.text.get("end_token")
            chosen = np.arange(tokens.info.count)
            fingerprint = tokens.info.fingerprint
            if view is not None:
                chosen = view
                fingerprint = dataset.fingerprint
        else:
            assert documents is not None
            made_with = dataset._arguments.get("end_token")
            dataset = documents
            chosen = np.arange(len(documents))
            fingerprint = documents.fingerprint
        if end_token not in (None, made_with):
            raise ConfigError(
                f"end_token={end_token}: this dataset has tokens that were made with "
                f"end_token={made_with}: leave it out, or pack the texts"
            )
        return cls(dataset, options, chosen, tokens, made_with, fingerprint)

    @property
    def names(self) -> PackedNames | None:
        if self._packed is None:
            return names_of(self.dataset)
        return None if self._packed.names is None else self._packed.names.take(self._chosen)

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def _some(self, dataset: TextDataset, chosen: IntArray, fingerprint: str) -> TextContents:
        return TextContents(
            dataset, self.options, chosen, self._tokens, self._end_token, fingerprint
        )

    def within(self, numbers: range, rows: Rows | None) -> TextContents:
        chosen = self._chosen[numbers.start : numbers.stop]
        if self._packed is not None:
            fingerprint = fingerprint_of_view(self._packed.info.fingerprint, chosen)
            return self._some(self.dataset, chosen, fingerprint)
        view = self.dataset.subset(np.asarray(numbers))
        return self._some(view, chosen, view.fingerprint)

    def without(self, unreadable: Mapping[int, object]) -> TextContents:
        if not unreadable:
            return self
        view = without(self.dataset, unreadable)
        return self._some(view, np.delete(self._chosen, list(unreadable)), view.fingerprint)

    def source_sizes(self) -> IntArray | None:
        """Bytes of each text, if each is a file that is read when it is packed: another job may
        meet another one.
        """
        if self._tokens is None and isinstance(self.dataset.sample_source, FilesSource):
            return self._sizes()
        return None

    def _sizes(self) -> IntArray:
        """Bytes of each document where it lies: of its text, or of its tokens."""
        if self._tokens is None:
            return self.dataset.text_nbytes(self._chosen)
        edges: IntArray = self._tokens.short[0]
        return (edges[self._chosen + 1] - edges[self._chosen]) * self._tokens.dtype.itemsize

    def _targets(self) -> Any:
        """Class numbers of folders, or a field of each record; None: there are none."""
        if self._packed is not None:
            targets: Any = self._packed.targets
            if targets is not None:
                targets = targets[self._chosen]
        else:
            targets = self.dataset.targets
            if targets is None:
                targets = self.dataset.record_targets()
        return None if targets is None else as_column(targets)

    def _info(self) -> PackedInfo:
        """What a packed file says of them; it lacks the count."""
        dataset = self.dataset
        # the first layout that knows marked ids, where there are such
        version = 5 if dataset.is_of_chats else 1
        if self._packed is not None:
            info = self._packed.info
            return replace(info, fingerprint=self._fingerprint, part=None, version=version)
        text = {
            "tokenizer": dataset.tokenizer_identity,
            "class": type(dataset.tokenizer).__qualname__,
            "end_token": self._end_token,
            "unit": dataset.document_unit,
        }
        classes = dataset.classes or None
        return PackedInfo(KIND, STORE, 0, self._fingerprint, classes, text=text, version=version)

    def survey(self, read_sizes: IntArray | None = None) -> Survey:
        """Parts are cut by bytes of the texts, so that each job tokenises its own parts alone."""
        info = self._info()
        read_sizes = self._sizes()
        sizes = read_sizes
        options = dict[str, Any](info.text)
        targets = self._targets()
        if targets is not None and self.source_sizes() is None:
            # of all: each part alone might seem to have targets of one kind
            options["annotations"] = crc_of_columns({TARGETS: targets})
        if self._tokens is None:
            # about, by some documents, evenly spread; their tokens tell another tokenizer
            before = 0
            count = 0
            crc = 0
            least = 0
            most = 0
            for number in some_of(len(sizes)):
                [ids] = self.dataset.ids_of([int(self._chosen[number])])
                if isinstance(ids, SampleError):  # said when it is packed
                    continue
                before += int(sizes[number])
                count += len(ids)
                least = min(least, int(ids.min(initial=0)))
                most = max(most, int(ids.max(initial=0)))
                crc = zlib.crc32(ids.astype("<i4").tobytes(), crc)
                if before >= _ENOUGH:
                    break
            options["tokens"] = crc
            if before:
                nbytes = count * np.dtype(dtype_for(least, most)).itemsize
                sizes = (sizes * (nbytes / before)).astype(np.int64)
        return Survey(info, sizes, read_sizes, options)

    def packing(self, part: PartFile | None, read_sizes: IntArray | None = None) -> Packing:
        """Documents as tokens. Where `on_error` is "skip", those that can't be read are left out.
        Into one file the dataset makes tokens that are not there yet, and keeps them.

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
        if self._packed is None and self.dataset.on_error != "raise":
            doubtful = np.flatnonzero(np.isin(self._chosen, tokens.short[1])).tolist()
            for number in doubtful:
                [ids] = self._ids_of([number])
                if isinstance(ids, SampleError):
                    left_out[number] = str(ids)
        readable = self.without(left_out)
        chosen = readable._chosen
        edges = tokens.short[0]

        def prepare(group: range) -> list[npt.NDArray[Any]]:
            some = chosen[group.start : group.stop]
            return tokens.parts(edges[some], edges[some + 1])

        lengths = edges[chosen + 1] - edges[chosen]
        return Packing(readable._plan(lengths, tokens.dtype), prepare, left_out)

    def _plan(self, lengths: IntArray, dtype: np.dtype[Any]) -> Any:
        """Of so many tokens each ([n] int64)."""
        info = replace(self._info(), count=len(lengths))
        rows = Rows(STORE, dtype, ())
        return make_plan(info, rows, lengths, None, self.names, self._targets(), {})

    def _ids_of(self, numbers: Sequence[int]) -> list[Any]:
        """The ids of some documents; a SampleError for each that may be left out.

        Raises:
            SampleError: `on_error` is a callable: what it makes up is no matter for a file.
        """
        with _TOKENISING.get():
            values = self.dataset.ids_of(self._chosen[numbers].tolist())
        for value in values:
            if isinstance(value, SampleError) and callable(self.dataset.on_error):
                raise value
        return values

    def _tokenised(self, part: PartFile) -> Packing:
        """Tokens go through a spool, 4 bytes each, since their number must be known before a file
        is laid out; they are made by one thread of a process at a time.
        """
        end = np.array([] if self._end_token is None else [self._end_token], np.int32)
        least = 0
        most = 0
        spool = Spool(part)

        def use(_: int, ids: npt.NDArray[Any]) -> None:
            nonlocal least, most
            ids = np.concatenate([ids.astype(np.int32, copy=False), end])
            least = min(least, int(ids.min(initial=0)))
            most = max(most, int(ids.max(initial=0)))
            spool.append(ids.tobytes())

        groups = groups_of(self._sizes(), _TOGETHER)
        left_out = self.made(self._ids_of, groups, "tokenising", use, workers=0)
        dtype = np.dtype(dtype_for(least, most))
        read = spool.reader()

        def prepare(group: range) -> list[npt.NDArray[Any]]:
            return [data.view(np.int32).astype(dtype) for data in read(group)]

        plan = self.without(left_out)._plan(spool.sizes // 4, dtype)
        return Packing(plan, prepare, left_out)


def _check_options(dataset: TextDataset, options: PackOptions) -> None:
    """Raises a ConfigError for an option that is not for texts."""
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
    if options.end_token is not None and dataset.is_of_chats:
        raise ConfigError(
            f"end_token={options.end_token} can't be given for chats, whose template ends each "
            "turn: leave it out"
        )
