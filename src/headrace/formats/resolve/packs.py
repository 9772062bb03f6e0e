"""Finds the parts of a pack, which `headrace.pack` wrote into a folder, by its manifest."""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from headrace.errors import DataNotFoundError, FormatError
from headrace.formats.resolve.file_set import FileSet
from headrace.io.paths import is_url, named_part, redact
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import read_whole

PLAN = "plan.json"
MANIFEST = "manifest.json"
_KEYS = {"plan", "parts", "kind", "store", "check"}
_PART = r"part-\d{5,}-of-\d{5,}\."
_BESIDE = re.compile(rf"{_PART}(?:h5|json)")
"""What lies beside the plan and the manifest of a pack."""
_SIDECARS = re.compile(rf"(?:^|/){_PART}json$".encode())


def checked_text(said: dict[str, Any]) -> bytes:
    """JSON with its own checksum: a manifest, a plan, or the sidecar of a part."""
    text = json.dumps({**said, "check": _crc_of(said)}, sort_keys=True, indent=1)
    return text.encode("ascii") + b"\n"


def checked_json(data: bytes) -> dict[str, Any]:
    """What `checked_text` was made of; raises a ValueError for anything else."""
    try:
        said = json.loads(data)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if not isinstance(said, dict) or said.pop("check", None) != _crc_of(said):
        raise ValueError("wrong checksum")
    return said


def _crc_of(said: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(said, sort_keys=True).encode("ascii"))


def parse_manifest(data: bytes, path: str | os.PathLike[Any]) -> dict[str, Any]:
    """What the manifest of a pack says.

    Raises:
        FormatError: it is damaged, or none.
    """
    try:
        said = checked_json(data)
        _check_manifest(said)
    except ValueError as error:
        raise FormatError(
            f"{redact(path)} is damaged ({error}): write it again (headrace.packing.join)"
        ) from error
    return said


def _check_manifest(said: dict[str, Any]) -> None:
    """Raises a ValueError for a value that no pack writes, such as the name of a part that leads
    out of the folder.
    """
    parts = said.get("parts")
    classes = said.get("classes")
    if not isinstance(parts, list) or not parts:
        raise ValueError(f"'parts' is {parts!r:.40}")
    if classes is not None and not are_texts(classes):
        raise ValueError(f"'classes' is {classes!r:.40}")
    for name in ("plan", "kind", "store", "fingerprint"):
        if not isinstance(said.get(name), str):
            raise ValueError(f"{name!r} is {said.get(name)!r:.40}")
    if not are_counts([said.get("samples"), said.get("left_out")]) or not are_texts(
        said.get("left_out_first")
    ):
        raise ValueError("'samples' or 'left_out' is wrong")
    for number, part in enumerate(parts):
        if not isinstance(part, dict) or not are_counts(
            [part.get(name) for name in ("samples", "nbytes", "crc32")]
        ):
            raise ValueError(f"part {number} is {part!r:.40}")
        if part.get("name") != f"part-{number:05d}-of-{len(parts):05d}.h5":
            raise ValueError(f"part {number} is called {part.get('name')!r:.60}")
    if sum(part["samples"] for part in parts) != said["samples"]:
        raise ValueError("the samples of the parts are other ones than 'samples'")


