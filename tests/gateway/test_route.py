"""A router in front of servers that do as they are told, on real sockets."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import aiohappyeyeballs
import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from ragcache.gateway.app import listening
from ragcache.gateway.drain import DRAIN
from ragcache.gateway.route import forward, pulse
from ragcache.gateway.route.app import create_app
from ragcache.gateway.route.operations import FORWARDER

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
USAGE = b'{"id":"x","usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}}'
SSE = {"Content-Type": "text/event-stream"}

Act = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Upstream:
    """A replica whose answers are written here."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.act: Act = self.usual
        self.ready = True
        self.frozen = asyncio.Event()
        self.frozen.set()  # that is: running
        self.seen: list[web.Request] = []
        self.bodies: list[bytes] = []
        self.cancelled = asyncio.Event()
        self.url = ""

    async def usual(self, _: web.Request) -> web.StreamResponse:
        return web.Response(body=USAGE, content_type="application/json")

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/ready":
            await self.frozen.wait()
            return web.json_response({"reason": "busy dying"}, status=200 if self.ready else 503)
        self.seen.append(request)
        self.bodies.append(await request.read())
        try:
            await self.frozen.wait()
            return await self.act(request)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        return app


async def stream(request: web.Request, *pieces: bytes, die: bool = False) -> web.StreamResponse:
    response = web.StreamResponse(headers=SSE)
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
    if die:
        request.transport.abort()
    return response


def refuse(status: int, code: str = "full", **headers: str) -> Act:
    async def act(_: web.Request) -> web.StreamResponse:
        body = {"error": {"message": "full", "type": "x", "param": None, "code": code}}
        return web.json_response(body, status=status, headers=headers)

    return act


async def break_off(request: web.Request) -> web.StreamResponse:
    request.transport.abort()
    return web.Response()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "INTERVAL", 0.02)
    monkeypatch.setattr(pulse, "TIMEOUT", aiohttp.ClientTimeout(total=0.2))


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def upstreams(stack) -> list[Upstream]:
    found = [Upstream("one"), Upstream("two")]
    for each in found:
        each.url = await stack.enter_async_context(listening(each.app(), "127.0.0.1", 0))
    return found


@pytest.fixture
def apps() -> list[web.Application]:
    """The routers that were started."""
    return []


@pytest.fixture
def start_router(stack, apps):
    """Start a router for some URLs; returns a client of it once as many replicas are usable."""

    async def start(*urls: str, usable: int | None = None, **options) -> aiohttp.ClientSession:
        loading = asyncio.get_running_loop().create_future()
        loading.set_result(None)
        app = create_app(loading, urls=urls, **options)
        apps.append(app)
        url = await stack.enter_async_context(listening(app, "127.0.0.1", 0))
        wanted = len(urls) if usable is None else usable
        async with asyncio.timeout(10):
            while len(app[FORWARDER].fleet.usable()) < wanted:
                await asyncio.sleep(0.01)
        return await stack.enter_async_context(aiohttp.ClientSession(url))

    return start


@pytest.fixture
async def client(upstreams, start_router) -> aiohttp.ClientSession:
    return await start_router(*[each.url for each in upstreams])


@pytest.fixture
async def order(client, upstreams) -> list[Upstream]:
    """The replicas in the order in which `CHAT` asks them."""
    await ask(client)
    first = next(each for each in upstreams if each.seen)
    first.seen.clear()
    return [first, *(each for each in upstreams if each is not first)]


async def ask(client, path="/v1/chat/completions", body=CHAT, **options):
    async with client.post(path, json=body, **options) as response:
        return response.status, response.headers, await response.read()


async def metrics(client) -> dict[str, float]:
    async with client.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    return {
        name: float(value)
        for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    }


