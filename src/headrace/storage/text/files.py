"""Texts that are samples as whole files."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from typing import Any

from headrace.io.files import Version
from headrace.io.ranges import ByteRanges
from headrace.io.remote.options import RemoteOptions
from headrace.io.resolve.expressions import DataPath
from headrace.storage.files import FilesSource
from headrace.storage.text.plain import Room, decompressed


class TextFilesSource(FilesSource):
    """Whole files, of which none is read that is too large for the budget."""

    def __init__(self, data_path: DataPath, extensions: Sequence[str], reach: RemoteOptions, room: Room) -> None:
        super().__init__(data_path, extensions, reach)
        self._room = room
        self._still: list[Version] | None = None

    @contextlib.contextmanager
    def of_one_version(self) -> Iterator[list[list[Any]] | None]:
        """Inside, remote files are read in the version that they have now.

        Yields:
            What tells them from others, and from what they were before; None: the server does not say.

        Raises:
            RemoteError, DataNotFoundError, AccessError: see `Remote.versions`.
        """
        assert self._far is not None
        remote = self._far.remote
        self._still = versions = remote.versions([self._url(number) for number in range(len(self))])
        of = [[remote.place, self.location(number), version.size, version.tag] for number, version in enumerate(versions)]
        try:
            yield None if any(version.tag is None for version in versions) else of
        finally:
            self._still = None

    def read(self, indices: Sequence[int]) -> list[bytes]:
        """The files' bytes, as they lie there. The size of a remote file is known when it has come."""
        if not self.listing.is_remote:
            return super().read(indices)
        if self._still is not None and self._far is not None:
            versions = [self._still[index] for index in indices]
            self._room.check(max((version.size for version in versions), default=0))
            of = {self._url(index): version for index, version in zip(indices, versions, strict=True)}
            whole = ByteRanges.of((url, 0, version.size) for url, version in zip(map(self._url, indices), versions, strict=True))
            return list(map(bytes, self._far.remote.read(whole, [of[url] for url in whole.paths])))
        found = super().read(indices)
        for data in found:
            self._room.check(len(data))
        return found

    def _content(self, file: io.FileIO) -> bytes:
        self._room.check(os.fstat(file.fileno()).st_size)
        return file.read()

    def content(self, index: int, record: bytes) -> bytes:
        """What a file holds, decompressed if it is compressed.

        Raises:
            FormatError: it is damaged, or too large.
        """
        return decompressed(record, os.fsdecode(self.listing.names[index]), self._room)
