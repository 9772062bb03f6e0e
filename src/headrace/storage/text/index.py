"""Makes the line index of one text, to be put beside it."""

from __future__ import annotations

from headrace.errors import FormatError
from headrace.io.array_file import Arrays
from headrace.io.paths import cache_folder, redact, without_query
from headrace.io.remote_files import RemoteFiles
from headrace.io.resolve.file_set import Kind
from headrace.io.resolve.resolver import resolve
from headrace.storage.text import records
from headrace.storage.text.files import Texts
from headrace.storage.text.index_beside import KIND
from headrace.storage.text.plain import is_compressed
from headrace.storage.text.source import LinesSource


def _index(files: RemoteFiles, url: str) -> Arrays:
    path = without_query(url)
    if is_compressed(path):
        raise FormatError(
            f"{redact(url)} is compressed: it is read through a plain copy, and has no use for an "
            "index"
        )
    unit = "record" if path.lower().endswith(records.FORMATS) else "line"
    listing = resolve([url], Kind("texts", ("",)), server=files)
    texts, folder = Texts(files, listing, [url]), cache_folder(files.options.cache_dir)
    return LinesSource(texts, unit, None, "utf-8", "strict", folder, is_kept=False).line_index()


INDEX = KIND._replace(make=_index)
"""Of one text (`headrace.storage.text.index_beside`)."""
