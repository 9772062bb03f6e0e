"""Resolves what a user passes as `data_path` to files."""

from __future__ import annotations

import dataclasses
import functools
import glob
import hashlib
import json
import os
import posixpath
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from headrace.arguments import described
from headrace.errors import ConfigError, DataNotFoundError, FormatError
from headrace.formats.resolve import local
from headrace.formats.resolve.file_set import (
    FileSet,
    Format,
    Found,
    are_bookkeeping,
    as_set,
    has_tables,
    merged,
    summary_of,
)
from headrace.formats.resolve.local import LocalWalk
from headrace.formats.resolve.remote import (
    RemoteWalk,
    are_folders,
    check_one_filesystem,
    has_magic,
    names_below,
)
from headrace.io.paths import check_regular, is_url, named_part, redact
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import RemoteFiles, read_whole

DataPath = str | os.PathLike[Any] | Sequence[str | os.PathLike[Any]]
_MOST = 1_000_000  # names that one pattern in braces may stand for
_BRACES = re.compile(r"\{(\d+\.\.\d+(?:\.\.\d+)?|[^{}]*,[^{}]*)\}")


def entries_of(data_path: DataPath, name: str = "data_path") -> list[Any]:
    """The paths that `data_path` names, patterns in braces expanded; globs stay as they are.

    Args:
        data_path: as the user gave it.
        name: the argument's, for messages.

    Raises:
        ConfigError: it is no path and no list of paths; or a pattern stands for too many names.
        DataNotFoundError: it is an empty one.
    """
    wanted = f"{name} must be a path, a glob, a URL or a list of these"
    if isinstance(data_path, (str, bytes, os.PathLike)):
        entries: list[Any] = [data_path]
    elif hasattr(data_path, "filename") or hasattr(data_path, "read"):
        raise ConfigError(f"{wanted}, not {described(data_path)} that is open: pass its path")
    elif isinstance(data_path, Mapping) or not isinstance(data_path, Iterable):
        raise ConfigError(f"{wanted}, not {described(data_path)}")
    elif isinstance(data_path, Iterator):
        raise ConfigError(
            f"{wanted}, not {described(data_path)}, which gives its paths once: pass list(...) of "
            "it"
        )
    else:
        entries = list(data_path)
    for number, entry in enumerate(entries):
        if not isinstance(entry, (str, bytes, os.PathLike)):
            raise ConfigError(
                f"{wanted}, and entry {number} of the {len(entries):,} given is {described(entry)}"
            )
    if not entries or not all(map(os.fspath, entries)):
        empty = next((number for number, entry in enumerate(entries) if not os.fspath(entry)), 0)
        what = (
            f"{name} is empty ({data_path!r})"
            if len(entries) < 2
            else f"{name}: entry {empty} of the {len(entries):,} given is empty"
        )
        raise DataNotFoundError(f"{what}: name at least one folder or file")
    # in a list of millions, at once
    if all(type(entry) is str for entry in entries) and "{" not in "".join(entries):
        return entries
    return [path for entry in entries for path in expand_braces(entry)]


def urls_among(entries: Sequence[Any], name: str = "data_path") -> list[str]:
    """The entries, if they are URLs; none, if they are paths of this machine.

    Raises:
        ConfigError: some are, and some are not.
    """
    urls = [entry for entry in entries if is_url(entry)]
    if urls and len(urls) < len(entries):
        raise ConfigError(f"{name} mixes URLs and local paths: make one dataset of each")
    return urls


def expand_braces(entry: Any) -> list[Any]:
    """``a-{000..003}.tar`` and ``{train,val}.tar`` as shells, and WebDataset, write them: all
    names. What is there as it stands, and what has no such braces, stays as it is.

    Raises:
        ConfigError: they stand for too many names.
    """
    text = os.fspath(entry)
    if (
        not isinstance(text, str)
        or "{" not in text
        or (not is_url(text) and os.path.exists(os.path.expanduser(text)))
    ):
        return [entry]
    expanded = [text]
    while True:
        matches = [_BRACES.search(name) for name in expanded]
        if not any(matches):
            return list(dict.fromkeys(expanded))  # braces in braces give some twice
        of = {
            inside: _parts(inside)
            for inside in {match[1] for match in matches if match is not None}
        }
        parts = [[""] if match is None else of[match[1]] for match in matches]
        if sum(map(len, parts)) > _MOST:
            raise ConfigError(f"{redact(entry)} stands for more than {_MOST:,} names")
        made = []
        for name, match, some in zip(expanded, matches, parts, strict=True):
            made += (
                [name]
                if match is None
                else [name[: match.start()] + part + name[match.end() :] for part in some]
            )
        expanded = made


