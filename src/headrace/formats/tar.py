"""Reads samples of tar shards, with random access.

A tar has no table: the header of each member gives the position of the next. `scanned` goes from
header to header once, and makes an index of the samples and their byte ranges. The members of a
sample are adjacent, so one read gets a sample.
"""

from __future__ import annotations

import array
import hashlib
import io
import json
import os
import posixpath
import re
import tarfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.dtypes import IntArray
from headrace.errors import FormatError, warn
from headrace.formats.files import fingerprint_names
from headrace.formats.resolve.file_set import TARS, FileSet, PackedNames
from headrace.formats.resolve.resolver import DataPath, resolve
from headrace.formats.source import Column, Description, RecordsSource
from headrace.io.files import Files
from headrace.io.index import Headers, IndexKind, indices_of
from headrace.io.paths import redact
from headrace.io.remote.options import RemoteOptions
from headrace.memory.anonymous import SharedArray

BLOCK = tarfile.BLOCKSIZE
"""Bytes of a header; members begin at multiples of it."""
RESERVED = "__key__", "__url__"
"""Fields of a record that are no members."""
_META = re.compile(rb"__[^/]*__($|/)")  # names that WebDataset keeps for itself
_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_BEHIND = 1 << 20  # bytes behind the end mark that are taken for the padding of some program

_VERSION = 3
_SHOWN = 16  # extensions that are described
_WARNINGS = {
    "links": "{count:,} members are links or devices, which have no bytes here, and are left out; "
    "the first: {shard}, {first!r}. `tar --dereference --hard-dereference` stores what they lead "
    "to",
    "behind": "{count:,} bytes follow the end mark of {shard} and are not read: were tars simply "
    "joined? `tar --concatenate` does it",
    "others": "there is no sample: members need a key and an extension, as in 'key.jpg'; {shard} "
    "has {first!r}",
}
"""By the keys of the notes of an index."""


# -- the index


class TarIndex(NamedTuple):
    """The samples of one tar: neighbouring members that share a key.

    Attributes:
        first: [samples + 1] number of each sample's first member.
        offsets: [members] where its bytes begin.
        sizes: [members] bytes.
        kinds: [members] numbers of extensions.
        keys, key_offsets: of the samples, as `PackedNames` have them.
        notes: JSON of the "extensions", in lower case, each once; and of what was left out: number,
            and name of the first, of "links" and of "others", members without key or extension; and
            of the bytes "behind" the end mark.
    """

    first: IntArray
    offsets: IntArray
    sizes: IntArray
    kinds: npt.NDArray[np.int32]
    keys: npt.NDArray[np.uint8]
    key_offsets: IntArray
    notes: npt.NDArray[np.uint8]


_TYPES = ("<i8", "<i8", "<i8", "<i4", "|u1", "<i8", "|u1")


INDEX = IndexKind("tar", _VERSION, _TYPES, lambda files, path: list(scanned(files, path)))
"""The index of a tar."""


def scanned(files: Files, path: str) -> TarIndex:
    """Makes the index of a tar from its headers.

    Raises:
        FormatError: it is no tar, damaged, cut short, compressed, or has members that can't be
            samples; the message names the offset.
        Exception: what `Files.read_into` raises.
    """
    shown = redact(path)
    notes: dict[str, list[Any]] = {"extensions": []}
    numbers: dict[str, int] = {}  # of extensions
    first = array.array("q")
    offsets = array.array("q")
    sizes = array.array("q")
    kinds = array.array("i")
    keys: list[bytes] = []
    last = b""  # the last key, in one form
    of_sample = set[int]()  # the extensions that it has by now
    for name, offset, nbytes in _files_in(Headers(files, path), shown, notes):
        folder, slash, base = name.rpartition(b"/")
        stem, dot, extension = base.partition(b".")
        if base.startswith(b".") or _META.match(name):
            # a hidden file, such as macOS adds one to each; or about the shard, and not of a sample
            continue
        if not (stem and dot):
            _leave_out(notes, "others", name)
            continue
        key = folder + slash + stem
        if _in_one_form(key) != last:
            last = _in_one_form(key)
            first.append(len(offsets))
            keys.append(key)
            of_sample = set()
        lower = os.fsdecode(extension).lower()
        number = numbers.setdefault(lower, len(numbers))
        if number in of_sample or lower in RESERVED:
            raise FormatError(
                f"{shown}: member {_text(name)!r}, whose bytes begin at {offset:,}, is the second "
                f"{_text(lower)!r} of sample {_text(key)!r}: give each sample a key of its own "
                "(the path up to the first dot of the name)"
            )
        of_sample.add(number)
        offsets.append(offset)
        sizes.append(nbytes)
        kinds.append(number)
    first.append(len(offsets))
    notes["extensions"] += numbers
    index = TarIndex(
        np.array(first),
        np.array(offsets),
        np.array(sizes),
        np.array(kinds),
        *PackedNames(keys).arrays,
        np.frombuffer(json.dumps(notes).encode(), np.uint8),
    )
    _check_together(index, keys, list(numbers), shown)
    return index


