"""Decodes encoded bytes by their extension: of members of tars, and of columns. And lines of text
shards.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from headrace.core.decoder import Decoder
from headrace.datasets.image.claims import Left
from headrace.datasets.image.pixels import decode_image, to_channels_first
from headrace.errors import ConfigError, FormatError
from headrace.formats.kinds import EXTENSIONS
from headrace.formats.tar.index import RESERVED
from headrace.formats.text.records import json_record
from headrace.formats.text.source import LinesSource

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