def _parts(inside: str) -> Sequence[str]:
    if ".." not in inside or "," in inside:
        return inside.split(",")
    first, last, *by = inside.split("..")
    is_padded = any(len(end) > 1 and end.startswith("0") for end in (first, last))
    width = 0
    if is_padded:
        width = max(len(first), len(last))
    step = 1
    if by:
        step = max(1, int(by[0]))
    if abs(int(last) - int(first)) // step > _MOST:
        raise ConfigError(f"{{{inside}}} stands for more than {_MOST:,} names")
    sign = -1
    if int(first) <= int(last):
        sign = 1
    return [f"{number:0{width}d}" for number in range(int(first), int(last) + sign, sign * step)]


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
            yield from (start + name + end for name in _part_names(manifest, path, wanted))
            return
    elif (folder := _folder_of(path)) is not None:
        yield from (
            os.path.join(folder, name)
            for name in _part_names(_local_manifest(folder), path, wanted)
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


def _part_names(manifest: dict[str, Any], path: str, wanted: tuple[str, ...] | None) -> list[str]:
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


def resolve(
    data_path: DataPath | FileSet,
    kind: Format,
    options: RemoteOptions | None = None,
    *,
    name: str = "data_path",
    server: RemoteFiles | None = None,
    asks: bool = False,
) -> FileSet:
    """The files of one kind that a path means.

    Args:
        data_path: a path, glob, URL, pattern in braces, or a list of these; what is resolved
            already stays as it is.
        kind: which files count.
        options: how URLs are read.
        name: the argument's, for messages.
        server: of the URLs, if it is open already; else a `RemoteFiles` is opened, and belongs to
            who gets the files.
        asks: ask for URLs that end as files do, too: one may be missing, or a folder.

    Raises:
        ConfigError: it is no path; it mixes URLs and local paths, or servers.
        DataNotFoundError: a path is missing, a glob matches nothing, or nothing under one of the
            paths is of the kind; the message says what is there.
        FormatError: a pack is damaged, or lies among texts; all that is there is what HuggingFace
            writes beside the tables of a data set.
        AccessError, RemoteError: a server does not say: see `headrace.io.remote.client.Remote.ask`.
    """
    if isinstance(data_path, FileSet):
        return data_path
    options = options or RemoteOptions()
    entries = parts_among(entries_of(data_path, name), kind.endings, options, kind.all_endings)
    urls = urls_among(entries, name)
    if not urls:
        files = _walked(entries, LocalWalk(kind), kind)
        refuse_sidecars(files)
        return files
    opened = server or RemoteFiles(urls[0], options)
    try:
        check_one_filesystem(urls, opened.filesystem)
        files = _walked(
            urls, RemoteWalk(kind, opened, asks and are_folders(urls, kind, opened)), kind
        )
        # else it holds what the listing said of each file, and each worker with it
        opened.filesystem.invalidate_cache()
        files = dataclasses.replace(files, server=opened)
        refuse_sidecars(files)
    except BaseException:
        if server is None:
            opened.close()
        raise
    return files


def _walked(entries: Sequence[Any], walk: LocalWalk | RemoteWalk, kind: Format) -> FileSet:
    def each(entry: Any) -> Found:
        others = len(walk.others)
        found = walk(entry)
        if not len(found.names) and not found.searched and len(walk.others) == others:
            place = ""
            if isinstance(walk, LocalWalk):
                place = f" (working folder: {os.getcwd()})"
            raise DataNotFoundError(f"nothing matches {redact(entry)}{place}: is the path right?")
        if not len(found.names) and len(entries) > 1:
            raise DataNotFoundError(
                f"{redact(entry)}, one of {len(entries):,} paths, has no file that ends in any of "
                f"{', '.join(kind.all_endings)}: leave it "
                "out, or make a dataset of its own for it (ConcatDataset joins datasets)"
            )
        return found

    files = (
        as_set(each(entries[0]))
        if len(entries) == 1
        else merged(map(each, entries), kind.keeps_order)
    )
    shown = ", ".join(redact(entry) for entry in entries[:3])
    if not len(files):
        raise DataNotFoundError(
            f"no file under {shown} ends in any of {', '.join(kind.all_endings)}; "
            f"{summary_of(walk.others)}"
        )
    if has_tables(walk.others) and are_bookkeeping(files.names):
        raise FormatError(
            f"{shown} holds tables, and else no more than what was written beside them: use "
            "TableDataset"
        )
    return files


def kind_of(
    data_path: DataPath,
    kinds: Sequence[Format],
    options: RemoteOptions | None = None,
    *,
    searches: bool = False,
    is_alone: bool = False,
) -> Format | None:
    """The first of some kinds of which there is something: by the names of files, globs and URLs;
    of local files whose names say nothing by their content; None where nothing is known.

    Args:
        data_path: see `resolve`.
        kinds: in the order in which they count.
        options: how URLs are read.
        searches: folders are searched until something of the first kind is met, of a remote one the
            first in it. False: nothing is listed; of URLs the manifests of packs are read.
        is_alone: files of arrays may not lie beside those of another kind that `holds_arrays`.

    Raises:
        ConfigError, DataNotFoundError: it is no path; it is empty; a pack is not complete; see
            `is_alone`.
        FormatError: the manifest of a pack is damaged.
        AccessError, RemoteError: a server does not answer.
    """
    met = set[str]()
    noted = set[str]()
    looks_inside = True
    bookkeeping = frozenset[str]().union(*(kind.bookkeeping for kind in kinds))
    entries = entries_of(data_path)
    by_ending = functools.lru_cache(1024)(lambda ending: _kind_by_name(ending, kinds))
    pack = next(filter(names_pack, entries), None)
    if (
        pack is not None
        and (kind := _kind_by_name(os.fsdecode(parts_among([pack], (), options)[0]), kinds))
        is not None
    ):
        return kind
    for path, is_whole in _names_in(
        entries, kinds, (options or RemoteOptions()) if searches else None
    ):
        # of a million names a few differ there
        kind = _kind_by_name(path, kinds) if is_whole else by_ending(_end_of(path))
        if kind is None and is_whole and looks_inside and not is_url(path):
            if os.path.exists(path):
                check_regular(path)
            kind = _kind_by_content(path, kinds)
            # of a million files without endings one is opened
            looks_inside = kind is not None or searches
        if kind is not None:
            (noted if not is_whole and path.rpartition("/")[2].lower() in bookkeeping else met).add(
                kind.name
            )
        if kind is kinds[0] and not (is_alone and kind.holds_arrays):
            break
    found = [kind for kind in kinds if kind.name in met]
    # it lies beside files of one kind only
    if not all(kind.bookkeeping for kind in found) or not found:
        found = [kind for kind in kinds if kind.name in met | noted]
    if is_alone and found and found[0].holds_arrays:
        _refuse_several(entries, [kind for kind in found if kind.holds_arrays], options)
    if found:
        return found[0]
    return None


def _refuse_several(
    entries: Sequence[Any], kinds: Sequence[Format], options: RemoteOptions | None
) -> None:
    """Raises a ConfigError where a dataset could be made of the files of each of several kinds."""
    counted = list[str]()
    patterns = list[str]()
    first = redact(entries[0])
    folder = first
    if not (is_url(first) or os.path.isdir(os.path.expanduser(first))):
        folder = os.path.dirname(first)
    for kind in kinds if len(kinds) > 1 else ():
        try:
            files = resolve(list(entries), kind, options)
        except DataNotFoundError:  # what lies deeper than it is searched for
            continue
        counted.append(
            f"{len(files):,} {kind.name if len(files) > 1 else kind.name[:-1]} "
            f"({redact(os.fsdecode(files.names[0]))})"
        )
        patterns.append(
            repr(os.path.join(folder, f"*{os.path.splitext(os.fsdecode(files.names[0]))[1]}"))
        )
        if files.server is not None:
            files.server.close()
    if len(counted) > 1:
        raise ConfigError(
            f"{first} holds {' and '.join(counted)}, and a dataset reads one kind: pass a glob "
            f"such as {' or '.join(patterns)}, or use "
            "HDF5Dataset or ZarrDataset, which ignore the other kind"
        )


def _names_in(
    entries: Sequence[Any], kinds: Sequence[Format], options: RemoteOptions | None
) -> Iterator[tuple[str, bool]]:
    """Paths, and names in folders, and whether each is a path."""
    for entry in entries:
        path = os.path.expanduser(os.fsdecode(entry))
        if options is None or (
            is_url(path) and (has_magic(path) or _kind_by_name(path, kinds) is not None)
        ):
            yield path, True
            continue
        if is_url(path):
            server = RemoteFiles(path, options)
            try:
                yield from ((name, False) for name in names_below(path, server))
            finally:
                server.close()
            continue
        for start in [path] if os.path.exists(path) else glob.iglob(path, recursive=True):
            is_folder = (
                os.path.isdir(start)
                and _kind_by_name(start, kinds) is None
                and _kind_by_content(start, kinds) is None
            )
            yield from (
                ((name, False) for name in local.names_below(start))
                if is_folder
                else [(start, True)]
            )


def _end_of(name: str) -> str:
    """The end of a file's name that may say of which kind it is: from its last dot but one, or
    from the last.
    """
    first, dot, last = name.rpartition(".")
    if "." in first[-9:]:
        return f".{first.rpartition('.')[2][-8:]}{dot}{last}"
    return dot + last


def _kind_by_name(path: str, kinds: Sequence[Format]) -> Format | None:
    return next((kind for kind in kinds if kind.fits(path)), None)


def _kind_by_content(path: str, kinds: Sequence[Format]) -> Format | None:
    return next(
        (kind for kind in kinds if kind.recognizes is not None and kind.recognizes(path)), None
    )
