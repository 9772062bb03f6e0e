"""How is the index of a file that will be read from afar written beside it? `write_index`."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from typing import Unpack

from headrace.arguments import check_names
from headrace.errors import AccessError, ConfigError, WriteError
from headrace.io.atomic import written_to
from headrace.io.index import IndexKind, index_bytes
from headrace.io.paths import is_url, redact
from headrace.io.remote.fsspec_calls import path_in
from headrace.io.remote.options import RemoteOptions, ServerKeywords
from headrace.io.remote_files import RemoteFiles, with_index
from headrace.io.resolve.scan import DataPath, entries_of, scan
from headrace.storage.hdf5.index import INDEX as HDF5
from headrace.storage.tar.build import INDEX as TAR
from headrace.storage.text.plain import is_compressed
from headrace.storage.text.records import FORMATS
from headrace.storage.text.remote import INDEX as LINES
from headrace.storage.zarr.shards import INDEX as SHARDS
from headrace.storage.zarr.shards import indexed
from headrace.storage.zarr.stores import ZarrUrl, is_zarr
from headrace.storage.zarr.zips import INDEX as ZIP

_SHARDS = (".tar", ".h5", ".hdf5", ".he5", ".jsonl", ".txt", ".zarr.zip")
"""What is looked for in folders."""
_KINDS: dict[str, IndexKind] = {".tar": TAR, ".zip": ZIP}
_KINDS |= dict.fromkeys((".h5", ".hdf5", ".he5"), HDF5)
_KINDS |= dict.fromkeys((".txt", ".md", *FORMATS), LINES)


def write_index(data_path: DataPath, **options: Unpack[ServerKeywords]) -> list[str]:
    """Writes beside each file what a dataset must know of it before its samples can be read: whoever reads it by URL then begins in a few
    round trips, from the first run on.

    The index of ``train.tar`` is ``train.tar.index``: upload both. It holds for that file alone, and is written anew with it.

    Args:
        data_path: a file, folder, glob or URL (of a server that may be written to), or a list of these: .tar, .h5, .txt, .md, .csv, .tsv,
            .json, .jsonl, .zarr.zip and .zarr (of arrays with shards). In a folder .tar, .h5, .txt, .jsonl and .zarr.zip are looked for.
        **options: `storage_options`, `retries` and `deadline`: see `headrace.RemoteOptions`.

    Returns:
        The paths or URLs of the indices that were written.

    Raises:
        ConfigError: an option makes no sense; or a file that has no index: compressed texts, say, are unpacked on each machine.
        DataNotFoundError, AccessError, FormatError, RemoteError: a file is missing, can't be read, or is damaged.
        WriteError: the index can't be written there.
    """
    check_names("write_index", options, ServerKeywords.__optional_keys__)
    remote, written = RemoteOptions.taken_from(options), []
    for entry in entries_of(data_path):
        text = os.fsdecode(entry) if not isinstance(entry, str) else entry
        local = not is_url(text)
        url = f"file://{os.path.abspath(os.path.expanduser(text))}" if local else text
        files = RemoteFiles(url, remote)
        try:
            for one, kind in _wanted(url, text, local, files):
                files.learn([one])
                data = index_bytes(kind.make(files, one), kind, files.version(one).size)
                written.append(_write(with_index(one), data, local, files))
        finally:
            files.close()
    return written


def _wanted(url: str, text: str, local: bool, files: RemoteFiles) -> Iterator[tuple[str, IndexKind]]:
    if is_zarr(text) and not url.lower().endswith(".zip"):
        found = list(indexed(ZarrUrl(url.rstrip("/"), files)))
        if not found:
            raise ConfigError(f"{redact(text)} has no array with shards, so there is nothing to write an index of")
        for one in found:
            yield one, SHARDS
        return
    for one in [url] if _kind_of(url) and not glob.has_magic(text.partition("?")[0]) else _below(text, url, local, files):
        kind = _kind_of(one)
        assert kind is not None
        yield one, kind


def _below(text: str, url: str, local: bool, files: RemoteFiles) -> list[str]:
    """The files below a folder, or that a glob names."""
    if is_compressed(text.partition("?")[0]):
        raise ConfigError(f"{redact(text)} is compressed, and is unpacked on each machine: it has no index")
    found = scan([text], _SHARDS, None if local else files)
    paths = [os.fsdecode(found.path(number)) for number in range(len(found.names))]
    paths = [path for path in paths if ".zarr" not in os.path.dirname(path)]  # files of a store are no shards
    if len(paths) == 1 and _kind_of(paths[0]) is None:  # it was named itself
        raise ConfigError(f"{redact(paths[0])} has no index: those of {', '.join(_KINDS)} and .zarr have one")
    return [f"file://{os.path.abspath(path)}" if local else files.filesystem.unstrip_protocol(path) for path in paths]


def _kind_of(path: str) -> IndexKind | None:
    return _KINDS.get(os.path.splitext(path.partition("?")[0])[1].lower())


def _write(url: str, data: bytes, local: bool, files: RemoteFiles) -> str:
    try:
        if local:
            path = url.removeprefix("file://")
            with written_to(path) as file:
                file.write(data)
            return path
        files.filesystem.pipe_file(path_in(url, files.filesystem), data)
    except PermissionError as error:
        raise AccessError(f"{redact(url)} can't be written: {redact(error)}") from None
    except Exception as error:  # of whatever library speaks to that server
        said = redact(error) or type(error).__name__
        raise WriteError(f"{redact(url)} can't be written ({said}): write the index of a local copy, and upload it") from None
    return url
