"""Texts as token ids: files, lines, records, windows, or packed blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack

import numpy as np
import numpy.typing as npt
import torch

from headrace.datasets.core.checks import check_arguments
from headrace.datasets.core.making import describe_held
from headrace.datasets.core.options import PathOptions, split_options
from headrace.datasets.image.labels import folder_targets
from headrace.datasets.kinds import TEXT_EXTENSIONS
from headrace.datasets.text.filling import TextFilling
from headrace.datasets.text.options import check_text_options
from headrace.datasets.text.packed import packed_source, packed_tokens, source_over, tokenizer_of
from headrace.datasets.text.passes import folder_of, record_columns, target_as, targets_in, tokens_of
from headrace.errors import ConfigError, FormatError, SampleError
from headrace.io.array_file import MappedArrays
from headrace.io.paths import is_url, without_query
from headrace.io.remote.options import RemoteOptions
from headrace.io.resolve.expressions import DataPath, entries_of
from headrace.io.resolve.file_set import FileSet
from headrace.memory.budget import MemoryBudget
from headrace.modes import LoadingMode, ModeName
from headrace.order import detect_world
from headrace.order.request import BatchRequest
from headrace.storage.text import records
from headrace.storage.text.files import TextFilesSource
from headrace.storage.text.lines import Newline
from headrace.storage.text.plain import Room, check_encoding
from headrace.storage.text.source import HeldArrays, LinesSource
from headrace.storage.text.texts import local_texts, remote_texts
from headrace.storage.tokens.source import BlocksSource, TokensSource
from headrace.tokenizer import CharTokenizer, identity_of, token_arrays, vocabulary_of

_MARK = "\ufeff"
_OF_READING = ("cache_dir", "on_error", "progress", "max_memory_usage")


class TextDataset(TextFilling):
    """Samples are texts as token ids: ``{"input_ids": int64 [tokens]}``, with ``"labels"`` where there are targets.

    They are not padded: batches are padded by `TextCollator`, which is what a loader takes where nothing else is said.

    With ``stride`` samples are windows over whole documents, and with ``packing`` blocks of `max_length` tokens over all documents as if
    they were one, ``{"input_ids": int64 [max_length], "document_ids": int32 [max_length]}`` (see `document_mask`). Both need all tokens
    beforehand: they are made once, and kept in `cache_dir` where the tokenizer can be known again (`CharTokenizer`, HuggingFace's fast
    ones, `tokenizers.Tokenizer`, or an attribute ``fingerprint`` of type str), else in memory.

    A file that `headrace.pack` made of texts holds their tokens, which are mapped; or read by ranges, where it lies behind a URL (.h5,
    .hdf5, .he5). All that is said of texts and tokenizer was said then.

    Args:
        data_path: a folder (searched through), a file, a glob, a URL, or a list of these: .txt, .md, .csv, .tsv, .json, .jsonl, also .gz
            and .zst. Lines and records of compressed files are read through a plain copy in `cache_dir`. Or a file that `headrace.pack`
            made, or its URL.
        tokenizer: a callable from a text to a list of ids, a HuggingFace tokenizer, a `tokenizers.Tokenizer`, or what has ``encode_batch``
            or ``encode``. None: `CharTokenizer()`.
        max_length: tokens of a sample: what is longer is cut; None: nothing is. `stride` and `packing` need it.
        unit: "file": each file is a document; "line": each line (blank ones too); "record": each record of .jsonl (a line), .json (an
            element of its list), .csv and .tsv (a row, named by the first). None: "record" where all files are .jsonl, .csv or .tsv (.gz
            and .zst too), or a field is named; else "file"; an error where some are and some are not.
        transform: called with the sample's dict, without "labels".
        loading_mode: see `LoadingMode`.
        text_field: of a record: the name of what holds the text, or a callable from the record (a dict) to its text. A record that is a
            text, as in a .json of these, needs none.
        target_field: of a record: what becomes "labels". Numbers stay numbers, and a column of a table that holds nothing else becomes
            numbers: `targets` is int64, or float64. Texts become class numbers, in the sorted order of the texts. What is neither, or
            both, stays as it is, and `targets` is None. All records are read once to find out.
        labels: "folders": "labels" are class numbers by first-level folder, and `classes` their names.
        stride: tokens from the beginning of a window to that of the next, at most `max_length`.
        packing: samples are blocks; what is left at the end of all tokens, less than a block, is not a sample.
        end_token: an id that is put behind each document, for `stride` and `packing`; None: none.
        newline: what ends a line: None: LF, CR or CRLF; or one of these. As Python's ``open`` has it.
        encoding, errors: of the texts, as Python has them. A byte order mark of UTF-8 is no part of a text.
        **options: see `BaseDataset`, and for URLs `RemoteOptions`.

    Attributes:
        tokenizer, max_length: as they are used; of a packed file that was not made with a `CharTokenizer` the first is None.
        classes, class_to_idx: names of classes, and the number of each, where `labels` or a `target_field` of texts gives some.

    A text that takes more than a quarter of what the memory budget leaves (from 16 MiB on) is not read; that is an error of its sample.

    Raises:
        ConfigError: an argument makes no sense; or files of records lie beside other texts, and `unit` is not given.
        DataNotFoundError: nothing there, or no text.
        AccessError: a file can't be read; or one is read through a copy, and `cache_dir` can't be written to.
        FormatError: a file is damaged, or not of its encoding; or a kind that has no records; or a table whose first line does not name
            `text_field`.
        SampleError: with `stride`, `packing` or `target_field`: a text can't be read, or tokenised, or has no target.
        RemoteError, FileChangedError: a server does not give what it was asked for; a file there is another one than when it was opened.
    """

    reads_urls = True
    collate: Callable[[list[Any]], Any] | str | None = "text"

    def __init__(
        self,
        data_path: DataPath,
        *,
        tokenizer: Any = None,
        max_length: int | None = None,
        unit: Literal["file", "line", "record"] | None = None,
        transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
        loading_mode: LoadingMode | ModeName = LoadingMode.LAZY,
        text_field: str | Callable[[Any], str] = records.TEXT_FIELD,
        target_field: str | None = None,
        labels: Literal["folders"] | None = None,
        stride: int | None = None,
        packing: bool = False,
        end_token: int | None = None,
        newline: Newline = None,
        encoding: str = "utf-8",
        errors: str = "strict",
        **options: Unpack[PathOptions],
    ) -> None:
        check_arguments(self, data_path, options, transform=transform, loading_mode=loading_mode)
        self.data_path = data_path
        check_text_options(max_length, unit, text_field, target_field, labels, stride, packing, end_token, newline)
        if unit is None and (text_field != records.TEXT_FIELD or target_field is not None):
            unit = "record"
        vocabulary_of(tokenizer)  # raises where it is none
        self.tokenizer = CharTokenizer() if tokenizer is None else tokenizer
        self.max_length = max_length
        self.classes: list[str] = []
        self._columns: MappedArrays | HeldArrays | None = None
        self._target_kind: str | None = None
        self._text_field, self._target_field = text_field, target_field
        self._encoding, self._errors = check_encoding(encoding, errors), errors
        reach, common = split_options(options)
        self._documents: TextDataset | None = None
        described: Any = {"text_field": text_field, "labels": labels, "newline": newline, "encoding": encoding, "errors": errors}
        of_texts = {"tokenizer": tokenizer, "unit": unit, "target_field": target_field, "end_token": end_token, **described}
        usual = {"text_field": records.TEXT_FIELD, "encoding": "utf-8", "errors": "strict"}
        packed = packed_tokens(data_path, {name: value for name, value in of_texts.items() if value != usual.get(name)}, reach)
        if packed is None and text_field != records.TEXT_FIELD and unit != "record":
            raise ConfigError(f"text_field={text_field!r} is a field of records: pass unit='record'")
        if packed is not None:
            self.tokenizer: Any = tokenizer_of(packed)
            self.classes = list(packed.info.classes or [])
            self._unit = packed.info.text.get("unit", "file")
            source: Any = packed_source(packed, max_length, stride, packing)
            targets: npt.NDArray[Any] | None = packed.targets
        elif packing or stride is not None:
            of_reading: Any = {name: options[name] for name in _OF_READING if name in options}  # type: ignore[literal-required]
            of_reading.update(reach.keywords())
            self._documents = TextDataset(data_path, tokenizer=self.tokenizer, max_length=None, unit=unit, **described, **of_reading)
            self._unit = self._documents._unit
            tokens, fingerprint = tokens_of(self._documents, end_token)
            source = source_over(tokens, fingerprint, self._documents._source.location, max_length, stride, packing)
            targets = None if self._documents.targets is None else np.asarray(self._documents.targets)
            self.classes = self._documents.classes
        else:
            source = self._opened(data_path, unit, newline, reach, options)
            targets = None if labels is None else self._folder_labels(source)
        if isinstance(source, BlocksSource):
            targets, self.collate = None, None
        elif targets is not None and stride is not None:
            targets = targets[source.document_of(np.arange(len(source)))]
        super().__init__(source, targets=targets, transform=transform, loading_mode=loading_mode, **common)
        if target_field is not None:
            self._target_kind, self.targets, self.classes = targets_in(self._record_columns(), target_field)
            self._reset_report()  # what can't be read is counted when its sample is asked for
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}

    def _opened(
        self, data_path: DataPath, unit: str | None, newline: Newline, reach: RemoteOptions, options: PathOptions
    ) -> TextFilesSource | LinesSource:
        room = Room(MemoryBudget(options.get("max_memory_usage", 0.8), local_world_size=detect_world().local_world_size))
        listing: FileSet | None = None
        if unit is None and all(is_url(url) and without_query(url).lower().endswith(records.BY_RECORD) for url in entries_of(data_path)):
            unit = "record"  # without a listing, which asks the server for each file
        if unit in (None, "file"):
            source = TextFilesSource(data_path, TEXT_EXTENSIONS, reach, room)
            unit = unit or records.unit_of(source.files)
            if unit == "file":
                self._unit = unit
                return source
            listing = source.files
            source.close()
        assert unit is not None
        self._unit = unit
        return self._lines(data_path, listing, newline, reach, room, options.get("progress"))

    def _lines(
        self, data_path: DataPath, listing: FileSet | None, newline: Newline, reach: RemoteOptions, room: Room, progress: bool | None
    ) -> LinesSource:
        folder, of_text = folder_of(reach.cache_dir), (newline, self._encoding, self._errors)
        if any(map(is_url, entries_of(data_path))):
            texts = remote_texts(data_path, TEXT_EXTENSIONS, reach, listing)
        else:
            texts = local_texts(listing or TextFilesSource(data_path, TEXT_EXTENSIONS, reach, room).files)
        is_kept = reach.cache_dir is not None
        source = LinesSource(texts, self._unit, *of_text, folder, is_kept=is_kept, room=room, progress=progress)
        for number, names in enumerate(source.headers):
            for name in (self._text_field, self._target_field) if names else ():
                if isinstance(name, str) and names.count(name) != 1:
                    raise FormatError(
                        f"{source.shown(number)}: its first line names {', '.join(map(repr, names[:20]))}, and "
                        f"{names.count(name) or 'none'} of these is {name!r}: pass text_field= or target_field=; a file without such a "
                        "line needs one, or unit='line' or 'file'"
                    )
        return source

    def _folder_labels(self, source: TextFilesSource | LinesSource) -> npt.NDArray[np.int64]:
        by_file, self.classes = folder_targets(source.files)
        if by_file is None:
            raise ConfigError('labels="folders": the files lie in no class folders')
        return by_file if isinstance(source, TextFilesSource) else by_file[source.file_numbers()]

    def held_as(self) -> str:
        if self._arguments.get("tokenizer") is None:
            return super().held_as()
        return describe_held(type(self), {**self._arguments, "tokenizer": identity_of(self.tokenizer) or self.tokenizer})

    def uncut(self) -> TextDataset:
        """The same texts as whole documents, whose value is their tokens alone: what is packed. Nothing is held of them.

        Not of windows, blocks and packed files, which have all tokens already.
        """
        cls = getattr(type(self), "_plain_class", type(self))
        documents: TextDataset = object.__new__(cls)
        documents.__dict__.update(self.__dict__, max_length=None, targets=None, loading_mode=LoadingMode.LAZY)
        documents.__dict__.update(_target_field=None, _target_kind=None, _chosen=None, _fingerprint=None, _mode=None, _hold=None)
        documents._reset_report()
        return documents

    # -- texts

    def text_of(self, index: int) -> str:
        """The text of a sample, before it is tokenised; of a window its document.

        Raises:
            SampleError: it can't be read.
            ConfigError: with `packing`: a block is of no one text.
        """
        whole = int(self._whole_indices([range(len(self))[index]])[0])
        if isinstance(self._source, BlocksSource):
            raise ConfigError("text_of: with packing=True a sample is a block of tokens, of no one text")
        if self._documents is None and isinstance(self._source, TokensSource):
            raise ConfigError("text_of: a packed file holds tokens and no texts; what its tokenizer decodes comes close")
        if self._documents is not None and isinstance(self._source, TokensSource):
            return self._documents.text_of(int(self._source.document_of(np.array([whole]))[0]))
        record = self._records([whole], self._source.read)[0]
        try:
            return self._text(whole, record)[0]
        except FormatError as error:
            failure = self._failed(whole, "can't be decoded", error)
            raise failure from error

    def _text(self, index: int, record: bytes) -> tuple[str, Any]:
        """Text and target of a document.

        Raises:
            FormatError: its bytes are no text of the encoding, or no such record.
        """
        source: Any = self._source
        if isinstance(source, TextFilesSource):
            data = source.content(index, record)
            return _decoded(data, self._encoding, self._errors, lambda: 0).removeprefix(_MARK), None
        encoding, errors = source.codec
        text = _decoded(record, encoding, errors, lambda: source.offset_of(index))
        if not source.has_records:
            return text, None
        row = source.fields(index, text)
        field = self._target_field
        found = records.text_of(row, self._text_field)
        return found, None if field is None else records.target_of(row, field, source.is_of_table(index))

    def _target(self, index: int, target: Any) -> Any:
        """A record's target as its sample has it."""
        kind = self._target_kind
        return target if kind is None else target_as(kind, target, self._source.is_of_table(index), self.class_to_idx)  # type: ignore[attr-defined]

    def _record_columns(self) -> MappedArrays | HeldArrays:
        if self._columns is None:
            self._columns = record_columns(self)
        return self._columns

    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each sample. Of what is not tokenised yet another measure stands for them: of records the characters of their texts,
        which are all read for it; of files and lines their bytes."""
        source: Any = self._source
        if isinstance(source, TokensSource):
            found = source.lengths()
        elif not isinstance(source, LinesSource):
            found = source.sizes()
        else:
            found = self._record_columns().long if source.has_records else source.nbytes()
        if isinstance(self.tokenizer, CharTokenizer) and self.max_length is not None:
            found = np.minimum(found, self.max_length)
        whole: npt.NDArray[np.int64] = found if self._chosen is None else found[self._chosen]
        return whole

    # -- from records to ids: a batch at a time, as tokenizers like it

    @property
    def decodes_together(self) -> bool:
        return not isinstance(self._source, TokensSource)

    def decode_together(self, found: Sequence[tuple[int, Any]], failed: Callable[[int, str, Exception], SampleError]) -> list[Any]:
        """The ids of documents, with the target if there is one."""
        source = self._source
        if isinstance(source, LinesSource) and not source.has_records:  # the usual case: all at once, unless one of them is at fault
            with contextlib.suppress(Exception):
                return list(token_arrays(self.tokenizer, [line.decode(*source.codec) for _, line in found], self.max_length))
        made: list[Any] = [None] * len(found)
        texts: dict[int, str] = {}
        targets: dict[int, Any] = {}
        for number, (index, record) in enumerate(found):
            try:
                text, target = self._text(index, record)
                targets[number] = self._target(index, target)
                texts[number] = text
            except Exception as error:
                made[number] = failed(number, "can't be decoded", error)
        for number, ids in self._ids(texts, failed):
            is_plain = self._target_field is None or isinstance(ids, SampleError)
            made[number] = ids if is_plain else (ids, targets[number])
        return made

    def _ids(self, texts: dict[int, str], failed: Callable[[int, str, Exception], SampleError]) -> list[tuple[int, Any]]:
        try:
            return list(zip(texts, token_arrays(self.tokenizer, [*texts.values()], self.max_length), strict=True)) if texts else []
        except Exception:
            pass
        found: list[tuple[int, Any]] = []
        for number, text in texts.items():  # one by one: to name the one at fault
            try:
                found.append((number, token_arrays(self.tokenizer, [text], self.max_length)[0]))
            except Exception as error:
                found.append((number, failed(number, "can't be tokenised", error)))
        return found

    # -- from ids to samples

    def pair(self, index: int, value: Any) -> tuple[Any, Any]:
        return value if self._target_field is not None else super().pair(index, value)

    def present(self, value: Any) -> Any:
        if isinstance(value, dict):  # a block
            return {"input_ids": _tensor(value["input_ids"], np.int64), "document_ids": _tensor(value["document_ids"], np.int32)}
        return {"input_ids": _tensor(value, np.int64)}

    def assemble(self, value: Any, target: Any) -> Any:
        if self.targets is None and self._target_field is None:
            return value
        return {**value, "labels": target} if isinstance(value, dict) else (value, target)

    @property
    def _is_ids_alone(self) -> bool:
        is_plain = not (self._is_random or self.return_index) and self.targets is None and self._target_field is None
        return is_plain and type(self).pair is TextDataset.pair and type(self).assemble is TextDataset.assemble

    @property
    def _presents_ids(self) -> bool:
        return type(self).present is TextDataset.present and type(self)._finished is TextDataset._finished

    @property
    def _decodes_plainly(self) -> bool:
        is_ours = type(self).decode_together is TextDataset.decode_together and type(self)._text is TextDataset._text
        return is_ours and type(self)._values is TextDataset._values

    def _finished(self, request: BatchRequest, values: list[Any], may_repeat: Callable[[], bool]) -> list[Any]:
        if self._is_ids_alone and all(type(value) is np.ndarray for value in values):
            return [self.present(value) for value in values]  # what is done below comes to this, and costs more than the rest
        return super()._finished(request, values, may_repeat)


def _tensor(ids: npt.NDArray[Any], dtype: type) -> torch.Tensor:
    return torch.from_numpy(ids.astype(dtype))


def _decoded(data: bytes, encoding: str, errors: str, begins: Callable[[], int]) -> str:
    try:
        return data.decode(encoding, errors)
    except UnicodeDecodeError as error:
        at = begins() + error.start
        said = f"byte 0x{data[error.start]:02x} at offset {at:,} is no {encoding} ({error.reason})"
        is_utf16 = at == 0 and data.startswith((b"\xff\xfe", b"\xfe\xff"))
        remedy = "it begins as UTF-16 does: pass encoding='utf-16'" if is_utf16 else "pass encoding= or errors="
        raise FormatError(f"{said}; {remedy}") from None
