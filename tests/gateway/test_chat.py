"""/v1/chat/completions through the official client."""

import asyncio
import json

import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk

HELLO = [{"role": "user", "content": "say hello to me"}]
ASK = {"model": "tiny", "messages": HELLO}


async def stream_of(client, **options):
    stream = await client.chat.completions.create(**ASK, stream=True, **options)
    return [chunk async for chunk in stream]


async def test_a_whole_answer_has_text_reason_and_usage(client, serving):
    serving.script.cached_tokens = 4
    answer = await client.chat.completions.create(**ASK)
    assert answer.choices[0].message.content == "Hello, wörld 🌍!"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 5)
    assert answer.usage.total_tokens == 10
    assert answer.usage.prompt_tokens_details.cached_tokens == 4


async def test_the_synchronous_client_works_too(url, serving):
    def ask():
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            whole = client.chat.completions.create(**ASK).choices[0].message.content
            chunks = list(client.chat.completions.create(**ASK, stream=True))
        return whole, "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    whole, streamed = await asyncio.to_thread(ask)
    assert whole == streamed == "Hello, wörld 🌍!"


async def test_required_keys_are_there_even_when_null(http):
    async with http.post("/v1/chat/completions", json=ASK) as response:
        body = await response.json()
    assert body["choices"][0]["message"]["refusal"] is None
    assert body["choices"][0]["logprobs"] is None
    ChatCompletion.model_validate(body, strict=True)


@pytest.mark.parametrize("max_tokens", [1, 3, 5, 1000])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_stream_obeys_the_protocol(client, n, max_tokens):
    chunks = await stream_of(client, n=n, max_tokens=max_tokens)
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    for index in range(n):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert (own[0].delta.role, own[0].delta.content) == ("assistant", "")
        assert [choice.delta.role for choice in own[1:]] == [None] * (len(own) - 1)
        assert [choice.finish_reason for choice in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].finish_reason == ("stop" if max_tokens >= 5 else "length")
        assert own[-1].delta.content is None


async def test_stream_and_whole_say_the_same(client, serving):
    serving.script.cached_tokens = 2
    options = {"n": 2, "logprobs": True, "top_logprobs": 2}
    whole = await client.chat.completions.create(**ASK, **options)
    chunks = await stream_of(client, stream_options={"include_usage": True}, **options)
    assert chunks[-1].usage == whole.usage
    for choice in whole.choices:
        own = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == choice.index]
        assert "".join(c.delta.content or "" for c in own) == choice.message.content
        entries = [entry for c in own if c.logprobs for entry in c.logprobs.content]
        assert entries == choice.logprobs.content


async def test_the_wire_of_a_stream_ends_at_once_after_done(http):
    body = {**ASK, "stream": True, "stream_options": {"include_usage": True}}
    async with http.post("/v1/chat/completions", json=body) as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Accel-Buffering"] == "no"
        assert "Content-Encoding" not in response.headers
        events = (await response.text()).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)


async def test_without_include_usage_no_chunk_mentions_it(http):
    async with http.post("/v1/chat/completions", json={**ASK, "stream": True}) as response:
        assert "usage" not in await response.text()


async def test_several_choices_count_the_prompt_once(client, serving):
    answer = await client.chat.completions.create(**ASK, n=3, max_tokens=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 6)
    assert len(serving.generations) == 1


async def test_log_probabilities_are_numbers_whatever_the_model_says(client):
    answer = await client.chat.completions.create(**ASK, logprobs=True, top_logprobs=2)
    first = answer.choices[0].logprobs.content[0]
    assert (first.token, first.logprob, first.bytes) == ("Hello", -0.5, list(b"Hello"))
    assert [other.logprob for other in first.top_logprobs] == [-9999.0, -9999.0]


async def test_every_sampling_field_reaches_the_serving(client, serving):
    await client.chat.completions.create(
        **ASK,
        temperature=0.5,
        top_p=0.25,
        seed=7,
        presence_penalty=-1,
        frequency_penalty=1.5,
        logit_bias={"42": -100},
        logprobs=True,
        stop=["a", "b"],
        max_tokens=99,
        max_completion_tokens=9,
        n=2,
        extra_body={
            "top_k": 3,
            "min_p": 0.125,
            "repetition_penalty": 1.25,
            "stop_token_ids": [1, 2],
            "min_tokens": 4,
            "ignore_eos": True,
            "cache_salt": "pepper",
            "chat_template_kwargs": {"enable_thinking": False},
        },
    )
    request = serving.generations[0].request
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.25, 7)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1, 1.5)
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (3, 0.125, 1.25)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.n) == (9, 4, 2)
    assert (sampling.logit_bias, sampling.logprobs) == ({42: -100}, 0)
    assert (sampling.stop_token_ids, sampling.ignore_eos) == ({1, 2}, True)
    assert (request.stop, request.cache_salt, request.tenant) == (("a", "b"), "pepper", "")
    assert request.prompt.template_options == {"enable_thinking": False}
    assert request.id.startswith("chatcmpl-")


async def test_an_alias_is_named_in_the_answer_as_it_was_asked_for(client):
    answer = await client.chat.completions.create(model="alias", messages=HELLO)
    assert answer.model == "alias"


async def test_the_request_id_of_the_client_comes_back(client, http):
    raw = await client.chat.completions.with_raw_response.create(
        **ASK, extra_headers={"x-request-id": "trace-7"}
    )
    assert raw.headers["x-request-id"] == "trace-7"
    assert (await client.chat.completions.create(**ASK))._request_id.startswith("req-")
    async with http.get("/health", headers={"x-request-id": "no spaces please"}) as response:
        assert response.headers["x-request-id"].startswith("req-")
    async with http.post("/v1/chat/completions", json={**ASK, "stream": True}) as response:
        assert response.headers["x-request-id"].startswith("req-")
