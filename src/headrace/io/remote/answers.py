"""What servers answer: checks that these are the bytes that were asked for, and what to make of a
failure: whether and when to try again, and what to tell the user.
"""

from __future__ import annotations

import asyncio
import email.utils
import errno
import re
import socket
import ssl
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from headrace.errors import AccessError, DataNotFoundError, FileChangedError, RemoteError
from headrace.io.library_errors import FULL_DISK
from headrace.io.paths import redact

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
    """An answer of another length than was asked for, or of other bytes, which is not read."""


class UnsuitableError(WrongLengthError):
    """The server can't be read by ranges: it compresses its answers, sends whole files, or does not
    say which bytes it sends. The message says what to do.
    """


class Answer(NamedTuple):
    """The bytes of an answer, and what it says of the file; None where it says nothing.

    Attributes:
        data: the bytes.
        etag: the version.
        modified: when it was last changed.
        size: bytes of the whole file.
    """

    data: bytes
    etag: str | None = None
    modified: str | None = None
    size: int | None = None


def checked_size(answer: Any, start: int, stop: int) -> int | None:
    """The size of the whole file, as the head of an answer of aiohttp says it; None: it does not.

    Raises:
        UnsuitableError: the server compresses, knows no ranges, or does not say which bytes it
            sends.
        WrongLengthError: it sends other bytes.
    """
    check_encoding(answer.headers)
    length: int | None = answer.content_length
    if answer.status != 206:
        if start or length != stop:
            if "bytes" not in answer.headers.get("Accept-Ranges", ""):
                raise UnsuitableError(
                    f"the server sends whole files where a range is asked for. {_NO_RANGES}"
                )
            raise WrongLengthError(
                f"the answer has {length or 0:,} bytes (the server seems to send whole files, "
                "where it must know of ranges)"
            )
        return length
    size = checked_range(answer.headers.get("Content-Range"), start, stop)
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
    """The size of the whole file, as the head of an answer (Content-Range) says it; None: it does
    not.

    Raises:
        UnsuitableError: it does not say which bytes it has.
        WrongLengthError: it has others than those that were asked for.
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
    """A failure that may pass."""

    cause: str
    wait: float | None
    """Seconds that the server wants to be left alone, if it says so."""
    is_absent: bool = False
    """True if nobody answers under that address: an unknown host, or a refused connection."""


def judged(error: BaseException, where: str) -> Passing:
    """What is to be made of the failure of a request.

    Args:
        error: of fsspec, or of what it uses.
        where: what was asked for, as messages name it.

    Raises:
        DataNotFoundError, AccessError, FileChangedError, RemoteError: it won't pass.
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
        raise DataNotFoundError(f"{where}: there is no such file") from None
    is_denied = isinstance(error, PermissionError) or kind in _NO_CREDENTIALS
    if status in (401, 403) or (status is None and is_denied):
        raise AccessError(
            f"{where}: access is denied ({said or kind}): look at the credentials "
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
    """The error of a remote file of which another version comes than that which was opened."""
    return FileChangedError(
        f"{where}: the file has been replaced since it was opened{why}: begin the epoch anew with "
        "the new one"
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
    """The HTTP status that an error, or what it was made of, tells of, and the headers."""
    for one in _chain(error):
        status = getattr(one, "status", None)
        headers = getattr(one, "headers", None)
        response = getattr(one, "response", None)  # botocore's
        if isinstance(response, dict):
            said = response.get("ResponseMetadata", {})
            status = said.get("HTTPStatusCode")
            headers = said.get("HTTPHeaders")
        if isinstance(status, int) and status >= 300:
            return status, headers
    return None, None


def _is_of_network(error: BaseException) -> bool:
    """True if it is of the way to the server, and may pass."""
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
    """Seconds; None where the server does not say."""
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
