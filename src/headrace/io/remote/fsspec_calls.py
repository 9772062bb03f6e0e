"""Calls of fsspec file systems: opening, paths, metadata, ranges; and the private names of theirs
that headrace uses.

========================  ====================================  ====================================
private name              used for                              without it
========================  ====================================  ====================================
`_call_s3` of s3fs        reading a range of one version        `cat_file`, and a warning: a file
                          (If-Match)                            that changes while it is read is not
                                                                noticed

`_strip_protocol`         the path that a URL names             `fsspec.core.strip_protocol`

`_get_kwargs_from_urls`   comparing the servers of several      they are not compared
                          URLs

`_session`                closing connections                   they end with the process
========================  ====================================  ====================================

Methods of asynchronous file systems that begin with an underscore (`_info`, `_cat_file`) are their
documented interface.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import tarfile
import zipfile
from typing import Any

from headrace.errors import ConfigError, DataNotFoundError, FormatError, SampleError, warn
from headrace.io.paths import chain_of, is_url, redact
from headrace.io.remote.http import Answer, checked_range, checked_size
from headrace.io.remote.timeouts import PART, Attempt

TRIED = ("2026.9",)
"""Versions of fsspec and s3fs that these have been tried with; others are used as long as
nothing is missing.
"""


def loop_of(fs: Any) -> Any:
    """The running loop that a file system's coroutines belong to."""
    if getattr(fs, "async_impl", False):
        return fs.loop
    import fsspec.asyn

    return fsspec.asyn.get_loop()


