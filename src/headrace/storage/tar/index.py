"""The samples of a tar, and where their bytes lie.

A tar has no table: each member has a header, which says how far it is to the next one. `scanned` goes from header to header; it says
which bytes it wants to see, and whoever drives it brings them, from a file or a server, of many tars at once.
"""

from __future__ import annotations

import array
import json
import os
import re
import tarfile
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import FormatError
from headrace.io.packed_strings import NamesBuilder, PackedNames

BLOCK = tarfile.BLOCKSIZE
"""Bytes of a header; members begin at multiples of it."""
RESERVED = "__key__", "__url__"
"""Fields of a record that are no members."""
_LONGEST = 1 << 20  # bytes of a header's extension, such as a long name; a damaged length would ask for anything
_TOGETHER = 1 << 14  # keys that are Python objects at the same time
_OF_THE_NEXT = frozenset({tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK})
"""Headers that say something of the next member, or of all that follow."""
_META = re.compile(rb"__[^/]*__($|/)")  # names that WebDataset keeps for itself
_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_BEHIND = 1 << 20  # bytes behind the end mark that are taken for the padding of some program

Wanted = tuple[int, int]
"""Offset and number of bytes."""


@dataclass(frozen=True, slots=True)
class TarIndex:
    """The samples of one tar: consecutive members that share a key."""

    first: npt.NDArray[np.int64]
    """[samples + 1] number of each sample's first member."""
    offsets: npt.NDArray[np.int64]
    """[members] where its bytes begin."""
    sizes: npt.NDArray[np.int64]
    """[members] bytes."""
    kinds: npt.NDArray[np.int32]
    """[members] numbers of `extensions`."""
    keys: PackedNames
    """[samples]"""
    extensions: PackedNames
    """In lower case, each once."""
    notes: dict[str, Any]
    """What was left out: {"links": number, "link": name of the first, "others": number of members without key or extension,
    "other": name of the first, "behind": bytes behind the end mark}."""

    TYPES = ("<i8", "<i8", "<i8", "<i4", "|u1", "<i8", "|u1", "<i8", "|u1")
    """Of `arrays`."""

    def arrays(self) -> list[npt.NDArray[Any]]:
        """All of it as arrays, to be kept."""
        notes = np.frombuffer(json.dumps(self.notes).encode(), np.uint8)
        return [self.first, self.offsets, self.sizes, self.kinds, *self.keys.arrays, *self.extensions.arrays, notes]

    @classmethod
    def from_arrays(cls, arrays: list[npt.NDArray[Any]]) -> TarIndex:
        """What `arrays` gave.

        Raises:
            ValueError: it can't have been that.
        """
        first, offsets, sizes, kinds, keys, key_offsets, extensions, extension_offsets, notes = arrays
        if not (len(first) == len(key_offsets) and len(offsets) == len(sizes) == len(kinds) == (first[-1] if len(first) else -1)):
            raise ValueError("the arrays don't fit one another")
        names = PackedNames.from_arrays(keys, key_offsets), PackedNames.from_arrays(extensions, extension_offsets)
        return cls(first, offsets, sizes, kinds, *names, json.loads(bytes(notes)))


