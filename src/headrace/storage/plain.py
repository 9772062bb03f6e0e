"""How is a text read that is compressed, or whose bytes don't show where its lines end?

Whole: in memory. Line by line: from a copy in plain UTF-8, which is made once, in `cache_dir`.
"""

from __future__ import annotations

import codecs
import os
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
import zstandard
from isal import igzip, igzip_lib

from headrace.errors import AccessError, ConfigError, FormatError
from headrace.storage.kept import UntrustedError
from headrace.storage.mapped import MappedArrays, MappedFile
from headrace.storage.paths import redact

COMPRESSED = (".gz", ".zst")
_VERSION = 1
_BROKEN: tuple[Any, ...] = (zlib.error, igzip.BadGzipFile, igzip_lib.IsalError)
_PIECE = 1 << 20


def without_compression(name: str) -> str:
    """A file's name without the ending that says how it is compressed."""
    root, ending = os.path.splitext(name)
    return root if ending.lower() in COMPRESSED else name


def is_compressed(name: str) -> bool:
    """Does the name say that the file is compressed?"""
    return without_compression(name) != name


def check_encoding(encoding: str, errors: str) -> str:
    """The encoding's name as Python has it.

    Raises:
        ConfigError: there is no such encoding, or no such way to handle errors.
    """
    try:
        name = codecs.lookup(encoding).name
        codecs.lookup_error(errors)
        "x".encode(name)
    except (LookupError, TypeError) as error:
        raise ConfigError(f"encoding={encoding!r}, errors={errors!r}: {error}") from None
    return name


def shows_lines(encoding: str) -> bool:
    """Is a byte 10 or 13 the end of a line in this encoding, and nothing else ever? So in UTF-8, and where each byte is a character."""
    if encoding in ("utf-8", "ascii"):
        return True
    try:
        lines = "\n".encode(encoding) == b"\n" and "\r".encode(encoding) == b"\r"
        return lines and len(bytes(range(256)).decode(encoding, "replace")) == 256 and len("\u00e9".encode(encoding, "replace")) == 1
    except (UnicodeError, LookupError):
        return False


def pieces_of(path: str | bytes) -> Iterator[bytes]:
    """The bytes of a file, decompressed as its name says.

    Raises:
        FormatError: they are damaged, or cut short.
        OSError: they can't be read.
    """
    with open(path, "rb") as file:
        ending = os.path.splitext(os.fsdecode(path))[1].lower()
        yield from {".gz": _from_gzip, ".zst": _from_zstd}.get(ending, _as_it_is)(file, path)


def decompressed(data: bytes, name: str) -> bytes:
    """The content of a file that was read whole.

    Raises:
        FormatError: it is damaged, or cut short.
    """
    import io

    ending = os.path.splitext(name)[1].lower()
    return b"".join({".gz": _from_gzip, ".zst": _from_zstd}.get(ending, _as_it_is)(io.BytesIO(data), name))


def _as_it_is(file: BinaryIO, _: Any) -> Iterator[bytes]:
    while piece := file.read(_PIECE):
        yield piece


def _from_gzip(file: BinaryIO, path: Any) -> Iterator[bytes]:
    try:
        with igzip.open(file, "rb") as opened:
            while piece := opened.read(_PIECE):
                yield piece
    except EOFError:
        raise FormatError(f"{redact(path)} is cut short: the end of its gzip stream is missing") from None
    except _BROKEN as error:
        raise FormatError(f"{redact(path)} is no sound gzip file: {error}") from None


def _from_zstd(file: BinaryIO, path: Any) -> Iterator[bytes]:
    frame, is_fed = zstandard.ZstdDecompressor().decompressobj(), False
    try:
        while piece := file.read(_PIECE):
            while piece:
                yield frame.decompress(piece)
                is_fed, piece = True, b""
                if frame.eof:
                    piece, frame, is_fed = frame.unused_data, zstandard.ZstdDecompressor().decompressobj(), False
    except zstandard.ZstdError as error:
        raise FormatError(f"{redact(path)} is no sound zstd file: {error}") from None
    if is_fed:
        raise FormatError(f"{redact(path)} is cut short: the end of its zstd frame is missing")


def plain_copy(path: str, encoding: str, errors: str, cache_dir: str) -> MappedArrays:
    """The text in UTF-8 as the long array (uint8) of a file in `cache_dir`; lone surrogates stand there as they are.

    Raises:
        FormatError: the file is damaged, or a byte of it is none of the encoding; the message names its offset.
        AccessError: the file can't be read, or `cache_dir` not written to.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise AccessError(f"{redact(path)} can't be read: {error.strerror}") from error
    about = [_VERSION, os.path.realpath(path), status.st_size, status.st_mtime_ns, encoding, errors]
    kept = MappedFile(cache_dir, "plain", {"of": about})
    try:
        return kept.open()
    except (OSError, UntrustedError):
        pass
    try:
        with kept.writing("u1") as writer:
            for piece in _in_utf8(path, encoding, errors):
                writer.write(np.frombuffer(piece, np.uint8))
        return kept.open()
    except OSError as error:
        said = f"{redact(path)} is read through a plain copy of its text, in {redact(cache_dir)}, which can't be made ({error.strerror})"
        raise AccessError(f"{said}: pass another cache_dir=, or decompress and convert the file to UTF-8") from error


def _in_utf8(path: str, encoding: str, errors: str) -> Iterator[bytes]:
    if shows_lines(encoding):  # decoded line by line, later
        yield from pieces_of(path)
        return
    decoder, fed = codecs.getincrementaldecoder(encoding)(errors), 0
    try:
        for piece in (*pieces_of(path), None):
            text = decoder.decode(piece or b"", piece is None)
            fed += len(piece or b"")
            yield text.encode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        at = fed + len(piece or b"") - len(error.object) + error.start
        raise FormatError(
            f"{redact(path)}: the bytes at offset {at:,} are no {encoding}: {error.reason}; say encoding= or errors="
        ) from None
