"""Decodes the stored bytes of a chunk to the bytes of its array, and encodes some.

The codecs are those that HDF5 and Zarr have in common, each a step from bytes to bytes. A step is
told how many bytes it must give, and allocates no more, whatever the data claim; any other number
is an error.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import parent_process
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from headrace.errors import FormatError, one_line

Bytes = Any
"""bytes, a memoryview of them, or a uint8 array."""

_GZIP = zlib.MAX_WBITS | 16  # the window size by which zlib knows gzip's frame
COMPRESSIONS = ("gzip", "zstd")
"""What `compress` knows: deflate in zlib's frame, and Zstandard."""
LEVELS = {"gzip": 4, "zstd": 3}
_PLAIN = 16  # bytes of the largest number


class Codec(NamedTuple):
    """One step of a pipeline.

    Attributes:
        name: for people.
        decode: called with data and the number of bytes that they must decode to (None: unknown);
            returns these bytes.
        adds: bytes by which encoding lengthens what it is given; None for a compressor, where that
            depends.
    """

    name: str
    decode: Callable[[Bytes, int | None], Bytes]
    adds: int | None = None


class Pipeline:
    """Codecs one after the other.

    Args:
        codecs: in the order in which they encoded.

    Raises:
        ValueError: sizes in between would not be known: there are two compressors, or one that is
            followed by a reordering.
    """

    def __init__(self, codecs: Sequence[Codec] = ()) -> None:
        self.codecs: tuple[Codec, ...] = tuple(codecs)
        packed = False
        for codec in self.codecs:
            if packed and codec.adds in (0, None):
                raise ValueError(f"{codec.name} works on what is compressed already")
            packed = packed or codec.adds is None

    def __bool__(self) -> bool:
        return bool(self.codecs)

    def __str__(self) -> str:
        return " + ".join(codec.name for codec in reversed(self.codecs))

    def decode(self, data: Bytes, nbytes: int, skipped: int = 0) -> npt.NDArray[np.uint8]:
        """The `nbytes` bytes that were encoded, perhaps over the memory of `data` or read-only.

        Args:
            skipped: bit i says that codec i was not used for these data.

        Raises:
            FormatError: the data are damaged; the message says how, and not where they lie.
        """
        steps: list[tuple[Codec, int | None]] = []
        size: int | None = nbytes  # of what a step must give
        for number, codec in enumerate(self.codecs):
            if not skipped >> number & 1:
                steps.append((codec, size))
                size = None if size is None or codec.adds is None else size + codec.adds
        for codec, expected in reversed(steps):
            try:
                data = codec.decode(data, expected)
            except (FormatError, MemoryError):
                raise
            except Exception as error:  # whatever a library makes of bytes that are none of its own
                raise FormatError(
                    f"{codec.name} can't decode it: {one_line(error) or type(error).__name__}"
                ) from error
        decoded = np.frombuffer(data, np.uint8)
        if len(decoded) != nbytes:
            raise FormatError(f"it decodes to {len(decoded):,} bytes, not {nbytes:,}")
        return decoded


def _inflate(wbits: int, data: Bytes, size: int | None) -> Bytes:
    """Deflate; what comes after the end of zlib's frame is ignored, as zlib does."""
    assert size is not None
    stream = isal_zlib.decompressobj(wbits)
    out = stream.decompress(data, size + 1)
    if len(out) > size:
        raise FormatError(f"it decodes to more than {size:,} bytes")
    if len(out) < size or not stream.eof:
        raise FormatError("its deflate stream is cut short")
    if wbits == _GZIP and stream.unused_data.strip(b"\0"):  # padding is allowed
        raise FormatError("there are bytes after the end of its gzip stream")
    return out


def _unshuffle(itemsize: int, data: Bytes, size: int | None) -> Bytes:
    """Puts bytes that are sorted by their place in an element back into elements; what is left
    over at the end stays as it is.
    """
    flat = np.frombuffer(_sized(data, size), np.uint8)
    count = len(flat) // itemsize
    if itemsize < 2 or count < 2:
        return flat
    out = np.empty_like(flat)
    whole = count * itemsize
    np.copyto(out[:whole].reshape(count, itemsize), flat[:whole].reshape(itemsize, count).T)
    out[whole:] = flat[whole:]
    return out