def scanned(shown: str, size: int) -> Generator[Wanted, bytes | memoryview, TarIndex]:
    """Goes through the headers of a tar.

    Args:
        shown: the tar, for messages.
        size: its bytes.

    Yields:
        offset and number of the bytes that it wants to be sent, which lie inside of the tar.

    Raises:
        FormatError: it is no tar, or a damaged one, cut short, compressed, or holds what can't be a sample; the message names the offset.
    """
    found, at = _Found(shown), 0
    overrides: list[dict[bytes, bytes]] = []  # what extensions say of the next member, the first one being the outermost
    if size == 0:
        raise FormatError(f"{shown} is empty (0 bytes), and so no tar: was it written to its end?")
    begin = bytes((yield 0, min(size, BLOCK)))
    if (how := next((name for magic, name in _PACKED.items() if begin.startswith(magic)), None)) is not None:
        raise compressed(shown, how)
    while True:
        if at + BLOCK > size:
            what = "within a header" if at < size else "without the mark of a tar's end"
            raise FormatError(f"{shown} ends at byte {size:,} {what}: it is cut short, copy or write it again")
        block = bytes((yield at, BLOCK))
        if block.count(0) == BLOCK:
            if overrides:
                raise FormatError(f"{shown}: the header at byte {at:,} should describe a member, and is empty: the file is damaged")
            return found.index(size - at - BLOCK)
        data = at + BLOCK
        if not overrides and (plain := _plain_member(block)) is not None:
            name, nbytes = plain
            if data + nbytes > size:
                raise _cut(shown, f"member {_text(name)!r}", data, nbytes, size)
            found.add(name, data, nbytes)
            at = data + _up(nbytes)
            continue
        member = _header(block, shown, at)
        if member.type in _OF_THE_NEXT:
            if member.size > _LONGEST:
                raise FormatError(f"{shown}: the header at byte {at:,} says that {member.size:,} bytes of names follow: it is damaged")
            if data + member.size > size:
                raise _cut(shown, "the names", data, member.size, size)
            said = bytes((yield data, member.size)) if member.size else b""
            if member.type == tarfile.GNUTYPE_LONGNAME:
                overrides.append({b"path": said.partition(b"\0")[0]})
            elif member.type == tarfile.XGLTYPE:
                _check_global(_pax(said, shown, data), shown, at)
            elif member.type != tarfile.GNUTYPE_LONGLINK:
                overrides.append(_pax(said, shown, data))
            at = data + _up(member.size)
            continue
        name, nbytes = os.fsencode(member.name), member.size
        for extension in reversed(overrides):
            if any(keyword.startswith(b"GNU.sparse.") for keyword in extension):
                raise _sparse(shown, extension.get(b"GNU.sparse.name", name), at)
            name = extension.get(b"path", name).rstrip(b"/")
            if b"size" in extension:
                nbytes = _number(extension[b"size"], shown, at)
        overrides = []
        if member.type == tarfile.GNUTYPE_SPARSE:
            raise _sparse(shown, name, at)
        has_data = member.isreg() or member.type not in tarfile.SUPPORTED_TYPES
        if has_data and data + nbytes > size:
            raise _cut(shown, f"member {_text(name)!r}", data, nbytes, size)
        if member.isreg():
            found.add(name, data, nbytes)
        elif not member.isdir():
            found.leave_out("link", name)
        at = data + (_up(nbytes) if has_data else 0)


class _Found:
    """What was found of a tar so far."""

    def __init__(self, shown: str) -> None:
        self._shown = shown
        self._first, self._offsets, self._sizes = array.array("q"), array.array("q"), array.array("q")
        self._kinds = array.array("i")
        self._keys, self._new_keys = NamesBuilder(), list[bytes]()
        self._numbers: dict[str, int] = {}  # of extensions
        self._key: bytes | None = None
        self._of_sample: set[int] = set()
        self._notes: dict[str, Any] = {"links": 0, "link": "", "others": 0, "other": "", "behind": 0}

    def leave_out(self, what: str, name: bytes) -> None:
        self._notes[what] = self._notes[what] or _text(name)
        self._notes[f"{what}s"] += 1

    def add(self, name: bytes, offset: int, nbytes: int) -> None:
        """A member that is a file."""
        folder, slash, base = name.rpartition(b"/")
        stem, dot, extension = base.partition(b".")
        if base.startswith(b".") or _META.match(name):
            return  # a hidden file, such as macOS adds one to each; or about the shard, and not of a sample
        if not (stem and dot):
            self.leave_out("other", name)
            return
        key = folder + slash + stem
        lower = os.fsdecode(extension).lower()
        number = self._numbers.setdefault(lower, len(self._numbers))
        if key != self._key:
            self._key, self._of_sample = key, set()
            self._first.append(len(self._offsets))
            self._new_keys.append(key)
            if len(self._new_keys) == _TOGETHER:
                self._flush()
        if number in self._of_sample or lower in RESERVED:
            raise FormatError(
                f"{self._shown}: member {_text(name)!r}, whose bytes begin at {offset:,}, is the second {_text(lower)!r} of sample "
                f"{_text(key)!r}: give each sample a key of its own (the path up to the first dot of the name)"
            )
        self._of_sample.add(number)
        self._offsets.append(offset)
        self._sizes.append(nbytes)
        self._kinds.append(number)

    def _flush(self) -> None:
        self._keys.extend(self._new_keys)
        self._new_keys.clear()

    def index(self, behind: int) -> TarIndex:
        self._flush()
        self._first.append(len(self._offsets))
        self._notes["behind"] = behind if behind > _BEHIND else 0
        columns = [np.array(column, np.int64) for column in (self._first, self._offsets, self._sizes)]
        extensions = PackedNames(map(os.fsencode, self._numbers))
        return TarIndex(
            columns[0], columns[1], columns[2], np.array(self._kinds, np.int32), self._keys.build(), extensions, self._notes
        )  # fmt: skip


