"""The samples of tar shards, with random access.

Members are located through an index, built once from the headers (`headrace.formats.tar.index`).
The members of a sample are adjacent, so a sample takes one read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.arguments import checks_keywords
from headrace.errors import warn
from headrace.formats.describe import Column, Description
from headrace.formats.files import fingerprint_names
from headrace.formats.resolve.file_set import FileSet, Format
from headrace.formats.resolve.resolver import DataPath, resolve
from headrace.formats.source import Locatable
from headrace.formats.tar.index import TarIndex, compressed, tar_indices
from headrace.io.local.files import LocalFiles
from headrace.io.packed_strings import NamesBuilder, PackedNames
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges
from headrace.io.remote.options import RemoteOptions
from headrace.memory.anonymous import SharedArray

ENDINGS = (".tar",)
COMPRESSED_TARS = (".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz")
TARS = Format("tar shards", (*ENDINGS, *COMPRESSED_TARS), dataset="StreamingDataset")
_SHOWN = 16  # extensions that are described
_WARNINGS = {
    "links": "{count:,} members are links or devices, which have no bytes here, and are left out; "
    "the first: {shard}, {link!r}. `tar --dereference --hard-dereference` stores what they lead to",
    "behind": "{count:,} bytes follow the end mark of {shard} and are not read: were tars simply "
    "joined? `tar --concatenate` does it",
    "others": "there is no sample: members need a key and an extension, as in 'key.jpg'; {shard} "
    "has {other!r}",
}
"""By what the notes of an index count."""


class TarSource(Locatable):
    """The samples of tar shards in WebDataset format: consecutive members of a shard whose names
    are equal up to the first dot.

    A record is a dict from extension (in lower case, without its first dot: "jpg", "cls",
    "seg.png") to bytes, with ``"__key__"``, the path up to that dot, and ``"__url__"``, the shard.
    Hidden files, and members without key or extension, are not part of a sample. Neither are links
    and devices, which have no bytes of their own; this is reported.

    The index is built once and cached in `cache_dir` by path, size, times and inode (or URL, size
    and version) of each shard. Only new shards are indexed again.

    Args:
        data_path: a shard, a folder (searched recursively for .tar), a glob, or a list of these:
            paths, or URLs of one server.
        cache_dir: folder for indexes. None: the user's cache folder; for local shards only large
            ones are cached there.
        progress: show a progress bar. None: only on a terminal.
        reach: options for URLs, instead of `cache_dir`.

    Raises:
        DataNotFoundError: the path does not exist, or contains no tar.
        FormatError: a tar is damaged, truncated or compressed as a whole, or has sparse members,
            two members of one name in a sample, or members of a sample that lie apart.
        AccessError: a tar can't be read.
        ConfigError: URLs and paths are mixed, or URLs of several servers.
        RemoteError: a request to a server failed.
    """

    @checks_keywords
    def __init__(
        self,
        data_path: DataPath | FileSet,
        *,
        cache_dir: str | os.PathLike[str] | None = None,
        progress: bool | None = None,
        reach: RemoteOptions | None = None,
    ) -> None:
        files = resolve(data_path, TARS, reach or RemoteOptions(cache_dir=cache_dir))
        self.names = files.names
        paths = files.urls()
        self.files = files.server or LocalFiles()
        self._shown = list(map(redact, paths)) if files.is_remote else paths
        self._paths = paths if files.is_remote else list(map(os.path.abspath, paths))
        for path in self._shown:
            if path.lower().endswith(COMPRESSED_TARS):
                raise compressed(redact(path), "its name says so")
        self._join(tar_indices(self.files, self._paths, cache_dir, progress))

    # -- the index

    def _join(self, indices: Sequence[TarIndex]) -> None:
        """The indices of all shards as one."""
        samples = [len(index.keys) for index in indices]
        members = [len(index.offsets) for index in indices]
        self._starts = np.cumsum([0, *samples])
        before = np.cumsum([0, *members])
        first = [index.first[:-1] + start for index, start in zip(indices, before, strict=False)]
        self._first = SharedArray(np.concatenate([*first, before[-1:]]).astype(np.int64))
        self._offsets = SharedArray(
            np.concatenate([[0], *(index.offsets for index in indices)])[1:]
        )
        self._sizes = SharedArray(np.concatenate([[0], *(index.sizes for index in indices)])[1:])
        keys = NamesBuilder()
        numbers = dict[bytes, int]()
        kinds = [np.zeros(0, np.int32)]
        for index in indices:
            data, offsets = index.keys.arrays
            keys.add_joined(data, np.diff(offsets))
            here = [numbers.setdefault(extension, len(numbers)) for extension in index.extensions]
            kinds.append(np.array(here, np.int32)[index.kinds])
        self.keys: PackedNames = keys.build()
        self.extensions: PackedNames = PackedNames(numbers)
        self._kinds = SharedArray(np.concatenate(kinds))
        self._others = sum(index.notes["others"] for index in indices)
        for what, warning in _WARNINGS.items():
            noted = [at for at, index in enumerate(indices) if index.notes[what]]
            if noted and (what != "others" or not len(self)):
                count = sum(indices[at].notes[what] for at in noted)
                notes = indices[noted[0]].notes
                shard = redact(self._shown[noted[0]])
                warn(warning.format(count=count, shard=shard, **notes))

    # -- reading

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _spans(
        self, indices: Sequence[int] | npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], ...]:
        """For each sample its shard, first member, one past the last, and where its bytes begin
        and end.
        """
        rows = np.asarray(indices, np.int64)
        shards = np.searchsorted(self._starts, rows, side="right") - 1
        first = self._first.array[rows]
        last = self._first.array[rows + 1]
        return (
            shards,
            first,
            last,
            self._offsets.array[first],
            self._offsets.array[last - 1] + self._sizes.array[last - 1],
        )

    def byte_ranges(self, indices: npt.NDArray[np.int64]) -> ByteRanges:
        shards, _, _, begins, ends = self._spans(indices)
        return ByteRanges(self._paths, shards, begins, ends)

    @property
    def stored_nbytes(self) -> int:
        """Bytes from each shard's first sample to its last, including the headers in between."""
        edges = self._first.array[self._starts]  # members
        filled = np.flatnonzero(np.diff(edges))
        last = edges[filled + 1] - 1
        return int(
            (
                self._offsets.array[last]
                + self._sizes.array[last]
                - self._offsets.array[edges[filled]]
            ).sum()
        )

    def read(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        shards, first, last, begins, ends = self._spans(indices)
        views = self.files.read(ByteRanges(self._paths, shards, begins, ends))
        samples = zip(
            indices,
            shards.tolist(),
            first.tolist(),
            last.tolist(),
            begins.tolist(),
            views,
            strict=True,
        )
        return [self._record(*sample) for sample in samples]

    def _record(
        self, index: int, shard: int, first: int, last: int, begin: int, view: memoryview | None
    ) -> dict[str, Any]:
        assert view is not None
        record: dict[str, Any] = {
            "__key__": os.fsdecode(self.keys[index]),
            "__url__": self._shown[shard],
        }
        starts = self._offsets.array[first:last].tolist()
        sizes = self._sizes.array[first:last].tolist()
        kinds = self._kinds.array[first:last].tolist()
        for kind, start, size in zip(kinds, starts, sizes, strict=True):
            extension = os.fsdecode(self.extensions[kind])
            record[extension] = bytes(view[start - begin : start - begin + size])
        return record

    # -- what it is

    def sizes(self) -> npt.NDArray[np.int64]:
        """Bytes of each sample over all its members ([n] int64)."""
        if not len(self):
            return np.zeros(0, np.int64)
        found: npt.NDArray[np.int64] = np.add.reduceat(self._sizes.array, self._first.array[:-1])
        return found

    @property
    def cut_nbytes(self) -> int:
        return self.stored_nbytes

    def blocks_of(self, nbytes: int) -> npt.NDArray[np.int64]:
        """Number of samples that start in each range of `nbytes` of a shard."""
        shards = np.repeat(np.arange(len(self._paths)), np.diff(self._starts))
        begins = self._offsets.array[self._first.array[:-1]]
        begin_anew = (np.diff(shards, prepend=-1) != 0) | (
            np.diff(begins // nbytes, prepend=-1) != 0
        )
        return np.diff(np.flatnonzero(begin_anew), append=len(shards)).astype(np.int64)

    def fingerprint(self) -> str:
        """A hash of the shards' names, the samples' keys, and the extensions and sizes of their
        members.
        """
        digest = hashlib.blake2b(digest_size=16)
        for names in (self.names, self.keys, self.extensions):
            digest.update(fingerprint_names(*names.arrays).encode())
        for numbers in (self._starts, self._first.array, self._sizes.array, self._kinds.array):
            digest.update(np.ascontiguousarray(numbers, "<i8").data)
        return digest.hexdigest()

    def location(self, index: int) -> str:
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        return f"{redact(self._paths[shard])}, sample {redact(self.keys[index])!r}"

    def describe(self) -> Description:
        left_out = ""
        if self._others:
            left_out = (
                f"; {self._others:,} members have no key or no extension, and are no part of a "
                "sample"
            )
        shards = f"{len(self._paths):,} tar shard{'s' * (len(self._paths) != 1)}"
        way = (
            f"{len(self):,} in {shards}, each read at once by an index of "
            f"{len(self._offsets):,} members{left_out}; {self.files.explain()}"
        )
        mean = self.stored_nbytes // max(1, len(self))
        extensions = ", ".join(map(os.fsdecode, self.extensions[:_SHOWN]))
        column = Column("samples", way, extensions, read=mean)
        return Description([column], files=len(self._paths), stored=self.stored_nbytes)
