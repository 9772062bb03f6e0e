"""Reads texts that are compressed, or whose bytes don't show where their lines end.

Whole files are decompressed in memory. Lines are read from a plain copy, which is made once, in
`cache_dir`.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import io
import itertools
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np
import zstandard
from isal import isal_zlib

from headrace.errors import AccessError, ConfigError, FormatError, HeadraceError
from headrace.io.array_file import ArrayWriter, FileArrays, copy_of
from headrace.io.files import Files
from headrace.io.paths import redact, without_query
from headrace.memory.budget import MemoryBudget, format_size

COMPRESSED = (".gz", ".zst")
LARGE = 16 << 20
"""Bytes of a text up to which the budget is not asked."""
_VERSION = 1
_BROKEN: tuple[Any, ...] = (zlib.error, isal_zlib.error, zstandard.ZstdError)
_PIECE = 1 << 20
# compressed: what comes out of it, at most some thousand times as much, is in memory at once
_INPUT = 1 << 13


def without_compression(name: str) -> str:
    """A file's name without the ending that says how it is compressed."""
    root, ending = os.path.splitext(name)
    return root if ending.lower() in COMPRESSED else name


def is_compressed(name: str) -> bool:
    """True if the name says that the file is compressed."""
    return without_compression(name) != name


def check_encoding(encoding: str, errors: str) -> str:
    """The encoding's name as Python has it; "utf-8" for "utf-8-sig", since a mark is no part of a
    text anyway.

    Raises:
        ConfigError: there is no such encoding, or no such way to handle errors.
    """
    try:
        name = codecs.lookup(encoding).name
        codecs.getincrementaldecoder(name)
        "x".encode(name)
        codecs.lookup_error(errors)
        with contextlib.suppress(UnicodeDecodeError):
            b"\xff".decode("ascii", errors)
    # a handler for encoding alone is a TypeError
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"encoding={encoding!r}, errors={errors!r}: {error}") from None
    return "utf-8" if name == "utf-8-sig" else name


def shows_lines(encoding: str) -> bool:
    """True if bytes 10 and 13 are always line ends in this encoding, as in UTF-8 and in encodings
    of one byte per character.
    """
    if encoding in ("utf-8", "ascii"):
        return True
    if "escape" in encoding or encoding.startswith(("hz", "iso2022")):  # by escapes
        return False
    try:
        each = bytes(range(256)).decode(encoding, "replace")
    except (UnicodeError, LookupError):
        return False
    ends = [place for place, character in enumerate(each) if character in "\r\n"]
    return len(each) == 256 and ends == [10, 13]


def pieces_of(path: str, opened: BinaryIO) -> Iterator[bytes]:
    """The bytes of a file, decompressed as its name says.

    Args:
        path: of the file, or its URL.
        opened: the file, which is closed at the end.

    Raises:
        FormatError: they are damaged, or cut short.
        OSError: they can't be read.
    """
    with opened as file:
        ending = os.path.splitext(without_query(path))[1].lower()
        if ending in _STARTS:
            yield from inflated(file, path, _STARTS[ending])
        else:
            yield from iter(functools.partial(file.read, _PIECE), b"")


def decompressed(data: bytes, name: str, budget: MemoryBudget | None = None) -> bytes:
    """The content of a file that was read whole.

    Args:
        data: the file's bytes.
        name: of the file.
        budget: see `check_room`.

    Raises:
        FormatError: it is damaged, or cut short; or too large.
    """
    if not is_compressed(name):
        return data
    content = bytearray()
    for piece in pieces_of(name, io.BytesIO(data)):
        content += piece
        check_room(len(content), budget)
    return bytes(content)