def _in_one_form(key: bytes) -> bytes:
    """The key of a sample as others may have it, too: "./a" is "a"."""
    return posixpath.normpath(key) if b"./" in key or b"//" in key else key


def _leave_out(notes: dict[str, list[Any]], what: str, name: bytes) -> None:
    notes.setdefault(what, [0, _text(name)])[0] += 1


def _check_together(
    index: TarIndex, keys: Sequence[bytes], extensions: Sequence[str], shown: str
) -> None:
    """Raises a FormatError if members with one key lie apart and have different extensions: they
    are one sample.

    If an extension comes again, it is another sample with the same key.
    """
    last: dict[bytes, int] = {}
    for number, path in enumerate(map(_in_one_form, keys)):
        earlier = last.get(path)
        last[path] = number
        if earlier is None:
            continue
        kinds = [index.kinds[slice(*index.first[at : at + 2])] for at in (earlier, number)]
        if set(kinds[0]).isdisjoint(kinds[1]):
            places = [
                f"{_text(extensions[index.kinds[at]])!r} at byte {index.offsets[at]:,}"
                for at in (index.first[earlier], index.first[number])
            ]
            raise FormatError(
                f"{shown}: the members of sample {_text(keys[earlier])!r} lie apart "
                f"({' and '.join(places)}), with others between them: write those of a sample "
                "one after the other, for example with `tar --sort=name`"
            )


