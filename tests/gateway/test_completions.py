"""/v1/completions through the official client."""

import pytest
from openai.types import Completion

from ragcache.types import Delta, FinishReason, TextLogprob


async def test_text_and_tokens_are_prompts_alike(client, serving):
    text = await client.completions.create(model="tiny", prompt="one two three")
    tokens = await client.completions.create(model="tiny", prompt=[11, 22, 33])
    assert text.choices == tokens.choices
    assert text.usage == tokens.usage
    prompts = [generation.request.prompt for generation in serving.generations]
    assert prompts == ["one two three", (11, 22, 33)]
    assert serving.generations[0].request.sampling.max_tokens == 16


@pytest.mark.parametrize("prompts", [["a", "b c", "d e f"], [[1], [2, 3], [4, 5, 6]]])
async def test_several_prompts_become_choices_in_order(client, serving, prompts):
    answer = await client.completions.create(model="tiny", prompt=prompts, n=2, max_tokens=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3, 4, 5]
    assert {choice.text for choice in answer.choices} == {"Hello, "}
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 12)
    assert len({generation.id for generation in serving.generations}) == 3


async def test_several_prompts_run_at_the_same_time(client, serving):
    serving.script.pause = 0.01
    stream = await client.completions.create(model="tiny", prompt=["a", "b"], stream=True)
    indices = [chunk.choices[0].index async for chunk in stream if chunk.choices[0].text]
    assert set(indices[:4]) == {0, 1}


async def test_legacy_log_probabilities_agree_in_stream_and_whole(client):
    ask = {"model": "tiny", "prompt": "x", "logprobs": 1}
    whole = (await client.completions.create(**ask)).choices[0].logprobs
    assert whole.tokens == ["Hello", ", ", "wörld", " 🌍", "!"]
    assert whole.text_offset == [0, 5, 7, 12, 14]
    assert whole.token_logprobs == [-0.5] * 5
    assert whole.top_logprobs[0] == {"Hello": -0.5, "alt0": -9999.0}
    stream = await client.completions.create(**ask, stream=True)
    parts = [c.choices[0].logprobs async for c in stream if c.choices[0].logprobs]
    for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        assert [item for part in parts for item in getattr(part, name)] == getattr(whole, name)


ECHO = {"model": "tiny", "prompt": "a 🌍", "echo": True, "max_tokens": 1, "logprobs": 1}
ECHOED = (
    TextLogprob("a ", b"a ", None),
    TextLogprob("\ufffd", b"\xf0\x9f", -2.0, (TextLogprob("b", b"b", -1.0),)),
    TextLogprob("\ufffd", b"\x8c\x8d", -3.0, (TextLogprob("c", b"c", -1.0),)),
)


async def test_an_echo_has_the_log_probabilities_of_the_prompt(client, serving):
    said = TextLogprob("!", b"!", -0.5, (TextLogprob("?", b"?", -1.0),))
    serving.script.deltas = (
        Delta(0, "a 🌍", ECHOED),
        Delta(0, "!", (said,)),
        Delta(0, finish_reason=FinishReason.LENGTH),
    )
    choice = (await client.completions.create(**ECHO)).choices[0]
    assert choice.text == "a 🌍!"
    assert choice.logprobs.token_logprobs == [None, -2.0, -3.0, -0.5]
    assert choice.logprobs.top_logprobs[:2] == [None, {"b": -1.0, "\ufffd": -2.0}]
    assert choice.logprobs.text_offset == [0, 2, 2, 3]
    request = serving.generations[0].request
    assert request.echo
    assert (request.sampling.prompt_logprobs, request.sampling.logprobs) == (1, 1)


async def test_no_log_probabilities_of_the_prompt_without_echo_or_without_asking(client, serving):
    await client.completions.create(model="tiny", prompt=["a", "b"], echo=True)
    await client.completions.create(model="tiny", prompt="a", logprobs=2)
    requests = [generation.request for generation in serving.generations]
    assert [request.sampling.prompt_logprobs for request in requests] == [None, None, None]
    assert [request.echo for request in requests] == [True, True, False]


async def test_nothing_may_be_asked_for_to_warm_the_cache(client):
    answer = await client.completions.create(model="tiny", prompt="one two", max_tokens=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 0)


async def test_a_full_context_is_a_length(client, serving):
    serving.script.deltas = (Delta(0, "x"), Delta(0, finish_reason=FinishReason.CONTEXT))
    answer = await client.completions.create(model="tiny", prompt="x")
    assert answer.choices[0].finish_reason == "length"


async def test_bodies_and_chunks_validate_against_the_clients_types(http, chunks_of):
    ask = {"model": "tiny", "prompt": "x", "logprobs": 2}
    async with http.post("/v1/completions", json=ask) as response:
        body = await response.json()
    assert body["object"] == "text_completion"
    Completion.model_validate(body, strict=True)
    *_, ending, usage = await chunks_of(
        {**ask, "stream_options": {"include_usage": True}}, "/v1/completions"
    )
    Completion.model_validate(ending, strict=True)
    Completion.model_validate(usage, strict=True)
