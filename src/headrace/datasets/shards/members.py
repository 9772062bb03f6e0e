"""Decodes the members of tar samples by their extension."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from headrace.datasets.core.format import SampleFormat
from headrace.datasets.image.claims import Left
from headrace.datasets.image.pixels import decode_image, to_channels_first
from headrace.errors import ConfigError, FormatError
from headrace.storage.kinds import EXTENSIONS
from headrace.storage.tar.index import RESERVED

Decoders = Mapping[str, Callable[[bytes], Any] | None]


def image_tensor(data: bytes, left: Left | None = None) -> torch.Tensor:
    """An encoded image as uint8 [3, H, W]; see `decode_image`."""
    return torch.from_numpy(to_channels_first(decode_image(data, left=left)))


def _array(data: bytes) -> Any:
    return np.load(io.BytesIO(data), allow_pickle=False)


def _arrays(data: bytes) -> dict[str, Any]:
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        return dict(file)


DECODERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys((ending[1:] for ending in EXTENSIONS), image_tensor),
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), int),
    **dict.fromkeys(("txt", "text", "transcript"), bytes.decode),
    **dict.fromkeys(("json", "jsn"), json.loads),
    "npy": _array,
    "npz": _arrays,
}
"""By the last part of an extension. Pickles are not among them: whoever writes one says what the
reader runs.
"""


class TarFormat(SampleFormat):
    """Samples of tar shards as dicts, each member decoded by its extension.

    Args:
        decode: True: as `DECODERS` has it; False: nothing is; or decoders by extension ("seg.png",
            or its last part "png"), which come before those. None in place of one leaves the bytes.
        left: says what the memory budget leaves for one image.

    Raises:
        ConfigError: `decode` is none of these.
    """

    stores_values = False
    names_warnings = True

    def __init__(self, decode: bool | Decoders = True, left: Left | None = None) -> None:
        given: dict[str, Callable[[bytes], Any] | None] = {}
        if isinstance(decode, Mapping):
            given = {
                str(extension).lower().removeprefix("."): function
                for extension, function in decode.items()
            }
        elif not isinstance(decode, bool):
            raise ConfigError(
                f"decode must be True, False or a dict from extension to a callable, not {decode!r}"
            )
        for extension, function in given.items():
            if function is not None and not callable(function):
                raise ConfigError(
                    f"decode[{extension!r}] must be a callable that takes bytes, or None, not "
                    f"{function!r}"
                )
        self._decoders, self._decodes, self._left = given, decode is not False, left

    def decode(self, record: dict[str, Any]) -> dict[str, Any]:
        """The members decoded; key and shard as they are.

        Raises:
            FormatError: a member can't be; the message names it.
        """
        if not self._decodes:
            return record
        return {extension: self._member(extension, data) for extension, data in record.items()}

    def _member(self, extension: str, data: Any) -> Any:
        function = None if extension in RESERVED else self._decoder(extension)
        if function is None:
            return data
        try:
            return image_tensor(data, self._left) if function is image_tensor else function(data)
        except MemoryError:
            raise
        except Exception as error:
            raise FormatError(
                f"member {extension!r}: {str(error) or type(error).__name__}"
            ) from error

    def _decoder(self, extension: str) -> Callable[[bytes], Any] | None:
        last = extension.rpartition(".")[2]
        for name in (extension, last):
            if name in self._decoders:
                return self._decoders[name]
        return DECODERS.get(last)


def describe_decoders(decode: bool | Decoders) -> str:
    """In words."""
    if decode is False:
        return "members are bytes"
    own = ", ".join(map(repr, decode)) if isinstance(decode, Mapping) and decode else ""
    return "members are decoded by their extension" + (f"; by your callables: {own}" if own else "")