async def test_an_answer_passes_through_as_it_is(client, upstreams):
    status, headers, body = await ask(client, headers={"x-request-id": "mine"})
    assert (status, body, headers["x-request-id"]) == (200, USAGE, "mine")
    assert headers["Content-Type"] == "application/json"
    (seen,) = [request for each in upstreams for request in each.seen]
    assert seen.headers["x-request-id"] == "mine"
    assert [body for each in upstreams for body in each.bodies] == [json.dumps(CHAT).encode()]


async def test_headers_of_one_hop_stay_behind(client, order):
    sent = {
        "Authorization": "Bearer key",
        "anthropic-version": "2023-06-01",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "Connection": "keep-alive, x-private",
        "x-private": "1",
        "TE": "trailers",
    }
    await ask(client, headers=sent)
    seen = order[0].seen[0].headers
    assert {name: seen[name] for name in list(sent)[:3]} == dict(list(sent.items())[:3])
    assert not seen.keys() & {"x-private", "TE"}
    assert seen["Host"] == order[0].url.removeprefix("http://")


async def test_a_client_error_is_an_answer(client, order):
    order[0].act = refuse(400)
    status, _, body = await ask(client)
    assert status == 400
    assert json.loads(body)["error"]["code"] == "full"
    assert not order[1].seen


async def test_what_is_not_json_is_for_a_replica_to_refuse(client, upstreams):
    async with client.post("/v1/messages", data=b"\xff{") as response:
        assert response.status == 200
    assert sum(each.bodies == [b"\xff{"] for each in upstreams) == 1


async def test_events_pass_through_one_by_one(client, order):
    heard = asyncio.Event()

    async def act(request):
        response = await stream(request, b"data: 1\n\n")
        await heard.wait()  # until the client has the first
        await response.write(b"data: 2\n\ndata: [DONE]\n\n")
        return response

    order[0].act = act
    async with client.post("/v1/chat/completions", json=CHAT) as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        assert await response.content.readuntil(b"\n\n") == b"data: 1\n\n"
        heard.set()
        assert await response.content.read() == b"data: 2\n\ndata: [DONE]\n\n"


async def test_a_conversation_keeps_its_replica(client, upstreams):
    for i in range(12):
        body = {**CHAT, "prompt_cache_key": f"key {i % 3}", "seed": i}
        await ask(client, body=body)
    keys = [{json.loads(body)["prompt_cache_key"] for body in each.bodies} for each in upstreams]
    assert not keys[0] & keys[1]


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({"x-session-id": "s"}, {}),
        ({}, {"user": "s"}),
        ({}, {"metadata": {"user_id": "s"}}),
        ({}, {"prompt_cache_key": "s"}),
    ],
)
async def test_a_conversation_may_be_named(client, upstreams, headers, fields):
    for i in range(8):
        body = {**CHAT, "messages": [{"role": "user", "content": str(i)}], **fields}
        await ask(client, body=body, headers=headers)
    assert sorted(len(each.seen) for each in upstreams) == [0, 8]


async def test_without_a_name_a_conversation_is_known_by_its_beginning(client, upstreams):
    turns = [{"role": "user", "content": "first"}]
    for i in range(4):
        await ask(client, body={**CHAT, "messages": turns})
        turns += [{"role": "assistant", "content": "a"}, {"role": "user", "content": str(i)}]
    assert sorted(len(each.seen) for each in upstreams) == [0, 4]
    for i in range(40):  # of which the ports decide how many go where
        await ask(client, body={**CHAT, "messages": [{"role": "user", "content": f"other {i}"}]})
    assert all(each.seen for each in upstreams)


@pytest.mark.parametrize("act", [refuse(429), refuse(503), break_off])
async def test_what_has_not_begun_to_answer_goes_elsewhere(client, order, act):
    order[0].act = act
    assert (await ask(client))[0] == 200
    assert [len(each.seen) for each in order] == [1, 1]


