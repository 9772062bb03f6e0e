"""Resolves what a user passes as `data_path` to files.

* A file: that file, whatever its ending.
* A folder, or its URL (a prefix): all files below it that end as files of the kind do, without
  hidden ones; of Zarr stores those in it.
* A glob: the matches that end so; where none does, those whose content is of the kind. Matching
  nothing is an error.
* A folder of parts that `headrace.pack` wrote, or the path or URL of its `manifest.json`: the
  parts. The `index.json` of another library's shards: these shards, unless texts are looked for.
* ``{a,b}``, ``{000..127}``: each of the names, as shells expand them, unless there is a file of
  that very name.
* A URL: as a path; its query is no part of a name. One that ends as a file does is not looked up
  before it is read.
* ``zip://a.jpg::s3://...``: a path in an archive, or through a cache of fsspec's.
* A list: the files of all its entries: paths of this machine, or URLs of one server.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import posixpath
import re
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.arguments import described
from headrace.errors import ConfigError, DataNotFoundError, FormatError
from headrace.formats.resolve.file_set import (
    MOST,
    NUMBERED,
    FileSet,
    Format,
    Found,
    are_bookkeeping,
    are_shards,
    are_tables,
    encoded,
    summary_of,
)
from headrace.formats.resolve.local import find_local, recognized
from headrace.formats.resolve.remote import (
    check_one_filesystem,
    find_remote,
    has_magic,
    learn,
    names_below,
    names_file,
)
from headrace.io.packed_strings import PackedNames
from headrace.io.paths import check_regular, is_url, named_part, redact
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import RemoteFiles, in_folder_of, read_whole
from headrace.memory.anonymous import SharedArray

DataPath = str | os.PathLike[Any] | Sequence[str | os.PathLike[Any]]
_MOST = 1_000_000  # names that one pattern in braces may stand for
_BRACES = re.compile(r"\{(\d+\.\.\d+(?:\.\.\d+)?|[^{}]*,[^{}]*)\}")


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
    entries, are_urls = _paths_of(data_path, options, kind, name)
    if not are_urls:
        files = _gathered(data_path, entries, partial(find_local, kinds=[kind]), [kind])
        assert files is not None
        return files
    opened = server or RemoteFiles(entries[0], options)
    try:
        check_one_filesystem(entries, opened.filesystem)
        if asks:
            named = [url for url in entries if names_file(url, kind)]
            learn(named, opened)
            opened.forget(named)  # files are read as they are then
        find = partial(find_remote, kind=kind, server=opened)
        files = _gathered(data_path, entries, find, [kind], opened)
        # else it holds what the listing said of each file, and each worker with it
        opened.filesystem.invalidate_cache()
    except BaseException:
        if server is None:
            opened.close()
        raise
    assert files is not None
    return files


def look_for(
    data_path: DataPath | FileSet,
    kinds: Sequence[Format],
    options: RemoteOptions | None = None,
    *,
    lists: bool = True,
) -> tuple[Format | None, DataPath | FileSet]:
    """The first of some kinds of which there is something, None if there is nothing of them; and
    its files where these were listed, else the path.

    Args:
        data_path: see `resolve`.
        kinds: in the order in which they count.
        options: how URLs are read.
        lists: list folders; of a server only the first ones. False: names of files, globs and URLs
            decide, and of local files whose names say nothing the content.

    Raises:
        ConfigError: files of arrays lie beside those of another kind that `holds_arrays`.
        ConfigError, DataNotFoundError, FormatError, AccessError, RemoteError: see `resolve`.
    """
    if isinstance(data_path, FileSet):
        return data_path.kind, data_path
    options = options or RemoteOptions()
    entries, are_urls = _paths_of(data_path, options)
    if lists and not are_urls:
        find = partial(find_local, kinds=kinds)
        files = _gathered(data_path, entries, find, kinds, chooses=True)
        if files is None:
            return None, data_path
        return files.kind, files
    paths = list[str]()
    for entry in entries:
        path = os.path.expanduser(os.fsdecode(entry))
        if not lists or has_magic(path) or any(kind.fits(path) for kind in kinds):
            paths.append(named_part(path))
            continue
        server = RemoteFiles(path, options)
        try:
            for name in names_below(path, server):
                paths.append(name)
                if kinds[0].fits(name) and not kinds[0].holds_arrays:
                    break
        finally:
            server.close()
    names = [os.fsencode(posixpath.basename(path.rstrip("/"))) for path in paths]
    path_of = None
    if not are_urls:
        path_of = paths.__getitem__
    return _chosen(names, kinds, path_of, entries)[0], data_path


def _gathered(
    data_path: DataPath,
    entries: Sequence[Any],
    find: Callable[[Any], Found],
    kinds: Sequence[Format],
    server: RemoteFiles | None = None,
    chooses: bool = False,
) -> FileSet | None:
    """The files of all entries that are of the first of some kinds, in their order. Of equal names
    that of an earlier entry comes first. None: `chooses`, and nothing is of any kind.
    """
    names = list[bytes]()
    roots = dict[tuple[str, str], int]()
    root_of = array("i")
    ends = [0]
    folders = set[bytes]()
    searched = set[str]()
    others = list[bytes]()
    for entry in entries:
        found = find(entry)
        names += found.names
        root = roots.setdefault((found.root, found.tail), len(roots))
        root_of += array("i", [root]) * len(found.names)
        ends.append(len(names))
        folders |= found.folders
        if found.searched:
            searched.add(found.root)
        others += found.others
    places, tails = zip(*roots, strict=True)
    kind: Format | None = kinds[0]
    numbers = np.arange(len(names))
    if chooses:

        def path_of(number: int) -> str:
            return os.path.join(places[root_of[number]], os.fsdecode(names[number]))

        kind, fits = _chosen(names, kinds, path_of, entries)
        numbers = np.flatnonzero(fits)
    if kind is None:
        return None
    edges = np.searchsorted(numbers, ends).tolist()
    if ".json" in kind.endings:
        _refuse_bookkeeping(names, others, entries)
    if len(set(edges)) <= len(entries):
        _refuse_missing(kind, entries, edges, others)
    if kind.keeps_order:
        parts = [numbers[start:stop].tolist() for start, stop in itertools.pairwise(edges)]
        order = [number for part in parts for number in sorted(part, key=names.__getitem__)]
    else:
        # names sort as the lists of their parts, byte by byte, if what stands between the parts is
        # less than any byte
        keys = list(map(methodcaller("replace", b"/", b"\0"), names))
        order = sorted(numbers.tolist(), key=keys.__getitem__)
    numbered = None
    if len(roots) > 1:
        numbered = SharedArray(np.array(root_of, np.int32)[order])
    files = FileSet(
        places,
        tails,
        numbered,
        PackedNames(map(names.__getitem__, order)),
        tuple(map(os.fsdecode, sorted(folders))),
        frozenset(searched),
        server,
        data_path,
        kind,
    )
    if ".json" in kind.endings:
        _refuse_sidecars(files)
    return files


def _refuse_bookkeeping(names: list[bytes], others: list[bytes], entries: Sequence[Any]) -> None:
    """Raises a FormatError where all texts are written beside data of another format."""
    if are_bookkeeping(names, (INDEX.encode(),)) and are_shards(others):
        raise FormatError(
            f"{redact(entries[0])} holds shards of another library: use headrace.open_dataset, or "
            "ImageDataset or TextDataset with column="
        )
    if are_bookkeeping(names) and are_tables(others):
        raise FormatError(
            f"{redact(entries[0])} holds tables, and else no more than what was written beside "
            "them: use TableDataset"
        )


def _refuse_missing(
    kind: Format, entries: Sequence[Any], edges: list[int], others: list[bytes]
) -> None:
    """Raises a DataNotFoundError: an entry has no files of a kind."""
    endings = ", ".join(kind.all_endings)
    if not edges[-1]:
        raise DataNotFoundError(
            f"no file under {', '.join(map(redact, entries[:3]))} ends in any of {endings}; "
            f"{summary_of(others)}"
        )
    for entry, (start, stop) in zip(entries, itertools.pairwise(edges), strict=True):
        if start == stop:
            raise DataNotFoundError(
                f"{redact(entry)}, one of {len(entries):,} paths, has no file that ends in any of "
                f"{endings}: leave it out, or make a dataset of its own for it (ConcatDataset "
                "joins datasets)"
            )


def _chosen(
    names: Sequence[bytes],
    kinds: Sequence[Format],
    path_of: Callable[[int], str] | None,
    entries: Sequence[Any],
) -> tuple[Format | None, npt.NDArray[np.bool_]]:
    """The first of some kinds that some files are of, and which these are; None: they are of none.

    Args:
        path_of: the paths of local files: where names say nothing, their content does, up to the
            first one that is of no kind.
        entries: the paths that were given, for messages.

    Raises:
        ConfigError: files of arrays lie beside those of another kind that `holds_arrays`.
    """
    lower = list[bytes]()
    if names:
        lower = NUMBERED.sub(rb"\1", b"\0".join(names).lower()).split(b"\0")
    fits = list[npt.NDArray[np.bool_]]()
    unknown = np.ones(len(names), bool)
    for kind in kinds:
        endings = itertools.repeat(encoded(kind.all_endings))
        fits.append(np.fromiter(map(bytes.endswith, lower, endings), bool, len(lower)))
        unknown &= ~fits[-1]
        if len(names) and fits[-1].all() and not kind.bookkeeping:
            return kind, fits[-1]
    if path_of is not None:
        for number in np.flatnonzero(unknown).tolist():
            path = path_of(number)
            if os.path.isdir(path) and not any(map(attrgetter("stores"), kinds)):
                break
            if os.path.exists(path):
                check_regular(path)
            found = recognized(path, kinds)
            if found is None:
                break
            fits[kinds.index(found)][number] = True
        for kind, which in zip(kinds, fits, strict=True):
            if kind.confirms is not None and which.any():
                which &= kind.confirms(path_of(int(which.argmax())))
    met = [(kind, which) for kind, which in zip(kinds, fits, strict=True) if which.any()]
    for kind, which in met:
        others = [names[number] for number in np.flatnonzero(~which)[: MOST + 1]]
        if kind.bookkeeping and are_bookkeeping(others, kind.bookkeeping):
            return kind, which
    if not met:
        return None, unknown
    arrays = [(kind, which) for kind, which in met if kind.holds_arrays]
    if not met[0][0].holds_arrays or len(arrays) < 2:
        return met[0]
    firsts = [(kind.name, redact(names[int(which.argmax())])) for kind, which in arrays]
    held = " and ".join(f"{name} ({first})" for name, first in firsts)
    globs = " or ".join(f"'*{os.path.splitext(first)[1]}'" for _, first in firsts)
    raise ConfigError(
        f"{', '.join(map(redact, entries[:3]))} holds {held}, and a dataset reads one kind: pass "
        f"those of one kind by a glob, {globs}, or use HDF5Dataset or ZarrDataset, which ignore "
        "the other kind"
    )


# -- what a user passes


def entries_of(data_path: DataPath | FileSet, name: str = "data_path") -> list[Any]:
    """The paths that `data_path` names, patterns in braces expanded; globs stay as they are.

    Args:
        data_path: as the user gave it.
        name: the argument's, for messages.

    Raises:
        ConfigError: it is no path and no list of paths; or a pattern stands for too many names.
        DataNotFoundError: it is an empty one.
    """
    wanted = f"{name} must be a path, a glob, a URL or a list of these"
    if isinstance(data_path, FileSet):
        data_path = data_path.given
    entries: list[Any] = [data_path]
    if not isinstance(data_path, (str, bytes, os.PathLike)):
        refused = f"{wanted}, not {described(data_path)}"
        if isinstance(data_path, (Mapping, Iterator)) or hasattr(data_path, "read"):
            raise ConfigError(f"{refused}: pass its path, or list(...) of its paths")
        if not isinstance(data_path, Iterable):
            raise ConfigError(refused)
        entries = list(data_path)
    if not entries:
        raise DataNotFoundError(
            f"{name} is empty ({data_path!r}): name at least one folder or file"
        )
    for number, entry in enumerate(entries):
        if not isinstance(entry, (str, bytes, os.PathLike)):
            raise ConfigError(
                f"{wanted}, and entry {number} of the {len(entries):,} given is {described(entry)}"
            )
        if not os.fspath(entry):
            raise DataNotFoundError(
                f"{name}: entry {number} of the {len(entries):,} given is empty: name at least one "
                "folder or file"
            )
    texts: Iterable[str] = entries
    if set(map(type, entries)) != {str}:  # in a list of millions, all are
        texts = map(os.fsdecode, entries)
    if "{" not in "".join(texts):
        return entries
    return [path for entry in entries for path in expand_braces(entry)]


def expand_braces(entry: Any) -> list[Any]:
    """``a-{000..003}.tar`` and ``{train,val}.tar`` as shells, and WebDataset, write them: all
    names. What is there as it stands, and what has no such braces, stays as it is.

    Raises:
        ConfigError: they stand for too many names.
    """
    text = os.fspath(entry)
    if not isinstance(text, str) or "{" not in text:
        return [entry]
    if not is_url(text) and os.path.exists(os.path.expanduser(text)):
        return [entry]
    expanded = [text]
    while _BRACES.search(expanded[0]):
        made = list[str]()
        for name in expanded:
            match = _BRACES.search(name)
            assert match is not None  # all have the same braces
            parts = _parts(match[1])
            if len(made) + len(parts) > _MOST:
                raise ConfigError(f"{redact(entry)} stands for more than {_MOST:,} names")
            made += [name[: match.start()] + part + name[match.end() :] for part in parts]
        expanded = made
    return list(dict.fromkeys(expanded))  # braces in braces give some twice


def _parts(inside: str) -> Sequence[str]:
    if ".." not in inside or "," in inside:
        return inside.split(",")
    first, last, *by = inside.split("..")
    width = 0
    if any(len(end) > 1 and end.startswith("0") for end in (first, last)):
        width = max(len(first), len(last))
    sign = 1
    if int(last) < int(first):
        sign = -1
    step = max([1, *map(int, by)])
    numbers = range(int(first), int(last) + sign, sign * step)
    if len(numbers) > _MOST:
        raise ConfigError(f"{{{inside}}} stands for more than {_MOST:,} names")
    return [f"{number:0{width}d}" for number in numbers]


# -- packs


INDEX = "index.json"
"""Names the shards of MosaicML Streaming, and the chunks of LitData, beside it."""
PLAN = "plan.json"
MANIFEST = "manifest.json"
_KEYS = (b'"plan"', b'"parts"', b'"kind"', b'"store"', b'"check"')
"""Of which a damaged manifest lacks one or two."""
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
        FormatError: it is damaged, or none; or says what no pack does, such as the name of a part
            that leads out of the folder.
    """
    try:
        said = checked_json(data)
        wrong = _wrong_in(said)
        if wrong:
            raise ValueError(f"{wrong[0]!r} is {said.get(wrong[0])!r:.60}")
    except ValueError as error:
        raise FormatError(
            f"{redact(path)} is damaged ({error}): write it again (headrace.packing.join)"
        ) from error
    return said


