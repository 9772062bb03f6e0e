"""The index of a tar: its samples, and where their bytes lie.

A tar has no table: each member has a header, which says how far it is to the next one. `scanned`
goes from header to header.
"""

from __future__ import annotations

import array
import functools
import io
import json
import logging
import os
import posixpath
import re
import tarfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from headrace.display import progress_bar
from headrace.errors import AccessError, FormatError, HeadraceError
from headrace.io.array_file import ArrayFile, Unkept
from headrace.io.files import Files
from headrace.io.index import IndexKind, index_of, learn_indexed
from headrace.io.packed_strings import NamesBuilder, PackedNames
from headrace.io.paths import cache_folder, redact
from headrace.io.ranges import ByteRanges
from headrace.io.remote_files import RemoteFiles

BLOCK = tarfile.BLOCKSIZE
"""Bytes of a header; members begin at multiples of it."""
RESERVED = "__key__", "__url__"
"""Fields of a record that are no members."""
# bytes of a header's extension, such as a long name; a damaged length would ask for anything
_LONGEST = 1 << 20
_TOGETHER = 1 << 14  # keys that are Python objects at the same time
_META = re.compile(rb"__[^/]*__($|/)")  # names that WebDataset keeps for itself
_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_BEHIND = 1 << 20  # bytes behind the end mark that are taken for the padding of some program

KEPT_FROM = 1 << 12
"""Members from which on an index is cached without a `cache_dir` too, in the user's cache
folder: fewer are read in a tenth of a second.
"""
THREADS = 16
"""Remote tars whose headers are read at the same time."""
_VERSION = 2
_log = logging.getLogger(__name__)

_LOCAL = 64 << 10, 4 << 10, 256 << 10, 256 << 10
_REMOTE = 1 << 20, 16 << 10, 1 << 20, 16 << 20  # a round trip takes as long as some 100 kB or more
"""How much is read at a time: bytes from one header to the next that are rather read than left out;
bytes that are read where the next header is farther away; where headers are near, bytes that are
read at first, and after these were doubled some times.
"""


@dataclass(frozen=True, slots=True)
class TarIndex:
    """The samples of one tar: neighbouring members that share a key."""

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
    """What was left out: {"links": number, "link": name of the first, "others": number of members
    without key or extension, "other": name of the first, "behind": bytes behind the end mark}.
    """

    TYPES = ("<i8", "<i8", "<i8", "<i4", "|u1", "<i8", "|u1", "<i8", "|u1")
    """Of `arrays`."""

    def arrays(self) -> list[npt.NDArray[Any]]:
        """All of it, to be cached."""
        notes = np.frombuffer(json.dumps(self.notes).encode(), np.uint8)
        return [
            self.first,
            self.offsets,
            self.sizes,
            self.kinds,
            *self.keys.arrays,
            *self.extensions.arrays,
            notes,
        ]

    @classmethod
    def from_arrays(cls, arrays: list[npt.NDArray[Any]]) -> TarIndex:
        """From what `arrays` gave; a ValueError if it can't have been that."""
        first, offsets, sizes, kinds, keys, key_offsets, extensions, extension_offsets, notes = (
            arrays
        )
        if not (
            len(first) == len(key_offsets)
            and len(offsets) == len(sizes) == len(kinds) == (first[-1] if len(first) else -1)
        ):
            raise ValueError("the arrays don't fit one another")
        names = (
            PackedNames.from_arrays(keys, key_offsets),
            PackedNames.from_arrays(extensions, extension_offsets),
        )
        return cls(first, offsets, sizes, kinds, *names, json.loads(bytes(notes)))


def tar_indices(
    files: Files,
    paths: Sequence[str],
    cache_dir: str | os.PathLike[str] | None,
    progress: bool | None,
) -> list[TarIndex]:
    """The indices of tars, cached or made now; of remote ones several at the same time.

    Args:
        files: by which they are read.
        paths: of the tars.
        cache_dir: where indices of local tars are cached; None: the user's cache folder, for large
            ones.
        progress: show a progress bar; None: only on a terminal.

    Raises:
        Exception: see `scanned`.
    """
    make: Callable[[str], TarIndex]
    if files.is_remote:
        server = cast(RemoteFiles, files)
        learn_indexed(server, paths, INDEX)
        make = functools.partial(_remote_index, server)
    else:
        make = functools.partial(_local_index, files, cache_dir)
    sizes = [files.version(path).size for path in paths]
    bar = progress_bar(
        progress, total=sum(sizes), desc="reading tar headers", unit="B", unit_scale=True, delay=1
    )
    indices = list[TarIndex]()
    with (
        bar,
        ThreadPoolExecutor(
            min(THREADS, len(paths)) if files.is_remote else 1, "headrace-tar-index"
        ) as pool,
    ):
        for index, size in zip(pool.map(make, paths), sizes, strict=True):
            indices.append(index)
            bar.update(size)
    return indices


