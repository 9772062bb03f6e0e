"""Classifies errors of requests: whether and when to try again, and what to tell the user."""

from __future__ import annotations

import asyncio
import email.utils
import errno
import socket
import ssl
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from headrace.errors import AccessError, DataNotFoundError, FileChangedError, RemoteError
from headrace.io.library_errors import FULL_DISK
from headrace.io.paths import redact
from headrace.io.remote.http import UnsuitableError, WrongLengthError

_PASSING = frozenset({408, 425, 429, *range(500, 600)})
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError")  # botocore's
_OF_PATHS = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)


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
    is_of_way = status is None and is_of_network(error)
    if is_of_way and isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        # fsspec takes whatever goes wrong with a question for a size for a missing file
        error = error.__cause__
    kind = type(error).__name__
    said = redact(str(error))
    text = said or kind
    named = kind
    if said:
        named = f"{kind}: {said}"
    if status in (412, 416):  # another version; shorter than it was
        raise was_replaced(where) from None
    if status == 404 or (
        status is None
        and not is_of_way
        and isinstance(error, FileNotFoundError | NotADirectoryError)
    ):
        raise DataNotFoundError(f"{where}: there is no such file") from None
    if status in (401, 403) or (
        status is None and (isinstance(error, PermissionError) or kind in _NO_CREDENTIALS)
    ):
        raise AccessError(
            f"{where}: access is denied ({text}): look at the credentials (storage_options), "
            "which may have expired"
        ) from None
    if isinstance(error, UnsuitableError):
        raise _final(f"{where}: {text}", of_server=True) from None
    if isinstance(error, WrongLengthError):
        return Passing(text, None)
    untrusted = next(
        (one for one in _chain(error) if isinstance(one, ssl.SSLCertVerificationError)), None
    )
    if untrusted is not None:
        reason = f"{where}: the server's certificate is not trusted ({untrusted.verify_message})"
        raise _final(
            f"{reason}. Use the name that the certificate is for, or install the CA certificate"
        ) from None
    full = next(
        (one for one in _chain(error) if isinstance(one, OSError) and one.errno in FULL_DISK), None
    )
    if full is not None:  # where fsspec, or headrace, caches on disk
        raise full
    if isinstance(error, TimeoutError):
        return Passing("nothing came in time", None)
    if status in _PASSING or is_of_way:
        said = named
        if status:
            said = f"the server says {status}"
        return Passing(said, retry_after(headers), status is None and is_absent(error))
    # aiohttp's and botocore's words for what they don't take
    is_option = isinstance(error, TypeError) or "Invalid endpoint" in text
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
        seen = seen + 1


def status_of(error: BaseException) -> tuple[int | None, Any]:
    """The HTTP status that an error, or what it was made of, tells of, and the headers."""
    for one in _chain(error):
        status = getattr(one, "status", None)
        if isinstance(status, int) and status >= 300:
            return status, getattr(one, "headers", None)
        response = getattr(one, "response", None)  # botocore's
        if isinstance(response, dict):
            said = response.get("ResponseMetadata", {})
            status = said.get("HTTPStatusCode")
            if isinstance(status, int) and status >= 300:
                return status, said.get("HTTPHeaders")
    return None, None


def is_of_network(error: BaseException) -> bool:
    """Is it of the way to the server, and may it pass?"""
    for one in _chain(error):
        if isinstance(one, ConnectionError | TimeoutError | asyncio.IncompleteReadError | EOFError):
            return True
        module = type(one).__module__.partition(".")[0]
        if module in (
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
        ) and not (isinstance(one, TypeError) or type(one).__name__ == "ParamValidationError"):
            return True
        if isinstance(one, OSError) and one.errno is not None and not isinstance(one, _OF_PATHS):
            return True
    return False


def is_absent(error: BaseException) -> bool:
    """True if nobody answers under that address: an unknown host, or a refused connection."""
    return any(
        isinstance(one, OSError)
        and (isinstance(one, socket.gaierror) or one.errno == errno.ECONNREFUSED)
        for one in _chain(error)
    )


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