@pytest.mark.parametrize(("status", "code"), [(429, "tenant_limit"), (503, "queue_timeout")])
async def test_what_would_be_no_better_elsewhere_is_an_answer(client, order, status, code):
    order[0].act = refuse(status, code)
    for _ in range(2):  # nor does it count as full for others
        assert (await ask(client))[0] == status
    assert [len(each.seen) for each in order] == [2, 0]


@pytest.mark.parametrize("silence", [b"", b": keep-alive\n\n"])
@pytest.mark.parametrize(
    ("path", "event"),
    [
        ("/v1/chat/completions", b'data: {"error":{"code":"shutting_down"}}\n\n'),
        ("/v1/messages", b'event: error\ndata: {"error":{"code":"engine_unavailable"}}\n\n'),
    ],
)
async def test_a_stream_that_only_says_no_goes_elsewhere(client, order, path, event, silence):
    async def act(request: web.Request) -> web.StreamResponse:
        response = await stream(request, silence)
        await asyncio.sleep(0.05)  # mostly enough for the router to pass it on by itself
        await response.write(event)
        return response

    order[0].act = act
    order[1].act = lambda request: stream(request, b"data: 1\n\n")
    assert (await ask(client, path))[2].removeprefix(silence) == b"data: 1\n\n"
    order[1].act = act
    status, headers, body = await ask(client, path)
    if status == 200:
        assert silence
        assert body.count(b"data: ") == 1
        assert body.endswith(event)
    else:
        assert (status, headers["Retry-After"]) == (503, "5")
        assert json.loads(body)["error"]["code"]


async def test_an_error_within_an_answer_is_part_of_it(client, order):
    late = b'data: 1\n\ndata: {"error":{"code":"shutting_down"}}\n\n'
    order[0].act = lambda request: stream(request, late)
    assert (await ask(client))[2] == late
    assert not order[1].seen


async def test_a_failure_to_connect_that_is_no_refusal_ends_nobody_elses_request(
    client, order, apps, monkeypatch
):
    release = asyncio.Event()

    async def act(request: web.Request) -> web.StreamResponse:
        await release.wait()
        return await order[0].usual(request)

    order[0].act = act
    waiting = asyncio.create_task(ask(client))
    while not order[0].seen:
        await asyncio.sleep(0.005)

    connect = aiohappyeyeballs.start_connection
    tries = Counter({URL(each.url).port: 0 for each in order})

    async def out_of_files(addr_infos, **options):
        port = addr_infos[0][4][1]
        if port not in tries:
            return await connect(addr_infos, **options)
        tries[port] += 1
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("aiohttp.connector.aiohappyeyeballs.start_connection", out_of_files)
        asked = 0
        while min(tries.values()) < asked + 5:  # the others are probes
            status, _, body = await ask(client)
            assert (status, json.loads(body)["error"]["code"]) == (503, "engine_unavailable")
            asked += 1
            await asyncio.sleep(0.005)
    assert not any(each.seen[1:] for each in order)
    release.set()
    assert (await waiting)[0] == 200
    assert not order[1].seen