def _local_index(files: Files, cache_dir: str | os.PathLike[str] | None, path: str) -> TarIndex:
    folder = cache_folder(cache_dir)
    about = {"of": files.identity(path)}
    cached = ArrayFile(os.fspath(folder), "tar", about, _VERSION, TarIndex.TYPES)
    try:
        if (arrays := cached.loaded()) is not None:
            return TarIndex.from_arrays(arrays)
    except ValueError as error:
        _log.info("%s is not used: %s", redact(cached.path), error)
    try:
        index = scanned(files, path)
        files.check(path)
    except OSError as error:
        if isinstance(error, HeadraceError):
            raise
        raise AccessError(f"{redact(path)} can't be read: {error.strerror}") from error
    finally:
        files.close()  # each process opens what it reads
    if cache_dir is not None or len(index.offsets) >= KEPT_FROM:
        with Unkept(str(folder), "indices of tars are", "headers are read at every start"):
            cached.write(index.arrays())
    return index


def _remote_index(files: RemoteFiles, url: str) -> TarIndex:
    arrays = index_of(files, url, INDEX)
    try:
        return TarIndex.from_arrays(arrays)
    except ValueError as error:
        raise FormatError(
            f"{redact(url)}: its index makes no sense ({error}): remove it from cache_dir, or "
            "from beside the tar"
        ) from None


INDEX = IndexKind("tar", _VERSION, TarIndex.TYPES, lambda files, url: scanned(files, url).arrays())
"""The index of a remote tar."""


class _Headers:
    """The headers of a tar, as a file: where they are near one another by long reads, elsewhere one
    by one.
    """

    def __init__(self, files: Files, path: str) -> None:
        self._files = files
        self._path = path
        self.size = files.version(path).size
        self._near, self._hop, self._first, self._most = _REMOTE if files.is_remote else _LOCAL
        self._start = 0
        self._window = b""
        self._at = 0
        self._last = 0
        self._nbytes = self._first

    def seek(self, offset: int) -> None:
        self._at = offset

    def tell(self) -> int:
        return self._at

    def read(self, nbytes: int) -> bytes:
        offset = self._at
        if not 0 <= nbytes <= _LONGEST:
            raise FormatError(
                f"{redact(self._path)}: the header at byte {offset:,} says that {nbytes:,} bytes "
                "of names follow: it is damaged"
            )
        if offset + nbytes > self.size:
            raise FormatError(
                f"{redact(self._path)} ends at byte {self.size:,}, before the mark of a tar's end: "
                "it is cut short, copy or write it again"
            )
        if offset + nbytes > self._start + len(self._window) or offset < self._start:
            is_near = offset - self._last <= self._near
            end = min(offset + max(nbytes, self._nbytes if is_near else self._hop), self.size)
            self._nbytes = min(self._most, self._nbytes * 2) if is_near else self._first
            window = bytearray(end - offset)
            ranges = ByteRanges.in_file(self._path, np.array([offset]), np.array([end]))
            self._files.read_into(ranges, [memoryview(window)])
            self._start = offset
            self._window = bytes(window)
        self._last = self._at = offset + nbytes
        return self._window[offset - self._start : self._last - self._start]


def scanned(files: Files, path: str) -> TarIndex:
    """The index of a tar, made from its headers.

    Raises:
        FormatError: it is no tar, or a damaged one, cut short, compressed, or holds what can't be a
            sample; the message names the offset.
        Exception: what `Files.read_into` raises.
    """
    shown = redact(path)
    headers = _Headers(files, path)
    size = headers.size
    if size == 0:
        raise FormatError(f"{shown} is empty (0 bytes), and so no tar: was it written to its end?")
    begin = headers.read(min(size, BLOCK))
    for magic, how in _PACKED.items():
        if begin.startswith(magic):
            raise compressed(shown, how)
    # what reads headers of other than the usual kind
    archive: Any = tarfile.TarFile(
        fileobj=io.BytesIO(bytes(2 * BLOCK)), encoding="utf-8", errors="surrogateescape"
    )
    archive.fileobj = headers
    builder = _IndexBuilder(shown)
    at = 0
    while True:
        headers.seek(at)
        block = headers.read(BLOCK)
        if block.count(0) == BLOCK:
            return builder.index(size - at - BLOCK)
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
            builder.add(name, data, nbytes)
        elif not member.isdir():
            builder.leave_out("link", name)
        at = end


