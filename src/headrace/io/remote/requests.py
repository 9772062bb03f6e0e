"""Calls of fsspec file systems: opening, paths, metadata, ranges.

Methods of asynchronous file systems that begin with an underscore (`_info`, `_cat_file`) are their
documented interface. Private names of theirs that are used here: `_call_s3` of s3fs, which can ask
for a range of one version, `_strip_protocol`, the path that a URL names, and
`_get_kwargs_from_urls`, what it says of its server.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import errno
import functools
import inspect
import re
import socket
import ssl
import tarfile
import time
import urllib.parse
import weakref
import zipfile
from collections.abc import Awaitable, Iterator
from typing import Any, NamedTuple

from headrace.errors import (
    AccessError,
    ConfigError,
    DataNotFoundError,
    FileChangedError,
    FormatError,
    RemoteError,
    SampleError,
)
from headrace.io.library_errors import FULL_DISK
from headrace.io.paths import chain_of, is_url, redact

SLOWEST = 16 << 10
"""Bytes a second below which a request times out."""
PART = 256 << 10
"""Bytes of a body that are read between two looks at the time."""


class Attempt:
    """The time limit of one attempt at a request, by the monotonic clock. Bytes that arrive extend
    it: many requests may share a slow line.

    Args:
        seconds: the limit if nothing arrives.
    """

    def __init__(self, seconds: float) -> None:
        self.end: float = time.monotonic() + seconds
        self._nbytes = 0

    def came(self, nbytes: int) -> None:
        """Counts bytes that have arrived."""
        self._nbytes += nbytes

    def left(self) -> float:
        """The seconds that are left.

        Raises:
            TimeoutError: there are none.
        """
        left = self.end + self._nbytes / SLOWEST - time.monotonic()
        if left <= 0:
            raise TimeoutError(self.shortfall)
        return left

    @property
    def shortfall(self) -> str:
        """Why the time is over, in words."""
        if self._nbytes:
            return f"only {self._nbytes:,} bytes came in time"
        return "nothing came in time"

    async def result(self, answer: Awaitable[Any]) -> Any:
        """The result of an awaitable, which is cancelled when the time is over.

        Raises:
            TimeoutError: the time is over.
        """
        task = asyncio.ensure_future(answer)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=self.left())
            return task.result()
        except BaseException:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise


def loop_of(fs: Any) -> Any:
    """The running loop that a file system's coroutines belong to."""
    if getattr(fs, "async_impl", False):
        return fs.loop
    import fsspec.asyn

    return fsspec.asyn.get_loop()