def check_room(nbytes: int, budget: MemoryBudget | None) -> None:
    """Raises a FormatError if a text of so many bytes, which is read at once, is too large for the
    memory budget. (So its sample is an error, and may be skipped.)

    Args:
        nbytes: size of the text, or of the part that was read so far.
        budget: must have room for the text and for what is made of it. None: there is no limit.
    """
    if nbytes <= LARGE or budget is None:
        return
    # its bytes, its characters, their codes or ids
    most = max(LARGE, budget.available // 4)
    if nbytes > most:
        raise FormatError(
            f"its content of {format_size(nbytes)} (or more) is too large for the memory budget, "
            f"which leaves room for {format_size(most)}: split it, or raise max_memory_usage"
        )


def inflated(file: BinaryIO, path: Any, start: Callable[[], Any]) -> Iterator[bytes]:
    """The content of compressed streams, one behind the other in a file.

    Args:
        file: the file, which is read to its end.
        path: its path or URL, for messages.
        start: starts to decompress a stream: `zlib.decompressobj` and the like.

    Raises:
        FormatError: they are damaged, or cut short.
        OSError: they can't be read.
    """
    count = 0
    stream = None
    try:
        while piece := file.read(_INPUT):
            while piece:
                if stream is None:
                    piece = piece.lstrip(b"\0")  # padding
                    if not piece:
                        break
                    stream = start()
                    count += 1
                yield stream.decompress(piece)
                piece = b""
                if stream.eof:
                    piece = stream.unused_data
                    stream = None
    except _BROKEN as error:
        raise FormatError(f"{redact(path)} can't be decompressed: {error}") from None
    if stream is not None or not count:
        raise FormatError(f"{redact(path)} is cut short: the end of its stream is missing")


_STARTS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: isal_zlib.decompressobj(zlib.MAX_WBITS + 16),
    ".zst": lambda: zstandard.ZstdDecompressor().decompressobj(),
}


def plain_copy(files: Files, path: str, codec: tuple[str, str], cache_dir: str) -> FileArrays:
    """The text as a `headrace.io.array_file.copy_of` the file: in its encoding where that shows
    lines, else in UTF-8, where lone surrogates stand as they are.

    Raises:
        FormatError: the file is damaged; or a byte of it is none of the encoding; the message names
            its offset.
        Exception: see `copy_of`.
    """

    def write(writer: ArrayWriter) -> None:
        for piece in _plain_pieces(files, path, *codec):
            writer.write(np.frombuffer(piece, np.uint8))

    about = ["plain", _VERSION, *codec]
    return copy_of(files, path, about, cache_dir, write, "decompress and convert it to UTF-8")


def _plain_pieces(files: Files, path: str, encoding: str, errors: str) -> Iterator[bytes]:
    """The bytes of the copy. An error of the system while they are read is the file's."""
    fed = 0
    piece = b""
    try:
        pieces = filter(None, pieces_of(path, files.stream(path)))
        if shows_lines(encoding):  # each line is decoded later
            yield from pieces
            return
        decoder = codecs.getincrementaldecoder(encoding)(errors)
        for piece in itertools.chain(pieces, [b""]):
            yield decoder.decode(piece, not piece).encode("utf-8", "surrogatepass")
            fed += len(piece)
    except UnicodeError as error:
        where = f"a byte after offset {fed:,} is"  # of a decoder that does not say where
        reason = str(error)
        if isinstance(error, UnicodeDecodeError):
            at = fed + len(piece) - len(error.object) + error.start
            where = f"the bytes at offset {at:,} of the text are"
            reason = error.reason
        raise FormatError(
            f"{redact(path)}: {where} not {encoding}: {reason}; pass encoding= or errors="
        ) from None
    except HeadraceError:
        raise
    except OSError as error:
        raise AccessError(f"{redact(path)} can't be read: {error.strerror}") from error


def undecodable(error: UnicodeDecodeError, begin: int) -> FormatError:
    """The error of bytes that are no text, of which the first stands at `begin` in its file."""
    offset = begin + error.start
    remedy = "pass encoding= or errors="
    if offset == 0 and error.object.startswith((b"\xff\xfe", b"\xfe\xff")):
        remedy = "it begins as UTF-16 does: pass encoding='utf-16'"
    return FormatError(
        f"byte 0x{error.object[error.start]:02x} at offset {offset:,} is not {error.encoding} "
        f"({error.reason}); {remedy}"
    )
