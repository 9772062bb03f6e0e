"""Text files, local or remote: read whole as samples, or listed with their versions for readers
of lines.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from headrace.errors import DataNotFoundError, FormatError
from headrace.formats.files import FilesSource
from headrace.formats.resolve.file_set import TEXT_EXTENSIONS, FileSet
from headrace.formats.resolve.resolver import DataPath
from headrace.formats.text.plain import Room, decompressed, pieces_of, undecodable
from headrace.io.files import Files
from headrace.io.local.files import LocalFiles, version_of
from headrace.io.paths import redact
from headrace.io.remote.options import RemoteOptions

_MARK = "\ufeff"


def files_of(listing: FileSet) -> tuple[Files, list[str]]:
    """By what texts are read by ranges, and their paths: absolute, or URLs, whose sizes and
    versions are asked for.

    Raises:
        DataNotFoundError, AccessError, RemoteError: see `Remote.versions`.
    """
    server = listing.server
    urls = listing.urls()
    if server is None:
        return LocalFiles(), list(map(os.path.abspath, urls))
    try:
        for url, version in zip(urls, server.learn(urls), strict=True):
            if not version.size and server.is_folder(url):
                raise DataNotFoundError(
                    f"{redact(url)} is a folder with the name of a file: add a slash to its end"
                )
    except BaseException:
        server.close()
        raise
    return server, urls


class TextFilesSource(FilesSource):
    """Whole files, of which none is read that is too large for the budget.

    Args:
        data_path: which.
        options: how URLs are reached.
        room: for one file.
        codec: how they are decoded: encoding and errors.
    """

    def __init__(
        self,
        data_path: DataPath,
        options: RemoteOptions,
        room: Room,
        codec: tuple[str, str] = ("utf-8", "strict"),
    ) -> None:
        super().__init__(data_path, TEXT_EXTENSIONS, options)
        self._room = room
        self._codec = codec

    @contextlib.contextmanager
    def of_one_version(self) -> Iterator[list[list[Any]] | None]:
        """Inside, remote files are read in the version that they have now.

        Yields:
            What tells the files from others, and from what they were before; None: the server does
            not say.

        Raises:
            RemoteError, DataNotFoundError, AccessError: see `RemoteFiles.learn`.
        """
        server = self._server
        paths = list(self._paths)
        if server is None:
            paths = list(map(os.path.abspath, paths))
            yield [[path, *version_of(os.stat(path))] for path in paths]
            return
        server.forget(paths)
        versions = server.learn(paths)
        of = [
            [server.place, self.location(number), version.size, version.tag]
            for number, version in enumerate(versions)
        ]
        try:
            yield None if any(version.tag is None for version in versions) else of
        finally:
            server.forget(paths)

    def read(self, indices: Sequence[int]) -> list[bytes]:
        """The files' bytes, as they lie there. The size of a remote file is known when it has
        come.
        """
        if self._server is None:
            self._room.check(max((os.stat(self._paths[i]).st_size for i in indices), default=0))
        found = super().read(indices)
        self._room.check(max(map(len, found), default=0))
        return found

    def head(self, index: int) -> bytes:
        """The first bytes of a file, decompressed; b"" of one of this machine that can't be read.

        Raises:
            RemoteError, AccessError, DataNotFoundError, FormatError: a remote file can't be read.
        """
        if self._server is not None:
            return self._content(index, self.read([index])[0])
        try:
            return next(pieces_of(os.fsdecode(self.listing.path(index))), b"")
        except (OSError, FormatError):  # its sample says what is wrong
            return b""

    def row(self, index: int, record: bytes) -> str:
        """The text of a file, decompressed if it is compressed, without a mark.

        Raises:
            FormatError: it is damaged, or too large, or no text of the encoding.
        """
        try:
            return self._content(index, record).decode(*self._codec).removeprefix(_MARK)
        except UnicodeDecodeError as error:
            raise undecodable(error, 0) from None

    def _content(self, index: int, record: bytes) -> bytes:
        return decompressed(record, os.fsdecode(self.listing.names[index]), self._room)
