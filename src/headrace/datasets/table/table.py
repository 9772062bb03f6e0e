"""Rows of Parquet, Arrow and NumPy files as samples."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack

import numpy as np

from headrace.casting import DTypeArgument, dtype_named
from headrace.core.checks import check_arguments
from headrace.core.decoder import Decoder, chained
from headrace.core.modes import LoadingMode, ModeName
from headrace.core.options import PathOptions, split_options
from headrace.datasets.arrays import joined_rows, joined_targets
from headrace.datasets.image.augment import image_sides, split_augment
from headrace.datasets.image.format import DEFAULT_SIZE, UNSET, ImageDecoder, check_image_options
from headrace.datasets.table.format import ColumnImage, ColumnImages, TableDecoder
from headrace.datasets.table.texts import ColumnChats, ColumnTexts, columns_along
from headrace.datasets.text.documents import TokenizedDataset
from headrace.datasets.text.options import CHAT, TextOptions, of_reading
from headrace.errors import ConfigError, FormatError
from headrace.io.paths import redact
from headrace.io.resolve.expressions import DataPath
from headrace.io.resolve.resolver import resolve
from headrace.memory.budget import MemoryBudget
from headrace.order.world import local_ranks
from headrace.storage.class_folders import warn_of_splits
from headrace.storage.table.arrays import open_arrays
from headrace.storage.table.columns import (
    holds_chats,
    holds_images,
    is_bytes,
    is_categorical,
    is_text,
)
from headrace.storage.table.files import TABLES, TableFile, classes_in, hold_arrays
from headrace.storage.table.source import TableSource, open_tables
from headrace.tokenizer import CharTokenizer

_IMAGE_OPTIONS: dict[str, Any] = {
    "image_size": UNSET,
    "color": "RGB",
    "normalize": True,
    "transform_input": "pil",
    "decode": "fast",
}
_TEXT_OPTIONS = ("tokenizer", "max_length", "chat_template", "stride", "packing", "end_token")


class TableDataset(TokenizedDataset):
    """Rows of a table as dicts of its columns. With `target_name` a sample is ``(row, target)``.

    Numbers are tensors of their dtype, lists of numbers 1-D tensors, texts str, and bytes bytes;
    lists and structs of these are lists and dicts. Row groups of Parquet files and record batches
    of Arrow files are the blocks of ``shuffle="block"``; each is decoded once for all rows of a
    batch. Record batches of local, uncompressed Arrow files are memory-mapped. A table that
    HuggingFace's `datasets` saved is opened in place.

    In NumPy files the rows of each array are samples: tensors for .npy, dicts of the arrays for
    .npz.

    Parquet and Arrow files need the package pyarrow: ``pip install 'headrace[arrow]'``.

    Args:
        data_path: a file; or several with equal columns, as a folder (searched for .parquet, .pq,
            .arrow, .feather, .npy, .npz), a glob, a pattern with braces or a list. Their rows are
            concatenated: a list's in its order, others sorted. Or fsspec URLs of such files, all on
            one server. The splits of a HuggingFace data set are separate tables.
        columns: list of column names: samples are dicts of these. One name as a str: samples are
            the values of that column. None: all columns except the targets, or, with `image_column`
            or `text_column`, only these.
        target_name: column of the targets, which is read when the table is opened.
            Dictionary-encoded texts, such as pandas categoricals, become class numbers (int64), in
            sorted order of the texts; other texts stay str.
        image_column: column of encoded images, as bytes or as structs {"bytes", "path"}, which are
            decoded as in `ImageDataset`. If no other column is read, the image itself is the
            sample's input.
        text_column: column of texts, which become ``"input_ids"`` (int64 [tokens]). If no other
            column is read, samples are those of `TextDataset`, and targets are their "labels". Or
            column of chats (lists of structs with "role" and "content"): "input_ids" and "labels"
            are those of chats in `TextDataset`, and columns "tools" and "chat_template_kwargs" are
            passed to the template.
        transform: a callable that is applied to the row (or the value, or the image).
        loading_mode: see `LoadingMode`.
        dtype: dtype that numbers are cast to in all columns, also inside lists and structs, but not
            targets, images, tokens and chats. None: unchanged.
        image_size, color, normalize, transform_input, decode: for `image_column`: see
            `ImageDataset`. If other columns are read too, `transform` receives the dict, with the
            image as a tensor.
        tokenizer, max_length, chat_template: for `text_column`: see `TextDataset`.
        stride, packing, end_token: for `text_column`, if no other column is read: samples are
            windows over the texts, or blocks of tokens, as in `TextDataset`. With `stride` a window
            has the target of its row.
        **options: see `BaseDataset`, and for URLs `RemoteOptions`.

    Attributes:
        classes, class_to_idx: class names, and their numbers, if targets are dictionary-encoded
            texts, or if HuggingFace's `datasets` stored them for `target_name` (`ClassLabel`).

    Raises:
        ConfigError: an argument is invalid, or pyarrow is missing.
        DataNotFoundError, FormatError: a file does not exist; it is damaged, or its values can't be
            samples.
        MissingNameError: there is no such column; the message lists the columns.
        SampleError: with `stride` or `packing`: a text can't be read or tokenised.
        AccessError, RemoteError: a file is not readable; a request to a server failed.
        FileChangedError: a file changed since it was opened.
        BudgetError: a decoded row group does not fit the memory budget; or tokens that can't be
            cached in `cache_dir` don't fit it.
    """

    reads_urls = True
    collate: Callable[[list[Any]], Any] | str | None = None

    def __init__(
        self,
        data_path: DataPath,
        columns: str | Sequence[str] | None = None,
        *,
        target_name: str | None = None,
        image_column: str | None = None,
        text_column: str | None = None,
        transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
        loading_mode: LoadingMode | ModeName = LoadingMode.LAZY,
        dtype: DTypeArgument | None = None,
        image_size: int | tuple[int, int] | None = UNSET,
        color: Literal["RGB", "L"] = "RGB",
        normalize: bool | Literal["host"] = True,
        transform_input: Literal["pil", "tensor", "numpy"] = "pil",
        decode: Literal["fast", "exact"] = "fast",
        tokenizer: Any = None,
        max_length: int | None = None,
        chat_template: str | None = None,
        stride: int | None = None,
        packing: bool = False,
        end_token: int | None = None,
        **options: Unpack[PathOptions],
    ) -> None:
        check_arguments(self, data_path, options, transform=transform, loading_mode=loading_mode)
        self.data_path = data_path
        for name, column in (
            ("image_column", image_column),
            ("text_column", text_column),
            ("target_name", target_name),
        ):
            if not isinstance(column, (str, type(None))):
                raise ConfigError(f"{name} must be the name of one column, or None, not {column!r}")
        images: dict[str, Any] = {
            "image_size": image_size,
            "color": color,
            "normalize": normalize,
            "transform_input": transform_input,
            "decode": decode,
        }
        if image_column is None:
            for name, usual in _IMAGE_OPTIONS.items():
                if images[name] is not usual and images[name] != usual:
                    raise ConfigError(f"{name} is for image_column: name the column")
        check_image_options(color, transform_input, decode, normalize)
        reach, common = split_options(options)
        texts = TextOptions(
            tokenizer=tokenizer,
            max_length=max_length,
            unit=None if chat_template is None else CHAT,
            stride=stride,
            packing=packing,
            end_token=end_token,
            chat_template=chat_template,
            cache_dir=reach.cache_dir,
            progress=common.get("progress"),
        )
        if text_column is None:
            for name in _TEXT_OPTIONS:
                if getattr(texts, name) is not None and getattr(texts, name) is not False:
                    raise ConfigError(f"{name} is for text_column: name the column")
        else:
            self.collate = "text"
            if tokenizer is None:
                texts = replace(texts, tokenizer=CharTokenizer())
        self.tokenizer: Any = texts.tokenizer
        self.classes: list[str] = []
        cast_to = dtype_named(dtype)
        names, is_one = _names_of(columns, image_column, text_column)
        image: ColumnImage | None = None
        if image_column is not None:
            augment = None
            if is_one:
                augment, transform = split_augment(transform)
            else:
                transform = chained(transform)
            has_transform = transform is not None or options.get("transforms") is not None
            images["augment"] = augment
            images["transformed"] = is_one and has_transform
            images["hold"] = common.get("hold")
            usage = common.get("max_memory_usage", 0.8)
            images["left"] = MemoryBudget(usage, local_world_size=local_ranks).left
            image = ColumnImage(image_column, _image_format(images, image_column, is_one))
        if texts.is_in_parts:
            if names != (text_column,):
                raise ConfigError(
                    "with stride or packing samples are tokens of one column alone: leave out "
                    "columns and image_column"
                )
            if packing and target_name is not None:
                raise ConfigError(
                    "target_name can't be given with packing: a block or row is of several rows of "
                    "the table"
                )
        files = resolve(data_path, TABLES, reach)
        warn_of_splits(files)
        shown = redact(
            data_path if isinstance(data_path, (str, bytes, os.PathLike)) else files.url(0)
        )
        source: Any
        rows: Decoder
        targets: Any = None
        if texts.is_in_parts:
            resolved: Any = files
            documents = TableDataset(
                resolved,
                text_column=text_column,
                target_name=target_name,
                tokenizer=texts.tokenizer,
                chat_template=chat_template,
                **of_reading(options),
            )
            rows, targets = self._cut(documents, texts)
            source = rows.source
        elif hold_arrays(files, shown):
            if image_column is not None or text_column is not None:
                raise ConfigError(
                    f"{shown} holds NumPy arrays, which have no columns of images or texts"
                )
            chosen = names[0] if names is not None and is_one else names
            arrays = open_arrays(files, chosen, target_name)
            source, rows = joined_rows(arrays, cast_to)
            if target_name is not None:
                of_arrays = [array.column(target_name) for array in arrays]
                paths = [array.path for array in arrays]
                targets, _ = joined_targets(of_arrays, paths, target_name)
        else:
            tables, reader = open_tables(files, shown)
            if names is None:
                names = tuple(name for name in tables[0].schema.names if name != target_name)
            if not names:
                raise FormatError(f"{tables[0].shown} has no column beside the targets")
            are_chats = text_column is not None and _are_chats(tables, text_column)
            read = names
            if are_chats:
                read = tuple(dict.fromkeys([*names, *columns_along(tables[0].schema)]))
            source = TableSource(tables, reader, read, is_one and len(read) == 1)
            kinds = {name: source.first.schema.field(name).type for name in read}
            for argument, column, fits, what in (
                ("image_column", image_column, holds_images, "images, as bytes or structs of them"),
                ("text_column", text_column, is_text, "texts or chats"),
            ):
                is_chat = are_chats and column == text_column
                if column is not None and not is_chat and not fits(kinds[column]):
                    raise FormatError(
                        f"{source.first.shown}: {argument}={column!r}: the column is of type "
                        f"{kinds[column]}, and holds no {what}"
                    )
            if are_chats and target_name is not None:
                raise ConfigError(
                    "target_name can't be given for chats, whose labels are the assistant's "
                    "tokens: leave it out"
                )
            if chat_template is not None and not are_chats:
                raise ConfigError(
                    f"chat_template is for chats, and the column {text_column!r} holds texts: "
                    "leave it out"
                )
            if target_name is not None:
                targets, self.classes = _targets(source, target_name)
            column_texts: ColumnTexts | ColumnChats | None = None
            if text_column is not None:
                of_column = ColumnChats if are_chats else ColumnTexts
                column_texts = of_column(source, texts, text_column)
                self._texts = column_texts
            if is_one and image is not None:
                rows = image.format
            elif is_one and column_texts is not None:
                rows = column_texts
            else:
                lists = [name for name, kind in kinds.items() if is_text(kind) or is_bytes(kind)]
                rows = TableDecoder(
                    source.specs, lists, is_one, image, column_texts, names, cast_to
                )
        super().__init__(
            source,
            sample_decoder=rows,
            targets=targets,
            transform=transform,
            loading_mode=loading_mode,
            **common,
        )

    def _layout_nbytes(self) -> int:
        source = self.sample_source
        return source.layout_nbytes if isinstance(source, TableSource) else source.block_nbytes

    @property
    def holds_encoded(self) -> bool:
        """True if modes "eager" and "cached" cache encoded images. Default: True if images keep
        their own size.
        """
        if self._hold is not None:
            return self._hold == "encoded"
        return isinstance(self._decoder, ImageDecoder) and self._decoder.image_size is None

    def held_nbytes(self) -> int | None:
        if self.holds_encoded or self._overridden:
            return None
        each = self._decoder.sample_nbytes()
        if isinstance(self._decoder, ImageDecoder):
            size = self._decoder.image_size
            each = None if size is None else size[0] * size[1] * self._decoder.channels
        return None if each is None else each * len(self.sample_source)


def _names_of(
    columns: Any, image_column: str | None, text_column: str | None
) -> tuple[tuple[str, ...] | None, bool]:
    """The columns that samples have (None: all), and whether samples are the values of the one
    column.
    """
    special = [name for name in (image_column, text_column) if name is not None]
    if len(set(special)) < len(special):
        raise ConfigError(f"image_column and text_column are both {image_column!r}")
    if columns is None or isinstance(columns, str):
        named = [] if columns is None else [columns]
        names = tuple(dict.fromkeys([*named, *special]))
        return names or None, len(names) == 1
    is_list = isinstance(columns, Sequence) and not isinstance(columns, bytes)
    if not is_list or not columns or not all(isinstance(name, str) for name in columns):
        raise ConfigError(
            f"columns must be the name of a column, or a list of such, not {columns!r}"
        )
    if len(set(columns)) < len(columns):
        raise ConfigError(f"columns names a column twice: {list(columns)!r}")
    return tuple(dict.fromkeys([*columns, *special])), False


def _are_chats(tables: Sequence[TableFile], column: str) -> bool:
    """True if a column of the first table with rows holds chats."""
    schema = next((table for table in tables if table.rows.any()), tables[0]).schema
    return column in schema.names and holds_chats(schema.field(column).type)


def _targets(source: TableSource, name: str) -> tuple[Any, list[str]]:
    """The targets, and the names of their classes."""
    for table in source.tables:
        table.check([name])
    values = source.column(name)
    if isinstance(values, list):
        for row, value in enumerate(values):
            if value is None:
                raise FormatError(
                    f"{source.location(row)}: target_name={name!r}: there is no value (null)"
                )
    if not is_categorical(source.first.schema.field(name).type):
        return values, classes_in(source.first.schema, name)
    classes = sorted(set(values))
    numbers = {text: number for number, text in enumerate(classes)}
    return np.array([numbers[text] for text in values], np.int64), classes


def _image_format(given: dict[str, Any], column: str, is_alone: bool) -> ImageDecoder:
    """The format of a column of images, beside which nothing is read where it `is_alone`."""
    options = dict(given)
    size = options.pop("image_size")
    augment = options["augment"]
    if size is UNSET:
        is_cropped = augment is not None and augment.size is not None
        options["image_size"] = None if options["transformed"] or is_cropped else DEFAULT_SIZE
    else:
        options["image_size"] = size and image_sides(size, "image_size", ", or None")
    options["is_size_given"] = size is not UNSET
    options["exact"] = options.pop("decode") == "exact"
    options["is_stored_decoded"] = False
    return ColumnImages(**options, column=column) if is_alone else ImageDecoder(**options)
