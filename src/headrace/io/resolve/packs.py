"""Finds the parts of a pack, which `headrace.pack` wrote into a folder, by its manifest."""

from __future__ import annotations

import json
import os
import posixpath
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from headrace.errors import DataNotFoundError, FormatError
from headrace.io.paths import is_url, named_part, redact
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import read_whole

PLAN, MANIFEST = "plan.json", "manifest.json"
ARRAYS = "data.zarr"
"""The Zarr group of a pack to Zarr."""
_KEYS = {"plan", "parts", "kind", "store"}


def manifest_text(said: dict[str, Any]) -> bytes:
    """The content of a manifest, with its own checksum."""
    return json.dumps({**said, "crc32": _crc_of(said)}, sort_keys=True, indent=1).encode("ascii") + b"\n"


def parse_manifest(data: bytes, path: str | os.PathLike[Any]) -> dict[str, Any] | None:
    """What a manifest says; None: it is a JSON file of something else.

    Raises:
        FormatError: it is damaged.
    """
    try:
        said = json.loads(data)
        if not isinstance(said, dict) or not said.keys() >= _KEYS:
            return None
        if said.pop("crc32", None) != _crc_of(said):
            raise ValueError("wrong checksum")
    except ValueError as error:
        raise FormatError(f"{redact(path)} is damaged ({error}): write it again (headrace.packing.join)") from error
    return said


def _crc_of(said: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(said, sort_keys=True).encode("ascii"))


def is_pack(folder: str) -> bool:
    """True if a local folder is one that `headrace.pack` wrote parts into, or begins to."""
    try:
        with open(os.path.join(folder, PLAN), "rb") as file:
            head = json.load(file)
    except (OSError, ValueError):
        return False
    return isinstance(head, dict) and {"edges", "fingerprint", "kind", "store"} <= head.keys()


def names_pack(entry: Any) -> bool:
    """True if a path is that of a pack's folder or manifest; of a URL its name decides."""
    path = os.path.expanduser(os.fsdecode(entry))
    return _is_manifest(path) if is_url(path) else _folder_of(path) is not None


def _is_manifest(path: str) -> bool:
    return posixpath.basename(named_part(path)) == MANIFEST


def _folder_of(path: str) -> str | None:
    """The folder of the pack that a local path names; None: it names no pack."""
    folder = os.path.dirname(path) or "." if _is_manifest(path) else path
    return folder if is_pack(folder) else None


def parts_among(
    entries: Sequence[Any], endings: tuple[str, ...], options: RemoteOptions | None, wanted: tuple[str, ...] | None = None
) -> list[Any]:
    """The entries, with the files of its parts in place of each pack: a folder of this machine, or the path or URL of a manifest.

    Args:
        entries: paths, globs and URLs.
        endings: of files that count themselves, and are not looked at.
        options: how URLs are read.
        wanted: endings that the files of packs must have; None: any.

    Raises:
        DataNotFoundError: a pack is not complete; a manifest is missing.
        FormatError: a manifest is damaged; a pack has files of another kind.
        AccessError, RemoteError: a server does not give it.
    """
    return [path for entry in entries for path in ([entry] if str(entry).endswith(endings) else _parts_of(entry, options, wanted))]


def _parts_of(entry: Any, options: RemoteOptions | None, wanted: tuple[str, ...] | None) -> Iterator[Any]:
    path = os.path.expanduser(os.fsdecode(entry))
    if is_url(path):
        manifest = _remote_manifest(path, options or RemoteOptions()) if _is_manifest(path) else None
        if manifest is not None:
            start, _, end = path.rpartition(MANIFEST)
            yield from (start + name + end for name in _names_in(manifest, path, wanted))
            return
    elif (folder := _folder_of(path)) is not None:
        manifest = _local_manifest(folder)
        if manifest is not None:
            yield from (os.path.join(folder, name) for name in _names_in(manifest, path, wanted))
            return
    yield entry


def _names_in(manifest: dict[str, Any], path: str, wanted: tuple[str, ...] | None) -> list[str]:
    """What holds the samples: a file for each part; or one Zarr group."""
    is_zarr = manifest.get("format") == "zarr"
    names = [ARRAYS] if is_zarr else [part["name"] for part in manifest["parts"]]
    if wanted is not None and not names[0].endswith(wanted):
        what = "a Zarr group" if is_zarr else "HDF5 files"
        raise FormatError(f"{redact(path)} is a pack, {what} of kind {manifest['kind']!r}: open it with headrace.open_dataset")
    return names


def _local_manifest(folder: str) -> dict[str, Any] | None:
    path = os.path.join(folder, MANIFEST)
    try:
        with open(path, "rb") as file:
            return parse_manifest(file.read(), path)
    except FileNotFoundError:
        raise DataNotFoundError(
            f"{redact(folder)} is a pack that is not complete (there is no {MANIFEST}): pack the rest by the same command; "
            "headrace.packing.pack_status says what is missing"
        ) from None


def _remote_manifest(url: str, options: RemoteOptions) -> dict[str, Any] | None:
    data = read_whole(url, options)
    if data is None:
        raise DataNotFoundError(f"{redact(url)} does not exist: is the pack complete, and copied with its {MANIFEST}?")
    return parse_manifest(data, url)