async def call(fs: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """What a method gives; of a file system without coroutines in a thread."""
    if getattr(fs, "async_impl", False):
        return await getattr(fs, f"_{name}")(*args, **kwargs)
    return await asyncio.to_thread(functools.partial(getattr(fs, name), *args, **kwargs))


def _protocols(fs: Any) -> tuple[str, ...]:
    if isinstance(fs.protocol, tuple | list):
        return tuple(fs.protocol)
    return (fs.protocol,)


async def info_of(fs: Any, path: str) -> Any:
    """What fsspec says of a file; of HTTP by one request, where it would ask twice for what is
    missing.
    """
    if is_http(fs):
        options = dict(getattr(fs, "kwargs", {}))
        # else the size may be of something compressed
        headers = {**options.pop("headers", {}), "Accept-Encoding": "identity"}
        session = await fs.set_session()
        try:
            async with session.head(
                fs.encode_url(path), **{"allow_redirects": True, **options}, headers=headers
            ) as answer:
                if answer.status == 404:
                    raise FileNotFoundError(path)
                said = answer.headers
                encoding = said.get("Content-Encoding", "identity")
                if answer.status == 200 and encoding != "identity":
                    return {"size": None, "type": "file", "encoding": encoding}
                if answer.status == 200 and "Content-Length" in said:
                    info: dict[str, Any] = {
                        name: said.get(name) for name in ("ETag", "Last-Modified")
                    }
                    info |= {
                        "is_redirected": bool(answer.history),
                        "accepts_ranges": "bytes" in said.get("Accept-Ranges", ""),
                    }
                    return {"size": int(said["Content-Length"]), **info}
        except Exception as error:
            # which aiohttp says of servers that answer HEAD with a body
            if getattr(error, "status", None) != 400:
                raise
    return await call(fs, "info", path)


async def fetch(
    fs: Any, path: str, start: int, stop: int, etag: str | None, attempt: Attempt
) -> Answer:
    """The bytes of a range; of the version with that ETag where the protocol can ask for that.

    Raises:
        WrongLengthError: see `headrace.io.remote.http.checked_size`.
    """
    protocols = _protocols(fs)
    if is_http(fs):
        return await fetch_http(fs, fs.encode_url(path), start, stop, etag, attempt)
    if (
        etag is not None
        and "s3" in protocols
        and _has_s3_calls(type(fs).__module__, hasattr(fs, "_call_s3"))
    ):
        bucket, key, version = fs.split_path(path)
        options = {} if version is None else {"VersionId": version}
        answer = await fs._call_s3(
            "get_object",
            Bucket=bucket,
            Key=key,
            Range=f"bytes={start}-{stop - 1}",
            IfMatch=etag,
            **options,
            **fs.req_kw,
        )
        parts = []
        try:
            size = checked_range(answer.get("ContentRange"), start, stop)
            while part := await answer["Body"].read(PART):
                parts.append(part)
                attempt.came(len(part))
        finally:
            answer["Body"].close()
        return Answer(b"".join(parts), answer.get("ETag"), None, size)
    data: bytes = await call(fs, "cat_file", path, start=start, end=stop)
    return Answer(data)


async def fetch_http(
    fs: Any, url: Any, start: int, stop: int, etag: str | None, attempt: Attempt
) -> Answer:
    """The bytes of a range of the web, as `cat_file` gives them, and what the answer says of
    them.
    """
    options = dict(getattr(fs, "kwargs", {}))
    headers = {
        **options.pop("headers", {}),
        "Accept-Encoding": "identity",
        "Range": f"bytes={start}-{stop - 1}",
    }
    if etag is not None:
        headers["If-Match"] = etag
    session = await fs.set_session()
    async with session.get(url, headers=headers, **options) as answer:
        said = answer.headers
        size = checked_size(answer.status, answer.reason, said, answer.content_length, start, stop)
        parts = []
        async for part in answer.content.iter_chunked(PART):
            parts.append(part)
            attempt.came(len(part))
    return Answer(b"".join(parts), said.get("ETag"), said.get("Last-Modified"), size, answer.url)


def is_http(fs: Any) -> bool:
    """True if a file system is fsspec's of the web."""
    return "http" in _protocols(fs) and hasattr(fs, "set_session")


def close_filesystem(filesystem: Any) -> None:
    """Closes its connections, if it has any of its own."""
    session = getattr(filesystem, "_session", None)
    loop = getattr(filesystem, "loop", None)
    close = getattr(session, "close", None)
    if close is None or loop is None or not loop.is_running():
        return

    async def closing() -> None:
        made = close()
        if inspect.isawaitable(made):
            await made

    with contextlib.suppress(Exception):
        asyncio.run_coroutine_threadsafe(closing(), loop).result(5)


def is_path(text: str) -> bool:
    """True if it is a path on a file system, and no URL: ``bucket/a::b.jpg``, and not
    ``zip::a.zip``.
    """
    return not is_url(text)


def path_in(url: str, filesystem: Any) -> str:
    """The part of a URL that names a path on its file system: ``c1`` of
    ``zip://c1::s3://bucket/a.zip``. A path stays as it is.
    """
    if is_path(url):
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
    """What stands before and after the paths of a server in their URLs, by one of these."""
    first, *others = chain_of(url)
    rest = "::".join(others)
    inner = getattr(filesystem, "fs", None)
    if others and inner is not None and "://" not in first:
        before, after = url_ends(rest, inner)
        return f"{first}::{before}", after
    path = path_in(url, filesystem)
    before = first.rstrip("/")
    before = (
        before.removesuffix(path)
        if path and before.endswith(path)
        else f"{first.partition('://')[0]}://"
    )
    return before, f"::{rest}" if others else ""


def url_of(path: str, ends: tuple[str, str]) -> str:
    """The URL of a path on a server."""
    before, after = ends
    if is_url(path):  # as those of the web are
        return path + after
    is_bare = before.endswith("://") and not before.endswith(("file://", "local://"))
    return f"{before}{path.removeprefix('/') if is_bare else path}{after}"


def server_of(url: str, filesystem: Any) -> dict[str, Any]:
    """What a URL says of its server, beside the path; nothing, where its file system can't tell."""
    options = getattr(filesystem, "_get_kwargs_from_urls", None)
    found: dict[str, Any] = {} if options is None or is_path(url) else options(url)
    return found


@functools.cache
def _has_s3_calls(module: str, has_calls: bool) -> bool:
    if not has_calls:
        warn(
            f"{module} has no _call_s3, which headrace uses (tried with s3fs {', '.join(TRIED)}): "
            "a file that changes while "
            "it is read is not noticed"
        )
    return has_calls


def without_secrets(error: Exception) -> Exception:
    """The error, or a SampleError with its text if that shows a URL with credentials or a query."""
    text = str(error)
    if redact(text) == text:
        return error
    return SampleError(f"{type(error).__name__}: {redact(text)}")


_EXTRAS = {"s3": "s3", "s3a": "s3", "http": "http", "https": "http"}
"""What is to be installed, by protocol."""


def open_filesystem(url: str, storage_options: dict[str, Any] | None = None) -> Any:
    """A fresh fsspec file system for a URL (never one that was inherited by fork).

    Raises:
        ConfigError: the protocol is unknown, or its package is missing.
        DataNotFoundError, FormatError: the archive that it lies in is missing, or damaged.
    """
    import fsspec

    options = dict(storage_options or {})
    # botocore's own retries would multiply with `Remote`'s, unseen
    if url.startswith(("s3://", "s3a://")):
        options["config_kwargs"] = {
            "retries": {"total_max_attempts": 1},
            **options.get("config_kwargs", {}),
        }
    try:
        # a key may hold colons, which fsspec takes for a chain
        links = [link.replace("::", ":") for link in chain_of(url)]
        return fsspec.core.url_to_fs("::".join(links), skip_instance_cache=True, **options)[0]
    except (ValueError, ImportError) as error:
        extra = (
            _EXTRAS.get(chain_of(url)[-1].partition("://")[0])
            if isinstance(error, ImportError)
            else None
        )
        remedy = ""
        if extra is not None:
            remedy = f": pip install 'headrace[{extra}]'"
        raise ConfigError(f"{redact(url)} can't be opened: {redact(error)}{remedy}") from None
    except FileNotFoundError:
        raise DataNotFoundError(f"{redact(url)} does not exist") from None
    except (zipfile.BadZipFile, tarfile.TarError) as error:
        raise FormatError(
            f"{redact(url)}: the archive is damaged, or of another kind ({redact(error)})"
        ) from None
    except Exception as error:
        raise without_secrets(error) from None
