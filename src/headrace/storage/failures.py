"""What does the error of a request say: which status, is it of the way to the server, how long is the server to be left alone?"""

from __future__ import annotations

import asyncio
import email.utils
import time
from collections.abc import Iterator
from typing import Any


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen = 0
    while error is not None and seen < 8:
        yield error
        error, seen = error.__cause__ or error.__context__, seen + 1


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
        if isinstance(one, ConnectionError | asyncio.IncompleteReadError | EOFError):
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
        ) and not isinstance(one, TypeError):
            return True
        if isinstance(one, OSError) and one.errno is not None and not isinstance(one, FileNotFoundError | PermissionError):
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