async def call(fs: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls a method; one without a coroutine in a thread."""
    if getattr(fs, "async_impl", False):
        return await getattr(fs, f"_{name}")(*args, **kwargs)
    return await asyncio.to_thread(functools.partial(getattr(fs, name), *args, **kwargs))


def is_http(fs: Any) -> bool:
    """True if it is fsspec's file system for HTTP."""
    return "http" in fs.protocol and hasattr(fs, "set_session")


def _list_below(fs: Any) -> None:
    """Limits lists over HTTP to what is below the folder: fsspec takes a page's links to itself and
    upwards for folders in it, and would follow them without end.
    """
    own = weakref.ref(fs)  # which holds this function

    async def ls(path: str, detail: bool = True, **options: Any) -> list[Any]:
        folder = path.rstrip("/") + "/"
        below = {}
        filesystem: Any = own()
        for one in await type(filesystem)._ls(filesystem, path, detail=True, **options):
            name = one["name"]
            if _DOTS.search(name):
                name = urllib.parse.urljoin(folder, name.removeprefix(folder))
                if not name.startswith(folder):
                    continue
            is_page = one["type"] == "directory" and ("?" in name or "#" in name)
            if name != folder and not is_page:
                below[name] = {**one, "name": name}
        if detail:
            return list(below.values())
        return sorted(below)

    fs._ls = ls


_DOTS = re.compile(r"/\.\.?(/|$)")


async def info_of(fs: Any, path: str) -> Any:
    """Metadata of a file, as fsspec's `info` returns it; over HTTP by one request, where fsspec
    makes two for a missing file.
    """
    if is_http(fs):
        try:
            async with await _request(fs, "HEAD", path) as answer:
                if answer.status == 404:
                    raise FileNotFoundError(path)
                said = answer.headers
                encoding = said.get("Content-Encoding", "identity")
                if answer.status == 200 and encoding != "identity":  # the size is of what is sent
                    return {"size": None, "type": "file", "headers": said}
                if answer.status == 200 and "Content-Length" in said:
                    return {
                        "size": int(said["Content-Length"]),
                        "ETag": said.get("ETag"),
                        "Last-Modified": said.get("Last-Modified"),
                        "accepts_ranges": "bytes" in said.get("Accept-Ranges", ""),
                        "is_redirected": bool(answer.history),
                    }
        except Exception as error:
            # which aiohttp says of servers that answer HEAD with a body
            if getattr(error, "status", None) != 400:
                raise
    return await call(fs, "info", path)


async def _request(fs: Any, method: str, path: str, **headers: str) -> Any:
    """An HTTP request as fsspec would make it, for `async with`."""
    options = dict(getattr(fs, "kwargs", {}))
    # else the size may be of something compressed
    headers = {**options.pop("headers", {}), "Accept-Encoding": "identity", **headers}
    session = await fs.set_session()
    options = {"allow_redirects": True, **options}
    return session.request(method, fs.encode_url(path), headers=headers, **options)


async def fetch(
    fs: Any, path: str, start: int, stop: int | None, etag: str | None, attempt: Attempt
) -> Answer:
    """The bytes of a range (without a stop: of the whole file), of the version with that ETag where
    the protocol can ask for one.

    Raises:
        WrongLengthError: it is another range; see `checked_size`.
    """
    parts = []
    size = None
    headers = {}
    if stop is not None:
        headers["Range"] = f"bytes={start}-{stop - 1}"
    if is_http(fs):
        if etag is not None:
            headers["If-Match"] = etag
        async with await _request(fs, "GET", path, **headers) as answer:
            answer.raise_for_status()
            if stop is not None:
                length = answer.content_length
                size = checked_size(answer.status, answer.headers, length, start, stop)
            async for part in answer.content.iter_chunked(PART):
                parts.append(part)
                attempt.came(len(part))
            said = answer.headers
            about = said.get("ETag"), said.get("Last-Modified"), size, answer.url
            return Answer(b"".join(parts), *about)
    if etag is not None and stop is not None and "s3" in fs.protocol:
        bucket, key, version = fs.split_path(path)
        options = {} if version is None else {"VersionId": version}
        place = {"Bucket": bucket, "Key": key, **options, **fs.req_kw}
        answer = await fs._call_s3("get_object", **headers, IfMatch=etag, **place)
        try:
            size = checked_range(answer.get("ContentRange"), start, stop)
            while part := await answer["Body"].read(PART):
                parts.append(part)
                attempt.came(len(part))
        finally:
            answer["Body"].close()
        return Answer(b"".join(parts), answer.get("ETag"), None, size)
    options = {}
    if stop is not None:
        options = {"start": start, "end": stop}
    if "hf" in fs.protocol:
        options["cache_type"] = "none"  # else it would read some megabytes more
    data: bytes = await call(fs, "cat_file", path, **options)
    return Answer(data)


def close_filesystem(filesystem: Any) -> None:
    """Closes the connections of a file system, if it has any of its own."""
    loop = getattr(filesystem, "loop", None)
    close = getattr(getattr(filesystem, "_session", None), "close", None)
    if close is None or loop is None or not loop.is_running():
        return

    async def closing() -> None:
        made = close()
        if inspect.isawaitable(made):
            await made

    with contextlib.suppress(Exception):
        asyncio.run_coroutine_threadsafe(closing(), loop).result(5)


# -- URLs, and paths on the file system: ``bucket/a::b.jpg`` is one, ``zip::a.zip`` is not


def path_in(url: str, filesystem: Any) -> str:
    """The part of a URL that names a path on its file system: ``c1`` of
    ``zip://c1::s3://bucket/a.zip``. A path stays as it is.
    """
    if not is_url(url):
        return url
    first, *others = chain_of(url)
    inner = getattr(filesystem, "fs", None)  # of one that caches another and takes over its paths
    if others and inner is not None and not first.partition("://")[2]:
        return path_in("::".join(others), inner)
    import fsspec.core

    path: str = getattr(filesystem, "_strip_protocol", fsspec.core.strip_protocol)(
        first if "://" in first or not others else f"{first}://"
    )
    return path


def url_ends(url: str, filesystem: Any) -> tuple[str, str]:
    """The text before and after the path in the URLs of a server, by one of these URLs."""
    first, *others = chain_of(url)
    rest = "::".join(others)
    inner = getattr(filesystem, "fs", None)
    if others and inner is not None and "://" not in first:
        before, after = url_ends(rest, inner)
        return f"{first}::{before}", after
    path = path_in(url, filesystem)
    before = first.rstrip("/")
    if path and before.endswith(path):
        before = before.removesuffix(path)
    else:
        before = f"{first.partition('://')[0]}://"
    return before, f"::{rest}" if others else ""


def url_of(path: str, ends: tuple[str, str]) -> str:
    """The URL of a path on a server."""
    before, after = ends
    if is_url(path):  # as those of the web are
        return path + after
    if before.endswith("://") and not before.endswith(("file://", "local://")):
        path = path.removeprefix("/")
    return f"{before}{path}{after}"


def server_of(url: str, filesystem: Any) -> dict[str, Any]:
    """What a URL says of its server, beside the path; nothing, where its file system can't tell."""
    options = getattr(filesystem, "_get_kwargs_from_urls", None)
    found: dict[str, Any] = {}
    if options is not None and is_url(url):
        found = options(url)
    return found


_BUCKETS = ("s3://", "s3a://")
_EXTRAS = {"s3": "s3", "s3a": "s3", "http": "http", "https": "http", "hf": "hf"}
"""Extras of the package, by protocol."""


def open_filesystem(url: str, storage_options: dict[str, Any] | None = None) -> Any:
    """A fresh fsspec file system for a URL (never one that was inherited by fork).

    Raises:
        ConfigError: the protocol is unknown, its package is missing, or the URL of a bucket has
            credentials.
        DataNotFoundError, FormatError: the archive that it lies in is missing, or damaged.
    """
    import fsspec

    options = dict(storage_options or {})
    if url.startswith(_BUCKETS):
        if "@" in url.split("/")[2]:  # the library would show them in its errors
            raise ConfigError(
                f"{redact(url)}: credentials can't be part of a bucket's URL: pass storage_options="
            )
        # botocore's own retries would multiply with `Remote`'s, unseen
        retries = {"retries": {"total_max_attempts": 1}}
        options["config_kwargs"] = {**retries, **options.get("config_kwargs", {})}
    try:
        # a key may hold colons, which fsspec takes for a chain
        links = [link.replace("::", ":") for link in chain_of(url)]
        fs = fsspec.core.url_to_fs("::".join(links), skip_instance_cache=True, **options)[0]
    except (ValueError, ImportError) as error:
        remedy = ""
        extra = _EXTRAS.get(chain_of(url)[-1].partition("://")[0])
        if isinstance(error, ImportError) and extra is not None:
            remedy = f": pip install 'headrace[{extra}]'"
        raise ConfigError(f"{redact(url)} can't be opened: {redact(error)}{remedy}") from None
    except FileNotFoundError:
        raise DataNotFoundError(f"{redact(url)} does not exist") from None
    except (zipfile.BadZipFile, tarfile.TarError) as error:
        raise FormatError(
            f"{redact(url)}: the archive is damaged, or of another kind ({redact(error)})"
        ) from None
    except Exception as error:
        text = str(error)
        if redact(text) == text:
            raise error from None
        # it shows a URL with credentials or a query
        raise SampleError(f"{type(error).__name__}: {redact(text)}") from None
    if is_http(fs):
        _list_below(fs)
    return fs


_PASSING = frozenset({408, 425, 429, *range(500, 600)})
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError")  # botocore's
_OF_PATHS = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
_OF_NETWORK = frozenset(
    [
        "aiohttp",
        "botocore",
        "aiobotocore",
        "urllib3",
        "requests",
        "httpx",
        "google",
        "azure",
        "http",
        "ssl",
    ]
)
_NO_RANGES = "Download the files, or use a server that supports byte ranges"


class WrongLengthError(Exception):
    """An answer with other bytes than were asked for, or another number of them."""


class UnsuitableError(WrongLengthError):
    """The server can't be read by ranges: it compresses its answers, sends whole files, or does not
    say which bytes it sends. The message says what to do.
    """


class Answer(NamedTuple):
    """An answer; attributes that it does not tell are None.

    Attributes:
        data: the bytes.
        etag: the ETag of the file.
        modified: its Last-Modified.
        size: its size in bytes.
        url: where the answer came from, behind redirections.
    """

    data: bytes | bytearray
    etag: str | None = None
    modified: str | None = None
    size: int | None = None
    url: Any = None


def checked_size(
    status: int, headers: Any, length: int | None, start: int, stop: int
) -> int | None:
    """The size of the whole file by the head of an answer; None: it does not tell.

    Args:
        status, headers: of the answer.
        length: of its body; None: unknown.
        start, stop: the range that was asked for.

    Raises:
        UnsuitableError: the server compresses, knows no ranges, or does not say which bytes it
            sends.
        WrongLengthError: it sends other bytes.
    """
    check_encoding(headers)
    if status != 206:
        if start or length != stop:
            if "bytes" not in headers.get("Accept-Ranges", ""):
                raise UnsuitableError(
                    f"the server sends whole files where a range is asked for. {_NO_RANGES}"
                )
            raise WrongLengthError(
                f"the answer has {length or 0:,} bytes (the server seems to send whole files, "
                "where it must know of ranges)"
            )
        return length
    size = checked_range(headers.get("Content-Range"), start, stop)
    if length not in (None, stop - start):
        raise WrongLengthError(f"the answer has {length:,} bytes")
    return size


def check_encoding(headers: Any) -> None:
    """Raises an UnsuitableError where an answer is compressed."""
    encoding = headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise UnsuitableError(
            f"the server compresses its answers (Content-Encoding: {encoding}), though identity "
            "was asked for. Turn compression off for these files, or download them"
        )


def checked_range(content_range: str | None, start: int, stop: int) -> int | None:
    """The size of the whole file by the Content-Range of an answer; None: it does not tell.

    Raises:
        UnsuitableError: there is no Content-Range.
        WrongLengthError: it is another range than that which was asked for.
    """
    if content_range is None:
        raise UnsuitableError(
            "the server does not say which bytes it sends (206 without Content-Range). "
            f"{_NO_RANGES}"
        )
    said = re.fullmatch(r"\s*bytes\s+(\d+)-(\d+)/(\d+|\*)\s*", content_range)
    if said is None or (int(said[1]), int(said[2])) != (start, stop - 1):
        raise WrongLengthError(
            f"the answer has other bytes (Content-Range: {content_range.strip()})"
        )
    if said[3] == "*":
        return None
    return int(said[3])


class Passing(NamedTuple):
    """A temporary failure."""

    cause: str
    wait: float | None
    """Seconds after which the server wants to be asked again (Retry-After)."""
    is_absent: bool = False
    """True if there is no server: an unknown host, or a refused connection."""


def judged(error: BaseException, where: str) -> Passing:
    """Decides if a failed request is worth a retry.

    Args:
        error: of fsspec, or of a library that it uses.
        where: what was asked for, as messages name it.

    Raises:
        DataNotFoundError, AccessError, FileChangedError, RemoteError: it is not.
        OSError: this machine's disk is full.
    """
    status, headers = status_of(error)
    is_of_way = status is None and _is_of_network(error)
    if is_of_way and isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        # fsspec takes whatever goes wrong with a question for a size for a missing file
        error = error.__cause__
    kind = type(error).__name__
    said = redact(str(error))
    named = kind
    if said:
        named = f"{kind}: {said}"
    if status in (412, 416):  # another version; shorter than it was
        raise was_replaced(where) from None
    is_bare = status is None and not is_of_way
    if status == 404 or (is_bare and isinstance(error, FileNotFoundError | NotADirectoryError)):
        raise DataNotFoundError(f"{where} does not exist") from None
    is_denied = isinstance(error, PermissionError) or kind in _NO_CREDENTIALS
    if status in (401, 403) or (status is None and is_denied):
        raise AccessError(
            f"{where}: access is denied ({said or kind}): check the credentials "
            "(storage_options), which may have expired"
        ) from None
    if isinstance(error, UnsuitableError):
        raise _final(f"{where}: {said}", of_server=True) from None
    if isinstance(error, WrongLengthError):
        return Passing(said, None)
    for one in _chain(error):
        if isinstance(one, ssl.SSLCertVerificationError):
            raise _final(
                f"{where}: the server's certificate is not trusted ({one.verify_message}). Use the "
                "name that the certificate is for, or install the CA certificate"
            ) from None
        if isinstance(one, OSError) and one.errno in FULL_DISK:
            raise one  # where fsspec, or headrace, caches on disk
    if isinstance(error, TimeoutError):
        return Passing("nothing came in time", None)
    if status in _PASSING:
        return Passing(f"the server says {status}", retry_after(headers))
    if is_of_way:
        is_absent = any(
            isinstance(one, socket.gaierror) or getattr(one, "errno", None) == errno.ECONNREFUSED
            for one in _chain(error)
        )
        return Passing(named, None, is_absent)
    # aiohttp's and botocore's words for what they don't take
    is_option = isinstance(error, TypeError) or "Invalid endpoint" in said
    remedy = ": look at storage_options" if is_option else ""
    raise _final(f"{where}: {named}{remedy}") from None


def was_replaced(where: str, why: str = "") -> FileChangedError:
    """The error for a remote file that has another version than when it was opened."""
    return FileChangedError(
        f"{where}: the file has been replaced since it was opened{why}: start the epoch again "
        "with the new file"
    )


def _final(message: str, of_server: bool = False) -> RemoteError:
    failure = RemoteError(message)
    failure.is_of_server = of_server  # and of no sample
    failure.is_final = True
    return failure


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen = 0
    while error is not None and seen < 8:
        yield error
        error = error.__cause__ or error.__context__
        seen += 1


def status_of(error: BaseException) -> tuple[int | None, Any]:
    """The HTTP status in an error or its causes, and the headers."""
    for one in _chain(error):
        status = getattr(one, "status", None)
        headers = getattr(one, "headers", None)
        response: Any = getattr(one, "response", None)  # botocore's; httpx's
        if hasattr(response, "status_code"):
            status = response.status_code
            headers = response.headers
        elif isinstance(response, dict):
            said = response.get("ResponseMetadata", {})
            status = said.get("HTTPStatusCode")
            headers = said.get("HTTPHeaders")
        if isinstance(status, int) and status >= 300:
            return status, headers
    return None, None


def _is_of_network(error: BaseException) -> bool:
    """True if the connection to the server failed, which may be temporary."""
    for one in _chain(error):
        if isinstance(one, ConnectionError | TimeoutError | asyncio.IncompleteReadError | EOFError):
            return True
        is_option = isinstance(one, TypeError) or type(one).__name__ == "ParamValidationError"
        if type(one).__module__.partition(".")[0] in _OF_NETWORK and not is_option:
            return True
        if isinstance(one, OSError) and one.errno is not None and not isinstance(one, _OF_PATHS):
            return True
    return False


def retry_after(headers: Any) -> float | None:
    """The seconds in Retry-After; None: there is no such header."""
    said = None if headers is None else headers.get("Retry-After", headers.get("retry-after"))
    if said is None:
        return None
    try:
        return max(0.0, float(said))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(said).timestamp() - time.time())
    except (TypeError, ValueError):
        return None
