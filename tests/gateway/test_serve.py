"""The loop that users start: signals, ports, a model that cannot be loaded."""

import asyncio
import logging
import os
import signal
import socket

import aiohttp
import pytest

from ragcache.errors import ConfigError, EngineUnavailable
from ragcache.gateway import watchdog
from ragcache.gateway.app import create_app, listening, serve
from ragcache.gateway.drain import DRAIN


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
        # A second one does what it does to any process: it ends it at once.
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    await asyncio.wait_for(task, 5)
    async with aiohttp.ClientSession(url) as http:
        with pytest.raises(aiohttp.ClientConnectorError):
            await http.get("/health")


@pytest.fixture
async def draining(loaded, serving, listened):
    """Starts a server with requests under way, and stops it; returns what they were answered."""

    async def draining(*requests, drain_timeout):
        app = create_app(loaded)
        task = asyncio.create_task(serve(app, loaded, "127.0.0.1", 0, drain_timeout))
        async with aiohttp.ClientSession(await listened()) as http:

            async def ask(path, body):
                async with http.post(path, json=body) as response:
                    return response.status, response.headers, await response.text()

            asks = [asyncio.create_task(ask(*request)) for request in requests]
            while len([each for each in serving.generations if each.usage.completion_tokens]) < 4:
                await asyncio.sleep(0.005)
            os.kill(os.getpid(), signal.SIGTERM)
            answers = await asyncio.gather(*asks)
        await asyncio.wait_for(task, 10)
        return answers

    return draining


async def test_what_outlasts_the_drain_is_told_so(draining, serving):
    serving.script.pieces, serving.script.pause = ("word ",) * 10_000, 0.01
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10_000}
    answers = await draining(
        ("/v1/chat/completions", chat | {"stream": True}),
        ("/v1/messages", chat | {"stream": True}),
        ("/v1/chat/completions", chat),
        ("/v1/messages", chat),
        drain_timeout=0.1,
    )
    for status, _, text in answers[:2]:
        assert status == 200
        last = text.rstrip().rpartition("\n")[2]
        assert "error" in last
        assert "the server is shutting down" in last
        assert "[DONE]" not in text
        assert "message_stop" not in text
    for status, headers, text in answers[2:]:
        assert (status, headers["Retry-After"]) == (503, "5")
        assert "the server is shutting down" in text
    assert all(generation.closed for generation in serving.generations)


async def test_an_answer_in_one_piece_is_sent_to_its_end(loaded, serving, listened, monkeypatch):
    monkeypatch.setattr("ragcache.gateway.app.LAST_WORDS", 0.05)
    serving.script.pieces = ("x" * 100_000,) * 400  # more than all buffers on the way
    task = asyncio.create_task(serve(create_app(loaded), loaded, "127.0.0.1", 0))
    body = {"model": "tiny", "prompt": "x", "max_tokens": 400}
    async with (
        aiohttp.ClientSession(await listened(), read_bufsize=1024) as http,
        http.post("/v1/completions", json=body) as response,
    ):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.5)
        assert not task.done()
        assert len((await response.json())["choices"][0]["text"]) == 40_000_000
    await asyncio.wait_for(task, 10)


async def test_without_requests_there_is_nothing_to_wait_for(loaded, listened):
    task = asyncio.create_task(serve(create_app(loaded), loaded, "127.0.0.1", 0, 1000))
    await listened()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(task, 10)


async def test_connections_end_with_the_drain(loaded, serving, listened):
    serving.script.pause = 0.05
    app = create_app(loaded)
    task = asyncio.create_task(serve(app, loaded, "127.0.0.1", 0))
    body = {"model": "tiny", "prompt": "x"}
    async with aiohttp.ClientSession(await listened()) as http:
        running = asyncio.create_task(http.post("/v1/completions", json=body))
        while not serving.generations:
            await asyncio.sleep(0.005)
        async with http.get("/health") as response:
            assert "Connection" not in response.headers
        os.kill(os.getpid(), signal.SIGTERM)
        while not app[DRAIN].began:
            await asyncio.sleep(0.005)
        for response in (await http.post("/v1/completions", json=body), await http.get("/health")):
            assert response.headers["Connection"] == "close"
        assert (await running).status == 200
    await asyncio.wait_for(task, 10)
    assert len(serving.generations) == 1


async def test_watchers_are_answered_while_the_last_requests_run(loaded, serving, listened):
    serving.script.pause = 0.1
    app = create_app(loaded)
    task = asyncio.create_task(serve(app, loaded, "127.0.0.1", 0))
    async with aiohttp.ClientSession(await listened()) as http:
        running = asyncio.create_task(
            http.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
        )
        while not serving.generations:
            await asyncio.sleep(0.005)
        app[DRAIN].tell()
        while not app[DRAIN].began:
            await asyncio.sleep(0.005)
        for path in ("/cache/stats", "/dashboard/data", "/metrics"):
            assert (await http.get(path)).status == 200
        assert (await running).status == 200
    await asyncio.wait_for(task, 10)


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


async def test_a_failed_engine_ends_the_server_once_its_requests_have_been_told(
    loaded, serving, listened, monkeypatch, errors_logged
):
    monkeypatch.setattr(watchdog, "INTERVAL", 0.005)
    serving.script.pause = 0.1
    task = asyncio.create_task(serve(create_app(loaded), loaded, "127.0.0.1", 0))
    body = {"model": "tiny", "prompt": "x"}
    async with aiohttp.ClientSession(await listened()) as http:
        asked = asyncio.create_task(http.post("/v1/completions", json=body))
        while not serving.generations:
            await asyncio.sleep(0.005)
        serving.failure = EngineUnavailable("the engine has failed")
        assert (await asked).status == 200
    with pytest.raises(EngineUnavailable, match="the engine has failed"):
        await asyncio.wait_for(task, 10)
    assert errors_logged() == ["the server ends: the engine has failed"]


async def test_the_url_of_an_ipv6_address_can_be_used(loaded):
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    async with (
        listening(create_app(loaded), "::1", 0) as url,
        aiohttp.ClientSession(url) as http,
        http.get("/health") as response,
    ):
        assert response.status == 200
