"""The server that all contestants of `stream.py` read from.

    python benchmarks/stream_server.py FOLDER

A process of its own on loopback; it prints its port. It serves FOLDER/BUCKET/KEY as /BUCKET/KEY: by
plain HTTP (GET and HEAD with Range, If-Match and ETag), and to clients of S3 that use path-style
addresses (objects, ListObjectsV2, the bucket's place); signatures are not looked at. POST /_set
takes JSON: `latency`, seconds before each answer, and `bandwidth`, bytes a second over all answers;
0: no limit. GET /_counts gives `requests` and `bytes` since the last call.

A thread a connection, and `sendfile` from the page cache: it takes a tenth of a core at 200 MB/s, a
sixth at 400, since it shares the cores with those who are measured.
"""

from __future__ import annotations

import contextlib
import email.utils
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path
from xml.sax.saxutils import escape

_PART = 256 << 10
"""Bytes that are sent at a time: answers share the line in turns of this size."""
_REASONS = {
    200: "OK",
    206: "Partial Content",
    404: "Not Found",
    405: "Method Not Allowed",
    412: "Precondition Failed",
    416: "Out of Range",
}


class StreamServer:
    """Runs the server in a process; a context manager.

    Args:
        folder: what is served.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = str(folder)

    def __enter__(self) -> StreamServer:
        command = [sys.executable, "-I", "-S", __file__, self.folder]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdout, self._process.stdin):
            if pipe is not None:
                pipe.close()

    @property
    def pid(self) -> int:
        return self._process.pid


def tell(url: str, **settings: float) -> None:
    """From now on `latency` and `bandwidth` of the server at `url` are these."""
    request = urllib.request.Request(f"{url}/_set", json.dumps(settings).encode(), method="POST")
    urllib.request.urlopen(request, timeout=10).close()


def counts(url: str) -> dict[str, int]:
    """Requests and bytes since the last call."""
    with urllib.request.urlopen(f"{url}/_counts", timeout=10) as answer:
        found: dict[str, int] = json.load(answer)
    return found


# -- in the server's process


class _Line:
    """What all connections share: the latency, the bandwidth, the counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_at = 0.0
        self.latency, self._bandwidth = 0.0, 0.0
        self._requests = self._bytes = 0

    def set(self, latency: float | None = None, bandwidth: float | None = None) -> None:
        with self._lock:
            self.latency = self.latency if latency is None else latency
            self._bandwidth = self._bandwidth if bandwidth is None else bandwidth

    def request(self) -> None:
        with self._lock:
            self._requests += 1

    def turn(self, nbytes: int) -> None:
        """Returns when the line has room for so many bytes."""
        with self._lock:
            self._bytes += nbytes
            if not self._bandwidth:
                return
            now = time.monotonic()
            begin = max(now, self._free_at)
            self._free_at = begin + nbytes / self._bandwidth
        if begin > now:
            time.sleep(begin - now)

    def take_counts(self) -> dict[str, int]:
        with self._lock:
            found = {"requests": self._requests, "bytes": self._bytes}
            self._requests = self._bytes = 0
        return found