def _wrong_in(said: dict[str, Any]) -> list[str]:
    """The names of values in a manifest that no pack writes."""
    texts = ("plan", "kind", "store", "fingerprint")
    wrong = [name for name in texts if not isinstance(said.get(name), str)]
    wrong += [name for name in ("samples", "left_out") if not _is_count(said.get(name))]
    for name in ("left_out_first", "classes"):
        values = said.get(name)
        is_missing = name == "classes" and values is None
        if not is_missing and not (
            isinstance(values, list) and all(isinstance(value, str) for value in values)
        ):
            wrong.append(name)
    parts = said.get("parts")
    if not isinstance(parts, list) or not parts or not all(map(_is_part, parts)):
        return [*wrong, "parts"]
    names = [f"part-{number:05d}-of-{len(parts):05d}.h5" for number in range(len(parts))]
    if [part.get("name") for part in parts] != names:
        wrong.append("parts")
    if sum(part["samples"] for part in parts) != said.get("samples"):
        wrong.append("samples")
    return wrong


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_part(part: Any) -> bool:
    return isinstance(part, dict) and all(
        _is_count(part.get(name)) for name in ("samples", "nbytes", "crc32")
    )


def _paths_of(
    data_path: DataPath,
    options: RemoteOptions,
    kind: Format | None = None,
    name: str = "data_path",
) -> tuple[list[Any], bool]:
    """The paths, globs or URLs that `data_path` names, with the files of its parts in place of each
    pack (a folder of this machine, or the path or URL of a manifest), and what `_shards_of` gives
    in place of the index of another library's shards. And whether these are URLs.

    Args:
        data_path: as the user gave it.
        options: how URLs are read.
        kind: what files are looked for: what ends as these do is not looked at. None: any.
        name: the argument's, for messages.

    Raises:
        ConfigError: it is no path; some are URLs, and some are not.
        DataNotFoundError: a pack is not complete; a manifest is missing.
        FormatError: a manifest is damaged; a pack has files of another kind.
        AccessError, RemoteError: a server does not give it.
    """
    found = list[Any]()
    for entry in entries_of(data_path, name):
        path = os.path.expanduser(os.fsdecode(entry))
        if kind is not None and path.endswith(kind.endings):
            found.append(entry)
            continue
        manifest = _manifest_of(path, options)
        if manifest is None and INDEX in path:
            found += _shards_of(path, options) or [entry]
            continue
        if manifest is None:
            found.append(entry)
            continue
        names = [part["name"] for part in manifest["parts"]]
        if kind is not None and not names[0].endswith(kind.all_endings):
            raise FormatError(
                f"{redact(path)} is a pack, HDF5 files of kind {manifest['kind']!r}: open it with "
                "headrace.open_dataset"
            )
        start, end = os.path.join(path, ""), ""
        if posixpath.basename(named_part(path)) == MANIFEST:
            start, _, end = path.rpartition(MANIFEST)
        found += [start + part + end for part in names]
    urls = list(filter(is_url, found))
    if urls and len(urls) < len(found):
        raise ConfigError(f"{name} mixes URLs and local paths: make one dataset of each")
    return found, bool(urls)


