"""More than there is room for, over real sockets, before an engine whose model can be held up."""

import asyncio
import json
import socket
import threading
import time
from contextlib import contextmanager

import aiohttp
import openai
import pytest

from ragcache.config import ServeSettings
from ragcache.gateway import sse

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
WAIT = 60  # seconds; generous, for a busy machine


def ask(i, path=CHAT, stream=False, **fields):
    """The path and body of a request like no other."""
    message = {"role": "user", "content": f"Tell me of lighthouse number {i}."}
    body = {"model": "tiny", "messages": [message], "max_tokens": 12, "temperature": 0}
    return path, body | {"stream": stream} | fields


@pytest.fixture(scope="module")
def gateway(make_gateway):
    """Room for four requests that run and four that wait."""
    settings = ServeSettings(max_running=4, max_queue=4, max_batch_tokens=512)
    with make_gateway(num_blocks=600, settings=settings) as gateway:
        gateway.script.free = True
        yield gateway
        stats = gateway.at_rest()
        assert stats.pool.held == 0
        assert stats.pool.free + stats.pool.cached == stats.pool.total


@pytest.fixture
async def http(gateway):
    timeout = aiohttp.ClientTimeout(WAIT)
    async with aiohttp.ClientSession(gateway.url, timeout=timeout) as http:
        yield http


@contextmanager
def held(model, seconds=None):
    """The model takes so long for a step or, without a time, waits until it is let go."""
    gate, run = threading.Event(), model.run

    def slow(batch, meanwhile):
        meanwhile()
        gate.wait(seconds)
        return run(batch)

    model.run = slow
    try:
        yield gate.set
    finally:
        gate.set()
        model.run = run


def said(raw):
    """The text of an answer of either wire, whole or in events."""
    if not raw.startswith(("data:", "event:")):
        body = json.loads(raw)
        if body.get("type") == "message":
            return body["content"][0]["text"]
        return body["choices"][0]["message"]["content"]
    lines = (line[6:] for line in raw.splitlines() if line.startswith("data: {"))
    events = [json.loads(line) for line in lines]
    openais = [e["choices"][0]["delta"].get("content") or "" for e in events if "choices" in e]
    anthropics = [e["delta"].get("text", "") for e in events if "delta" in e]
    return "".join(openais + anthropics)


async def until(condition):
    async with asyncio.timeout(WAIT):
        while not condition():
            await asyncio.sleep(0.002)


async def post(http, path, body, read=said):
    """Status, headers and what is read of the answer, or the text of a refusal."""
    async with http.post(path, json=body) as response:
        raw = await response.text()
        return response.status, response.headers, read(raw) if response.status == 200 else raw


async def first(count, tasks):
    """The results of the tasks that are done when so many are."""
    await until(lambda: sum(task.done() for task in tasks) >= count)
    return [task.result() for task in tasks if task.done()]


async def test_what_fits_is_answered_and_the_rest_is_refused_at_once(gateway, http):
    requests = [ask(i, (CHAT, MESSAGES)[i % 2], stream=i % 4 < 2) for i in range(40)]
    with held(gateway.model) as let_go:
        tasks = [asyncio.create_task(post(http, *each)) for each in requests]
        refused = await first(32, tasks)
        # Before the model has said a word, exactly those that do not fit are refused.
        await asyncio.sleep(0.1)
        assert sum(task.done() for task in tasks) == 32
        assert [status for status, _, _ in refused] == [429] * 32
        assert all(1 <= int(headers["Retry-After"]) <= 60 for _, headers, _ in refused)
        assert all("8 answers are running or queued" in text for _, _, text in refused)
        let_go()
        answers = await asyncio.gather(*tasks)
    answered = [i for i in range(40) if answers[i][0] == 200]
    assert len(answered) == 8
    for i in answered:
        status, _, alone = await post(http, *requests[i])
        assert (status, answers[i][2]) == (200, alone)
    for i in range(40):
        assert (await post(http, *ask(i)))[0] == 200


async def test_a_retry_after_the_time_that_was_told_finds_room(gateway, http):
    with held(gateway.model) as let_go:
        tasks = [asyncio.create_task(post(http, *ask(i))) for i in range(8)]
        await until(lambda: gateway.serving._capacity._all.taken == 8)
        client = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=5)
        patient = asyncio.create_task(client.chat.completions.create(**ask("later")[1]))
        await until(lambda: gateway.serving._capacity._all.turned_away)
        let_go()
        assert (await patient).choices
        assert {(await task)[0] for task in tasks} == {200}
        await client.close()


