"""Text files, local or remote: read whole as samples, or listed with their versions for readers
of lines.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from headrace.errors import DataNotFoundError, FormatError
from headrace.io.files import Files, Version
from headrace.io.local.files import LocalFiles, version_of
from headrace.io.paths import redact
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import RemoteFiles
from headrace.io.resolve.expressions import DataPath
from headrace.io.resolve.file_set import FileSet, Kind
from headrace.io.resolve.resolver import resolve
from headrace.storage.files import FilesSource
from headrace.storage.text.plain import Room, decompressed, pieces_of


class Texts(NamedTuple):
    """Texts of this machine, or of one server."""

    files: Files
    listing: FileSet
    paths: list[str]
    """Of each file of the listing: absolute, or a URL."""


def local_texts(listing: FileSet) -> Texts:
    """The texts of a listing of local files."""
    paths = [
        os.path.abspath(os.fsdecode(listing.path(number))) for number in range(len(listing.names))
    ]
    return Texts(LocalFiles(), listing, paths)


def remote_texts(
    data_path: DataPath | FileSet,
    extensions: Sequence[str],
    options: RemoteOptions,
    listing: FileSet | None = None,
) -> Texts:
    """The texts that some URLs lead to, with size and version of each.

    Args:
        data_path: a URL, or a list: of files, of folders (or prefixes), or globs.
        extensions: endings of the files that count, in any case.
        options: how they are reached.
        listing: of these URLs, where it is known.

    Raises:
        ConfigError: URLs and paths are mixed, or of several servers.
        DataNotFoundError, AccessError, RemoteError: nothing there, or nothing that fits; see
            `Remote.versions`.
    """
    if listing is None:
        listing = resolve(data_path, Kind("texts", tuple(map(str.lower, extensions))), options)
        assert listing.server is not None
        files = listing.server
    else:
        files = RemoteFiles(listing.url(0), options)
    try:
        urls = listing.urls()
        for url, version in zip(urls, files.learn(urls), strict=True):
            if not version.size and files.is_folder(url):
                raise DataNotFoundError(
                    f"{redact(url)} is a folder with the name of a file: add a slash to its end"
                )
    except BaseException:
        files.close()
        raise
    return Texts(files, listing, urls)


class TextFilesSource(FilesSource):
    """Whole files, of which none is read that is too large for the budget."""

    def __init__(
        self, data_path: DataPath, extensions: Sequence[str], reach: RemoteOptions, room: Room
    ) -> None:
        super().__init__(data_path, extensions, reach)
        self._room = room
        self._still: list[Version] | None = None  # of all files, inside of `of_one_version`

    @contextlib.contextmanager
    def of_one_version(self) -> Iterator[list[list[Any]] | None]:
        """Inside, remote files are read in the version that they have now.

        Yields:
            What tells the files from others, and from what they were before; None: the server does
            not say.

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
        of = [
            [server.place, self.location(number), version.size, version.tag]
            for number, version in enumerate(versions)
        ]
        try:
            yield None if any(version.tag is None for version in versions) else of
        finally:
            self._still = None
            server.forget(paths)

    def read(self, indices: Sequence[int]) -> list[bytes]:
        """The files' bytes, as they lie there. The size of a remote file is known when it has
        come.
        """
        if self._server is None:
            for index in indices:
                self._room.check(os.stat(self._paths[index]).st_size)
        elif self._still is not None:
            self._room.check(max((self._still[index].size for index in indices), default=0))
        found = super().read(indices)
        for data in found:
            self._room.check(len(data))
        return found

    def head(self, index: int) -> bytes:
        """The first bytes of a file, decompressed; b"" of one of this machine that can't be read.

        Raises:
            RemoteError, AccessError, DataNotFoundError, FormatError: a remote file can't be read.
        """
        if self._server is not None:
            return self.content(index, self.read([index])[0])
        try:
            return next(pieces_of(os.fsdecode(self.listing.path(index))), b"")
        except (OSError, FormatError):  # its sample says what is wrong
            return b""

    def content(self, index: int, record: bytes) -> bytes:
        """What a file holds, decompressed if it is compressed.

        Raises:
            FormatError: it is damaged, or too large.
        """
        return decompressed(record, os.fsdecode(self.listing.names[index]), self._room)
