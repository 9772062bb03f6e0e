"""Whole files of a server of the web come as they are, by plain HTTP where the answer says its
length, and else by fsspec.
"""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from headrace.io.remote.http import HTTPRanges
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import RemoteFiles

CONTENT = b"the mill stands, the wheel turns\n" * 500


class _Handler(BaseHTTPRequestHandler):
    """Answers by path: with a length, in chunks, encoded, nothing at all, or 404."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        way = self.path.strip("/")
        body = {"encoded": gzip.compress(CONTENT), "empty": b""}.get(way, CONTENT)
        self.send_response(404 if way == "missing" else 200)
        if way == "encoded":
            self.send_header("Content-Encoding", "gzip")
        if way == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for start in range(0, len(body), 5000):
                part = body[start : start + 5000]
                self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")
            return
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def served() -> Iterator[tuple[RemoteFiles, str]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    found = RemoteFiles(url, RemoteOptions(retries=0, deadline=20))
    try:
        yield found, url
    finally:
        found.close()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("first", ["plain", "chunked", "encoded"])
def test_whole_files_however_they_are_sent(
    served: tuple[RemoteFiles, str], first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, url = served
    plainly = list[str]()
    read = HTTPRanges.read

    def counted(self: HTTPRanges, of: str, *rest: object) -> bytearray:
        data = read(self, of, *rest)  # type: ignore[arg-type]
        plainly.append(of.rpartition("/")[2])
        return data

    monkeypatch.setattr(HTTPRanges, "read", counted)
    assert files.find_metadata([f"{url}/{first}"]) == [CONTENT]
    names = ["plain", "chunked", "missing", "empty", "encoded"]
    assert files.find_metadata([f"{url}/{name}" for name in names]) == [
        CONTENT,
        CONTENT,
        None,
        b"",
        CONTENT,
    ]
    assert ("plain" in plainly) == (first == "plain") and not {"chunked", "encoded"} & set(plainly)