def _plain_member(block: bytes) -> tuple[bytes, int] | None:
    """Name and size of a file, of the usual kind of header; None: `_header` is to look at it. As that, at a fraction of the time."""
    if block[156] != 0x30 or block[124] & 0x80:
        return None
    try:
        size, checksum = int(block[124:136].partition(b"\0")[0] or b"0", 8), int(block[148:156].partition(b"\0")[0] or b"0", 8)
    except ValueError:
        return None
    if size < 0 or sum(block) - sum(block[148:156]) + 8 * 0x20 != checksum:
        return None
    name, prefix = block[:100].partition(b"\0")[0], block[345:500].partition(b"\0")[0]
    return prefix + b"/" + name if prefix else name, size


def _header(block: bytes, shown: str, at: int) -> tarfile.TarInfo:
    try:
        member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        what = "is no tar, whatever its name says" if at == 0 else "is damaged, or was not written to its end"
        raise FormatError(f"{shown}: the header at byte {at:,} is none ({error}): the file {what}") from None
    if member.size < 0:
        raise FormatError(f"{shown}: the header at byte {at:,} says that its member has {member.size:,} bytes: the file is damaged")
    return member


def compressed(shown: str, how: str) -> FormatError:
    """Why no compressed tar is read."""
    return FormatError(
        f"{shown} is compressed as a whole ({how}), so nothing in it can be read without all that comes before: unpack it "
        "(`gunzip`, `unzstd`, ...) to a .tar; images and most other samples are compressed themselves, and it hardly grows"
    )


def _cut(shown: str, what: str, begin: int, nbytes: int, size: int) -> FormatError:
    return FormatError(
        f"{shown} ends at byte {size:,}, and {what} should go from {begin:,} to {begin + nbytes:,}: it is cut short, or damaged"
    )


def _sparse(shown: str, name: bytes, at: int) -> FormatError:
    return FormatError(
        f"{shown}: member {_text(name)!r} at byte {at:,} is sparse (its holes are not stored): write the tar without `tar --sparse`"
    )


def _pax(data: bytes, shown: str, begin: int) -> dict[bytes, bytes]:
    """The keywords of an extended header: ``length keyword=value`` and an LF, one after the other."""
    found, at = dict[bytes, bytes](), 0
    while at < len(data) and data[at]:
        length, space, _ = data[at : at + 20].partition(b" ")
        end = at + (int(length) if length.isdigit() else 0)
        keyword, equals, value = data[at + len(length) + 1 : end - 1].partition(b"=")
        if not (space and equals and keyword and end <= len(data) and data[end - 1 : end] == b"\n"):
            raise FormatError(f"{shown}: the extended header at byte {begin + at:,} can't be understood: the file is damaged")
        found[keyword] = value
        at = end
    return found


def _check_global(said: dict[bytes, bytes], shown: str, at: int) -> None:
    """Headers for all members that follow may say who wrote the tar, and no name or size."""
    wrong = [keyword for keyword in said if keyword in (b"path", b"size") or keyword.startswith(b"GNU.sparse.")]
    if wrong:
        raise FormatError(f"{shown}: the header at byte {at:,} gives all members that follow one {_text(wrong[0])}: the file is damaged")


def _number(value: bytes, shown: str, at: int) -> int:
    if not value.isdigit() or len(value) > 18:
        raise FormatError(f"{shown}: the extended header of byte {at:,} says a size of {_text(value)!r}: the file is damaged")
    return int(value)


def _up(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK


def _text(name: bytes | str) -> str:
    """A name as it may be printed."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
