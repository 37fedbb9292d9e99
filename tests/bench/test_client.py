import socket

import aiohttp
import pytest

from ragcache.bench.client import ChatClient, RequestFailed, first_model

HELLO = [{"role": "user", "content": "one two three"}]


@pytest.fixture
async def http():
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
def client(http, fake):
    return ChatClient(http, fake.url, "made-up", {"ignore_eos": True})


async def test_a_reply_holds_text_counts_and_times(client):
    reply = await client.ask(HELLO, max_tokens=3)
    assert len(reply.text.split()) == 3
    assert (reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens) == (5, 3, 0)
    assert reply.finish_reason == "length"
    assert reply.ttft > 0
    assert 0 < reply.tpot < reply.last_at - reply.sent_at


async def test_cached_tokens_come_from_the_usage(client):
    await client.ask(HELLO, max_tokens=3)
    assert (await client.ask(HELLO, max_tokens=3)).cached_tokens == 4


async def test_one_token_has_no_time_per_output_token(client):
    assert (await client.ask(HELLO, max_tokens=1)).tpot is None


async def test_salt_and_extra_fields_are_sent_only_when_given(client, fake):
    await client.ask(HELLO, max_tokens=1)
    await client.ask(HELLO, max_tokens=1, salt="s")
    assert "cache_salt" not in fake.requests[0]
    assert fake.requests[1]["cache_salt"] == "s"
    assert fake.requests[0]["ignore_eos"] is True


async def test_a_refusal_shows_status_and_body(client, fake):
    fake.refusal = (429, "the queue is full")
    with pytest.raises(RequestFailed, match=r"HTTP 429: the queue is full"):
        await client.ask(HELLO, max_tokens=1)


async def test_an_error_inside_the_stream_is_not_an_answer(client, fake):
    fake.stream = [{"error": {"message": "engine stopped"}}]
    with pytest.raises(RequestFailed, match="engine stopped"):
        await client.ask(HELLO, max_tokens=1)


ANSWER = {"choices": [{"delta": {"content": "a"}, "finish_reason": "length"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}


@pytest.mark.parametrize(
    "stream",
    [
        [{"choices": [{"delta": {"content": "a"}}]}],
        [{"choices": [{"delta": {"content": "a"}}]}, USAGE, "[DONE]"],
        [ANSWER],
    ],
)
async def test_an_unfinished_stream_is_a_failure(client, fake, stream):
    fake.stream = stream
    with pytest.raises(RequestFailed, match="without a finish reason, or without usage"):
        await client.ask(HELLO, max_tokens=1)


@pytest.mark.parametrize("end", [[], ["[DONE]"]])
async def test_a_stream_may_end_without_done(client, fake, end):
    fake.stream = [ANSWER, USAGE, *end]
    reply = await client.ask(HELLO, max_tokens=1)
    assert (reply.text, reply.prompt_tokens) == ("a", 3)


async def test_a_server_that_is_not_there_is_named(http):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        with pytest.raises(RequestFailed, match=url):
            await ChatClient(http, url, "m").ask(HELLO, max_tokens=1)
        with pytest.raises(RequestFailed, match=url):
            await first_model(http, url)


async def test_the_first_listed_model_is_the_default(http, fake):
    assert await first_model(http, fake.url) == "made-up"
