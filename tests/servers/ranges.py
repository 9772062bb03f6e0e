"""A server of byte ranges, as slow and as faulty as a test wants it: a process of its own on
loopback.

    python -m tests.servers.ranges FOLDER

prints the port. GET and HEAD of /NAME (with slashes: below folders) give the file, with Range, ETag
and If-Match. POST /_set takes JSON of what is to be from now on:

* latency: seconds before each answer; bandwidth: bytes a second over all answers; 0: no limit.
* faults: {kind: probability}, of "500", "503", "429", "403", "reset", "short" (the body ends
  early), "less" and "more" (a whole body of another length), "hang" (never answers), "wrong" (a
  flipped byte), "whole" (the range is ignored).
* denied: names of files that nobody may have (403).
* seed: of the faults; most: how many there are at most; null: no limit.

GET /_counts gives what was asked for since the last call: {"requests", "bytes", "faults", "ranges":
[[name, start, stop], ...]}.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any, Self

from tests.servers.process import ServerProcess


class RangeServer(ServerProcess):
    """Runs the server in a process, for a test or a benchmark; a context manager.

    Args:
        folder: what is served.
        **settings: as POST /_set takes them.
    """

    def __init__(self, folder: str | Path, **settings: Any) -> None:
        super().__init__("tests.servers.ranges", os.path.abspath(folder))
        self.folder, self._settings = Path(folder), settings

    def __enter__(self) -> Self:
        super().__enter__()
        self.set(**self._settings)
        return self

    def set(self, **settings: Any) -> None:
        """From now on."""
        request = urllib.request.Request(
            f"{self.url}/_set", json.dumps(settings).encode(), method="POST"
        )
        urllib.request.urlopen(request, timeout=10).close()

    def counts(self) -> dict[str, Any]:
        """What was asked for since the last call."""
        with urllib.request.urlopen(f"{self.url}/_counts", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


class _Answers:
    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._latency, self._bandwidth = 0.0, 0.0
        self._faults: dict[str, float] = {}
        self._denied: list[str] = []
        self._random = random.Random(0)
        self._left: int | None = None  # faults
        self._free_at = 0.0  # when the line is free again
        self._new_counts()

    def _new_counts(self) -> None:
        self._counts: dict[str, Any] = {"requests": 0, "bytes": 0, "faults": {}, "ranges": []}

    async def set(self, request: Any) -> Any:
        from aiohttp import web

        said = await request.json()
        self._latency = said.get("latency", self._latency)
        self._bandwidth = said.get("bandwidth", self._bandwidth)
        self._faults = said.get("faults", self._faults)
        self._denied = said.get("denied", self._denied)
        self._left = said.get("most")
        if "seed" in said:
            self._random.seed(said["seed"])
        return web.Response()

    async def counts(self, _: Any) -> Any:
        from aiohttp import web

        found = self._counts
        self._new_counts()
        return web.json_response(found)

    async def file(self, request: Any) -> Any:
        from aiohttp import web

        name = request.match_info["name"]
        self._counts["requests"] += 1
        await asyncio.sleep(self._latency)
        fault = self._fault()
        if name in self._denied:
            return web.Response(status=403)
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "reset":
            request.transport.abort()
            return web.Response()
        if fault in ("500", "503", "429", "403"):
            headers = {"Retry-After": "0.05"} if fault == "429" else {}
            return web.Response(status=int(fault), headers=headers)
        try:
            with open(os.path.join(self._folder, name), "rb") as file:
                status = os.fstat(file.fileno())
                tag = f'"{status.st_size}-{status.st_mtime_ns}-{status.st_ino}"'
                if request.headers.get("If-Match", tag) != tag:
                    return web.Response(status=412)
                start, stop = _range(request.headers.get("Range"), status.st_size)
                if fault == "whole":
                    start, stop = 0, status.st_size
                file.seek(start)
                body = file.read(stop - start) if request.method == "GET" else b""
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return web.Response(status=404)
        headers = {"ETag": tag, "Accept-Ranges": "bytes", "Content-Length": str(stop - start)}
        if request.method == "HEAD":
            return web.Response(headers=headers)
        if request.headers.get("Range") is not None:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{status.st_size}"
        self._counts["ranges"].append([name, start, stop])
        is_part = "Content-Range" in headers and fault != "whole"
        return await self._send(request, body, headers, fault, is_part)

    async def _send(
        self, request: Any, body: bytes, headers: dict[str, str], fault: str, is_part: bool
    ) -> Any:
        from aiohttp import web

        if fault == "wrong" and body:
            at = self._random.randrange(len(body))
            body = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
        if fault == "less":
            body = body[: len(body) // 2]
        if fault == "more":
            body += b"more"
        if fault in ("less", "more"):
            headers["Content-Length"] = str(len(body))
        response = web.StreamResponse(status=206 if is_part else 200, headers=headers)
        await response.prepare(request)
        sent = body[: len(body) // 2] if fault == "short" else body
        for at in range(0, len(sent), 1 << 16):
            part = sent[at : at + (1 << 16)]
            await self._take_turn(len(part))
            await response.write(part)
            self._counts["bytes"] += len(part)
        if fault == "short":
            request.transport.abort()
            return response
        await response.write_eof()
        return response

    async def _take_turn(self, nbytes: int) -> None:
        """All answers share one line."""
        if self._bandwidth:
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + nbytes / self._bandwidth
            await asyncio.sleep(self._free_at - now)

    def _fault(self) -> str:
        drawn, below = self._random.random(), 0.0
        for kind, probability in self._faults.items():
            below += probability
            if drawn < below and self._left != 0:
                self._left = None if self._left is None else self._left - 1
                self._counts["faults"][kind] = self._counts["faults"].get(kind, 0) + 1
                return kind
        return ""


def _range(header: str | None, size: int) -> tuple[int, int]:
    if header is None:
        return 0, size
    first, _, last = header.removeprefix("bytes=").partition("-")
    if not first:
        return max(0, size - int(last)), size
    return min(int(first), size), min(int(last) + 1, size) if last else size


async def _serve(folder: str) -> None:
    from aiohttp import web

    answers, app = _Answers(folder), web.Application()
    app.router.add_post("/_set", answers.set)
    app.router.add_get("/_counts", answers.counts)
    app.router.add_get("/{name:.*}", answers.file, allow_head=True)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    print(site._server.sockets[0].getsockname()[1], flush=True)
    # until whoever started it is gone
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
