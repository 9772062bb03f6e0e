"""Recognises Zarr stores, without opening them."""

from __future__ import annotations

import contextlib
import os
import zipfile
from typing import Any

from headrace.errors import AccessError, FormatError
from headrace.formats.resolve.file_set import Format
from headrace.formats.zarr.store import NODE_FILES, root_among
from headrace.io.library_errors import asking
from headrace.io.paths import is_url, redact
from headrace.io.remote_files import RemoteFiles, below


def is_zarr(path: str | os.PathLike[Any]) -> bool:
    """True if it is a folder that is a Zarr node, or a zip file with one store. Of a URL the
    name decides: ``.zarr`` or ``.zarr.zip``.
    """
    place = os.fspath(path)
    if is_url(place):
        return place.partition("?")[0].rstrip("/").lower().endswith((".zarr", ".zarr.zip"))
    if os.path.isdir(place):
        return any(os.path.isfile(os.path.join(place, name)) for name in NODE_FILES)
    if not os.path.isfile(place) or not zipfile.is_zipfile(place):
        return False
    with (
        asking("zipfile", redact(place)),
        zipfile.ZipFile(place) as file,
        contextlib.suppress(FormatError),
    ):
        root_among(set(file.namelist()))
        return True
    return False


def _is_store(url: str, files: RemoteFiles) -> bool:
    """True if metadata of a store lie below a URL, or it is not known: nothing may be read
    there.
    """
    try:
        return any(
            data is not None
            for data in files.find_metadata([below(url, name) for name in NODE_FILES])
        )
    except AccessError:
        return True


ZARR = Format(
    "Zarr stores",
    (),
    stores=(".zarr", ".zarr.zip"),
    keeps_order=True,
    recognizes=is_zarr,
    is_store=_is_store,
    holds_arrays=True,
    dataset="ZarrDataset",
)
