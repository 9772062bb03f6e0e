"""Decodes encoded bytes by their extension: members of tars, and columns of other containers."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import numpy as np
import torch

from headrace.core.dataset import BaseDataset
from headrace.core.decoder import Decoder
from headrace.core.options import LoadingMode, ModeName, PathOptions, check_arguments
from headrace.datasets.arrays import as_input
from headrace.datasets.pixels import Left, decode_image
from headrace.datasets.resizing import to_channels_first
from headrace.errors import ConfigError, FormatError
from headrace.formats.registry import detect, open_columns
from headrace.formats.resolve.file_set import EXTENSIONS
from headrace.formats.resolve.resolver import DataPath, entries_of
from headrace.formats.tar import RESERVED
from headrace.formats.text.plain import decompressed, is_compressed, without_compression
from headrace.formats.text.records import json_record
from headrace.formats.text.source import LinesSource
from headrace.io.paths import redact
from headrace.io.remote.options import RemoteOptions
from headrace.memory.budget import MemoryBudget
from headrace.order.world import local_ranks

Decode = Callable[[bytes], Any]
Decoders = Mapping[str, Decode | None]


def _image(data: bytes, left: Left | None = None) -> torch.Tensor:
    """An encoded image as uint8 [3, H, W]; see `decode_image`."""
    return torch.from_numpy(to_channels_first(decode_image(data, left=left)))


def _array(data: bytes) -> Any:
    array = np.load(io.BytesIO(data), allow_pickle=False)
    if isinstance(array, np.ndarray):
        return array
    return dict(array)


DECODERS: dict[str, Decode] = {
    **dict.fromkeys((ending[1:] for ending in EXTENSIONS), _image),
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), int),
    **dict.fromkeys(("txt", "text", "transcript"), bytes.decode),
    **dict.fromkeys(("json", "jsn"), json.loads),
    **dict.fromkeys(("npy", "npz"), _array),
}
"""Decoders by the last part of an extension. There is none for pickles, which can run any code."""


def checked_decoders(decode: Any) -> dict[str, Decode | None]:
    """The decoders of bytes, by column (None: they stay bytes).

    Raises:
        ConfigError: `decode` is not a dict, or has a value other than a callable, an extension or
            None.
    """
    if not isinstance(decode, Mapping):
        raise ConfigError(
            "decode must be a dict from a column or an extension to what decodes its bytes, not "
            f"{decode!r}"
        )
    found = {}
    for name, wanted in decode.items():
        function = DECODERS.get(wanted, wanted) if isinstance(wanted, str) else wanted
        if function is not None and not callable(function):
            raise ConfigError(
                f"decode[{name!r}] must be a callable that takes bytes, None, or one of "
                f"{', '.join(DECODERS)}, not {wanted!r}"
            )
        found[name] = function
    return found


class BytesDecoder(Decoder):
    """Decodes encoded bytes in rows (dicts of columns), or in the values of one column.

    Args:
        decoders: decoders of bytes, by column. None: they stay bytes.
        column: the column whose values are the records. None: records are dicts.
        left: returns the remaining memory budget.
    """

    stores_values = False
    kind = "column"
    """The word for a column in messages."""

    def __init__(
        self, decoders: Decoders, column: str | None = None, left: Left | None = None
    ) -> None:
        image = functools.partial(_image, left=left)
        self.decoders: dict[str, Decode | None] = {
            name: image if function is _image else function for name, function in decoders.items()
        }
        self.column = column

    def decoder_of(self, name: str) -> Decode | None:
        """The decoder of a column's bytes, or None."""
        return self.decoders.get(name)

    def decode(self, record: Any) -> Any:
        """Decodes the bytes in a row.

        Raises:
            FormatError: a value can't be decoded; the message names its column.
        """
        if self.column is not None:
            return self._decoded(self.column, record)
        return {name: self._decoded(name, value) for name, value in record.items()}

    def _decoded(self, name: str, value: Any) -> Any:
        function = self.decoder_of(name)
        if function is None:
            return value
        data = value.get("bytes") if isinstance(value, dict) else value
        if data is None:
            raise FormatError(f"{self.kind} {name!r} is null")
        try:
            return function(data)
        except MemoryError:
            raise
        except Exception as error:
            why = str(error) or type(error).__name__
            raise FormatError(f"{self.kind} {name!r}: {why}") from error