def _files_in(
    headers: Headers, shown: str, notes: dict[str, list[Any]]
) -> Iterator[tuple[bytes, int, int]]:
    """Name, first byte and bytes of each file in a tar."""
    size = headers.size
    if size == 0:
        raise FormatError(
            f"{shown} is empty (0 bytes), so it is not a tar: fetch or write it again"
        )
    begin = headers.read(min(size, BLOCK))
    for magic, how in _PACKED.items():
        if begin.startswith(magic):
            raise FormatError(
                f"{shown} is compressed as a whole ({how}), so nothing in it can be read without "
                "all that comes before: unpack it (`gunzip`, `unzstd`, ...) to a .tar; images and "
                "most other samples are compressed themselves, and it hardly grows"
            )
    # what reads headers of other than the usual kind
    archive: Any = tarfile.TarFile(
        fileobj=io.BytesIO(bytes(2 * BLOCK)), encoding="utf-8", errors="surrogateescape"
    )
    archive.fileobj = headers
    at = 0
    while True:
        headers.seek(at)
        block = headers.read(BLOCK)
        if block.count(0) == BLOCK:
            behind = size - at - BLOCK
            if behind > _BEHIND:
                notes["behind"] = [behind, ""]
            return
        plain = _plain_member(block)
        if plain is not None:
            name, nbytes = plain
            data = at + BLOCK
            end = data + -(-nbytes // BLOCK) * BLOCK
        else:
            headers.seek(at)
            member = _member(archive, shown, at)
            name = os.fsencode(member.name)
            nbytes = member.size
            data = member.offset_data
            end = archive.offset
        if end > data and data + nbytes > size:
            raise FormatError(
                f"{shown} ends at byte {size:,}, and member {_text(name)!r} should go from "
                f"{data:,} to {data + nbytes:,}: it is cut short, or damaged"
            )
        if plain is not None or member.isreg():
            yield name, data, nbytes
        elif not member.isdir():
            _leave_out(notes, "links", name)
        at = end


def _member(archive: Any, shown: str, at: int) -> tarfile.TarInfo:
    """The member whose headers begin at byte `at`."""
    try:
        member = tarfile.TarInfo.fromtarfile(archive)
    except (tarfile.TarError, ValueError, IndexError) as error:
        what = "is damaged, or was not written to its end"
        if at == 0:
            what = "is not a tar, despite its name"
        raise FormatError(
            f"{shown}: the header at byte {at:,} can't be read ({error}): the file {what}"
        ) from None
    if member.size < 0 or archive.offset < member.offset_data:
        raise FormatError(
            f"{shown}: the header at byte {at:,} says that its member has {member.size:,} bytes: "
            "the file is damaged"
        )
    # it may say who wrote the tar, and no name or size
    if not archive.pax_headers.keys().isdisjoint(("path", "size")):
        raise FormatError(
            f"{shown}: a header before byte {archive.offset:,} gives all members that follow one "
            "name or size: the file is damaged"
        )
    if member.issparse() or any(name.startswith("GNU.sparse.") for name in member.pax_headers):
        raise FormatError(
            f"{shown}: member {_text(member.name)!r} at byte {at:,} is sparse (its holes are not "
            "stored): write the tar without `tar --sparse`"
        )
    return member


def _plain_member(block: bytes) -> tuple[bytes, int] | None:
    """Name and size of a file from an ordinary header, as `tarfile` reads them in many times the
    time. None: another header, which `tarfile` must read.
    """
    if block[156] != 0x30 or block[124] & 0x80:
        return None
    try:
        size = int(block[124:136].partition(b"\0")[0] or b"0", 8)
        checksum = int(block[148:156].partition(b"\0")[0] or b"0", 8)
    except ValueError:
        return None
    if size < 0 or sum(block) - sum(block[148:156]) + 8 * 0x20 != checksum:
        return None
    name, prefix = block[:100].partition(b"\0")[0], block[345:500].partition(b"\0")[0]
    return prefix + b"/" + name if prefix else name, size


def _text(name: bytes | str) -> str:
    """A printable name."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


# -- the samples


class TarSource(RecordsSource):
    """The samples of tar shards in WebDataset format: consecutive members of a shard whose names
    are equal up to the first dot.

    A record is a dict from extension (in lower case, without its first dot: "jpg", "cls",
    "seg.png") to bytes, with ``"__key__"``, the path up to that dot, and ``"__url__"``, the shard.
    Hidden files, and members without key or extension, are not part of a sample. Neither are links
    and devices, which have no bytes of their own; this is reported.

    The index is built once and cached by path, size, times and inode (or URL, size and version) of
    each shard. Only new shards are indexed again.

    Args:
        data_path: a shard, a folder (searched recursively for .tar), a glob, or a list of these:
            paths, or URLs of one server.
        reach: how URLs are reached, and where indices are cached. Without a `cache_dir` those of
            local shards are cached if they are large.
        progress: show a progress bar. None: only on a terminal.

    Raises:
        DataNotFoundError: the path does not exist, or contains no tar.
        FormatError: a tar is damaged, truncated or compressed as a whole, or has sparse members,
            two members of one name in a sample, or members of a sample that lie apart.
        AccessError: a tar can't be read.
        ConfigError: URLs and paths are mixed, or URLs of several servers.
        RemoteError: a request to a server failed.
    """

    def __init__(
        self,
        data_path: DataPath | FileSet,
        reach: RemoteOptions | None = None,
        progress: bool | None = None,
    ) -> None:
        reach = reach or RemoteOptions()
        files = resolve(data_path, TARS, reach)
        self.names: PackedNames = files.names
        self._paths, self.files = files.to_read(reach.cache_dir)
        self._shown = list(map(redact, files.urls()))
        found = indices_of(self.files, self._paths, INDEX, progress)
        indices = [TarIndex(*arrays) for arrays in found]
        self._first = np.cumsum([0, *(len(index.first) - 1 for index in indices)])
        self._bases = np.zeros(len(indices), np.int64)
        members = np.cumsum([0, *(len(index.offsets) for index in indices)])
        first = list[IntArray]()
        kinds = list[npt.NDArray[np.int32]]()
        keys = list[PackedNames | None]()
        numbers = dict[str, int]()
        noted = defaultdict[str, list[tuple[str, int, str]]](list)
        for index, start, shard in zip(indices, members[:-1], self._shown, strict=True):
            first.append(index.first[:-1] + start)
            keys.append(PackedNames.from_arrays(index.keys, index.key_offsets))
            notes = json.loads(bytes(index.notes))
            here = [numbers.setdefault(name, len(numbers)) for name in notes.pop("extensions")]
            kinds.append(np.array(here, np.int32)[index.kinds])
            for what, (count, name) in notes.items():
                noted[what].append((shard, count, name))
        self._members = SharedArray(np.concatenate([*first, members[-1:]]))  # the first of samples
        self._offsets = SharedArray(np.concatenate([index.offsets for index in indices]))
        self._sizes = SharedArray(np.concatenate([index.sizes for index in indices]))
        self._kinds = SharedArray(np.concatenate(kinds))
        self.keys: PackedNames = PackedNames.joined(keys) or PackedNames()
        self.extensions: list[str] = list(numbers)
        self._others = sum(count for _, count, _ in noted.get("others", ()))
        for what, each in noted.items():
            if what != "others" or not len(self):
                shard, _, name = each[0]
                count = sum(count for _, count, _ in each)
                warn(_WARNINGS[what].format(count=count, shard=redact(shard), first=name))

    # -- reading

    def bounds(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        last = self._members.array[rows + 1] - 1
        ends = self._offsets.array[last] + self._sizes.array[last]
        return self._offsets.array[self._members.array[rows]], ends

    def read(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        rows = np.asarray(indices, np.int64)
        views = self.files.read(self.byte_ranges(rows))
        members = self._members.array
        columns = (self.file_of(rows), members[rows], members[rows + 1])
        records = []
        for index, shard, start, stop, view in zip(
            indices, *(column.tolist() for column in columns), views, strict=True
        ):
            record: dict[str, Any] = {
                "__key__": os.fsdecode(self.keys[index]),
                "__url__": self._shown[shard],
            }
            offsets = self._offsets.array[start:stop].tolist()
            sizes = self._sizes.array[start:stop].tolist()
            kinds = self._kinds.array[start:stop].tolist()
            for kind, offset, size in zip(kinds, offsets, sizes, strict=True):
                begin = offset - offsets[0]
                record[self.extensions[kind]] = bytes(view[begin : begin + size])
            records.append(record)
        return records

    # -- what it is

    def sizes(self) -> IntArray:
        """Bytes of each sample over all its members ([n] int64)."""
        if not len(self):
            return np.zeros(0, np.int64)
        found: IntArray = np.add.reduceat(self._sizes.array, self._members.array[:-1])
        return found

    def fingerprint(self) -> str:
        """A hash of the shards' names, the samples' keys, and the extensions and sizes of their
        members.
        """
        digest = hashlib.blake2b(digest_size=16)
        extensions = PackedNames(map(os.fsencode, self.extensions))
        for names in (self.names, self.keys, extensions):
            digest.update(fingerprint_names(*names.arrays).encode())
        for numbers in (self._first, self._members.array, self._sizes.array, self._kinds.array):
            digest.update(np.ascontiguousarray(numbers, "<i8").data)
        return digest.hexdigest()

    def location(self, index: int) -> str:
        shard = int(self.file_of(np.array(index)))
        return f"{redact(self._paths[shard])}, sample {redact(self.keys[index])!r}"

    def describe(self) -> Description:
        left_out = ""
        if self._others:
            left_out = f"; {self._others:,} members have no key or no extension, and are left out"
        shards = f"{len(self._paths):,} tar shard{'s' * (len(self._paths) != 1)}"
        way = (
            f"{len(self):,} in {shards}, each read at once by an index of "
            f"{len(self._offsets):,} members{left_out}; {self.files.explain()}"
        )
        mean = self.stored_nbytes // max(1, len(self))
        extensions = ", ".join(self.extensions[:_SHOWN])
        column = Column("samples", way, extensions, read=mean)
        return Description([column], files=len(self._paths), stored=self.stored_nbytes)
