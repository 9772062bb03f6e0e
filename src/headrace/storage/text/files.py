"""Texts that are samples as whole files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from headrace.io.files import Version
from headrace.io.local.files import version_of
from headrace.io.remote.options import RemoteOptions
from headrace.io.resolve.expressions import DataPath
from headrace.storage.files import FilesSource
from headrace.storage.text.plain import Room, decompressed


class TextFilesSource(FilesSource):
    """Whole files, of which none is read that is too large for the budget."""

    def __init__(self, data_path: DataPath, extensions: Sequence[str], reach: RemoteOptions, room: Room) -> None:
        super().__init__(data_path, extensions, reach)
        self._room = room
        self._still: list[Version] | None = None  # of all files, inside of `of_one_version`

    @contextlib.contextmanager
    def of_one_version(self) -> Iterator[list[list[Any]] | None]:
        """Inside, remote files are read in the version that they have now.

        Yields:
            What tells the files from others, and from what they were before; None: the server does not say.

        Raises:
            RemoteError, DataNotFoundError, AccessError: see `RemoteFiles.learn`.
        """
        server, paths = self._server, list(self._paths)
        if server is None:
            paths = list(map(os.path.abspath, paths))
            yield [[path, *version_of(os.stat(path))] for path in paths]
            return
        server.forget(paths)
        self._still = versions = server.learn(paths)
        of = [[server.place, self.location(number), version.size, version.tag] for number, version in enumerate(versions)]
        try:
            yield None if any(version.tag is None for version in versions) else of
        finally:
            self._still = None
            server.forget(paths)

    def read(self, indices: Sequence[int]) -> list[bytes]:
        """The files' bytes, as they lie there. The size of a remote file is known when it has come."""
        if self._server is None:
            for index in indices:
                self._room.check(os.stat(self._paths[index]).st_size)
        elif self._still is not None:
            self._room.check(max((self._still[index].size for index in indices), default=0))
        found = super().read(indices)
        for data in found:
            self._room.check(len(data))
        return found

    def content(self, index: int, record: bytes) -> bytes:
        """What a file holds, decompressed if it is compressed.

        Raises:
            FormatError: it is damaged, or too large.
        """
        return decompressed(record, os.fsdecode(self.listing.names[index]), self._room)
