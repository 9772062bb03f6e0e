"""Files that list the files of a dataset: the manifest of a pack, the `index.json` of another
library's shards, and the README.md of a dataset of Hugging Face's Hub.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import itertools
import json
import os
import posixpath
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.errors import AccessError, ConfigError, DataNotFoundError, FormatError
from headrace.formats.resolve.file_set import Format
from headrace.io.paths import below, in_folder_of, is_url, named_part, redact
from headrace.io.remote.options import RemoteOptions

INDEX = "index.json"
"""Lists the shards of MosaicML Streaming, and the chunks of LitData."""
PLAN = "plan.json"
MANIFEST = "manifest.json"
README = "README.md"
ON_HUB = re.compile(r"hf://datasets/[^/]+/[^/]+/?")
_FRONT = re.compile(r"\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)
"""The YAML that a README.md begins with."""
_CONFIGS = re.compile(r"^configs:.*?(?=^[^\s#-]|\Z)", re.DOTALL | re.MULTILINE)
"""The configurations in it. Other parts may be long."""
_SHOWN = 8  # splits in a message
_KEYS = (b'"plan"', b'"parts"', b'"kind"', b'"store"', b'"check"')
"""Keys of a manifest. A damaged one lacks one or two."""
OF_PART = re.compile(r"part-\d{5,}-of-\d{5,}\.(?:h5|json)")
"""Names of parts and their sidecars, next to the plan and the manifest of a pack."""


def read_whole(path: str, options: RemoteOptions) -> bytes | None:
    """The bytes of a file, local or remote; None: there is none."""
    if not is_url(path):
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            return file.read()
        return None
    from headrace.io.remote_files import RemoteFiles  # which local files don't need

    with contextlib.closing(RemoteFiles(path, options)) as server:
        return server.find_metadata([path])[0]


# -- packs


def parts_of(path: str, options: RemoteOptions, kind: Format | None) -> list[str]:
    """The files of the parts of a pack; []: it is no pack.

    Args:
        path: path or URL of its manifest, or its local folder.
        options: how URLs are read.
        kind: the format that is looked for. None: any.

    Raises:
        DataNotFoundError: the pack is not complete; the manifest is missing.
        FormatError: the manifest is damaged; the pack has files of another kind.
        AccessError, RemoteError: the manifest can't be fetched.
    """
    manifest = _manifest_of(path, options)
    if manifest is None:
        return []
    names = [part["name"] for part in manifest["parts"]]
    if kind is not None and not names[0].endswith(kind.all_endings):
        raise FormatError(
            f"{redact(path)} is a pack of kind {manifest['kind']!r}: open it with "
            "headrace.open_dataset"
        )
    start, end = os.path.join(path, ""), ""
    if posixpath.basename(named_part(path)) == MANIFEST:
        start, _, end = path.rpartition(MANIFEST)
    return [start + name + end for name in names]


def checked_text(said: dict[str, Any]) -> bytes:
    """JSON with its own checksum: a manifest, a plan, or the sidecar of a part."""
    text = json.dumps({**said, "check": _crc_of(said)}, sort_keys=True, indent=1)
    return text.encode("ascii") + b"\n"


def checked_json(data: bytes) -> dict[str, Any]:
    """The dict that `checked_text` was made of. Raises a ValueError for any other text."""
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
    """The contents of the manifest of a pack.

    Raises:
        FormatError: it is damaged, or no manifest; or has values that no pack has, such as the name
            of a part outside the folder.
    """
    try:
        said = checked_json(data)
        wrong = _wrong_in(said)
        if wrong:
            raise ValueError(f"{wrong!r} is {said.get(wrong)!r:.60}")
    except ValueError as error:
        raise FormatError(
            f"{redact(path)} is damaged ({error}): write it again (headrace.packing.join)"
        ) from error
    return said


def _wrong_in(said: dict[str, Any]) -> str | None:
    """The first key of a manifest whose value no pack has; None: there is none."""
    for name in ("plan", "kind", "store", "fingerprint"):
        if not isinstance(said.get(name), str):
            return name
    for name in ("samples", "left_out"):
        if not _is_count(said.get(name)):
            return name
    for name in ("left_out_first", "classes"):
        values = said.get(name)
        if name == "classes" and values is None:
            continue
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            return name
    parts = said.get("parts")
    if not isinstance(parts, list) or not parts:
        return "parts"
    for number, part in enumerate(parts):
        name = f"part-{number:05d}-of-{len(parts):05d}.h5"
        if not isinstance(part, dict) or part.get("name") != name:
            return "parts"
        if not all(_is_count(part.get(key)) for key in ("samples", "nbytes", "crc32")):
            return "parts"
    if sum(part["samples"] for part in parts) != said["samples"]:
        return "samples"
    return None


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _manifest_of(path: str, options: RemoteOptions) -> dict[str, Any] | None:
    """The manifest at a path or URL, or in a local folder with files that `headrace.pack` writes.
    None: there is no pack.
    """
    if is_url(path):
        if posixpath.basename(named_part(path)) != MANIFEST:
            return None
        data = read_whole(path, options)
        if data is None:
            raise DataNotFoundError(
                f"{redact(path)} does not exist: is the pack complete, and copied with its "
                f"{MANIFEST}?"
            )
        if sum(key in data for key in _KEYS) <= len(_KEYS) // 2:  # it is of something else
            return None
        return parse_manifest(data, path)
    folder = path
    if os.path.basename(path) == MANIFEST:
        folder = os.path.dirname(path) or "."
    manifest_path = os.path.join(folder, MANIFEST)
    plan_path = os.path.join(folder, PLAN)
    has_manifest = os.path.exists(manifest_path)
    names = list[str]()
    if has_manifest or os.path.exists(plan_path):
        with contextlib.suppress(OSError):
            names = os.listdir(folder)
    if not any(map(OF_PART.fullmatch, names)):
        return None
    if not has_manifest:
        raise DataNotFoundError(
            f"{redact(folder)} is an incomplete pack (without {MANIFEST}): run the same command "
            "again; headrace.packing.pack_status lists what is missing"
        )
    manifest = parse_manifest(Path(manifest_path).read_bytes(), manifest_path)
    plan = read_whole(plan_path, options)
    if plan is None or hashlib.blake2b(plan, digest_size=8).hexdigest() != manifest["plan"]:
        raise FormatError(
            f"{redact(folder)}: {PLAN} is missing, or not the plan that {MANIFEST} names: copy "
            "both again, or pack again"
        )
    return manifest


def shards_of(path: str, options: RemoteOptions) -> list[str]:
    """The shards in an `index.json`: their local folder, or, since a server may not list folders,
    their URLs. []: it is another index.
    """
    said = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        said = json.loads(read_whole(path, options) or b"")
    if not isinstance(said, dict) or not isinstance(said.get("shards", said.get("chunks")), list):
        return []
    if is_url(path):
        with contextlib.suppress(LookupError, TypeError, AttributeError):  # who opens them says so
            names = [chunk["filename"] for chunk in said.get("chunks", ())]
            for shard in said.get("shards", ()):
                names.append((shard.get("zip_data") or shard["raw_data"])["basename"])
            return [in_folder_of(path, name) for name in names]
    start, _, end = path.rpartition(INDEX)
    return [(start or ".") + end]


# -- datasets of Hugging Face's Hub


def split_of(path: str, options: RemoteOptions) -> list[str]:
    """The files of the one split of the default configuration in the README.md of a dataset, as
    globs. []: it lists no files.

    Source: https://huggingface.co/docs/hub/datasets-manual-configuration

    Raises:
        ConfigError: there are several splits; the message names the files of each.
        FormatError: the configurations can't be read.
        RemoteError: the README.md can't be fetched.
    """
    data: bytes | None = None
    root = glob.escape(path)
    readme = os.path.join(path, README)
    if is_url(path):
        root = path
        readme = below(path, README)
    with contextlib.suppress(AccessError):  # listing the folder says so
        data = read_whole(readme, options)
    front = _FRONT.match((data or b"").decode("utf-8", "replace"))
    configs = _CONFIGS.search(front[1]) if front else None
    if configs is None:
        return []
    import yaml

    try:
        splits = _splits_in(yaml.safe_load(configs[0])["configs"], root.rstrip("/"))
    except Exception as error:  # whatever people write there
        raise FormatError(
            f"{redact(path)}: the configs in its {README} can't be read ({error}): pass the files "
            "of one split by a glob"
        ) from error
    if len(splits) < 2:
        return next(iter(splits.values()), [])
    shown = []
    for name, globs in itertools.islice(splits.items(), _SHOWN):
        files: Any = list(map(redact, globs))
        shown.append(f"{name} {files if len(files) > 1 else files[0]!r}")
    if len(splits) > len(shown):
        shown.append(f"and {len(splits) - len(shown):,} more")
    raise ConfigError(
        f"{redact(path)} holds several splits of a dataset, as its {README} says: pass the files "
        f"of one: {', '.join(shown)}"
    )


def _splits_in(configs: Sequence[Mapping[str, Any]], root: str) -> dict[str, list[str]]:
    """The files of each split of the default configuration, as globs. If there is no default, of
    all configurations; splits are then called ``configuration/split``.
    """
    chosen = [config for config in configs if config.get("default")]
    chosen += [config for config in configs if config.get("config_name") == "default"]
    chosen = chosen[:1] or list(configs)
    splits = dict[str, list[str]]()
    for config in chosen:
        files = config.get("data_files", {"": ""})
        if isinstance(files, list) and all(isinstance(entry, dict) for entry in files):
            files = {entry["split"]: entry["path"] for entry in files}
        elif not isinstance(files, dict):
            files = {"train": files}
        for split, patterns in files.items():
            names = [split] if len(chosen) == 1 else [config["config_name"], split]
            globs = [patterns] if isinstance(patterns, str) else patterns
            files_of_split = splits.setdefault("/".join(filter(None, names)), [])
            for pattern in globs:
                place = posixpath.join(config.get("data_dir", ""), pattern).removeprefix("./")
                if place.startswith("/") or "://" in place or ".." in place.split("/"):
                    raise ValueError(f"the files {place!r} lie elsewhere")
                files_of_split.append(f"{root}/{place}")
    return splits