class MemberDecoder(BytesDecoder):
    """Decodes samples of tar shards, dicts of members: each member by its extension, or the last
    part of it, as in `DECODERS`. "gz" and "zst" members are decompressed first, and the part before
    decides.

    Args:
        decode: True: decode all members. False: leave all bytes as they are. Or decoders by
            extension ("seg.png", or its last part "png"), which take precedence.
        budget: memory budget of an image and of a decompressed member. None: no limit.

    Raises:
        ConfigError: `decode` is something else.
    """

    kind = "member"

    def __init__(self, decode: bool | Decoders = True, budget: MemoryBudget | None = None) -> None:
        decoders = dict[str, Decode | None]()
        if decode is not False:
            decoders.update(DECODERS)
        if not isinstance(decode, bool):
            for extension, function in checked_decoders(decode).items():
                decoders[str(extension).lower().removeprefix(".")] = function
        super().__init__(decoders, left=None if budget is None else budget.left)
        self._budget = budget
        self._decompresses = decode is not False

    def decoder_of(self, name: str) -> Decode | None:
        if name in RESERVED:
            return None
        for extension in (name, name.rpartition(".")[2]):
            if extension in self.decoders:
                return self.decoders[extension]
        if self._decompresses and is_compressed(name):
            return functools.partial(self._decode_compressed, name)
        return None

    def _decode_compressed(self, name: str, data: bytes) -> Any:
        content = decompressed(data, name, self._budget)
        function = self.decoder_of(without_compression(name))
        if function is None:
            return content
        return function(content)


class LineDecoder(Decoder):
    """Decodes lines of texts to str, or JSON Lines to their objects."""

    stores_values = False

    def __init__(self, source: LinesSource) -> None:
        self._codec = source.codec
        self._is_json = source.has_records

    def decode(self, record: bytes) -> Any:
        text = record.decode(*self._codec)
        if self._is_json:
            return json_record(text)
        return text


class ColumnsDataset(BaseDataset):
    """Rows of the shards of MosaicML Streaming (MDS) and LitData, of TFRecord files, and of
    containers whose format another package registered (see docs/own_format.md).

    A sample is a dict of the values of a row. Arrays become tensors of their shape and dtype.
    Encoded bytes are decoded if the format names their type. Everything else is unchanged.

    Args:
        data_path: a path, folder, glob or URL, or a list of these.
        columns: the names of the columns that samples have. None: all. A str: samples are the
            values of this column.
        transform, loading_mode, **options: see `BaseDataset`, and for URLs `RemoteOptions`.

    Raises:
        ConfigError: an option is invalid.
        DataNotFoundError, FormatError, AccessError, RemoteError: the path does not exist, or can't
            be read.
        MissingNameError: there is no such column.
    """

    reads_urls = True

    def __init__(
        self,
        data_path: DataPath,
        columns: str | Sequence[str] | None = None,
        *,
        transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
        loading_mode: LoadingMode | ModeName = LoadingMode.LAZY,
        **options: Unpack[PathOptions],
    ) -> None:
        check_arguments(self, data_path, options, transform=transform, loading_mode=loading_mode)
        reach, common = RemoteOptions.split(options)
        files = detect(data_path, reach)
        kind = files.kind
        if kind.open is None:
            shown = redact(entries_of(data_path)[0])
            raise FormatError(f"{shown} holds {kind.name}: use {kind.dataset}")
        one = None
        if isinstance(columns, str):
            one = columns
            columns = [columns]
        elif columns is not None and not isinstance(columns, Sequence):
            raise ConfigError(f"columns must be a name or a list of names, not {columns!r}")
        opened = open_columns(files, reach, columns or ())
        source = opened.rows(list(columns or opened.names))
        if one is not None:
            source = opened.column(one)
        budget = MemoryBudget(options.get("max_memory_usage", 0.8), local_world_size=local_ranks)
        decoders = {name: DECODERS[kind] for name, kind in opened.decoders.items()}
        super().__init__(
            source,
            sample_decoder=_RowDecoder(decoders, one, budget.left),
            transform=transform,
            loading_mode=loading_mode,
            **common,
        )


class _RowDecoder(BytesDecoder):
    """Arrays as tensors, and bytes decoded, also those in lists."""

    def _decoded(self, name: str, value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, list) and self.decoder_of(name) is not None:
            return [self._decoded(name, one) for one in value]
        return as_input(super()._decoded(name, value))
