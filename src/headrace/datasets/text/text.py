"""Texts as token ids: files, lines, records, windows, or packed blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack

import numpy as np
import numpy.typing as npt

from headrace.datasets.core.checks import check_arguments
from headrace.datasets.core.construction import describe_held
from headrace.datasets.core.options import PathOptions, split_options
from headrace.datasets.text.documents import TokenizedDataset
from headrace.datasets.text.opening import (
    Cutting,
    folder_labels,
    open_texts,
    packed_source,
    packed_tokens,
    parts_of,
    tokenizer_of,
    unit_over,
)
from headrace.datasets.text.options import CHAT, OF_READING, TextOptions, check_chat_options, check_text_options
from headrace.datasets.text.units import RecordTexts, TextUnit, TokenBlocks
from headrace.errors import ConfigError
from headrace.io.resolve.expressions import DataPath
from headrace.modes import LoadingMode, ModeName
from headrace.storage.text import records
from headrace.storage.text.lines import Newline
from headrace.storage.text.plain import check_encoding
from headrace.tokenizer import CharTokenizer, vocabulary_of


class TextDataset(TokenizedDataset):
    """Samples are texts as token ids: ``{"input_ids": int64 [tokens]}``, with ``"labels"`` where there are targets.

    They are not padded: batches are padded by `TextCollator`, which is what a loader takes where nothing else is said.

    With ``stride`` samples are windows over whole documents, and with ``packing`` blocks of `max_length` tokens over all documents as if
    they were one, ``{"input_ids": int64 [max_length], "document_ids": int32 [max_length]}`` (see `document_mask`). Both need all tokens
    beforehand: they are made once, and kept in `cache_dir` where the tokenizer can be known again (`CharTokenizer`, HuggingFace's fast
    ones, `tokenizers.Tokenizer`, or an attribute ``fingerprint`` of type str), else in memory.

    Chats are ``{"input_ids": int64 [tokens], "labels": int64 [tokens]}``: records with ``messages`` (or ``conversations``, as ShareGPT has
    them), rendered by the tokenizer's chat template. Labels are the ids of the assistant's turns, up to the token that ends each, and -100
    elsewhere: what the template's ``{% generation %}`` encloses; or, where it has none, what follows the generation prompt of each turn.
    Where that can't be told with certainty it is an error of the sample. So it is where a chat has no assistant's turn, or none of it is
    left when it is cut at `max_length`. With `packing` blocks have "labels" too.

    With ``packing="bfd"`` samples are rows of whole documents, which are packed by best fit decreasing, as TRL's strategy of that name does
    it: ``{"input_ids": int64, "labels": int64, "document_ids": int32, "position_ids": int64}``, all [max_length]. Rows are the same in each
    epoch. A document that is longer than a row is cut at its end. Behind the last one is padding: id 0, document -1. Labels are -100 there,
    and at the first token of each document; position ids begin anew with each.

    Files that `headrace.pack` made of texts hold their tokens, which are mapped; or read by ranges, where they lie behind a URL (.h5,
    .hdf5, .he5). Several are read as one. All that is said of texts and tokenizer was said then.

    Args:
        data_path: a folder (searched through), a file, a glob, a URL, or a list of these: .txt, .md, .csv, .tsv, .json, .jsonl, also .gz
            and .zst. Lines and records of compressed files are read through a plain copy in `cache_dir`. Or files that `headrace.pack`
            made, or a folder of parts, or URLs.
        tokenizer: a callable from a text to a list of ids, a HuggingFace tokenizer, a `tokenizers.Tokenizer`, or what has ``encode_batch``
            or ``encode``. None: `CharTokenizer()`. Of chats: one of HuggingFace's.
        max_length: tokens of a sample: what is longer is cut; None: nothing is. `stride` and `packing` need it.
        unit: "file": each file is a document; "line": each line (blank ones too); "record": each record of .jsonl (a line), .json (an
            element of its list), .csv and .tsv (a row, named by the first); "chat": each such record. None: "record" where all files are
            .jsonl, .csv or .tsv (.gz and .zst too), or a field is named, and "chat" where besides the tokenizer has a chat template and
            the first record ``messages``; else "file"; an error where some are and some are not.
        transform: called with the sample's dict, without "labels"; of chats with them.
        loading_mode: see `LoadingMode`.
        text_field: of a record: the name of what holds the text, or a callable from the record (a dict) to its text. A record that is a
            text, as in a .json of these, needs none. Of a chat: of what holds its messages.
        target_field: of a record: what becomes "labels". Numbers stay numbers, and a column of a table that holds nothing else becomes
            numbers: `targets` is int64, or float64. Texts become class numbers, in the sorted order of the texts. What is neither, or
            both, stays as it is, and `targets` is None. All records are read once to find out.
        labels: "folders": "labels" are class numbers by first-level folder, and `classes` their names.
        stride: tokens from the beginning of a window to that of the next, at most `max_length`.
        packing: True: samples are blocks; what is left at the end of all tokens, less than a block, is not a sample. "bfd": samples are
            rows of whole documents.
        end_token: an id that is put behind each document, for `stride` and `packing`; None: none.
        newline: what ends a line: None: LF, CR or CRLF; or one of these. As Python's ``open`` has it.
        encoding, errors: of the texts, as Python has them. A byte order mark of UTF-8 is no part of a text.
        chat_template: instead of the tokenizer's own: Jinja, or the name of one of several that it has.
        **options: see `BaseDataset`, and for URLs `RemoteOptions`.

    Attributes:
        tokenizer, max_length: as they are used; of a packed file that was not made with a `CharTokenizer` the first is None.
        classes, class_to_idx: names of classes, and the number of each, where `labels` or a `target_field` of texts gives some.

    A text that takes more than a quarter of what the memory budget leaves (from 16 MiB on) is not read; that is an error of its sample.

    Raises:
        ConfigError: an argument makes no sense; a tokenizer of chats has no chat template; or files of records lie beside other texts, and
            `unit` is not given.
        DataNotFoundError: nothing there, or no text.
        AccessError: a file can't be read; or one is read through a copy, and `cache_dir` can't be written to.
        FormatError: a file is damaged, or not of its encoding; or a kind that has no records; or a table whose first line does not name
            `text_field`.
        SampleError: with `stride`, `packing` or `target_field`: a text can't be read, or tokenised, or has no target.
        RemoteError, FileChangedError: a server does not give what it was asked for; a file there is another one than when it was opened.
    """

    reads_urls = True
    collate: Callable[[list[Any]], Any] | str | None = "text"
    _format: TextUnit

    def __init__(
        self,
        data_path: DataPath,
        *,
        tokenizer: Any = None,
        max_length: int | None = None,
        unit: Literal["file", "line", "record", "chat"] | None = None,
        transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
        loading_mode: LoadingMode | ModeName = LoadingMode.LAZY,
        text_field: str | Callable[[Any], str] = records.TEXT_FIELD,
        target_field: str | None = None,
        labels: Literal["folders"] | None = None,
        stride: int | None = None,
        packing: bool | Literal["bfd"] = False,
        end_token: int | None = None,
        newline: Newline = None,
        encoding: str = "utf-8",
        errors: str = "strict",
        chat_template: str | None = None,
        **options: Unpack[PathOptions],
    ) -> None:
        check_arguments(self, data_path, options, transform=transform, loading_mode=loading_mode)
        self.data_path = data_path
        if unit is None and chat_template is not None:
            unit = "chat"
        check_text_options(max_length, unit, text_field, target_field, labels, stride, packing, end_token, newline, chat_template)
        if unit is None and (text_field != records.TEXT_FIELD or target_field is not None):
            unit = "record"
        vocabulary_of(tokenizer)  # raises where it is none
        self.tokenizer: Any = CharTokenizer() if tokenizer is None else tokenizer
        self.max_length = max_length
        self.classes: list[str] = []
        encoding = check_encoding(encoding, errors)
        reach, common = split_options(options)
        of_texts = TextOptions(
            self.tokenizer, max_length, text_field, target_field, encoding, errors, reach.cache_dir, common.get("progress"), chat_template
        )
        described: Any = {"text_field": text_field, "labels": labels, "newline": newline, "encoding": encoding, "errors": errors}
        described["chat_template"] = chat_template
        given = {"tokenizer": tokenizer, "unit": unit, "target_field": target_field, "end_token": end_token, **described}
        usual = {"text_field": records.TEXT_FIELD, "encoding": "utf-8", "errors": "strict"}
        packed = packed_tokens(data_path, {name: value for name, value in given.items() if value != usual.get(name)}, reach)
        if packed is None and text_field != records.TEXT_FIELD and unit not in ("record", CHAT):
            raise ConfigError(f"text_field={text_field!r} is a field of records: pass unit='record' or unit='chat'")
        sample_format: TextUnit
        targets: npt.NDArray[Any] | None = None
        leaves_out = options.get("on_error", "raise") != "raise"
        if packed is not None:
            self.tokenizer, self.classes, targets = tokenizer_of(packed), list(packed.info.classes or []), packed.targets
            unit_packed = packed.info.text.get("unit", "file")
            is_marked = unit_packed == CHAT
            check_chat_options(is_marked, stride, None)
            source = packed_source(packed, Cutting(max_length, stride, packing, is_marked, leaves_out))
            sample_format = unit_over(source, unit_packed, None, is_marked)
        elif packing or stride is not None:
            of_reading: Any = {name: options[name] for name in OF_READING if name in options}  # type: ignore[literal-required]
            of_reading.update(reach.keywords())
            documents = TextDataset(data_path, tokenizer=self.tokenizer, max_length=None, unit=unit, **described, **of_reading)
            check_chat_options(documents.is_of_chats, stride, labels)
            self._documents = documents
            cutting = Cutting(max_length, stride, packing, documents.is_of_chats, leaves_out)
            sample_format = parts_of(documents.tokens(end_token), documents._format, documents.text_of, cutting)
            self.classes, targets = documents.classes, None if documents.targets is None else np.asarray(documents.targets)
        else:
            sample_format = open_texts(data_path, unit, newline, reach, of_texts, options)
            check_chat_options(sample_format.is_marked, stride, labels)
            if labels is not None:
                targets, self.classes = folder_labels(sample_format.source)
            if isinstance(sample_format, RecordTexts) and sample_format.targets is not None:
                _, targets, self.classes = sample_format.targets
        if isinstance(sample_format, TokenBlocks):
            targets, self.collate = None, None
        elif targets is not None and stride is not None:
            targets = targets[sample_format.source.document_of(np.arange(len(sample_format.source)))]
        source = sample_format.source
        super().__init__(source, sample_format=sample_format, targets=targets, transform=transform, loading_mode=loading_mode, **common)
        self.class_to_idx: dict[str, int] = {name: number for number, name in enumerate(self.classes)}

    def held_as(self) -> str:
        if self._arguments.get("tokenizer") is None:
            return super().held_as()
        return describe_held(type(self), {**self._arguments, "tokenizer": self.tokenizer_identity or self.tokenizer})

    def text_of(self, index: int) -> str:
        """The text of a sample, before it is tokenised; of a window its document.

        Raises:
            SampleError: it can't be read.
            ConfigError: with `packing`: a block is of no one text.
        """
        return self._format.text_of(int(self.whole_indices(range(len(self))[index])), self.sample_reader)

    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each sample. Of what is not tokenised yet another measure stands for them: of records the characters of their texts,
        which are all read for it; of files and lines their bytes."""
        found = self._format.lengths(self.sample_reader)
        if isinstance(self.tokenizer, CharTokenizer) and self.max_length is not None:
            found = np.minimum(found, self.max_length)
        return found if self._chosen is None else found[self._chosen]
