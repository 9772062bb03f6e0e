"""Decodes encoded bytes by their extension: members of tars, and columns of other containers."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import numpy as np
import torch

from headrace.core.dataset import BaseDataset
from headrace.core.decoder import Decoder
from headrace.core.options import LoadingMode, ModeName, PathOptions, check_arguments, split_options
from headrace.datasets.image.pixels import Left, decode_image, to_channels_first
from headrace.errors import ConfigError, FormatError
from headrace.formats.registry import look_up, open_columns
from headrace.formats.resolve.file_set import EXTENSIONS
from headrace.formats.resolve.resolver import DataPath, entries_of
from headrace.formats.tar import RESERVED
from headrace.formats.text.records import json_record
from headrace.formats.text.source import LinesSource
from headrace.io.paths import redact

Decoders = Mapping[str, Callable[[bytes], Any] | None]


def _image(data: bytes, left: Left | None = None) -> torch.Tensor:
    """An encoded image as uint8 [3, H, W]; see `decode_image`."""
    return torch.from_numpy(to_channels_first(decode_image(data, left=left)))


def _array(data: bytes) -> Any:
    array = np.load(io.BytesIO(data), allow_pickle=False)
    if isinstance(array, np.ndarray):
        return array
    return dict(array)


DECODERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys((ending[1:] for ending in EXTENSIONS), _image),
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), int),
    **dict.fromkeys(("txt", "text", "transcript"), bytes.decode),
    **dict.fromkeys(("json", "jsn"), json.loads),
    **dict.fromkeys(("npy", "npz"), _array),
}
"""By the last part of an extension. Pickles are not among them: whoever writes one says what the
reader runs.
"""


def decoded(data: Any, function: Callable[[bytes], Any], where: str, left: Left | None) -> Any:
    """What a function makes of encoded bytes.

    Raises:
        FormatError: it can't; the message begins with `where`.
    """
    try:
        if function is _image:
            return _image(data, left)
        return function(data)
    except MemoryError:
        raise
    except Exception as error:
        raise FormatError(f"{where}: {str(error) or type(error).__name__}") from error


class TarDecoder(Decoder):
    """Samples of tar shards as dicts, each member decoded by its extension.

    Args:
        decode: True: as `DECODERS` has it; False: nothing is; or decoders by extension ("seg.png",
            or its last part "png"), which come before those. None in place of one leaves the bytes.
        left: says what the memory budget leaves for one image.

    Raises:
        ConfigError: `decode` is none of these.
    """

    stores_values = False

    def __init__(self, decode: bool | Decoders = True, left: Left | None = None) -> None:
        if not isinstance(decode, (bool, Mapping)):
            raise ConfigError(
                f"decode must be True, False or a dict from extension to a callable, not {decode!r}"
            )
        self._decodes = decode is not False
        self._left = left
        self._decoders: dict[str, Callable[[bytes], Any] | None] = dict(DECODERS)
        for extension, function in decode.items() if isinstance(decode, Mapping) else ():
            if function is not None and not callable(function):
                raise ConfigError(
                    f"decode[{extension!r}] must be a callable that takes bytes, or None, not "
                    f"{function!r}"
                )
            self._decoders[str(extension).lower().removeprefix(".")] = function

    def decode(self, record: dict[str, Any]) -> dict[str, Any]:
        """The members decoded; key and shard as they are.

        Raises:
            FormatError: a member can't be; the message names it.
        """
        if not self._decodes:
            return record
        sample = dict(record)
        for extension, data in record.items():
            last = extension.rpartition(".")[2]
            function = self._decoders.get(extension, self._decoders.get(last))
            if function is None or extension in RESERVED:
                continue
            sample[extension] = decoded(data, function, f"member {extension!r}", self._left)
        return sample


class LineDecoder(Decoder):
    """The lines of texts as str, or the objects of JSON Lines."""

    stores_values = False

    def __init__(self, source: LinesSource) -> None:
        self._codec = source.codec
        self._is_json = source.has_records

    def decode(self, record: bytes) -> Any:
        text = record.decode(*self._codec)
        if self._is_json:
            return json_record(text, False)
        return text


class ColumnsDataset(BaseDataset):
    """Rows of a container whose format another package registered (see docs/own_format.md).

    A sample is a dict of the values of a row: arrays as tensors of their shape and dtype; encoded
    bytes decoded where the format says what they are; all else as the format gives it.

    Args:
        data_path: a path, folder, glob or URL, or a list of these.
        columns: the names of the columns that samples have. None: all. A str: samples are the
            values of this column.
        transform, loading_mode, **options: see `BaseDataset`, and for URLs `RemoteOptions`.

    Raises:
        ConfigError: an option is invalid; or the files are of a format that headrace reads itself.
        DataNotFoundError, FormatError, AccessError, RemoteError: nothing is there; it can't be
            read.
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
        reach, common = split_options(options)
        format_, files = look_up(data_path, reach)
        if format_.open is None:
            shown = redact(entries_of(data_path)[0])
            raise FormatError(f"{shown} holds {format_.name}: use {format_.dataset}")
        self._column = columns if isinstance(columns, str) else None
        if isinstance(columns, str):
            columns = [columns]
        opened = open_columns(files or data_path, format_, reach, columns or ())
        names = list(columns or opened.names)
        source = opened.rows(names) if self._column is None else opened.column(self._column)
        self._decoders = {
            name: DECODERS[opened.decoders[name]] for name in names if name in opened.decoders
        }
        super().__init__(source, transform=transform, loading_mode=loading_mode, **common)

    def decode(self, record: Any) -> Any:
        if self._column is not None:
            return self._decoded(self._column, record)
        return {name: self._decoded(name, value) for name, value in record.items()}

    def _decoded(self, column: str, value: Any) -> Any:
        decode = self._decoders.get(column)
        if decode is not None:
            return decoded(value, decode, f"column {column!r}", self.budget.left)
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            return torch.from_numpy(value)
        return value
