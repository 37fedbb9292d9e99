"""Replicas, a router and Redis as processes, which tests treat badly."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

SYSTEM = "You keep a lighthouse, and answer from what is written in its log book. " * 20


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """`ragcache` with some command on a port of its own; it may be started again."""

    def __init__(self, command: str, *options: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._arguments = [command, "--port", str(self.port), *options]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-m", "ragcache", *self._arguments])

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 120
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}/ready", timeout=5):
                    return
            except OSError:
                time.sleep(0.1)
        raise AssertionError(f"{self._arguments} did not become ready")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()


class Load:
    """Clients that ask one question after the other on both wires, streaming or not.

    All have the same long prefix. `outcomes` counts statuses, `broken` where an answer had begun
    and did not end, and `lost` where nothing came of a request.
    """

    def __init__(self, url: str, clients: int = 4) -> None:
        self.outcomes: Counter[int | str] = Counter()
        self.cached: list[int] = []
        self._url = url
        self._clients = clients
        self._asked = 0
        self._stopping = False

    async def __aenter__(self) -> Load:
        self._http = aiohttp.ClientSession(self._url, timeout=aiohttp.ClientTimeout(60))
        self._running = [asyncio.create_task(self._client()) for _ in range(self._clients)]
        return self

    async def __aexit__(self, *error: object) -> None:
        self._stopping = True
        await asyncio.gather(*self._running)
        await self._http.close()

    async def answers(self, more: int) -> None:
        """Wait until so many more questions were answered."""
        wanted = self.outcomes.total() + more
        async with asyncio.timeout(120):
            while self.outcomes.total() < wanted:
                await asyncio.sleep(0.01)

    async def _client(self) -> None:
        while not self._stopping:
            self._asked += 1
            ask = (ask_chat, ask_message)[self._asked % 2]
            outcome, text = await ask(self._http, f"Question {self._asked}", self._asked % 4 < 2)
            self.outcomes[outcome] += 1
            if cached := CACHED.findall(text):
                self.cached.append(max(map(int, cached)))


CACHED = re.compile(r'"(?:cached_tokens|cache_read_input_tokens)":(\d+)')


async def ask_chat(
    http: aiohttp.ClientSession,
    question: str,
    stream: bool = False,
    tokens: int = 8,
    system: str = SYSTEM,
) -> tuple[int | str, str]:
    """The outcome of a chat, see `Load`, and the text of its answer."""
    turns = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {"model": "tiny", "max_tokens": tokens, "ignore_eos": True, "messages": turns}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return await _ask(http, "/v1/chat/completions", body, "[DONE]")


async def ask_message(
    http: aiohttp.ClientSession, question: str, stream: bool = False
) -> tuple[int | str, str]:
    """The same on the other wire."""
    turns = [{"role": "user", "content": question}]
    body = {"model": "tiny", "max_tokens": 8, "system": SYSTEM, "messages": turns}
    return await _ask(http, "/v1/messages", body | {"stream": stream}, "message_stop")


async def _ask(
    http: aiohttp.ClientSession, path: str, body: dict[str, Any], end: str
) -> tuple[int | str, str]:
    try:
        async with http.post(path, json=body) as response:
            text = await response.text()
    except aiohttp.ClientError:
        return "lost", ""
    if response.status != 200 or not body.get("stream") or end in text:
        return response.status, text
    return ("broken" if text.partition('"error"')[0].count("data: ") > 1 else "lost"), text


def cached_tokens(answer: tuple[int | str, str]) -> int:
    """Of a whole answer, which has to be there."""
    outcome, text = answer
    assert outcome == 200, text
    return int(CACHED.search(text)[1])


async def served(replica: Server) -> int:
    """The chats that a replica has answered since its start."""
    samples = await metrics(replica.url)
    return round(
        sum(
            value
            for name, value in samples.items()
            if name.startswith("ragcache_requests_total{") and 'status="200"' in name
        )
    )


async def metrics(url: str) -> dict[str, float]:
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in samples}


async def eventually(condition: Callable[[], Awaitable[bool]], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.05)