async def test_several_prompts_take_several_places_or_none(gateway, http):
    def prompts(count):
        return COMPLETIONS, {"model": "tiny", "prompt": ["x y z"] * count, "max_tokens": 2}

    status, headers, text = await post(http, *prompts(9))
    assert (status, "Retry-After" in headers) == (400, False)
    assert json.loads(text)["error"]["param"] == "prompt"
    assert "9 answers in one request, but the server takes at most 8" in text
    with held(gateway.model) as let_go:
        waiting = asyncio.create_task(post(http, *ask("first")))
        await until(lambda: gateway.serving._capacity._all.taken == 1)
        assert (await post(http, *prompts(8)))[0] == 429
        assert gateway.serving._capacity._all.taken == 1
        let_go()
        assert (await waiting)[0] == 200
    gateway.at_rest()
    async with http.post(prompts(8)[0], json=prompts(8)[1]) as response:
        assert len((await response.json())["choices"]) == 8


async def test_one_tenant_cannot_take_all_the_room(make_gateway):
    settings = ServeSettings(max_running=2, max_queue=6, max_requests_per_tenant=3)
    keys = ["a:key-1", "a:key-2", "b:key-3"]
    with make_gateway(settings=settings, api_keys=keys) as gateway:
        async with aiohttp.ClientSession(gateway.url) as http:

            async def status(key, i):
                path, body = ask(i)
                async with http.post(path, json=body, headers={"x-api-key": key}) as response:
                    return response.status, await response.json()

            with held(gateway.model) as let_go:
                a = [asyncio.create_task(status(f"key-{1 + i % 2}", i)) for i in range(5)]
                for refused, body in await first(2, a):
                    assert refused == 429
                    assert "each tenant may have at most 3" in body["error"]["message"]
                b = asyncio.create_task(status("key-3", 9))
                await until(lambda: gateway.serving._capacity._all.taken == 4)
                let_go()
                assert (await b)[0] == 200
            assert sorted([(await each)[0] for each in a]) == [200, 200, 200, 429, 429]


async def test_the_answers_to_one_prompt_do_not_crowd_out_another_tenant(make_gateway):
    settings = ServeSettings(max_running=3, max_queue=6, max_requests_per_tenant=3)
    with make_gateway(settings=settings, api_keys=["a:key-a", "b:key-b"]) as gateway:
        async with aiohttp.ClientSession(gateway.url) as http:

            async def status(key, **fields):
                path, body = ask(key, **fields)
                async with http.post(path, json=body, headers={"x-api-key": key}) as response:
                    return response.status, await response.json()

            with held(gateway.model) as let_go:
                running = asyncio.create_task(status("key-a", n=3))
                await until(lambda: gateway.serving._capacity._all.taken == 3)
                assert (await status("key-a"))[0] == 429
                refused, body = await status("key-a", n=4)
                assert (refused, body["error"]["param"]) == (400, "n")
                other = asyncio.create_task(status("key-b", n=3))
                await until(lambda: gateway.serving._capacity._all.taken == 6)
                let_go()
                for answered, body in (await running, await other):
                    assert (answered, len(body["choices"])) == (200, 3)


async def test_time_limits_over_both_wires(make_gateway):
    settings = ServeSettings(max_running=1, max_queue=9, queue_timeout=0.3, request_timeout=3)
    with make_gateway(settings=settings) as gateway:
        gateway.script.free = True
        before = gateway.serving.stats().query_tokens
        endless = {"max_tokens": 5000, "logit_bias": {"2": -100}}
        async with aiohttp.ClientSession(gateway.url) as http:
            with held(gateway.model, 0.01):
                running = asyncio.create_task(post(http, *ask("long", **endless)))
                await until(lambda: gateway.serving.stats().running)
                asked = gateway.serving.stats().query_tokens - before
                *waiting, (streamed, _, events) = await asyncio.gather(
                    post(http, *ask("whole")),
                    post(http, *ask("whole", MESSAGES)),
                    post(http, *ask("streamed", stream=True), read=str),
                )
                status, headers, text = await running
            assert (status, headers["x-should-retry"]) == (504, "false")
            assert "took longer than 3 s" in text
            for status, headers, text in waiting:
                assert (status, headers["Retry-After"]) == (503, "5")
                assert "waited for 0.3 s and was not begun" in text
            assert streamed == 200
            assert "waited for 0.3 s and was not begun" in events.rstrip().rpartition("\n")[2]
            stats = gateway.at_rest()
            assert stats.query_tokens - before == asked  # nothing that waited was ever begun
            assert stats.pool.held == 0
            assert (await post(http, *ask("next")))[0] == 200


async def test_a_client_that_retries_has_one_generation_at_a_time(gateway):
    def aborts():
        name = 'ragcache_requests_total{api="chat",finish_reason="abort",model_name="tiny"'
        return gateway.metrics().get(f'{name},status="499"}}', 0)

    most, before, run = [0], aborts(), gateway.model.run

    def counted(batch, meanwhile):
        most[0] = max(most[0], len(batch.layout.kv_len))
        time.sleep(0.01)
        return run(batch, meanwhile)

    gateway.model.run = counted
    try:
        async with openai.AsyncOpenAI(
            base_url=f"{gateway.url}/v1", api_key="none", max_retries=3, timeout=0.3
        ) as client:
            _, body = ask("retried", max_tokens=5000, logit_bias={"2": -100})
            with pytest.raises(openai.APITimeoutError):
                await client.chat.completions.create(**body)
        gateway.at_rest()
    finally:
        gateway.model.run = run
    assert most == [1]
    await until(lambda: aborts() == before + 4)