def are_counts(values: Any) -> bool:
    """True of a list of integers from 0 on, as JSON has them."""
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def are_texts(values: Any) -> bool:
    """True of a list of texts."""
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def is_pack(folder: str) -> bool:
    """True if a local folder holds files named as those that `headrace.pack` writes, whatever is
    in them.
    """
    if not any(os.path.exists(os.path.join(folder, name)) for name in (PLAN, MANIFEST)):
        return False
    try:
        with os.scandir(folder) as listing:
            return any(_BESIDE.fullmatch(entry.name) for entry in listing)
    except OSError:
        return False


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
    entries: Sequence[Any],
    endings: tuple[str, ...],
    options: RemoteOptions | None,
    wanted: tuple[str, ...] | None = None,
) -> list[Any]:
    """The entries, with the files of its parts in place of each pack: a folder of this machine, or
    the path or URL of a manifest.

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
    return [
        path
        for entry in entries
        for path in ([entry] if str(entry).endswith(endings) else _parts_of(entry, options, wanted))
    ]


def _parts_of(
    entry: Any, options: RemoteOptions | None, wanted: tuple[str, ...] | None
) -> Iterator[Any]:
    path = os.path.expanduser(os.fsdecode(entry))
    if is_url(path):
        manifest = (
            _remote_manifest(path, options or RemoteOptions()) if _is_manifest(path) else None
        )
        if manifest is not None:
            start, _, end = path.rpartition(MANIFEST)
            yield from (start + name + end for name in _names_in(manifest, path, wanted))
            return
    elif (folder := _folder_of(path)) is not None:
        yield from (
            os.path.join(folder, name) for name in _names_in(_local_manifest(folder), path, wanted)
        )
        return
    yield entry


def refuse_sidecars(files: FileSet) -> None:
    """Raises a FormatError where JSON files that `headrace.pack` wrote beside parts are among
    texts.
    """
    data, _ = files.names.arrays
    if re.search(rb"-of-\d", data.data) is None:
        return
    names = set(files.names)
    for index, name in enumerate(files.names):
        if _SIDECARS.search(name) is None:
            continue
        folder = name[: name.rfind(b"/") + 1]
        part = files.url(index).removesuffix("json") + "h5"
        if (
            folder + PLAN.encode() in names
            or folder + MANIFEST.encode() in names
            or os.path.exists(part)
        ):
            pack = posixpath.dirname(files.url(index))
            raise FormatError(
                f"{redact(pack)} is a pack, and its .json files are no texts: pass its {MANIFEST} "
                "as a path of its own, or a glob of the "
                "texts"
            )


def _names_in(manifest: dict[str, Any], path: str, wanted: tuple[str, ...] | None) -> list[str]:
    """The files of the parts."""
    names = [part["name"] for part in manifest["parts"]]
    if wanted is not None and not names[0].endswith(wanted):
        raise FormatError(
            f"{redact(path)} is a pack, HDF5 files of kind {manifest['kind']!r}: open it with "
            "headrace.open_dataset"
        )
    return names


def _local_manifest(folder: str) -> dict[str, Any]:
    path = os.path.join(folder, MANIFEST)
    try:
        with open(path, "rb") as file:
            manifest = parse_manifest(file.read(), path)
    except FileNotFoundError:
        raise DataNotFoundError(
            f"{redact(folder)} is a pack that is not complete (there is no {MANIFEST}): pack the "
            "rest by the same command; "
            "headrace.packing.pack_status says what is missing"
        ) from None
    try:
        with open(os.path.join(folder, PLAN), "rb") as file:
            digest = hashlib.blake2b(file.read(), digest_size=8).hexdigest()
    except FileNotFoundError:
        raise FormatError(
            f"{redact(folder)} is a pack without its {PLAN}: copy that too, or pack again"
        ) from None
    if digest != manifest["plan"]:
        raise FormatError(
            f"{redact(folder)}: {PLAN} is not the plan that {MANIFEST} names: copy both again, or "
            "pack again"
        )
    return manifest


def _remote_manifest(url: str, options: RemoteOptions) -> dict[str, Any] | None:
    """The manifest at a URL; None: it is a JSON file of something else."""
    data = read_whole(url, options)
    if data is None:
        raise DataNotFoundError(
            f"{redact(url)} does not exist: is the pack complete, and copied with its {MANIFEST}?"
        )
    try:
        said = json.loads(data)
    except (ValueError, RecursionError):
        return parse_manifest(data, url)  # says what is wrong
    # a damaged one lacks one or two
    is_of_pack = isinstance(said, dict) and len(_KEYS & said.keys()) > len(_KEYS) // 2
    return parse_manifest(data, url) if is_of_pack else None
