"""Python's own HTTP server in a thread: it knows no ranges, and shows folders as pages."""

from __future__ import annotations

import contextlib
import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class _Handler(http.server.SimpleHTTPRequestHandler):
    def __init__(self, *args: Any, signature: str, **options: Any) -> None:
        self._signature = signature
        super().__init__(*args, **options)

    def send_head(self) -> Any:
        if self._signature in self.path:
            return super().send_head()
        self.send_error(403)
        return None

    def copyfile(self, source: Any, outputfile: Any) -> None:
        with contextlib.suppress(ConnectionError):  # who wants a range goes away
            super().copyfile(source, outputfile)

    def log_message(self, *_: Any) -> None: ...


@contextlib.contextmanager
def plain_server(folder: Path, signature: str = "") -> Iterator[str]:
    """Serves a folder; its URL.

    Args:
        folder: what is served.
        signature: what a URL must hold; others are denied (403).
    """
    handler = functools.partial(_Handler, directory=str(folder), signature=signature)
    with served(handler) as url:
        yield url


@contextlib.contextmanager
def served(handler: Any) -> Iterator[str]:
    """Runs a server in a thread; its URL."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