class _Connection:
    """One client, from its first request to its last."""

    def __init__(self, connection: socket.socket, folder: str, line: _Line) -> None:
        self._socket, self._folder, self._line = connection, folder, line
        self._received = b""

    def serve(self) -> None:
        with contextlib.suppress(OSError), self._socket:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while (head := self._head()) is not None:
                if not self._answer(*head):
                    break

    def _head(self) -> tuple[str, str, dict[str, str]] | None:
        while b"\r\n\r\n" not in self._received:
            more = self._socket.recv(1 << 16)
            if not more:
                return None
            self._received += more
        head, _, self._received = self._received.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ", 2)
        headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (one.partition(":") for one in lines)
        }
        return method, target, headers

    def _body(self, headers: dict[str, str]) -> bytes:
        size = int(headers.get("content-length", 0))
        while len(self._received) < size:
            more = self._socket.recv(1 << 16)
            if not more:
                break
            self._received += more
        body, self._received = self._received[:size], self._received[size:]
        return body

    def _answer(self, method: str, target: str, headers: dict[str, str]) -> bool:
        """Answers one request; says whether the connection stays."""
        parts = urllib.parse.urlsplit(target)
        path, query = (
            urllib.parse.unquote(parts.path).strip("/"),
            dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True)),
        )
        if path == "_set":
            self._line.set(**json.loads(self._body(headers)))
            self._send(200, {}, b"", method)
        elif path == "_counts":
            self._send(
                200,
                {"Content-Type": "application/json"},
                json.dumps(self._line.take_counts()).encode(),
                method,
            )
        else:
            self._body(headers)
            self._line.request()
            time.sleep(self._line.latency)
            if method not in ("GET", "HEAD"):
                self._send(405, {}, b"", method)
            elif "/" in path:
                self._object(method, path, headers)
            else:
                self._bucket(method, path, query)
        return headers.get("connection", "").lower() != "close"

    # -- objects

    def _object(self, method: str, path: str, headers: dict[str, str]) -> None:
        with contextlib.ExitStack() as opened:
            try:
                file = opened.enter_context(
                    open(os.path.join(self._folder, path), "rb", buffering=0)
                )
            except OSError:
                self._send(
                    404, {"Content-Type": "application/xml"}, _error("NoSuchKey", path), method
                )
                return
            status = os.fstat(file.fileno())
            tag = _tag(status)
            if headers.get("if-match", tag) not in (tag, "*"):
                self._send(412, {}, _error("PreconditionFailed", path), method)
                return
            start, stop = _range(headers.get("range"), status.st_size)
            if start >= stop and status.st_size:
                self._send(
                    416,
                    {"Content-Range": f"bytes */{status.st_size}"},
                    _error("InvalidRange", path),
                    method,
                )
                return
            is_part = "range" in headers
            about = {
                "ETag": tag,
                "Last-Modified": email.utils.formatdate(status.st_mtime, usegmt=True),
                "Accept-Ranges": "bytes",
                "Content-Type": "application/octet-stream",
            }
            if is_part:
                about["Content-Range"] = f"bytes {start}-{stop - 1}/{status.st_size}"
            self._send_head(206 if is_part else 200, about, stop - start)
            if method == "GET":
                self._send_file(file.fileno(), start, stop)

    def _send_file(self, fd: int, start: int, stop: int) -> None:
        while start < stop:
            end = min(start + _PART, stop)
            self._line.turn(end - start)
            while start < end:
                sent = os.sendfile(self._socket.fileno(), fd, start, end - start)
                if not sent:
                    raise ConnectionError
                start += sent

    # -- buckets

    def _bucket(self, method: str, bucket: str, query: dict[str, str]) -> None:
        folder = os.path.join(self._folder, bucket)
        if not bucket or not os.path.isdir(folder):
            self._send(
                404, {"Content-Type": "application/xml"}, _error("NoSuchBucket", bucket), method
            )
            return
        body = (
            b'<?xml version="1.0"?><LocationConstraint/>'
            if "location" in query
            else _listing(folder, bucket, query)
        )
        self._send(
            200,
            {"Content-Type": "application/xml", "x-amz-bucket-region": "us-east-1"},
            body,
            method,
        )

    # -- answers

    def _send_head(self, status: int, headers: dict[str, str], length: int) -> None:
        lines = [
            f"HTTP/1.1 {status} {_REASONS[status]}",
            f"Content-Length: {length}",
            f"Date: {email.utils.formatdate(usegmt=True)}",
        ]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))

    def _send(self, status: int, headers: dict[str, str], body: bytes, method: str) -> None:
        self._send_head(status, headers, len(body))
        if method != "HEAD":
            self._socket.sendall(body)


def _tag(status: os.stat_result) -> str:
    return (
        '"'
        + hashlib.md5(f"{status.st_size} {status.st_mtime_ns} {status.st_ino}".encode()).hexdigest()
        + '"'
    )


def _range(header: str | None, size: int) -> tuple[int, int]:
    if header is None:
        return 0, size
    first, _, last = header.removeprefix("bytes=").partition("-")
    if not first:
        return max(0, size - int(last)), size
    return min(int(first), size), min(int(last) + 1, size) if last else size


def _error(code: str, resource: str) -> bytes:
    return (
        "<?xml "
        f'version="1.0"?><Error><Code>{code}</Code><Message>{code}</Message><Resource>/{escape(resource)}</Resource></Error>'
    ).encode()


def _listing(folder: str, bucket: str, query: dict[str, str]) -> bytes:
    """ListObjectsV2 of all keys with a prefix, in one page."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    keys = sorted(
        os.path.relpath(os.path.join(at, name), folder)
        for at, _, names in os.walk(folder)
        for name in names
    )
    contents, common = [], dict[str, None]()
    for key in keys:
        if not key.startswith(prefix):
            continue
        rest = key[len(prefix) :]
        if delimiter and delimiter in rest:
            common[prefix + rest[: rest.index(delimiter) + 1]] = None
            continue
        status = os.stat(os.path.join(folder, key))
        when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(status.st_mtime))
        contents.append(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{when}</LastModified><ETag>{escape(_tag(status))}</ETag>"
            f"<Size>{status.st_size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
        )
    folders = [f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in common]
    return (
        '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{escape(bucket)}</Name><Prefix>{escape(prefix)}</Prefix>"
        f"<KeyCount>{len(contents) + len(common)}</KeyCount>"
        f"<MaxKeys>1000000</MaxKeys><IsTruncated>false</IsTruncated>{''.join(contents)}{''.join(folders)}</ListBucketResult>"
    ).encode()


def main() -> None:
    folder, line = sys.argv[1], _Line()
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    print(listener.getsockname()[1], flush=True)

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(
                target=_Connection(connection, folder, line).serve, daemon=True
            ).start()

    threading.Thread(target=accept, daemon=True).start()
    sys.stdin.read()  # until whoever started it is gone


if __name__ == "__main__":
    main()