def _member(archive: Any, shown: str, at: int) -> tarfile.TarInfo:
    """The member whose headers begin at a byte."""
    try:
        member = tarfile.TarInfo.fromtarfile(archive)
    except (tarfile.TarError, ValueError, IndexError) as error:
        what = "is damaged, or was not written to its end"
        if at == 0:
            what = "is no tar, whatever its name says"
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


class _IndexBuilder:
    """Collects the samples of a tar."""

    def __init__(self, shown: str) -> None:
        self._shown = shown
        self._first = array.array("q")
        self._offsets = array.array("q")
        self._sizes = array.array("q")
        self._kinds = array.array("i")
        self._keys = NamesBuilder()
        self._new_keys = list[bytes]()
        self._numbers: dict[str, int] = {}  # of extensions
        self._key: bytes | None = None
        self._hashes = array.array("q")  # of each sample's key
        self._of_sample: set[int] = set()
        self._notes: dict[str, Any] = {
            "links": 0,
            "link": "",
            "others": 0,
            "other": "",
            "behind": 0,
        }

    def leave_out(self, what: str, name: bytes) -> None:
        self._notes[what] = self._notes[what] or _text(name)
        self._notes[f"{what}s"] += 1

    def add(self, name: bytes, offset: int, nbytes: int) -> None:
        """A member that is a file."""
        folder, slash, base = name.rpartition(b"/")
        stem, dot, extension = base.partition(b".")
        if base.startswith(b".") or _META.match(name):
            # a hidden file, such as macOS adds one to each; or about the shard, and not of a sample
            return
        if not (stem and dot):
            self.leave_out("other", name)
            return
        key = folder + slash + stem
        path = posixpath.normpath(key) if b"./" in key or b"//" in key else key  # "./a" is "a"
        lower = os.fsdecode(extension).lower()
        number = self._numbers.setdefault(lower, len(self._numbers))
        if path != self._key:
            self._key = path
            self._of_sample = set()
            self._hashes.append(hash(path))
            self._first.append(len(self._offsets))
            self._new_keys.append(key)
            if len(self._new_keys) == _TOGETHER:
                self._flush()
        if number in self._of_sample or lower in RESERVED:
            raise FormatError(
                f"{self._shown}: member {_text(name)!r}, whose bytes begin at {offset:,}, is the "
                f"second {_text(lower)!r} of sample "
                f"{_text(key)!r}: give each sample a key of its own (the path up to the first dot "
                "of the name)"
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
        first, offsets, sizes, kinds = (
            np.array(column) for column in (self._first, self._offsets, self._sizes, self._kinds)
        )
        index = TarIndex(
            first,
            offsets,
            sizes,
            kinds,
            self._keys.build(),
            PackedNames(map(os.fsencode, self._numbers)),
            self._notes,
        )
        self._check_halves(index)
        return index

    def _check_halves(self, index: TarIndex) -> None:
        """Raises a FormatError where members of one key lie in several places, each with other
        extensions: these are parts of one sample.

        Where an extension comes again, it is another sample of the same key.
        """
        hashes = np.array(self._hashes, np.int64)
        order = np.argsort(hashes, kind="stable")
        is_again = np.diff(hashes[order]) == 0
        pairs = np.stack([order[:-1][is_again], order[1:][is_again]], axis=1)
        for former, latter in pairs[np.argsort(pairs[:, 1])].tolist():
            kinds = [
                set(index.kinds[index.first[one] : index.first[one + 1]].tolist())
                for one in (former, latter)
            ]
            if kinds[0].isdisjoint(kinds[1]):
                places = [
                    f"{_text(index.extensions[min(of_one)])!r} at byte "
                    f"{index.offsets[index.first[one]]:,}"
                    for one, of_one in zip((former, latter), kinds, strict=True)
                ]
                raise FormatError(
                    f"{self._shown}: the members of sample {_text(index.keys[former])!r} lie "
                    f"apart ({' and '.join(places)}), with others "
                    "between them: write those of a sample one after the other, for example with "
                    "`tar --sort=name`"
                )


def _plain_member(block: bytes) -> tuple[bytes, int] | None:
    """Name and size of a file, of the usual kind of header; None: tarfile is to look at it. As
    that, at a fraction of the time.
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


def compressed(shown: str, how: str) -> FormatError:
    """Why no compressed tar is read."""
    return FormatError(
        f"{shown} is compressed as a whole ({how}), so nothing in it can be read without all that "
        "comes before: unpack it "
        "(`gunzip`, `unzstd`, ...) to a .tar; images and most other samples are compressed "
        "themselves, and it hardly grows"
    )


def _text(name: bytes | str) -> str:
    """A name as it may be printed."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
