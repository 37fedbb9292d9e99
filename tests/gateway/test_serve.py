"""The loop that users start: signals, ports, a model that cannot be loaded."""

import asyncio
import logging
import os
import signal
import socket

import aiohttp
import pytest

from ragcache.errors import ConfigError
from ragcache.gateway.app import create_app, listening, serve


@pytest.fixture
async def loaded(serving):
    loading = asyncio.get_running_loop().create_future()
    loading.set_result(serving)
    return loading


@pytest.fixture
async def listened(caplog):
    """Waits for the line that says where the server listens; returns the URL in it."""
    caplog.set_level(logging.INFO, "ragcache.gateway.app")

    async def listened():
        async with asyncio.timeout(5):
            while True:
                for record in caplog.records:
                    if record.getMessage().startswith("listening on "):
                        return record.args[0]
                await asyncio.sleep(0.005)

    return listened


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_lets_running_requests_finish_and_then_ends(
    loaded, serving, listened, number
):
    serving.script.pause = 0.02
    task = asyncio.create_task(serve(create_app(loaded), loaded, "127.0.0.1", 0))
    url = await listened()
    body = {"model": "tiny", "prompt": "x", "stream": True}
    async with (
        aiohttp.ClientSession(url) as http,
        http.post("/v1/completions", json=body) as response,
    ):
        os.kill(os.getpid(), number)
        assert (await response.text()).endswith("data: [DONE]\n\n")
    await asyncio.wait_for(task, 5)
    async with aiohttp.ClientSession(url) as http:
        with pytest.raises(aiohttp.ClientConnectorError):
            await http.get("/health")


async def test_a_busy_port_is_one_clear_error(loaded):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            await serve(create_app(loaded), loaded, "127.0.0.1", port)


async def test_an_address_of_another_machine_is_one_clear_error(loaded):
    with pytest.raises(ConfigError, match="cannot listen on"):
        await serve(create_app(loaded), loaded, "192.0.2.1", 0)


async def test_a_model_that_cannot_be_loaded_ends_the_server(listened):
    loading = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(create_app(loading), loading, "127.0.0.1", 0))
    await listened()
    loading.set_exception(ConfigError("no such model"))
    with pytest.raises(ConfigError, match="no such model"):
        await asyncio.wait_for(task, 5)


async def test_the_url_of_an_ipv6_address_can_be_used(loaded):
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    async with (
        listening(create_app(loaded), "::1", 0) as url,
        aiohttp.ClientSession(url) as http,
        http.get("/health") as response,
    ):
        assert response.status == 200
