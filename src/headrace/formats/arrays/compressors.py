"""Encodes chunks of arrays, as `headrace.formats.arrays.codecs` decodes them."""

from __future__ import annotations

import threading
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

COMPRESSIONS = ("gzip", "zstd")
"""What `compress` knows: deflate in zlib's frame, and Zstandard."""
LEVELS = {"gzip": 4, "zstd": 3}

_local = threading.local()  # compressors of zstandard are used by one thread at a time
_PLAIN = 16  # bytes of the largest number


def compress(name: str, data: npt.NDArray[np.uint8]) -> bytes:
    """Bytes ([n] uint8, C-contiguous) by one of the `COMPRESSIONS`; the same bytes give the same
    result, whatever thread does it.
    """
    if name == "gzip":
        return zlib.compress(data.data, LEVELS["gzip"])
    import zstandard

    if not hasattr(_local, "zstd"):
        _local.zstd = zstandard.ZstdCompressor(LEVELS["zstd"])
    return bytes(_local.zstd.compress(data))


def shuffles(dtype: np.dtype[Any]) -> bool:
    """True if the bytes of elements are sorted by their place in the element before they are
    compressed: numbers of several bytes.
    """
    return dtype.names is None and 1 < dtype.itemsize <= _PLAIN


def shuffled(data: npt.NDArray[np.uint8], itemsize: int) -> npt.NDArray[np.uint8]:
    """Bytes ([n] uint8) sorted by their place in elements of so many bytes: all first bytes, all
    second bytes...
    """
    return np.ascontiguousarray(data.reshape(-1, itemsize).T).reshape(-1)


def codec_versions(name: str) -> dict[str, str]:
    """The versions of what decides the bytes that `compress` gives."""
    if name == "gzip":
        return {"zlib": zlib.ZLIB_RUNTIME_VERSION}
    import zstandard

    return {"zstd": ".".join(map(str, zstandard.ZSTD_VERSION))}
