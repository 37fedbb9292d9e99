"""A gateway survives what random clients do to it; and what would be wrong is found."""

import json

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from ragcache.bench.chaos.answers import Answer, Broken, read_answer
from ragcache.bench.chaos.command import own_gateway, render, run
from ragcache.bench.chaos.requests import make_request
from ragcache.bench.chaos.run import Chaos, Inside, Plan
from ragcache.bench.options import BenchFailed, ChaosBench

POOL = {"free": 3, "cached": 7, "held": 0, "total": 10}
IDLE = {"pool": POOL, "running": 0, "waiting": 0}


def test_hundreds_of_requests_break_nothing():
    results = json.loads(json.dumps(run(ChaosBench(requests=250, compared=20, seed=7))))
    assert results["violations"] == []
    outcomes = results["outcomes"]
    assert outcomes["same answer alone"] == 20
    assert outcomes["left"] > 15
    assert outcomes["refused, as it must be"] > 0
    answered = outcomes["streamed"] + outcomes["whole"] - 20  # those asked for alone again
    told = answered + outcomes["left"] + outcomes["refused, as it must be"]
    assert told + outcomes.get("refused, too many", 0) == 250
    assert results["growth"] is not None
    console = Console(width=100)
    with console.capture() as shown:
        console.print(render(results))
    assert "nothing broke" in shown.get()


def test_a_seed_gives_the_same_requests_of_every_kind():
    requests = [make_request(5, number, "m", 0.2) for number in range(600)]
    assert requests == [make_request(5, number, "m", 0.2) for number in range(600)]
    assert requests != [make_request(6, number, "m", 0.2) for number in range(600)]
    assert {request.wire for request in requests} == {"chat", "messages"}
    assert 80 < sum(request.leaves_after is not None for request in requests) < 160
    assert 0 < sum(not request.is_valid for request in requests) < 40
    fields = {field for request in requests for field in request.body}
    assert fields >= {"n", "response_format", "output_config", "stop", "stop_sequences", "seed"}
    systems = {str(request.body.get("system", request.body["messages"][0])) for request in requests}
    assert len(systems) < 40  # many begin alike


def test_compared_requests_are_greedy_stay_and_are_asked_for_alone():
    plan = Plan(seed=1, requests=200, concurrency=1, leaving=0.2, compared=10, model="m")
    assert len(plan.chosen()) == 10
    for number in plan.chosen():
        request = plan.request(number)
        assert request.body["temperature"] == 0
        assert request.leaves_after is None
        assert request.alone().body["stream"] is False
        assert request.alone().body["cache_salt"] == f"alone {number}"
    few = Plan(seed=1, requests=3, concurrency=1, leaving=0, compared=10, model="m")
    assert len(few.chosen()) <= 3


def whole(request, text="a light", reason=("stop", "end_turn")):
    if request.path.endswith("/messages"):
        usage = {"input_tokens": 9, "output_tokens": 2}
        content = [{"type": "text", "text": text}]
        return web.json_response({"content": content, "stop_reason": reason[1], "usage": usage})
    choice = {"message": {"content": text}, "finish_reason": reason[0]}
    usage = {"prompt_tokens": 9, "completion_tokens": 2}
    return web.json_response({"choices": [choice], "usage": usage})


async def all_well():
    """What a check of the cache comes to."""


async def play(answer, stats=IDLE, check=all_well, **options):
    """What is found at a server that answers so; all requests want an answer in one piece."""

    async def post(request):
        body = await request.json()
        if body.get("temperature") == -1 or body["max_tokens"] == -1:
            return web.json_response({}, status=400)
        return answer(request, body)

    async def get_stats(request):
        return web.json_response(stats)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", post)
    app.router.add_post("/v1/messages", post)
    app.router.add_get("/cache/stats", get_stats)
    plan = Plan(
        **{"seed": 0, "requests": 30, "concurrency": 3, "leaving": 0, "compared": 4, "model": "m"}
        | options
    )
    memory = iter(range(100, 10**6))
    async with TestServer(app) as server, aiohttp.ClientSession() as http:
        url = str(server.make_url("/v1"))
        chaos = Chaos(http, url, plan, Inside(lambda: next(memory), check), lambda: None)
        await chaos.play()
    return chaos


async def test_a_server_that_does_all_right_is_not_accused():
    chaos = await play(lambda request, body: whole(request))
    assert chaos.account.violations == []
    assert chaos.account.answers
    assert {Answer((("a light", "stop"),), 2), Answer((("a light", "end_turn"),), 2)} >= set(
        chaos.account.answers.values()
    )


async def test_a_refusal_for_lack_of_room_is_none_and_one_without_a_hint_is():
    def busy(hint):
        return lambda request, body: web.json_response({}, status=429, headers=hint)

    assert (await play(busy({"Retry-After": "1"}), compared=0)).account.violations == []
    assert "HTTP 429" in (await play(busy({}), compared=0)).account.violations[0]


@pytest.mark.parametrize("status", [500, 503, 404])
async def test_any_other_status_is_a_violation(status):
    chaos = await play(lambda request, body: web.json_response({}, status=status))
    assert f"HTTP {status}" in chaos.account.violations[0]
    assert chaos.account.outcomes["violation"] > 20


