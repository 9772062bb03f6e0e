"""Tells URLs from paths, takes them apart, and shows them without secrets."""

from __future__ import annotations

import functools
import heapq
import os
import posixpath
import re
import stat
import tempfile
import unicodedata
from collections.abc import Callable, Iterable
from pathlib import Path

from headrace.errors import AccessError, ConfigError, warn

_PROTOCOL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+://")
_CHAINING = {
    "zip",
    "tar",
    "libarchive",
    "simplecache",
    "filecache",
    "blockcache",
    "cached",
    "reference",
}
_CHAINING |= {"dir", "asyncwrapper", "async_wrapper", "generic"}
"""Protocols of fsspec that lie on another file system: archives and caches."""


def is_url(path: object) -> bool:
    """True if it is an fsspec URL, such as ``s3://bucket/key`` or ``zip://*::archive.zip``."""
    if not isinstance(path, str):
        return False
    return _PROTOCOL.match(path) is not None or ("::" in path and len(chain_of(path)) > 1)


def chain_of(url: str) -> list[str]:
    """The links of a chained URL: ``zip://a.jpg`` and ``s3://b/c.zip`` of
    ``zip://a.jpg::s3://b/c.zip``.

    A key may hold "::" itself: only archives and caches, or what stands before another URL, begin a
    chain.
    """
    first, colons, rest = url.partition("::")
    if colons and (first.partition("://")[0] in _CHAINING or _PROTOCOL.match(rest)):
        return [first, *chain_of(rest)]
    return [url]


def redact(path: object) -> str:
    """A path or URL as it may be shown: without user, password and query string, and always
    printable.
    """
    text = os.fsdecode(path) if isinstance(path, (bytes, os.PathLike)) else str(path)
    if "://" in text or "::" in text:
        text = re.sub(r"(://)[^/?\s]*@", r"\1", text) if "@" in text else text
        text = re.sub(r"\?(?:(?!::)\S)*", "", text) if "?" in text else text
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def in_one_line(name: object) -> str:
    """A name as it may be shown within a line: `redact`, and control characters such as newlines
    escaped.
    """
    return re.sub(r"[\x00-\x1f\x7f]", lambda found: repr(found[0])[1:-1], redact(name))


def composed(name: str) -> str:
    """A name with its accents composed (Unicode's NFC), by which names that look the same are
    equal. macOS decomposes many names.
    """
    if name.isascii():
        return name
    return unicodedata.normalize("NFC", name)


def in_ascii(name: str) -> str:
    """A name as it may be shown beside one that looks the same: "caf\\xe9" and "cafe\\u0301"."""
    return redact(name).encode("ascii", "backslashreplace").decode("ascii")


def without_query(path: str) -> str:
    """A path, or a URL of the web without its query: its ending is that of the file."""
    if path.startswith(("http://", "https://")):
        return path.partition("?")[0]
    return path


def cache_folder(cache_dir: str | os.PathLike[str] | None) -> Path:
    """The folder for caches: `cache_dir`, or headrace's part of the user's cache folder (XDG).

    Without a folder of the user that can be written to, it is a private one in the temporary
    directory.

    Raises:
        ConfigError: `cache_dir` begins with the home folder of a user who has none.
    """
    if cache_dir is not None:
        folder = Path(os.path.expanduser(cache_dir))
        if folder.parts and folder.parts[0].startswith("~") and not os.path.isdir(folder.parts[0]):
            raise ConfigError(
                f"cache_dir={os.fspath(cache_dir)!r}: {folder.parts[0]} is not a known home "
                "folder: pass a path without ~"
            )
        return folder
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):
        return Path(given) / "headrace"
    home = Path(os.path.expanduser("~"))
    folder = home / ".cache" / "headrace"
    there = folder
    while not os.path.lexists(there):
        there = there.parent
    can_be_written = os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK)
    if home.is_absolute() and home != Path(home.anchor) and can_be_written:
        return folder
    return _private_folder()


@functools.cache
def _private_folder() -> Path:
    """A folder of this user in the temporary directory; one that another user has made is not
    used.
    """
    user = 0
    if hasattr(os, "geteuid"):
        user = os.geteuid()
    folder = Path(tempfile.gettempdir()) / f"headrace-{user}"
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
        status = os.lstat(folder)
        is_private = stat.S_ISDIR(status.st_mode) and (
            os.name == "nt" or (status.st_uid == user and not status.st_mode & 0o077)
        )
    except OSError:
        is_private = False
    if not is_private:
        folder = Path(tempfile.mkdtemp(prefix="headrace-"))
    warn(
        f"there is no home folder that can be written to: caches are in {folder}; to keep them, "
        "pass cache_dir= or set XDG_CACHE_HOME"
    )
    return folder


