"""Resolves a `data_path` to files.

* A file: that file, whatever its ending.
* A folder, or its URL (a prefix): all files below it that end as files of the kind do, without
  hidden ones; of Zarr stores those in it.
* A glob: the matches that end so; where none does, those whose content is of the kind. Matching
  nothing is an error.
* A folder of parts that `headrace.pack` wrote, or the path or URL of its `manifest.json`: the
  parts. The `index.json` of another library's shards: these shards, unless texts are looked for.
  A folder whose README.md names the files of one split, as on Hugging Face's Hub: these.
* ``{a,b}``, ``{000..127}``: each of the names, as shells expand them, unless there is a file of
  that very name.
* A URL: as a path; its query is no part of a name. One that ends as a file does is not looked up
  before it is read.
* ``zip://a.jpg::s3://...``: a path in an archive, or through a cache of fsspec's.
* A list: the files of all its entries: paths of this machine, or URLs of one server.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import posixpath
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from headrace.arguments import described
from headrace.errors import ConfigError, DataNotFoundError, FormatError
from headrace.formats.resolve.file_set import (
    MOST,
    NUMBERED,
    FileSet,
    Format,
    PackedNames,
    are_bookkeeping,
    are_shards,
    are_tables,
    summary_of,
)
from headrace.formats.resolve.find import (
    find_local,
    find_remote,
    names_below,
    recognized,
)
from headrace.formats.resolve.manifests import (
    INDEX,
    MANIFEST,
    ON_HUB,
    PLAN,
    README,
    parts_of,
    shards_of,
    split_of,
)
from headrace.io.paths import check_regular, is_url, named_part, redact
from headrace.io.remote.options import RemoteOptions
from headrace.memory.anonymous import SharedArray

if TYPE_CHECKING:
    from headrace.io.remote_files import RemoteFiles

DataPath = str | os.PathLike[Any] | Sequence[str | os.PathLike[Any]]
_MOST = 1_000_000  # names that one pattern in braces may stand for
_BRACES = re.compile(r"\{(\d+\.\.\d+(?:\.\.\d+)?|[^{}]*,[^{}]*)\}")


def resolve(
    data_path: DataPath | FileSet,
    kind: Format,
    options: RemoteOptions | None = None,
) -> FileSet:
    """The files of one format at a path. URLs with the ending of a file are not checked.

    Args:
        data_path: a path, glob, URL, pattern in braces, or a list of these; a `FileSet` is returned
            as it is.
        kind: the format.
        options: how URLs are read; the server that is opened for them belongs to the caller.

    Raises:
        ConfigError: it is no path; it mixes URLs and local paths, or servers.
        DataNotFoundError: a path is missing, a glob matches nothing, or nothing under one of the
            paths is of the kind; the message says what is there.
        FormatError: a pack is damaged, or among texts; there are only metadata files of
            HuggingFace next to tables.
        AccessError, RemoteError: see `headrace.io.remote.client.Remote.ask`.
    """
    if isinstance(data_path, FileSet):
        return data_path
    options = options or RemoteOptions()
    entries = _paths_of(data_path, options, kind)
    if not is_url(entries[0]):
        files = _gathered(data_path, entries, [kind])
    else:
        with _server_of(entries, options) as server:
            files = _gathered(data_path, entries, [kind], server)
    assert files is not None
    return files


@contextlib.contextmanager
def _server_of(urls: Sequence[str], options: RemoteOptions) -> Iterator[RemoteFiles]:
    """Opens the one server of some URLs; an error closes it."""
    from headrace.io.remote_files import RemoteFiles  # which local files don't need

    server = RemoteFiles(urls[0], options)
    try:
        server.check_one_filesystem(urls)
        yield server
    except BaseException:
        server.close()
        raise


def look_for(
    data_path: DataPath | FileSet,
    kinds: Sequence[Format],
    options: RemoteOptions | None = None,
) -> FileSet | None:
    """The files of the first of some formats that a path has files of; None: of none. Of folders
    on a server only the first ones decide.

    Args:
        data_path: see `resolve`.
        kinds: the formats, the most important first.
        options: how URLs are read.

    Raises:
        ConfigError: there are files of two formats that are exclusive.
        ConfigError, DataNotFoundError, FormatError, AccessError, RemoteError: see `resolve`.
    """
    if isinstance(data_path, FileSet):
        return data_path
    options = options or RemoteOptions()
    entries = _paths_of(data_path, options)
    if not is_url(entries[0]):
        return _gathered(data_path, entries, kinds, chooses=True)
    with _server_of(entries, options) as server:
        paths = []
        for url in entries:
            if any(kind.fits(url) for kind in kinds):
                paths.append(named_part(url))
                continue
            for path in names_below(url, server):
                paths.append(path)
                if kinds[0].fits(path) and not kinds[0].is_exclusive:
                    break
        kind, _ = _chosen(_last_parts(paths), kinds, None, entries)
        if kind is not None:
            return _gathered(data_path, entries, [kind], server)
        # pages of the web have no type: all that they name is found, and decides
        files = _gathered(data_path, entries, kinds, server, chooses=True)
        if files is None:
            server.close()
        return files


def named_format(
    data_path: DataPath, kinds: Sequence[Format], options: RemoteOptions | None = None
) -> tuple[Format | None, list[Any]]:
    """The first of some formats by the names of files, globs and URLs alone (None: by none), and by
    the content of local files whose names tell nothing; and the paths, in which a pack, an index or
    a README.md is replaced by its files.

    Raises:
        ConfigError, DataNotFoundError, FormatError, AccessError, RemoteError: see `look_for`.
    """
    entries = _paths_of(data_path, options or RemoteOptions())
    paths = [named_part(os.path.expanduser(os.fsdecode(entry))) for entry in entries]
    path_of = None if is_url(entries[0]) else paths.__getitem__
    return _chosen(_last_parts(paths), kinds, path_of, entries)[0], entries


def _last_parts(paths: Iterable[str]) -> list[bytes]:
    """The names of files or stores, without their folders."""
    return [os.fsencode(posixpath.basename(path.rstrip("/"))) for path in paths]


def _gathered(
    data_path: DataPath,
    entries: Sequence[Any],
    kinds: Sequence[Format],
    server: RemoteFiles | None = None,
    chooses: bool = False,
) -> FileSet | None:
    """The files of all entries in the first format of `kinds`, sorted; of equal names, that of the
    earlier entry comes first. With `chooses` the format is the first that there are files of; None:
    there are none.
    """
    names = list[bytes]()
    roots = dict[tuple[str, str], int]()
    root_of = array("i")
    ends = [0]
    folders = set[bytes]()
    searched = set[str]()
    others = list[bytes]()
    kind: Format | None = kinds[0]
    any_of = kinds[0]
    if server is not None and len(kinds) > 1:
        endings = (ending for one in kinds for ending in one.endings)
        stores = (ending for one in kinds for ending in one.stores)
        any_of = Format("data", tuple(endings), tuple(stores))
    for entry in entries:
        found = find_remote(entry, any_of, server) if server else find_local(entry, kinds)
        names += found.names
        root = roots.setdefault((found.root, found.tail), len(roots))
        root_of += array("i", [root]) * len(found.names)
        ends.append(len(names))
        folders |= found.folders
        if found.searched:
            searched.add(found.root)
        others += found.others
    if server is not None:
        # it holds what the listing said of each file, and each worker with it
        server.filesystem.invalidate_cache()
    places, tails = zip(*roots, strict=True)
    numbers = np.arange(len(names))
    if chooses:

        def path_of(number: int) -> str:
            return os.path.join(places[root_of[number]], os.fsdecode(names[number]))

        kind, fits = _chosen(names, kinds, None if server else path_of, entries)
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
    """Raises a FormatError if all texts are metadata of data in another format."""
    if are_bookkeeping(names, (INDEX.encode(),)) and are_shards(others):
        raise FormatError(
            f"{redact(entries[0])} holds shards of another library: use headrace.open_dataset, or "
            "ImageDataset or TextDataset with column="
        )
    if are_bookkeeping(names) and are_tables(others):
        raise FormatError(
            f"{redact(entries[0])} holds tables, not samples of another format: use TableDataset"
        )


def _refuse_missing(
    kind: Format, entries: Sequence[Any], edges: list[int], others: list[bytes]
) -> None:
    """Raises a DataNotFoundError: an entry has no files of the format."""
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
                f"{endings}: leave it out, or make a dataset of it alone (ConcatDataset joins "
                "datasets)"
            )


def _chosen(
    names: Sequence[bytes],
    kinds: Sequence[Format],
    path_of: Callable[[int], str] | None,
    entries: Sequence[Any],
) -> tuple[Format | None, npt.NDArray[np.bool_]]:
    """The first of some formats that there are files of (None: of none), and which files these are.

    Args:
        path_of: gives paths of local files: if a name tells nothing, the content decides, up to the
            first file in no format.
        entries: the paths as the user passed them, for messages.

    Raises:
        ConfigError: there are files of two formats that are exclusive.
    """
    lower = list[bytes]()
    if names:
        lower = NUMBERED.sub(rb"\1", b"\0".join(names).lower()).split(b"\0")
    fits = list[npt.NDArray[np.bool_]]()
    unknown = np.ones(len(names), bool)
    for kind in kinds:
        endings = itertools.repeat(tuple(map(os.fsencode, kind.all_endings)))
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
    met = [(kind, which) for kind, which in zip(kinds, fits, strict=True) if which.any()]
    for kind, which in met:
        others = [names[number] for number in np.flatnonzero(~which)[: MOST + 1]]
        if kind.bookkeeping and are_bookkeeping(others, kind.bookkeeping):
            return kind, which
    if not met:
        return None, unknown
    exclusive = [(kind, which) for kind, which in met if kind.is_exclusive]
    if not met[0][0].is_exclusive or len(exclusive) < 2:
        return met[0]
    firsts = [(kind.name, redact(names[int(which.argmax())])) for kind, which in exclusive]
    held = " and ".join(f"{name} ({first})" for name, first in firsts)
    globs = " or ".join(f"'*{os.path.splitext(first)[1]}'" for _, first in firsts)
    raise ConfigError(
        f"{', '.join(map(redact, entries[:3]))} holds {held}, and a dataset reads one kind: make "
        f"one dataset per kind, by globs such as {globs}"
    )


# -- what a user passes


def entries_of(data_path: DataPath | FileSet, name: str = "data_path") -> list[Any]:
    """The entries of a `data_path`, with patterns in braces expanded. Globs stay as they are.

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
    """Expands ``a-{000..003}.tar`` and ``{train,val}.tar`` as shells and WebDataset do. The path of
    an existing file, and one without such braces, stays as it is.

    Raises:
        ConfigError: there are too many names.
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
                raise ConfigError(f"{redact(entry)} expands to more than {_MOST:,} names")
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


def _paths_of(
    data_path: DataPath,
    options: RemoteOptions,
    kind: Format | None = None,
) -> list[Any]:
    """The paths, globs or URLs of a `data_path`: all are URLs, or none. A pack is replaced by its
    parts, the index of another library by its shards, a dataset by the files of its one split.

    Args:
        data_path: as the user gave it.
        options: how URLs are read.
        kind: the format that is looked for: paths with its endings are taken as they are. None:
            any.

    Raises:
        ConfigError: it is no path; or it mixes URLs and local paths.
        ConfigError, DataNotFoundError, FormatError, AccessError, RemoteError: see `parts_of`,
            `shards_of` and `split_of`.
    """
    found = list[Any]()
    for entry in entries_of(data_path):
        path = os.path.expanduser(os.fsdecode(entry))
        if kind is not None and path.endswith(kind.endings):
            found.append(entry)
            continue
        is_local = not is_url(path)
        base = os.path.basename(path)
        if not is_local:
            base = posixpath.basename(named_part(path))
        has_plan = is_local and (
            os.path.exists(os.path.join(path, MANIFEST)) or os.path.exists(os.path.join(path, PLAN))
        )
        has_readme = is_local and os.path.isfile(os.path.join(path, README))
        named = list[str]()
        if base == INDEX:
            named = shards_of(path, options)
        elif base == MANIFEST or has_plan:
            named = parts_of(path, options, kind)
        if not named and (has_readme or ON_HUB.fullmatch(path)):
            named = split_of(path, options)
        found += named or [entry]
    if len(set(map(is_url, found))) > 1:
        raise ConfigError("the paths mix URLs and local paths: make one dataset of each")
    return found


_SIDECARS = re.compile(rb"(?:^|/)part-\d{5,}-of-\d{5,}\.json$")


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
                f"{redact(posixpath.dirname(path))} is a pack, whose .json files are not texts: "
                f"pass its {MANIFEST}, or a glob of the texts"
            )
