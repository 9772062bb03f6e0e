"""Makes the line index of one text, to be put beside it."""

from __future__ import annotations

from headrace.errors import FormatError
from headrace.io.array_file import Arrays
from headrace.io.paths import cache_folder, redact, without_query
from headrace.io.remote_files import RemoteFiles
from headrace.io.resolve.file_set import Kind
from headrace.io.resolve.resolver import resolve
from headrace.storage.text import records
from headrace.storage.text.index_beside import KIND, arrays_of
from headrace.storage.text.plain import is_compressed
from headrace.storage.text.scan import NotedScan, Scan
from headrace.storage.text.source import LinesSource
from headrace.storage.text.texts import Texts


class _Indexed(LinesSource):
    """A text whose index is being made: nothing of it is cached here."""

    scanned: NotedScan
    keeps_tables = False

    def _scan(self, progress: bool | None) -> Scan:
        self.scanned = NotedScan(self._to_scan, progress, self._size)
        return self.scanned


def _index(files: RemoteFiles, url: str) -> Arrays:
    path = without_query(url)
    if is_compressed(path):
        raise FormatError(f"{redact(url)} is compressed: it is read through a plain copy, and has no use for an index")
    unit = "record" if path.lower().endswith(records.FORMATS) else "line"
    listing = resolve([url], Kind("texts", ("",)), server=files)
    scanned = _Indexed(Texts(files, listing, [url]), unit, None, "utf-8", "strict", cache_folder(files.options.cache_dir)).scanned
    return arrays_of(unit, scanned.header, iter(scanned.noted), scanned.blank)


INDEX = KIND._replace(make=_index)
"""Of one text (`headrace.storage.text.index_beside`)."""