def named_part(path: str) -> str:
    """A path; or the part of a URL that names the file, without query: ``zip://a.jpg`` of
    ``zip://a.jpg::s3://b/c.zip``, and ``s3://bucket/key`` of
    ``simplecache::s3://bucket/key?versionId=1``.
    """
    if not is_url(path):
        return path
    first, *others = chain_of(path)
    if others and "://" not in first:
        return named_part("::".join(others))
    return first.partition("?")[0]


def below(url: str, name: str) -> str:
    """The URL of a file below another URL: before the query, if there is one."""
    if not name:
        return url
    return _with_path(url, lambda path: posixpath.join(path, name))


def with_index(url: str) -> str:
    """The URL of the index next to a file (see `headrace.io.index`): before the query, if there is
    one.
    """
    return _with_path(url, lambda path: f"{path}.index")


def in_folder_of(url: str, name: str) -> str:
    """The path or URL of a file in the folder of another one: before the query, if there is one."""
    return _with_path(url, lambda path: posixpath.join(posixpath.dirname(path), name))


def above(url: str) -> str:
    """The path or URL of the same name one folder above; itself in the root of a server."""

    def change(path: str) -> str:
        folder, name = posixpath.split(path)
        upper = posixpath.dirname(folder)
        if upper.endswith(":"):
            return path
        return posixpath.join(upper, name)

    return _with_path(url, change)


def _with_path(url: str, change: Callable[[str], str]) -> str:
    first, *others = chain_of(url)
    if others and "://" not in first:  # of simplecache::s3://bucket/key the second is the file's
        return f"{first}::{_with_path('::'.join(others), change)}"
    path, question, query = first.partition("?")
    return "::".join([f"{change(path)}{question}{query}", *others])


def check_regular(path: str) -> None:
    """Refuses a local path that is no regular file, before it is opened.

    Raises:
        ConfigError: it is a pipe, which a reader would wait for, a socket or a device; or its size
            is not known, as that of files in /proc.
        AccessError: it is empty, and this user may not read it.
        OSError: it does not exist.
    """
    status = os.stat(path)
    kind = _SPECIAL.get(stat.S_IFMT(status.st_mode))
    if kind is not None:
        raise ConfigError(
            f"{redact(path)} is {kind}, not a file: write its contents to a file, and pass that"
        )
    if stat.S_ISREG(status.st_mode) and status.st_size == 0:
        try:
            with open(path, "rb", buffering=0) as file:
                has_bytes = bool(file.read(1))
        except PermissionError as error:
            raise AccessError(f"{redact(path)}: this user may not read it") from error
        except OSError:  # of the disk: whoever reads the file says so
            has_bytes = False
        if has_bytes:
            raise ConfigError(
                f"{redact(path)} has no size, like files of /proc: copy it to a file, and pass that"
            )


_SPECIAL = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


_MOST = 10


def listed_names(names: Iterable[str], wanted: str = "", show: Callable[[str], str] = str) -> str:
    """Names as part of a message: all of them up to ten; of more the ten that are nearest to a
    name, and how many others there are.

    Args:
        names: in any order.
        wanted: the name that is missing; "": none in particular, so that the first ten are listed.
        show: what a name looks like in the message. One that looks like the missing one is shown in
            ASCII.
    """
    found = sorted(names)
    others = len(found) - _MOST
    if others > 0 and wanted:

        def likeness(name: str) -> float:
            """The share of letters that two names begin and end with."""
            one = wanted.lower()
            other = name.lower()
            same = _same(one, other) + _same(one[::-1], other[::-1])
            return same / (len(wanted) + len(name))

        found = heapq.nlargest(_MOST, found, key=likeness)
    shown = [
        ascii(name) if name != wanted and composed(name) == composed(wanted) else show(name)
        for name in found[:_MOST]
    ]
    return (", ".join(shown) or "none") + (f" and {others:,} more" if others > 0 else "")


def _same(one: str, other: str) -> int:
    """The number of letters that two names begin with alike."""
    for count, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return count
    return min(len(one), len(other))
