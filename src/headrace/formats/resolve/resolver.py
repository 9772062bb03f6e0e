"""Resolves what a user passes as `data_path` to files.

* A file: that file, whatever its ending.
* A folder, or its URL (a prefix): all files below it that end as files of the kind do, without
  hidden ones; of Zarr stores those in it.
* A glob: the matches that end so; where none does, those whose content is of the kind. Matching
  nothing is an error.
* A folder of parts that `headrace.pack` wrote, or the path or URL of its `manifest.json`: the
  parts.
* ``{a,b}``, ``{000..127}``: each of the names, as shells expand them, unless there is a file of
  that very name.
* A URL: as a path; its query is no part of a name. One that ends as a file does is not looked up
  before it is read.
* ``zip://a.jpg::s3://...``: a path in an archive, or through a cache of fsspec's.
* A list: the files of all its entries: paths of this machine, or URLs of one server.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import os
from collections.abc import Iterator, Sequence
from typing import Any

from headrace.errors import ConfigError, DataNotFoundError, FormatError
from headrace.formats.resolve import contents
from headrace.formats.resolve.contents import are_bookkeeping, has_tables, summary_of
from headrace.formats.resolve.expressions import DataPath, entries_of, urls_among
from headrace.formats.resolve.file_set import FileSet, Format, Found, as_set, merged
from headrace.formats.resolve.local import LocalWalk
from headrace.formats.resolve.packs import names_pack, parts_among, refuse_sidecars
from headrace.formats.resolve.remote import (
    RemoteWalk,
    are_folders,
    check_one_filesystem,
    has_magic,
    names_below,
)
from headrace.io.paths import check_regular, is_url, redact
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import RemoteFiles


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
                ((name, False) for name in contents.names_below(start))
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
