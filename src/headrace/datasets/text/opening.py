"""Opens texts as files, lines, records, windows or blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.datasets.core.reader import SampleReader
from headrace.datasets.core.threads import WorkerThreads
from headrace.datasets.image.labels import folder_targets
from headrace.datasets.kinds import TEXT_EXTENSIONS
from headrace.datasets.text.options import TextOptions
from headrace.datasets.text.passes import folder_of
from headrace.datasets.text.units import FileTexts, LineTexts, RecordTexts, TextUnit, TokenBlocks, TokenizedTexts, TokenWindows
from headrace.errors import ConfigError, FormatError
from headrace.io.paths import is_url, without_query
from headrace.io.remote.options import RemoteOptions
from headrace.io.resolve.expressions import DataPath, entries_of
from headrace.io.resolve.file_set import FileSet
from headrace.memory.budget import MemoryBudget
from headrace.order import detect_world
from headrace.storage.text import records
from headrace.storage.text.files import TextFilesSource
from headrace.storage.text.lines import Newline
from headrace.storage.text.plain import Room
from headrace.storage.text.source import LinesSource
from headrace.storage.text.texts import local_texts, remote_texts
from headrace.storage.tokens.source import BlocksSource, TokensSource


def open_texts(
    data_path: DataPath, unit: str | None, newline: Newline, reach: RemoteOptions, texts: TextOptions, options: Mapping[str, Any]
) -> TokenizedTexts:
    """The texts below a path.

    Args:
        data_path: as `TextDataset` takes it.
        unit: "file", "line" or "record"; None: as the names of the files have it.
        newline: what ends a line.
        reach: how URLs are reached.
        texts: what texts are.
        options: of the dataset.

    Raises:
        ConfigError, DataNotFoundError, AccessError, FormatError, SampleError, RemoteError: see `TextDataset`.
    """
    room = Room(MemoryBudget(options.get("max_memory_usage", 0.8), local_world_size=detect_world().local_world_size))
    listing: FileSet | None = None
    if unit is None and all(is_url(url) and without_query(url).lower().endswith(records.BY_RECORD) for url in entries_of(data_path)):
        unit = "record"  # without a listing, which asks the server for each file
    if unit in (None, "file"):
        source = TextFilesSource(data_path, TEXT_EXTENSIONS, reach, room)
        unit = unit or records.unit_of(source.listing)
        if unit == "file":
            return FileTexts(source, texts)
        listing = source.listing
        source.close()
    assert unit is not None
    lines = _lines(data_path, unit, listing, newline, reach, texts, room)
    if unit == "line":
        return LineTexts(lines, texts)
    return RecordTexts(lines, texts, SampleReader(lines, options.get("on_error", "raise"), WorkerThreads()))


def _lines(
    data_path: DataPath, unit: str, listing: FileSet | None, newline: Newline, reach: RemoteOptions, options: TextOptions, room: Room
) -> LinesSource:
    folder, of_text = folder_of(reach.cache_dir), (newline, options.encoding, options.errors)
    if any(map(is_url, entries_of(data_path))):
        texts = remote_texts(data_path, TEXT_EXTENSIONS, reach, listing)
    else:
        texts = local_texts(listing or TextFilesSource(data_path, TEXT_EXTENSIONS, reach, room).listing)
    source = LinesSource(
        texts, unit, *of_text, folder, is_kept=reach.cache_dir is not None or texts.files.is_remote, room=room, progress=options.progress
    )
    for number, names in enumerate(source.headers):
        for name in (options.text_field, options.target_field) if names else ():
            if isinstance(name, str) and names.count(name) != 1:
                raise FormatError(
                    f"{source.shown(number)}: its first line names {', '.join(map(repr, names[:20]))}, and "
                    f"{names.count(name) or 'none'} of these is {name!r}: pass text_field= or target_field=; a file without such a "
                    "line needs one, or unit='line' or 'file'"
                )
    return source


def folder_labels(source: TextFilesSource | LinesSource) -> tuple[npt.NDArray[np.int64], list[str]]:
    """The class number of each document by first-level folder, and the names of the classes.

    Raises:
        ConfigError: the files lie in no class folders.
    """
    by_file, classes = folder_targets(source.listing)
    if by_file is None:
        raise ConfigError('labels="folders": the files lie in no class folders')
    return by_file if isinstance(source, TextFilesSource) else by_file[source.file_numbers()], classes


def unit_over(source: TokensSource, name: str, text_of: Callable[[int], str] | None) -> TextUnit:
    """Samples of tokens that are there already.

    Args:
        source: the documents, windows or blocks.
        name: what a document is.
        text_of: says what the text of a document is; None: nobody can.
    """
    return TokenBlocks(source, name) if isinstance(source, BlocksSource) else TokenWindows(source, name, text_of)