async def test_what_must_be_refused_and_is_answered_is_a_violation():
    async def accept(request):
        return whole(request)

    app = web.Application()
    app.router.add_post("/v1/{path:.*}", accept)
    plan = Plan(seed=0, requests=200, concurrency=1, leaving=0, compared=0, model="m")
    number = next(i for i in range(200) if not plan.request(i).is_valid)
    async with TestServer(app) as server, aiohttp.ClientSession() as http:
        chaos = Chaos(http, str(server.make_url("/v1")), plan, None, lambda: None)
        assert await chaos._send(plan.request(number)) is None
    assert "HTTP 200" in chaos.account.violations[0]


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([{"error": {"message": "oh"}}, {"type": "error", "error": {}}], "an error in a stream"),
        ([], "without an end"),
    ],
)
async def test_a_stream_that_breaks_off_is_a_violation(events, message):
    def stream(request, body):
        if not body["stream"]:
            return whole(request)
        event = events[request.path.endswith("/messages")] if events else None
        text = f"data: {json.dumps(event)}\n\n" if event else ""
        return web.Response(text=text, content_type="text/event-stream")

    chaos = await play(stream, compared=0)
    assert message in chaos.account.violations[0]


def chat_event(text="", reason=None):
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
    return {"choices": [choice], "usage": {"completion_tokens": 1}}


TEXT = {"type": "content_block_delta", "delta": {"text": "a"}}
END = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}}
STOP = {"type": "message_stop"}
WELL = {
    "chat": [chat_event("a"), chat_event(reason="stop"), "[DONE]"],
    "messages": [{"type": "ping"}, TEXT, END, STOP],
}


async def read(wire, events):
    async def stream(request):
        data = (each if isinstance(each, str) else json.dumps(each) for each in events)
        text = "".join(f"data: {each}\n\n" for each in data)
        return web.Response(text=text, content_type="text/event-stream")

    app = web.Application()
    app.router.add_get("/", stream)
    async with (
        TestServer(app) as server,
        aiohttp.ClientSession() as http,
        http.get(server.make_url("/")) as response,
    ):
        return await read_answer(response, wire)


@pytest.mark.parametrize(("wire", "reason"), [("chat", "stop"), ("messages", "end_turn")])
async def test_a_stream_that_ends_as_it_must_is_an_answer(wire, reason):
    assert await read(wire, WELL[wire]) == Answer((("a", reason),), 1)


@pytest.mark.parametrize("wire", ["chat", "messages"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda events: events[:-1], "without an end"),
        (lambda events: [*events[:-2], events[-1]], "without an end of"),
        (lambda events: [*events, events[-1]], "more behind the end of a stream"),
        (lambda events: [*events, events[1]], "more behind the end of a stream"),
        (lambda events: [*events[:-1], events[-2], events[-1]], "more behind the end of a"),
        (lambda events: [*events[:-1], events[-3], events[-1]], "more behind the end of a"),
    ],
    ids=["no last event", "no reason", "two last events", "text after all", "two ends", "late"],
)
async def test_a_stream_that_ends_wrongly_is_broken(wire, spoil, message):
    with pytest.raises(Broken, match=message):
        await read(wire, spoil(WELL[wire]))


async def test_an_answer_that_differs_from_the_one_alone_is_a_violation():
    def other_alone(request, body):
        return whole(request, "another" if "cache_salt" in body else "a light")

    chaos = await play(lambda request, body: other_alone(request, body | {"stream": False}))
    found = [line for line in chaos.account.violations if "but alone" in line]
    assert found
    assert chaos.account.outcomes["same answer alone"] == 0


async def test_a_wrong_account_of_the_blocks_is_a_violation():
    async def wrong():
        raise AssertionError("block 3 is in no queue")

    chaos = await play(lambda request, body: whole(request), check=wrong)
    assert chaos.account.violations == [
        "the accounting of KV blocks is wrong: block 3 is in no queue"
    ]


async def test_the_own_gateway_shows_when_its_accounts_are_wrong(monkeypatch):
    async with own_gateway() as (_, serving):
        await serving.check_cache()
        pool = serving._client.engine._cache._pool
        monkeypatch.setattr(pool, "free", pool.free - 1)
        with pytest.raises(AssertionError):
            await serving.check_cache()
        monkeypatch.undo()
        await serving.check_cache()


async def test_blocks_that_nobody_gives_back_are_a_violation(monkeypatch):
    monkeypatch.setattr("ragcache.bench.chaos.run.SETTLED", 0.0)
    held = IDLE | {"pool": POOL | {"held": 1, "free": 2}}
    chaos = await play(lambda request, body: whole(request), stats=held)
    assert "blocks are still held" in chaos.account.violations[0]


async def test_memory_that_grows_in_the_second_half_is_a_violation(monkeypatch):
    monkeypatch.setattr("ragcache.bench.chaos.run.LONG_ENOUGH", 30)
    chaos = await play(lambda request, body: whole(request))
    assert chaos.growth() > 0.03  # one more each time, from a hundred on
    assert "memory grew by" in chaos.account.violations[-1]


def test_a_violation_ends_the_command_with_an_error(monkeypatch):
    results = {"requests": 1, "seconds": 1, "outcomes": {}, "violations": ["x"], "growth": None}
    monkeypatch.setattr("ragcache.bench.chaos.command.run", lambda options: results)
    with pytest.raises(BenchFailed, match="1 thing"):
        ChaosBench().cli_cmd()
