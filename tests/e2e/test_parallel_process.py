"""`ragcache serve --tensor-parallel-size 2`: neither rank outlives the other."""

import signal
import subprocess
import sys
import time

import aiohttp
import psutil
import pytest

BODY = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Is it lit?"}],
    "max_tokens": 1000,
    "ignore_eos": True,
    "stream": True,
}


@pytest.fixture
def server(tiny_llama):
    """A server process and its worker, when it is ready, and its URL."""
    options = ["--device", "cpu", "--tensor-parallel-size", "2", "--served-model-name", "tiny"]
    command = [sys.executable, "-m", "ragcache", "serve", tiny_llama, "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = None
            for line in process.stderr:
                url = line.split()[-1] if "listening on" in line else url
                if line.endswith(": ready\n"):
                    break
            (worker,) = psutil.Process(process.pid).children()
            yield process, worker, url
        finally:
            process.kill()


def wait_for_end(process: psutil.Process) -> None:
    deadline = time.monotonic() + 60
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


async def ready(http) -> tuple[int, dict]:
    async with http.get("/ready") as response:
        return response.status, await response.json()


async def test_a_worker_ends_with_rank_0_whatever_ends_that(server):
    process, worker, url = server
    async with aiohttp.ClientSession(url) as http:
        response = await http.post("/v1/chat/completions", json=BODY)
        assert (await response.content.readline()).startswith(b"data: ")
        process.kill()
        wait_for_end(worker)
        response.close()


async def test_a_lost_worker_makes_an_idle_server_unready_and_a_signal_ends_that(server):
    process, worker, url = server
    async with aiohttp.ClientSession(url) as http:
        assert (await ready(http))[0] == 200
        worker.kill()
        wait_for_end(worker)
        deadline = time.monotonic() + 60
        while (await ready(http))[0] == 200:
            assert time.monotonic() < deadline
        assert "failed" in (await ready(http))[1]["reason"]
    process.send_signal(signal.SIGTERM)
    assert "rank 1 ended with status -9" in process.stderr.read()
    assert process.wait(60) == 0
