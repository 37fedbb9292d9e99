"""A headless Chromium, over its DevTools protocol: enough to open a page and to look at it."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
PROGRAM = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
PATIENCE = 60.0  # seconds; a busy machine starts it slowly

needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="no chromium on this machine")


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = count(1)
        self.problems: list[str] = []  # exceptions, and what the console or the policy complains of

    async def open(self, url: str) -> None:
        """Load a page."""
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)
        await self.until(f"location.href === {url!r} && document.readyState === 'complete'")

    async def call(self, method: str, **params: Any) -> Any:
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(PATIENCE):
            while True:
                message = json.loads((await self._socket.receive()).data)
                if message.get("id") == number:
                    assert "error" not in message, message["error"]
                    return message["result"]
                self._note(message)

    async def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = await self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def text(self, selector: str) -> str:
        """What a person reads there; empty while it is hidden."""
        shown = "(node) => (node?.checkVisibility() ? node.innerText : '')"
        return await self.run(f"({shown})(document.querySelector({selector!r}))")

    async def until(self, script: str) -> None:
        """Wait until an expression is true."""
        async with asyncio.timeout(PATIENCE):
            while not await self.run(f"Boolean({script})"):
                await asyncio.sleep(0.1)

    async def appear(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Be as wide as a screen, and as dark."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def screenshot(self) -> bytes:
        """All of the page, as PNG."""
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(params["exceptionDetails"]["exception"]["description"])
        elif message.get("method") == "Log.entryAdded":
            self.problems.append(params["entry"]["text"])


@contextmanager
def chromium(profile: Path) -> Iterator[str]:
    """A browser that keeps its files in the new folder `profile`; yields where it is controlled."""
    options = ("--remote-debugging-port=0", f"--user-data-dir={profile}")
    with subprocess.Popen([PROGRAM, *FLAGS, *options], stderr=subprocess.DEVNULL) as process:
        try:
            yield f"http://127.0.0.1:{_port(profile / 'DevToolsActivePort')}"
        finally:
            process.terminate()


def _port(file: Path) -> int:
    """The port that the browser has chosen, once it listens."""
    deadline = time.monotonic() + PATIENCE
    while not (file.is_file() and (lines := file.read_text().split())):
        assert time.monotonic() < deadline, "the browser does not start"
        time.sleep(0.05)
    return int(lines[0])


@asynccontextmanager
async def tab(browser: str) -> AsyncIterator[Page]:
    """A new tab of a browser."""
    async with aiohttp.ClientSession(browser) as http:
        async with http.put("/json/new?about:blank") as response:
            opened = await response.json(content_type=None)
        async with http.ws_connect(opened["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            yield Page(socket)
        async with http.get(f"/json/close/{opened['id']}") as response:
            assert response.status == 200
