"""How `ragcache serve` ends: what runs may finish, what comes is sent elsewhere."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest

PROMPT, KEY = "a prompt that nobody shall log", "sk-nobody-shall-log-this"
HEADERS = {"Authorization": f"Bearer {KEY}"}
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
TOKENS = 600
ASK = {
    "model": "tiny",
    "messages": [{"role": "user", "content": PROMPT}],
    "max_tokens": TOKENS,
    "temperature": 0,
    "logit_bias": {"0": -100, "2": -100},
    "stream": True,
}


class Server:
    """A server process with its log in a file."""

    def __init__(self, model: Path, log: Path, patch: str = "") -> None:
        program = f"{patch}\nfrom ragcache.cli import main\nmain()"
        command = [sys.executable, "-c", program, "serve", str(model), "--port", "0"]
        command += ["--device", "cpu", "--kv-cache-blocks", "200", "--served-model-name", "tiny"]
        command += ["--api-key", f"team:{KEY}", "--log-format", "json"]
        self.log = log
        with log.open("w") as stderr:
            self.process = subprocess.Popen(command, stderr=stderr)

    def lines(self) -> list[dict]:
        """The lines of its log so far."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def wait_for(self, text: str) -> str:
        """Wait for a line that begins with `text`; returns what comes behind it."""
        while True:
            for line in self.log.read_text().splitlines(keepends=True):
                message = json.loads(line)["message"] if line.endswith("\n") else ""
                if message.startswith(text):
                    return message.removeprefix(text)
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)

    def end(self) -> int:
        """The exit status."""
        return self.process.wait(60)


@pytest.fixture
def patch():
    """What the process runs first."""
    return ""


@pytest.fixture
def server(tiny_llama, tmp_path, patch):
    server = Server(tiny_llama, tmp_path / "log", patch)
    yield server
    server.process.kill()
    server.process.wait()


async def begun(response: aiohttp.ClientResponse) -> bytes:
    """What has come once the answer itself has begun."""
    return await response.content.readuntil(b"content") + await response.content.readline()


async def until_draining(http: aiohttp.ClientSession) -> None:
    while True:
        async with http.get("/ready") as response:
            if response.status == 503:
                assert (await response.json())["reason"] == "the server is shutting down"
                return
        await asyncio.sleep(0.01)


async def test_a_signal_lets_streams_finish_and_sends_new_requests_elsewhere(server):
    url = await asyncio.to_thread(server.wait_for, "listening on ")
    await asyncio.to_thread(server.wait_for, "ready")
    async with (
        aiohttp.ClientSession(url, headers=HEADERS) as http,
        http.post(CHAT, json=ASK) as stream,
    ):
        seen = await begun(stream)
        server.process.send_signal(signal.SIGTERM)
        await until_draining(http)
        for path in (CHAT, MESSAGES):
            async with http.post(path, json=ASK) as refused:
                assert refused.status == 503
                assert int(refused.headers["Retry-After"]) >= 1
                error = (await refused.json())["error"]
                assert error["message"] == "the server is shutting down"
        async with http.get("/health") as response:
            assert response.status == 200
        text = (seen + await stream.read()).decode()
    assert text.endswith('"finish_reason":"length"}]}\n\ndata: [DONE]\n\n')
    assert await asyncio.to_thread(server.end) == 0
    (line,) = [each for each in server.lines() if each.get("status") == 200]
    assert (line["finish_reason"], line["completion_tokens"]) == ("length", TOKENS)
    log = server.log.read_text()
    assert PROMPT not in log
    assert KEY not in log


async def test_a_signal_ends_a_server_whose_model_is_still_loading(server):
    await asyncio.to_thread(server.wait_for, "listening on ")
    server.process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(server.end) == 0
    messages = [line["message"] for line in server.lines()]
    assert "ready" not in messages


BROKEN = """
from ragcache.engine.scheduler import Scheduler
Scheduler.add = lambda self, sequence: 1 / 0
"""


@pytest.mark.parametrize("patch", [BROKEN], ids=["broken"])
async def test_a_failed_engine_ends_the_process_with_an_error(server):
    url = await asyncio.to_thread(server.wait_for, "listening on ")
    await asyncio.to_thread(server.wait_for, "ready")
    async with (
        aiohttp.ClientSession(url, headers=HEADERS) as http,
        http.post(CHAT, json=ASK | {"stream": False}) as response,
    ):
        assert response.status == 503
        assert "the engine has failed" in await response.text()
    assert await asyncio.to_thread(server.end) == 1
    *lines, last = server.log.read_text().splitlines()
    assert last == "ragcache: the engine has failed; the server's log tells why"
    messages = [json.loads(line)["message"] for line in lines]
    assert "the server ends: the engine has failed; the server's log tells why" in messages
