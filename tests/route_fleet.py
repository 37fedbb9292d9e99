"""Replicas, a router and Redis as processes, which tests treat badly."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable

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
    """Clients that ask one question after the other, each with the same long prefix."""

    def __init__(self, url: str, clients: int = 4, tokens: int = 8) -> None:
        self.statuses: Counter[int | str] = Counter()
        self.cached: list[int] = []
        self._url = url
        self._clients = clients
        self._tokens = tokens
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
        wanted = self.statuses.total() + more
        async with asyncio.timeout(120):
            while self.statuses.total() < wanted:
                await asyncio.sleep(0.01)

    async def _client(self) -> None:
        while not self._stopping:
            self._asked += 1
            try:
                status, body = await ask(self._http, f"Question {self._asked}", self._tokens)
            except aiohttp.ClientError as error:
                status, body = type(error).__name__, {}
            self.statuses[status] += 1
            if status == 200:
                self.cached.append(body["usage"]["prompt_tokens_details"]["cached_tokens"])


async def ask(http: aiohttp.ClientSession, question: str, tokens: int = 8, system: str = SYSTEM):
    """The status and the body of an answer."""
    body = {
        "model": "tiny",
        "max_tokens": tokens,
        "ignore_eos": True,
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": question},
        ],
    }
    async with http.post("/v1/chat/completions", json=body) as response:
        return response.status, await response.json()


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
