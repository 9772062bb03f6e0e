"""Makes tar shards of photographs, and serves a folder by HTTP with byte ranges: for
stream_shards.py, where no server is at hand.
"""

from __future__ import annotations

import contextlib
import functools
import io
import tarfile
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from make_photos import make_photos

SIZE = 96  # pixels
SENT = Counter[str]()


class RangeHandler(SimpleHTTPRequestHandler):
    """Serves byte ranges, which Python's own handler does not and real servers do; counts what
    it sends.
    """

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        file = Path(self.translate_path(self.path))
        if not file.is_file():
            return self.send_error(404)
        content = file.read_bytes()
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last or len(content)) + 1]
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header(
            "Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
        )
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)
        SENT.update(requests=1, bytes=len(part))

    def log_message(self, *_: Any) -> None:
        pass  # a line a request is too much


def make_shards(folder: Path, images: int, shards: int = 4) -> Path:
    """Photographs in tars, as WebDataset has them: 0007.jpg and 0007.cls are a sample."""
    paths = sorted(make_photos(folder / "photos", images, size=(SIZE, SIZE)).rglob("*.*"))
    classes = sorted({path.parent.name for path in paths})
    (folder / "shards").mkdir(exist_ok=True)
    for shard in range(shards):
        with tarfile.open(folder / "shards" / f"train-{shard:04d}.tar", "w") as tar:
            for number in range(shard, len(paths), shards):
                target = str(classes.index(paths[number].parent.name)).encode()
                for extension, content in (("jpg", paths[number].read_bytes()), ("cls", target)):
                    (member := tarfile.TarInfo(f"{number:04d}.{extension}")).size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return folder / "shards"


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The URL of the shards in a folder, from a server in a thread of this process."""
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(RangeHandler, directory=str(folder))
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/train-{{0000..0003}}.tar"
        finally:
            server.shutdown()
    print(f"the server answered {SENT['requests']} requests with {SENT['bytes'] / 1e6:.1f} MB")