async def test_too_many_requests_are_refused_on_either_wire(start_router, upstreams):
    client = await start_router(upstreams[0].url, max_requests=1)
    release = asyncio.Event()

    async def act(request: web.Request) -> web.StreamResponse:
        await release.wait()
        return await upstreams[0].usual(request)

    upstreams[0].act = act
    waiting = asyncio.create_task(ask(client))
    while not upstreams[0].seen:
        await asyncio.sleep(0.005)
    for path, kind in (("/v1/completions", "type"), ("/v1/messages", "type")):
        status, headers, body = await ask(client, path)
        assert (status, headers["Retry-After"]) == (429, "1")
        assert json.loads(body)["error"][kind] == "rate_limit_error"
    release.set()
    assert (await waiting)[0] == 200
    assert (await ask(client))[0] == 200


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/completions"), ("GET", "/v1/models")])
async def test_the_host_of_a_request_line_leads_nowhere_else(client, upstreams, method, path):
    url = client._base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    target = f"http://elsewhere.example{path}?a=%2F"
    writer.write(f"{method} {target} HTTP/1.0\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
    await reader.read()
    writer.close()
    seen = [request.raw_path for each in upstreams for request in each.seen]
    assert set(seen) == {f"{path}?a=%2F"}


async def test_a_replica_that_refuses_comes_last_for_a_moment(client, order):
    order[0].act = refuse(429)
    for _ in range(3):
        assert (await ask(client))[0] == 200
    assert [len(each.seen) for each in order] == [1, 3]


async def test_a_dead_replica_costs_nothing(start_router, upstreams):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{probe.getsockname()[1]}"
    client = await start_router(dead, upstreams[0].url, usable=1)
    assert (await ask(client))[0] == 200


async def test_when_all_refuse_the_last_refusal_is_the_answer(client, order):
    order[0].act = refuse(503, **{"Retry-After": "7"})
    order[1].act = refuse(429, **{"Retry-After": "3"})
    status, headers, body = await ask(client)
    assert (status, headers["Retry-After"]) == (429, "3")
    assert json.loads(body)["error"]["message"] == "full"


async def test_a_request_that_kills_replicas_kills_no_more_than_two(stack, start_router):
    fleet = [Upstream(str(i)) for i in range(4)]
    for each in fleet:
        each.url = await stack.enter_async_context(listening(each.app(), "127.0.0.1", 0))
        each.act = break_off
    client = await start_router(*[each.url for each in fleet])
    status, _, body = await ask(client)
    assert status == 502
    assert json.loads(body)["error"]["code"] == "replica_lost"
    assert sum(len(each.seen) for each in fleet) == forward.LOST_ATTEMPTS


@pytest.mark.parametrize(
    ("path", "event"),
    [("/v1/chat/completions", b"data: "), ("/v1/messages", b"event: error\ndata: ")],
)
async def test_an_answer_that_breaks_off_ends_with_an_error_event(client, upstreams, path, event):
    for each in upstreams:
        each.act = lambda request: stream(request, b"data: 1\n\ndata: half", die=True)
    status, _, body = await ask(client, path)
    assert status == 200
    assert body.startswith(b"data: 1\n\n" + event)
    error = json.loads(body.removeprefix(b"data: 1\n\n" + event))
    assert "broke off" in error["error"]["message"]
    assert sum(len(each.seen) for each in upstreams) == 1


@pytest.mark.parametrize("silence", [b": keep-alive\n\n", b"event: ping\ndata: {}\n\n"])
async def test_keep_alives_are_no_answer(client, order, silence):
    order[0].act = lambda request: stream(request, silence, die=True)
    order[1].act = lambda request: stream(request, b"data: 1\n\n")
    assert (await ask(client))[2] == silence + b"data: 1\n\n"


async def test_a_refusal_behind_keep_alives_is_an_event(client, order):
    order[0].act = lambda request: stream(request, b": wait\n\n", die=True)
    order[1].act = refuse(429)
    body = (await ask(client))[2]
    assert body.startswith(b": wait\n\ndata: {")
    assert json.loads(body.split(b"data: ")[1])["error"]["code"] == "full"


async def test_a_frozen_replica_gives_its_requests_back(client, order):
    order[0].frozen.clear()
    async with asyncio.timeout(10):
        assert (await ask(client))[0] == 200
    assert [len(each.seen) for each in order] == [1, 1]
    order[0].frozen.set()
    async with asyncio.timeout(10):
        while len(order[0].seen) < 2:  # it is asked again once it lives
            await ask(client)


async def test_the_log_has_a_line_for_each_change_of_a_replica(client, order, caplog):
    caplog.set_level("INFO", "ragcache.gateway.route.pulse")
    name = f'ragcache_route_replica_ready{{replica="{order[0].url}"}}'
    for ready in (False, True):
        order[0].ready = ready
        async with asyncio.timeout(10):
            while (await metrics(client))[name] != ready:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # many probes
    told = [record.getMessage() for record in caplog.records if order[0].url in record.message]
    assert told == [
        f"replica {order[0].url} is not ready: busy dying",
        f"replica {order[0].url} is ready",
    ]


async def test_a_slow_replica_keeps_its_requests(client, order):
    async def act(request):
        await asyncio.sleep(1)  # many probes
        return await order[0].usual(request)

    order[0].act = act
    assert (await ask(client))[0] == 200
    assert [len(each.seen) for each in order] == [1, 0]


async def test_a_stream_that_freezes_ends_after_a_while(client, order, monkeypatch):
    monkeypatch.setattr(pulse, "PATIENCE", 0.2)

    async def act(request):
        response = await stream(request, b"data: 1\n\n")
        order[0].frozen.clear()
        await order[0].frozen.wait()
        return response

    order[0].act = act
    async with asyncio.timeout(10):
        body = (await ask(client))[2]
    assert b"the replica is lost" in body.removeprefix(b"data: 1\n\n")
    order[0].frozen.set()


async def test_a_replica_that_drains_gets_no_new_requests(client, order):
    order[0].ready = False
    async with asyncio.timeout(10):
        while (await metrics(client))[f'ragcache_route_replica_ready{{replica="{order[0].url}"}}']:
            await asyncio.sleep(0.01)
    for _ in range(3):
        await ask(client)
    assert [len(each.seen) for each in order] == [0, 3]


async def test_a_router_lets_its_requests_end_and_cuts_off_the_rest(client, order, apps):
    async def endless(request: web.Request) -> web.StreamResponse:
        response = await stream(request, b'data: {"choices":[]}\n\n')
        await asyncio.Event().wait()
        return response

    async def silent(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        return web.Response()

    order[0].act = endless
    streaming = asyncio.create_task(ask(client))
    while not order[0].seen:
        await asyncio.sleep(0.005)
    for each in order:
        each.act = silent
    waiting = asyncio.create_task(ask(client, "/v1/messages"))
    while len(order[0].seen) + len(order[1].seen) < 2:
        await asyncio.sleep(0.005)
    draining = asyncio.create_task(apps[0][DRAIN].run(0.1))
    await asyncio.sleep(0.02)
    status, headers, _ = await ask(client)
    assert (status, headers["Retry-After"]) == (503, "5")
    async with client.get("/ready") as response:
        assert (await response.json())["reason"] == "the server is shutting down"
    await asyncio.wait_for(draining, 10)
    status, _, events = await streaming
    assert status == 200
    assert b"the server is shutting down" in events.rstrip().rpartition(b"\n")[2]
    status, headers, body = await waiting
    assert (status, headers["Retry-After"]) == (503, "5")
    assert json.loads(body)["error"]["message"] == "the server is shutting down"
    await asyncio.wait_for(order[0].cancelled.wait(), 10)  # its replica learns of it


async def test_a_client_that_leaves_stops_its_replica(client, order):
    async def act(request):
        response = await stream(request, b"data: 1\n\n")
        await asyncio.sleep(60)
        return response

    order[0].act = act
    async with client.post("/v1/chat/completions", json=CHAT) as response:
        await response.content.readuntil(b"\n\n")
    async with asyncio.timeout(5):
        await order[0].cancelled.wait()
    outcome = f'ragcache_route_requests_total{{outcome="left",replica="{order[0].url}"}}'
    async with asyncio.timeout(5):
        while (await metrics(client)).get(outcome) != 1:
            await asyncio.sleep(0.01)


async def test_a_client_that_leaves_before_the_answer_stops_its_replica_too(client, order):
    async def act(_):
        await asyncio.sleep(60)

    order[0].act = act
    waiting = asyncio.ensure_future(ask(client))
    async with asyncio.timeout(5):
        while not order[0].seen:
            await asyncio.sleep(0.01)
        waiting.cancel()
        await order[0].cancelled.wait()
    assert not order[1].seen


async def test_a_slow_reader_holds_up_its_replica_and_no_memory_is_filled(client, order):
    written = 0

    async def act(request):
        nonlocal written
        response = await stream(request)
        for _ in range(2000):
            await response.write(b"data: " + b"x" * 65536 + b"\n\n")
            written += 1
        return response

    order[0].act = act
    async with client.post("/v1/chat/completions", json=CHAT) as response:
        await response.content.readuntil(b"\n\n")
        before = -1
        async with asyncio.timeout(20):
            while written != before:  # until it stands still
                before = written
                await asyncio.sleep(0.3)
        assert written < 1000
        response.close()


async def test_operations_see_all_replicas(client, upstreams):
    for each in upstreams:

        async def act(request, each=each):
            if request.path == "/cache/reset":
                return web.json_response({"reset": True, "blocks": 5})
            if request.path == "/v1/models":
                data = [{"id": "shared"}, {"id": each.name}]
                return web.json_response({"object": "list", "data": data})
            if request.path == f"/cache/explain/{each.name}":
                return web.json_response({"id": each.name})
            return web.json_response({"error": {"message": "no such thing"}}, status=404)

        each.act = act
    async with client.get("/v1/models") as response:
        models = await response.json()
    assert {each["id"] for each in models["data"]} == {"shared", "one", "two"}
    for name in ("one", "two"):
        async with client.get(f"/cache/explain/{name}") as response:
            assert (await response.json())["id"] == name
    async with client.get("/cache/explain/three") as response:
        assert response.status == 404
    assert json.loads((await ask(client, "/cache/reset"))[2])["blocks"] == 10
    upstreams[0].act = refuse(401)
    status, _, body = await ask(client, "/cache/reset")
    assert status == 502
    assert json.loads(body)["replicas"] == {upstreams[0].url: None, upstreams[1].url: 5}


async def test_ready_tells_why_not(start_router, upstreams):
    upstreams[0].ready = False
    client = await start_router(upstreams[0].url, usable=0)
    async with asyncio.timeout(10):
        while True:
            async with client.get("/ready") as response:
                reason = (await response.json())["reason"]
                assert response.status == 503
            if "busy dying" in reason:
                break
    status, headers, body = await ask(client, "/v1/messages")
    assert (status, headers["Retry-After"]) == (503, "5")
    assert json.loads(body)["error"]["type"] == "overloaded_error"
    async with client.get("/health") as response:
        assert response.status == 200
    upstreams[0].ready = True
    async with asyncio.timeout(10):
        while (await ask(client))[0] != 200:
            await asyncio.sleep(0.01)


async def test_keys_are_checked_before_anything_is_forwarded(start_router, upstreams):
    client = await start_router(upstreams[0].url, api_keys=["secret"])
    assert (await ask(client))[0] == 401
    assert not upstreams[0].seen
    assert (await ask(client, headers={"x-api-key": "secret"}))[0] == 200
    assert upstreams[0].seen[0].headers["x-api-key"] == "secret"


async def test_metrics_count_what_came_of_requests(client, order):
    order[0].act = refuse(429)
    await ask(client)
    samples = await metrics(client)
    for each, outcome in zip(order, ("refused", "answered"), strict=True):
        name = f'ragcache_route_requests_total{{outcome="{outcome}",replica="{each.url}"}}'
        assert samples[name] >= 1
        assert samples[f'ragcache_route_in_flight{{replica="{each.url}"}}'] == 0
    assert samples["ragcache_route_blind"] == 1
    assert samples['ragcache_route_answers_total{api="chat",status="200"}'] == 2
    reported = f'ragcache_route_reported_hit_tokens_total{{replica="{order[1].url}"}}'
    assert samples[reported] == 4