async def test_every_request_is_counted_once_whatever_becomes_of_it(gateway, http):
    def outcomes():
        counts = {}
        for name, value in gateway.metrics().items():
            if name.startswith("ragcache_requests_total"):
                reason = name.partition('finish_reason="')[2].partition('"')[0]
                counts[reason] = counts.get(reason, 0) + value
        return counts

    prompts = 'ragcache_prompt_tokens_total{model_name="tiny"}'
    before, asked = outcomes(), gateway.at_rest().query_tokens
    with held(gateway.model) as let_go:  # the first in its first step, the others behind it
        tasks = [
            asyncio.create_task(post(http, *ask(f"c{i}", stream=i % 2 == 1))) for i in range(8)
        ]
        await until(lambda: gateway.serving.stats().running)
        await until(lambda: gateway.serving._capacity._all.taken == 8)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        let_go()
    begun = gateway.at_rest().query_tokens - asked
    for i in range(4):
        path, body = ask(f"m{i}", stream=True, max_tokens=5000, logit_bias={"2": -100})
        async with http.post(path, json=body) as response:
            await response.content.readuntil(b"content")
    await until(lambda: not gateway.serving.stats().running)  # the last client has left, too
    stats, told = gateway.at_rest(), gateway.metrics()[prompts]
    assert told == stats.query_tokens
    answered = [json.loads((await post(http, *ask(f"n{i}"), read=str))[2]) for i in range(4)]
    in_usage = sum(answer["usage"]["prompt_tokens"] for answer in answered)
    assert gateway.metrics()[prompts] - told == in_usage > 0
    await until(lambda: sum(outcomes().values()) - sum(before.values()) == 16)
    after = outcomes()
    assert after["abort"] - before.get("abort", 0) == 12
    assert after["length"] - before.get("length", 0) == 4
    assert begun > 0
    metrics = gateway.metrics()
    assert metrics['ragcache_requests_running{model_name="tiny"}'] == 0
    assert metrics['ragcache_requests_waiting{model_name="tiny"}'] == 0


async def test_a_slow_reader_loses_its_stream_and_nobody_else(gateway, http, monkeypatch):
    def sample(name):
        return sum(value for each, value in gateway.metrics().items() if each.startswith(name))

    aborts = 'ragcache_requests_total{api="chat",finish_reason="abort"'
    tokens, aborted = sample("ragcache_generation_tokens_total"), sample(aborts)
    monkeypatch.setattr(sse, "STALLED", 0.3)
    longest = 7000  # some 20 MB of events, which no buffer on the way can hold
    path, body = ask("slow", stream=True, max_tokens=longest, logit_bias={"2": -100}, logprobs=True)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, _, port = gateway.url[7:].partition(":")
    connection.connect((host, int(port)))
    reader, writer = await asyncio.open_connection(sock=connection, limit=1024)
    writer.transport.pause_reading()
    raw = json.dumps(body | {"top_logprobs": 20}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)
    await until(lambda: gateway.serving.stats().running)
    others = [ask(f"o{i}", stream=True) for i in range(3)]
    together = await asyncio.gather(*[post(http, *each) for each in others])
    await until(lambda: not gateway.serving.stats().running)
    assert gateway.at_rest().pool.held == 0
    await until(lambda: sample(aborts) == aborted + 1)
    assert sample("ragcache_generation_tokens_total") - tokens < longest
    for each, answer in zip(others, together, strict=True):
        assert answer[2] == (await post(http, *each))[2]
    writer.transport.abort()
    assert reader


async def test_prompts_that_fit_alone_but_not_together_are_both_answered(make_gateway):
    settings = ServeSettings(max_running=4, max_queue=4, max_batch_tokens=256)
    with make_gateway(num_blocks=40, max_model_len=600, settings=settings) as gateway:
        gateway.script.free = True
        prompts = [[200 + i + 7 * j for j in range(380)] for i in range(2)]  # 0.6 of the pool each
        async with aiohttp.ClientSession(gateway.url) as http:

            async def complete(prompt):
                body = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "temperature": 0}
                async with http.post(COMPLETIONS, json=body) as response:
                    assert response.status == 200
                    return (await response.json())["choices"][0]["text"]

            together = await asyncio.gather(*map(complete, prompts))
            for prompt, text in zip(prompts, together, strict=True):
                await http.post("/cache/reset")
                assert await complete(prompt) == text
        assert gateway.at_rest().pool.held == 0
