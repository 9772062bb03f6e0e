"""Gives h5py a remote file to read.

NOTE [ h5py and remote files ]

* h5py reads through a file object, here `RemoteFile`: from the known pages of the file, else in
  aligned pieces from the server.
* While a dataset is opened, the pages that h5py reads are recorded (superblock, groups, headers,
  lists of chunks), and so is what they say: shapes, layouts of arrays that are read directly,
  columns such as targets. All of it becomes the file's index. Later openings find it there, and
  h5py need not open the file, which takes a millisecond. If they need more (another name), it is
  fetched, and the index is cached again with both.
* h5py calls the file object while it holds its global lock. Destroying an h5py object needs the
  same lock. The garbage collector may do so in any thread, including those of the connections,
  which would then deadlock with the thread that waits for them. Therefore garbage collection is off
  while a fetch is waited for.
* Errors of the server pass through h5py unchanged (`headrace.io.library_errors.remember`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import h5py

from headrace.errors import HeadraceError
from headrace.formats.hdf5.files import not_whole, without_gc
from headrace.io.files import HeldBytes
from headrace.io.library_errors import OF_THE_MACHINE, asking, remember
from headrace.io.paths import redact
from headrace.io.ranges import ByteRanges
from headrace.io.remote_files import RemoteFiles

PAGE = 4 << 10
PIECE = 64 << 10
WIDEST = 4 << 20
"""Bytes that are fetched at least; and at most ahead of h5py, where one read follows the other."""
_HELD = 8 << 20  # bytes of pages that are not recorded, for each open file


class RemoteFile(HeldBytes):
    """A remote file as a seekable file object for h5py, which reads it in one thread at a time.

    Args:
        files, url: of the file.
        numbers, data: of its known pages, and their bytes.

    Attributes:
        pages: those that are known, by number.
        is_recording: pages that are read become known.
    """

    def __init__(
        self, files: RemoteFiles, url: str, numbers: Sequence[int] = (), data: Any = b""
    ) -> None:
        super().__init__(files.version(url).size, (), lambda start, stop: memoryview(b""))
        self.pages: dict[int, bytes | memoryview] = {}
        self.is_recording = False
        self._files = files
        self.url = url
        self._fetched: OrderedDict[int, memoryview] = OrderedDict()
        self._end = -1  # of the last fetch
        self._width = PIECE
        view = memoryview(data)
        for at, number in enumerate(numbers):
            self.pages[number] = view[at * PAGE : (at + 1) * PAGE]

    def opened(self) -> h5py.File:
        """The file, opened for reading; see `headrace.formats.hdf5.files.open_file`."""
        with asking("h5py", redact(self.url)):
            try:
                return h5py.File(self, "r")
            except OSError as error:
                if isinstance(error, HeadraceError) or error.errno in OF_THE_MACHINE:
                    raise
                raise not_whole(self.url, error) from error

    def readinto(self, buffer: Any) -> int:
        """Fills a buffer; behind the end of the file with zeros, as HDF5 does on a disk. Errors
        are remembered too, see `asking`.
        """
        out = memoryview(buffer)
        try:
            inside = max(0, min(len(out), self._size - self._at))
            if inside and not self._fill(out[:inside]):
                self._fetch_pieces(self._at, self._at + inside)
                self._fill(out[:inside])
            out[inside:] = bytes(len(out) - inside)
        except BaseException as error:
            remember(error)
            raise
        self._at += len(out)
        return len(out)

    def _fill(self, out: memoryview) -> bool:
        """Copies bytes, and records their pages; returns False if these are not there."""
        numbers = range(self._at // PAGE, -(-(self._at + len(out)) // PAGE))
        pages: list[bytes | memoryview] = []
        for number in numbers:
            page = self.pages.get(number) or self._fetched.get(number)
            if page is None:
                return False
            pages.append(page)
        first = self._at - numbers.start * PAGE
        out[:] = memoryview(b"".join(pages))[first : first + len(out)]
        if self.is_recording:
            for number, page in zip(numbers, pages, strict=True):
                if number not in self.pages:
                    self.pages[number] = bytes(page)
        return True

    def _fetch_pieces(self, start: int, stop: int) -> None:
        """Fetches pieces that hold some bytes; see NOTE [ h5py and remote files ]."""
        first = start // PIECE * PIECE
        follows = first <= self._end <= stop
        self._width = min(WIDEST, 2 * self._width) if follows else PIECE
        self._end = min(self._size, max(-(-stop // PIECE) * PIECE, first + self._width))
        with without_gc():
            [piece] = self._files.read(ByteRanges.of([(self.url, first, self._end)]))
        self.hold(first, piece)

    def hold(self, start: int, data: memoryview | None) -> None:
        """Caches the pages of a piece, which begins at a page."""
        piece = data or memoryview(b"")
        for at in range(0, len(piece), PAGE):
            self._fetched[(start + at) // PAGE] = piece[at : at + PAGE]
        most = max(_HELD, len(piece)) // PAGE + 1
        while len(self._fetched) > most:
            self._fetched.popitem(last=False)
