"""Answers of other bytes, or of another version, than were asked for: an error, and never wrong
rows. Whole files come as they are.
"""

import contextlib
import gzip
import itertools
import pickle
import random
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from headrace import HeadraceWarning, TextDataset
from headrace.errors import FileChangedError, RemoteError
from headrace.io.remote import client as module
from headrace.io.remote.options import RemoteOptions
from headrace.io.remote_files import RemoteFiles
from tests.io.remote.reading import Range, read, versions_of
from tests.servers.plain import served

CONTENT = bytes(range(256)) * 2000


class Answers:
    """What the server does: set by a test."""

    def __init__(self) -> None:
        self.files = {"a.bin": CONTENT}
        self.tags = {"a.bin": '"1"'}
        self.mirrors: Iterator[str] | None = None  # where requests are led to, one after the other
        self.shift = 0
        self.total: str | None = None
        self.says_range = self.heeds_if_match = True
        self.about, self.encoding = "ETag", ""
        self.requests = 0


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Answers, str]]:
    monkeypatch.setattr(module, "_WAIT", 0.001)
    answers = Answers()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answers.requests += 1
            name = self.path.strip("/")
            if answers.mirrors is not None and "/" not in name:
                return self.answer(302, b"", Location=f"/{next(answers.mirrors)}/{name}")
            if name not in answers.files:
                return self.answer(404, b"")
            data, tag = answers.files[name], answers.tags.get(name, '"1"')
            about = {answers.about: tag, "Accept-Ranges": "bytes"}
            if answers.encoding or name == "encoded":
                about["Content-Encoding"] = answers.encoding or "gzip"
            if answers.heeds_if_match and tag not in self.headers.get("If-Match", tag):
                return self.answer(412, b"")
            said = re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if said is None:
                return self.answer(200, data, **about)
            first, last = int(said[1]) + answers.shift, int(said[2]) + answers.shift
            if answers.says_range:
                about["Content-Range"] = f"bytes {first}-{last}/{answers.total or len(data)}"
            self.answer(206, data[first : last + 1], **about)

        do_HEAD = do_GET

        def answer(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response(status)
            if self.path == "/chunked":
                headers["Transfer-Encoding"] = "chunked"
                body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
            else:
                headers["Content-Length"] = str(len(body))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with served(Handler) as url:
        yield answers, url


@pytest.fixture(params=[None, {"client_kwargs": {"trust_env": False}}], ids=["plain", "fsspec"])
def remote(answers: Any, remote_of: Any, request: pytest.FixtureRequest) -> Any:
    return remote_of(f"{answers[1]}/a.bin", storage_options=request.param, retries=2)


def test_ranges_are_those_that_were_asked_for(answers: Any, remote: Any) -> None:
    server, url = answers
    wanted = [Range(f"{url}/a.bin", 3, 1000)]
    server.total = "*"
    assert read(remote, wanted) == [CONTENT[3:1000]]
    server.shift = 16
    with pytest.raises(RemoteError, match=r"3 attempts .*Content-Range: bytes 19-1015/\*"):
        read(remote, wanted)
    server.shift, server.says_range = 0, False
    with pytest.raises(RemoteError, match="without Content-Range"):
        read(remote, wanted)
    server.says_range, server.encoding = True, "gzip"
    for ask in (lambda: read(remote, wanted), lambda: versions_of(remote, [f"{url}/a.bin"])):
        server.requests = 0
        with pytest.raises(RemoteError, match="Content-Encoding: gzip"):
            ask()
        assert server.requests == 1  # said at once


def test_other_version_from_a_server_that_ignores_if_match(answers: Any, remote: Any) -> None:
    for header, old, new in [
        ("Last-Modified", "Wed, 25 Nov 2026 12:00:00 GMT", "Wed, 25 Nov 2026 12:00:01 GMT"),
        ("ETag", '"1"', '"2"'),
        ("ETag", 'W/"1"', 'W/"2"'),
    ]:
        server, url = answers
        server.heeds_if_match, server.about, server.tags["a.bin"] = False, header, old
        version = versions_of(remote, [f"{url}/a.bin"])[0]
        wanted = [Range(f"{url}/a.bin", 0, 3, version)]
        assert read(remote, wanted) == [CONTENT[:3]]
        server.total = str(len(CONTENT) + 1)
        with pytest.raises(FileChangedError, match=r"512,001 bytes, where it had 512,000"):
            read(remote, wanted)
        server.total, server.tags["a.bin"] = None, new
        with pytest.raises(FileChangedError, match=new.removeprefix("W/")):
            read(remote, wanted)


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("heeds_if_match", [True, False])
def test_mirrors_with_tags_of_their_own(answers: Any, remote: Any, heeds_if_match: bool) -> None:
    server, url = answers
    draws = map(random.Random(1).choice, itertools.repeat("pq"))
    server.heeds_if_match, server.mirrors = heeds_if_match, draws
    for mirror in "pqr":
        server.files[f"{mirror}/a.bin"], server.tags[f"{mirror}/a.bin"] = CONTENT, f'"{mirror}"'
    version = versions_of(remote, [f"{url}/a.bin"])[0]
    wanted = [Range(f"{url}/a.bin", at, at + 1000, version) for at in range(0, 500_000, 100_000)]
    with pytest.warns(HeadraceWarning, match=r'\("[pq]" and "[pq]"\)') as caught:
        for one in wanted * 4:
            assert read(remote, [one]) == [CONTENT[one.start : one.stop]]
    assert len(caught) == 1
    server.mirrors, server.files["r/a.bin"] = itertools.repeat("r"), CONTENT[::-1]
    with pytest.raises(FileChangedError, match=r'its version is "r", and was "[pq]"'):
        read(remote, wanted)


def test_mirror_that_answers_without_redirection(answers: Any, remote: Any) -> None:
    server, url = answers
    server.mirrors, server.heeds_if_match = itertools.repeat("p"), False
    server.files["p/a.bin"], server.tags["p/a.bin"] = CONTENT, '"p"'
    wanted = [Range(f"{url}/a.bin", 3, 1000, versions_of(remote, [f"{url}/a.bin"])[0])]
    server.mirrors = None
    with (
        contextlib.closing(pickle.loads(pickle.dumps(remote))) as in_worker,
        pytest.warns(HeadraceWarning, match=r'\("p" and "1"\)'),
    ):
        assert read(in_worker, wanted) == [CONTENT[3:1000]]


def _texts(path: Any) -> list[str]:
    with TextDataset(path, unit="file") as dataset:
        return sorted(dataset.text_of(number) for number in range(len(dataset)))


def test_a_key_is_opaque(memory: Any, tmp_path: Path) -> None:
    # fsspec itself takes "::" apart here
    keys = ["d/x.txt", "d//x.txt", "d///w.txt", "d/q?x=1.txt", "d/st*r.txt"]
    for key in keys:
        memory.pipe_file(f"/{key}", key.encode())
    for path in ("memory://d", "memory://", [f"memory://{key}" for key in keys]):
        assert _texts(path) == sorted(keys)
    (tmp_path / "a::b.txt").write_text("local")
    with contextlib.chdir(tmp_path):
        assert _texts("a::b.txt") == ["local"]


def test_whole_files_however_they_are_sent(answers: Any) -> None:
    server, url = answers
    served = dict.fromkeys(("plain", "chunked"), CONTENT)
    server.files = {**served, "empty": b"", "encoded": gzip.compress(CONTENT)}
    with contextlib.closing(RemoteFiles(url, RemoteOptions(retries=0, deadline=20))) as files:
        names = ["plain", "chunked", "missing", "empty", "encoded"]
        found = files.find_metadata([f"{url}/{name}" for name in names])
    assert found == [CONTENT, CONTENT, None, b"", CONTENT]