def _fletcher32(data: Bytes, size: int | None) -> Bytes:
    """Checks and removes HDF5's checksum."""
    import numcodecs

    if len(data) < 4:
        raise FormatError("it is too short for its checksum")
    try:
        decoded = numcodecs.Fletcher32().decode(np.frombuffer(data, np.uint8))
        return _sized(np.frombuffer(decoded, np.uint8), size)
    except RuntimeError as error:
        raise FormatError("wrong checksum (fletcher32), the file is damaged") from error


def _crc32c(data: Bytes, size: int | None) -> Bytes:
    """Checks and removes Zarr's checksum."""
    import google_crc32c

    whole = bytes(data)
    if len(whole) < 4 or google_crc32c.value(whole[:-4]) != int.from_bytes(whole[-4:], "little"):
        raise FormatError("wrong checksum (crc32c), the file is damaged")
    return _sized(memoryview(whole)[:-4], size)


_local = threading.local()  # what zstandard has is used by one thread at a time


def _zstd(data: Bytes, size: int | None) -> Bytes:
    """One frame of Zstandard, whose content size may be unknown."""
    assert size is not None
    if not hasattr(_local, "zstd"):
        import zstandard

        decompressor = zstandard.ZstdDecompressor()
        _local.zstd = (zstandard.frame_content_size, decompressor.decompress)
    content_size, decompress = _local.zstd
    said = content_size(data)
    if said != size and said != -1:
        raise FormatError(f"it would decode to {said:,} bytes, not {size:,}")
    if said:
        return decompress(data, max_output_size=max(1, size), allow_extra_data=False)
    return b""


def _blosc(data: Bytes, size: int | None) -> Bytes:
    """Blosc 1 with any of its compressors."""
    from numcodecs import blosc

    assert size is not None
    if parent_process() is not None:
        # a worker has its own; and the library's don't outlive a fork
        blosc.use_threads = False
    head = bytes(data[:16])
    said, packed = (int.from_bytes(head[at : at + 4], "little") for at in (4, 12))
    if len(head) < 16 or said != size or packed != len(data):
        raise FormatError(
            f"blosc's header says {packed:,} bytes that decode to {said:,}, but there are "
            f"{len(data):,} for {size:,}"
        )
    out = np.empty(size, np.uint8)
    blosc.decompress(np.frombuffer(data, np.uint8), out)
    return out


def _sized(data: Bytes, size: int | None) -> Bytes:
    if size is not None and len(data) != size:
        raise FormatError(f"it decodes to {len(data):,} bytes, not {size:,}")
    return data


INFLATE = Codec("inflate", partial(_inflate, zlib.MAX_WBITS))
GUNZIP = Codec("inflate", partial(_inflate, _GZIP))
ZSTD = Codec("zstd", _zstd)
BLOSC = Codec("blosc", _blosc)
FLETCHER32 = Codec("fletcher32", _fletcher32, 4)
CRC32C = Codec("crc32c", _crc32c, 4)


def unshuffle(itemsize: int) -> Codec:
    """The codec of elements of so many bytes."""
    return Codec("unshuffle", partial(_unshuffle, itemsize), 0)


# -- encoding


def compress(name: str, data: npt.NDArray[np.uint8]) -> bytes:
    """Bytes ([n] uint8, C-contiguous) by one of the `COMPRESSIONS`; the same bytes give the same
    result, whatever thread does it.
    """
    if name == "gzip":
        return zlib.compress(data.data, LEVELS["gzip"])
    import zstandard

    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(LEVELS["zstd"])
    return bytes(_local.compressor.compress(data))


def shuffles(dtype: np.dtype[Any]) -> bool:
    """True if the bytes of elements are sorted by their place in the element before they are
    compressed: numbers of several bytes.
    """
    return dtype.names is None and 1 < dtype.itemsize <= _PLAIN


def shuffled(data: npt.NDArray[np.uint8], itemsize: int) -> npt.NDArray[np.uint8]:
    """Bytes ([n] uint8) sorted by their place in an element: all first bytes, all second ones..."""
    return np.ascontiguousarray(data.reshape(-1, itemsize).T).reshape(-1)


def codec_versions(name: str) -> dict[str, str]:
    """The versions of what decides the bytes that `compress` gives."""
    if name == "gzip":
        return {"zlib": zlib.ZLIB_RUNTIME_VERSION}
    import zstandard

    return {"zstd": ".".join(map(str, zstandard.ZSTD_VERSION))}
