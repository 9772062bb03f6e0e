"""The page of a profile: in headless Chromium, at three widths, without a request."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import html
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.profiling.report.page import page_of
from tests.profiling.test_profile import made

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
WIDTHS = (360, 800, 1400)
_QUIET = (
    *(
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
    ),
    *(
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
        "--no-default-browser-check",
        "--disable-extensions",
    ),
)


def test_everything_is_in_the_page() -> None:
    page = page_of(made().as_dict())
    assert (
        "Decoding &amp; more holds the loop back." in page
        and "ceiling: the &lt;decoder&gt; alone" in page
    )
    assert (
        not re.search(r"(src|href)=\"(?!data:,)", page)
        and "url(" not in page
        and "<script" not in page
        and "@import" not in page
    )
    assert page.count("<rect") == 9 * 8 and "default-src 'none'" in html.unescape(page)
    assert (
        "x1.80 to x2.10" in page
        and "samples/s, from 0 to 120.0 at most" in page
        and "batch_size=4" in page
    )


def test_a_page_of_little() -> None:
    profile = made()
    profile.stages, profile.advice, profile.batches, profile.series, profile.free_per_second = (
        [],
        [],
        [],
        [],
        None,
    )
    page = page_of(profile.as_dict())
    assert "Nothing that headrace knows of" in page and "<svg" not in page


class Browser:
    """Headless Chromium, by its DevTools protocol.

    Args:
        folder: for its files.
    """

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        command = [
            CHROMIUM,
            *_QUIET,
            "--remote-debugging-port=0",
            f"--user-data-dir={folder}",
            "about:blank",
        ]
        own = {
            **os.environ,
            "HOME": str(folder),
            "XDG_CONFIG_HOME": str(folder),
            "XDG_CACHE_HOME": str(folder),
        }
        self._process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env=own,
        )
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if match := re.search(r"DevTools listening on (ws://\S+)", line):
                self.address = match[1]
                return
        raise AssertionError("Chromium has not begun")

    def close(self) -> None:
        """Ends it, with all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(20)
        assert self._process.stderr is not None
        self._process.stderr.close()

    async def look(
        self, url: str, widths: tuple[int, ...]
    ) -> tuple[list[str], dict[int, dict[str, Any]]]:
        """The requests that a page makes, and by width what it looks like."""
        import aiohttp

        requests: list[str] = []
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(self.address, max_msg_size=1 << 28) as socket,
        ):
            number = 0

            async def ask(
                method: str, session_id: str | None = None, **params: Any
            ) -> dict[str, Any]:
                nonlocal number
                number += 1
                await socket.send_json(
                    {
                        "id": number,
                        "method": method,
                        "params": params,
                        **({"sessionId": session_id} if session_id else {}),
                    }
                )
                while True:
                    message = await asyncio.wait_for(socket.receive_json(), 30)
                    if message.get("method") == "Network.requestWillBeSent":
                        requests.append(message["params"]["request"]["url"])
                    if message.get("id") == number:
                        assert "error" not in message, message
                        answer: dict[str, Any] = message["result"]
                        return answer

            target = (await ask("Target.createTarget", url="about:blank"))["targetId"]
            tab = (await ask("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
            for domain in ("Network", "Page", "Runtime"):
                await ask(f"{domain}.enable", tab)
            seen = {}
            for width in widths:
                await ask(
                    "Emulation.setDeviceMetricsOverride",
                    tab,
                    width=width,
                    height=900,
                    deviceScaleFactor=1,
                    mobile=False,
                )
                await ask("Page.navigate", tab, url=url)
                script = (
                    "new Promise(done => { const look = () => document.readyState == 'complete' ? "
                    "done({title: document.title, verdict: "
                    "document.querySelector('#verdict')?.innerText, wide: "
                    "document.documentElement.scrollWidth, "
                    "bars: document.querySelectorAll('rect').length}) : setTimeout(look, 20); "
                    "look() })"
                )
                result = await ask(
                    "Runtime.evaluate",
                    tab,
                    expression=script,
                    awaitPromise=True,
                    returnByValue=True,
                )
                picture = await ask("Page.captureScreenshot", tab, captureBeyondViewport=True)
                seen[width] = {
                    **result["result"]["value"],
                    "png": base64.b64decode(picture["data"]),
                }
            return requests, seen


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    pytest.importorskip("aiohttp")
    running = Browser(tmp_path / "chromium")
    yield running
    running.close()


@pytest.mark.slow
def test_the_page_in_chromium(browser: Browser, tmp_path: Path) -> None:
    """With HEADRACE_SCREENSHOTS=FOLDER the pictures are left there."""
    path = tmp_path / "profile.html"
    made().save_html(path)
    requests, seen = asyncio.run(browser.look(path.as_uri(), WIDTHS))
    assert set(requests) == {path.as_uri()}
    for width, page in seen.items():
        assert (
            page["title"] == "headrace profile"
            and page["verdict"] == "Decoding & more holds the loop back."
        )
        assert page["wide"] <= width and page["bars"] == 72, "nothing hangs over the side"
        assert len(page["png"]) > 10_000
        if folder := os.environ.get("HEADRACE_SCREENSHOTS"):
            Path(folder, f"{width}.png").write_bytes(page["png"])
