"""A server that answers like Hugging Face's Hub: files come from another one, by redirections."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.servers.plain import served

_INFO = {"id": "owner/name", "sha": "1" * 40, "siblings": [], "private": True}


class _Hub(http.server.BaseHTTPRequestHandler):
    folder: Path
    cdn: str
    token: str

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        _, _, name = url.path.partition("/datasets/owner/name")
        question, _, rest = name.removeprefix("/").partition("/")
        revision, _, path = rest.partition("/")
        if self.headers["Authorization"] != f"Bearer {self.token}":
            self._answer(401, "RepoNotFound")
        elif revision not in ("", "main", "v1"):
            self._answer(404, "RevisionNotFound")
        elif question == "resolve":
            self.send_response(302)
            self.send_header("Location", f"{self.cdn}/{path}?Signature=secret")
            self.send_header("ETag", '"of-the-hub"')  # the other server gives one of its own
            self.end_headers()
        elif question != "tree":
            self._answer(200, "", _INFO)
        elif (self.folder / path).is_dir():
            each = "**/*" if "recursive=true" in url.query.lower() else "*"
            self._answer(200, "", [self._entry(one) for one in (self.folder / path).glob(each)])
        else:
            self._answer(404, "EntryNotFound")

    def _entry(self, path: Path) -> dict[str, Any]:
        name = str(path.relative_to(self.folder))
        if path.is_dir():
            return {"type": "directory", "path": name, "oid": "2" * 40, "size": 0}
        data = path.read_bytes()
        oid = hashlib.sha1(data).hexdigest()
        return {"type": "file", "path": name, "oid": oid, "size": len(data)}

    def _answer(self, status: int, code: str, said: Any = None) -> None:
        body = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


def hub(folder: Path, cdn: str, token: str) -> contextlib.AbstractContextManager[str]:
    """Serves the tree of a folder as the dataset "owner/name", at "main" and "v1"; the URL.

    Args:
        folder: what is served.
        cdn: the URL of the server that the files come from.
        token: without which nothing is told.
    """
    return served(type("Hub", (_Hub,), {"folder": folder, "cdn": cdn, "token": token}))
