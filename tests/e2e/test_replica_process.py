"""A replica as a process that is killed, comes back at the same address, and ends."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from contextlib import suppress

import httpx2
from redis_pool import Pool, RedisServer, eventually

from ragcache.prefix.names import block_names, namespace_name, owner_name

PROMPT = list(range(100, 180))


async def test_a_replica_that_was_killed_comes_back_without_its_past(tiny_llama):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server, replica, url = RedisServer(), f"127.0.0.1:{port}", f"http://127.0.0.1:{port}"
    options = ["--port", str(port), "--kv-cache-blocks", "100", "--redis-url", server.url]
    command = [sys.executable, "-m", "ragcache", "serve", str(tiny_llama), *options]
    pool = Pool(server.url, "default")
    directory = pool.directory()

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command)

    def epochs() -> list[str]:
        return [each.epoch for each in directory.replicas() if not each.draining]

    def known() -> int:
        (fingerprint,) = {each.fingerprint for each in directory.replicas()}
        namespace = namespace_name(owner_name(fingerprint, ""))
        return directory.match(replica, block_names(namespace, PROMPT, 16))

    async def warm() -> None:
        body = {"model": tiny_llama.name, "prompt": PROMPT, "max_tokens": 1}
        async with httpx2.AsyncClient(timeout=60) as client:
            (await client.post(f"{url}/v1/completions", json=body)).raise_for_status()

    process = start()  # Redis is not there yet
    try:
        await until_ready(url)
        server.start()
        await eventually(epochs)
        await warm()
        await eventually(lambda: known() == 5)
        (first,) = epochs()
        process.kill()
        process.wait()
        process = start()
        await eventually(lambda: epochs() not in ([first], []), 150)
        assert known() == 0
        await warm()
        await eventually(lambda: known() == 5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        await eventually(lambda: not epochs())
    finally:
        process.kill()
        process.wait()
        await pool.close()
        server.close()


async def until_ready(url: str) -> None:
    async with httpx2.AsyncClient() as client:
        while True:
            await asyncio.sleep(0.2)
            with suppress(httpx2.TransportError):
                if (await client.get(f"{url}/ready")).status_code == 200:
                    return
