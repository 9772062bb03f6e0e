"""Reads byte ranges and whole files over HTTP, at the cost of little more than the copy.

fsspec's client takes a body apart and joins it again, in the one thread of its loop. Here each body
is read straight into its buffer, in a thread, by Python's own `http.client` over connections that
stay open. Only plain requests are made here: those with proxies, a custom client, a password or a
redirection are made by fsspec, as are those for versions and lists.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
import urllib.parse
import urllib.request
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headrace.io.remote import requests
from headrace.io.remote.requests import Answer, Attempt, checked_size

# a connection that was idle for longer is not used again: servers close them, some silently
_IDLE_S = 20.0


class NotPlainError(Exception):
    """The request can't be made here: fsspec has to make it."""


class StatusError(Exception):
    """The server refuses a request.

    Attributes:
        status: of HTTP.
        headers: of the answer.
    """

    def __init__(self, status: int, headers: Any) -> None:
        super().__init__(f"{status}")
        self.status: int = status
        self.headers: Any = headers


class HTTPRanges:
    """Reads ranges of files, and whole files, over HTTP, each in a thread.

    Args:
        headers: headers of each request.
        most: number of threads.
    """

    def __init__(self, headers: dict[str, str], most: int) -> None:
        self._headers = headers
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, str], list[tuple[http.client.HTTPConnection, float]]] = {}
        self._busy: set[http.client.HTTPConnection] = set()
        self._is_open = True
        self.pool: ThreadPoolExecutor = ThreadPoolExecutor(most, "headrace-http")
        weakref.finalize(self, _close_all, self._idle).atexit = False  # where nobody closed it

    def read(
        self, url: str, start: int, stop: int | None, tag: str | None, attempt: Attempt
    ) -> Answer:
        """The bytes of a range, or of a whole file.

        Args:
            url: of the file.
            start, stop: first byte and end; None: of the whole file, whatever its length.
            tag: ETags of the expected version (If-Match), or None.
            attempt: its time limit.

        Raises:
            StatusError: the server refuses.
            NotPlainError: the answer is a redirection, has no length, or is a whole file that is
                encoded.
            WrongLengthError: see `checked_size`.
            TimeoutError, OSError, HTTPException: it does not come, or not whole.
        """
        parts = urllib.parse.urlsplit(url)
        if "@" in parts.netloc:
            raise NotPlainError("a password")
        headers = {**self._headers, "Accept-Encoding": "identity"}
        if stop is not None:
            headers["Range"] = f"bytes={start}-{stop - 1}"
        if tag is not None:
            headers["If-Match"] = tag
        target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        place = parts.scheme, parts.netloc
        connection = self._kept(place)
        while True:
            is_new = connection is None
            connection = connection or _connection(*place, attempt)
            with self._in_use(connection, place):
                try:
                    if connection.sock is not None:
                        connection.sock.settimeout(attempt.left())
                    connection.request("GET", target, headers=headers)
                    answer = connection.getresponse()
                except ConnectionError:
                    if is_new:
                        raise
                    connection.close()  # the server did, while nobody used it
                    connection = None
                    continue
                with answer:
                    if 300 <= answer.status < 400:
                        raise NotPlainError(f"{answer.status}")
                    if answer.status not in (200, 206):
                        raise StatusError(answer.status, answer.headers)
                    size = answer.length
                    if stop is not None:
                        size = checked_size(
                            answer.status, answer.headers, answer.length, start, stop
                        )
                    elif answer.headers.get("Content-Encoding", "identity") != "identity":
                        raise NotPlainError("encoded")
                    length = answer.length
                    if length is None:
                        raise NotPlainError("a body without a length, or encoded")
                    body = bytearray(length)
                    done = 0
                    with memoryview(body) as whole:
                        while done < length:
                            # else the answer has it, which is the connection's last
                            if connection.sock is not None:
                                connection.sock.settimeout(attempt.left())
                            nbytes = answer.readinto(
                                whole[done : min(length, done + requests.PART)]
                            )
                            if not nbytes:
                                raise http.client.IncompleteRead(b"", length - done)
                            done += nbytes
                            attempt.came(nbytes)
                    said = answer.headers
                    return Answer(body, said.get("ETag"), said.get("Last-Modified"), size, url)

    @contextlib.contextmanager
    def _in_use(
        self, connection: http.client.HTTPConnection, place: tuple[str, str]
    ) -> Iterator[None]:
        """Keeps the connection for the next request, unless an error is raised inside."""
        with self._lock:
            if not self._is_open:
                raise ConnectionAbortedError("the connections were closed")
            self._busy.add(connection)
        try:
            yield
        except BaseException:
            connection.close()
            raise
        finally:
            with self._lock:
                self._busy.discard(connection)
                if connection.sock is not None and self._is_open:
                    self._idle.setdefault(place, []).append((connection, time.monotonic()))
                else:
                    connection.close()

    def _kept(self, place: tuple[str, str]) -> http.client.HTTPConnection | None:
        with self._lock:
            idle = self._idle.get(place, [])
            while idle:
                connection, since = idle.pop()
                if time.monotonic() - since < _IDLE_S:
                    return connection
                connection.close()
        return None

    def close(self) -> None:
        """Closes all connections, also those that are in use."""
        with self._lock:
            self._is_open = False
            _close_all(self._idle)
            for connection in self._busy:
                # it has none, or closes it just now
                with contextlib.suppress(OSError, AttributeError):
                    connection.sock.shutdown(socket.SHUT_RDWR)
        self.pool.shutdown(wait=True, cancel_futures=True)


def _close_all(idle: dict[tuple[str, str], list[tuple[http.client.HTTPConnection, float]]]) -> None:
    for connections in idle.values():
        for connection, _ in connections:
            connection.close()
    idle.clear()


def _connection(scheme: str, netloc: str, attempt: Attempt) -> http.client.HTTPConnection:
    if scheme == "https":
        return http.client.HTTPSConnection(
            netloc, timeout=attempt.left(), context=ssl.create_default_context()
        )
    return http.client.HTTPConnection(netloc, timeout=attempt.left())


def plain_headers(filesystem: Any) -> dict[str, str] | None:
    """The headers that an fsspec file system sends; None: it has other options too, which
    only fsspec obeys.
    """
    if type(filesystem).__name__ != "HTTPFileSystem":
        return None
    options = dict(filesystem.kwargs)
    headers = dict(options.pop("headers", {}))
    is_own = filesystem.get_client.__module__ == "fsspec.implementations.http"
    if options or filesystem.client_kwargs or not is_own or urllib.request.getproxies():
        return None
    return headers