def _manifest_of(path: str, options: RemoteOptions) -> dict[str, Any] | None:
    """The manifest of a pack, if a path or URL is that of a manifest, or of a folder on this
    machine with files named as those that `headrace.pack` writes; None: it is something else.
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
    has_plan = os.path.exists(plan_path)
    if not (has_manifest or has_plan) or not _holds_parts(folder):
        return None
    if not has_manifest:
        raise DataNotFoundError(
            f"{redact(folder)} is a pack that is not complete (there is no {MANIFEST}): pack the "
            "rest by the same command; headrace.packing.pack_status says what is missing"
        )
    with open(manifest_path, "rb") as file:
        manifest = parse_manifest(file.read(), manifest_path)
    digest = ""
    if has_plan:
        with open(plan_path, "rb") as file:
            digest = hashlib.blake2b(file.read(), digest_size=8).hexdigest()
    if digest != manifest["plan"]:
        raise FormatError(
            f"{redact(folder)}: {PLAN} is missing, or not the plan that {MANIFEST} names: copy "
            "both again, or pack again"
        )
    return manifest


def _shards_of(path: str, options: RemoteOptions) -> list[str]:
    """What the index of another library's shards stands for: their folder, or at a URL, since a
    server may list none, the shards that it names. Nothing: it is the index of none.
    """
    if posixpath.basename(named_part(path)) != INDEX:
        return []
    said = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if is_url(path):
            said = json.loads(read_whole(path, options) or b"")
        else:
            with open(path, "rb") as file:
                said = json.load(file)
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


def _holds_parts(folder: str) -> bool:
    with contextlib.suppress(OSError):
        return any(map(_BESIDE.fullmatch, os.listdir(folder)))
    return False


def _refuse_sidecars(files: FileSet) -> None:
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
        path = files.url(index)
        folder = name[: name.rfind(b"/") + 1]
        beside = {folder + PLAN.encode(), folder + MANIFEST.encode()}
        if names & beside or os.path.exists(path.removesuffix("json") + "h5"):
            raise FormatError(
                f"{redact(posixpath.dirname(path))} is a pack, and its .json files are no texts: "
                f"pass its {MANIFEST} as a path of its own, or a glob of the texts"
            )
