"""Every field of OpenAI's chat API: it works, is tolerated by intent, or is refused by name."""

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
# what the serving is told, apart from who asks
PARTS = ("prompt", "sampling", "output", "stop", "cache_salt", "explicit_caching", "echo")
TOOL = {"type": "function", "function": {"name": "f"}}

# field → a value, and what of the request that reaches the serving shows it
EFFECTIVE = {
    "messages": ([{"role": "user", "content": "ho"}], lambda r: r.prompt.messages[0].content),
    "temperature": (0.5, lambda r: r.sampling.temperature),
    "top_p": (0.5, lambda r: r.sampling.top_p),
    "top_k": (5, lambda r: r.sampling.top_k),
    "min_p": (0.5, lambda r: r.sampling.min_p),
    "seed": (7, lambda r: r.sampling.seed),
    "n": (2, lambda r: r.sampling.n),
    "presence_penalty": (1.0, lambda r: r.sampling.presence_penalty),
    "frequency_penalty": (1.0, lambda r: r.sampling.frequency_penalty),
    "repetition_penalty": (1.5, lambda r: r.sampling.repetition_penalty),
    "logit_bias": ({"3": 2.0}, lambda r: r.sampling.logit_bias),
    "logprobs": (True, lambda r: r.sampling.logprobs),
    "max_tokens": (3, lambda r: r.sampling.max_tokens),
    "max_completion_tokens": (3, lambda r: r.sampling.max_tokens),
    "min_tokens": (2, lambda r: r.sampling.min_tokens),
    "ignore_eos": (True, lambda r: r.sampling.ignore_eos),
    "stop": ("x", lambda r: r.stop),
    "stop_token_ids": ([3], lambda r: r.sampling.stop_token_ids),
    "tools": ([TOOL], lambda r: r.prompt.tools),
    "response_format": ({"type": "json_object"}, lambda r: r.output.schema),
    "parallel_tool_calls": (False, lambda r: r.output.parallel_tool_calls),
    "chat_template_kwargs": ({"a": 1}, lambda r: r.prompt.template_options),
    "cache_salt": ("s", lambda r: r.cache_salt),
    "cache_control": ({"type": "ephemeral"}, lambda r: r.prompt.breakpoints),
    "prompt_cache_options": ({"mode": "explicit"}, lambda r: r.explicit_caching),
    "prompt_cache_retention": ("24h", lambda r: r.prompt.breakpoints),
    "ragcache": ({"previous_id": "x"}, lambda r: r.previous_id),
}
IGNORED = {
    "user": "u",
    "safety_identifier": "u",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "priority",
    "reasoning_effort": "high",
    "verbosity": "low",
    "prompt_cache_key": "k",
    "stream_options": None,
    "made_up_by_a_client": [1],
}
REFUSED = {
    "audio": {"voice": "alloy", "format": "wav"},
    "modalities": ["text", "audio"],
    "prediction": {"type": "content", "content": "x"},
    "web_search_options": {},
    "moderation": {"model": "m"},
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "tool_choice": "required",
    "top_logprobs": 2,
    "n": 17,
    "echo": True,
    "suffix": "x",
    "best_of": 2,
    "prompt_logprobs": 1,
    "truncate_prompt_tokens": 5,
    "use_beam_search": True,
    "structured_outputs": {"regex": "a"},
    "guided_json": {},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": "a",
}
HARMLESS = {
    "modalities": ["text"],
    "functions": [],
    "function_call": "none",
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "echo": False,
    "suffix": "",
    "best_of": 1,
    "use_beam_search": False,
}


@pytest.fixture
def post(http, serving):
    """Status and body of an answer, and the request that reached the serving."""

    async def post(**fields):
        async with http.post("/v1/chat/completions", json={**ASK, **fields}) as response:
            body = await response.json()
        request = serving.generations[-1].request if response.status == 200 else None
        return response.status, body, request

    return post


@pytest.mark.parametrize("field", EFFECTIVE)
async def test_a_field_that_works_changes_the_request(post, field):
    value, seen = EFFECTIVE[field]
    _, _, plain = await post()
    status, _, changed = await post(**{field: value})
    assert status == 200
    assert seen(changed) != seen(plain)


@pytest.mark.parametrize("field", IGNORED)
async def test_a_field_that_is_ignored_changes_nothing(post, field):
    _, _, plain = await post()
    status, _, ignored = await post(**{field: IGNORED[field]})
    assert status == 200
    for part in PARTS:
        assert getattr(ignored, part) == getattr(plain, part)


@pytest.mark.parametrize("field", REFUSED)
async def test_a_field_that_is_not_supported_is_named(post, field):
    status, body, _ = await post(**{field: REFUSED[field]})
    assert (status, body["error"]["param"]) == (400, field)


@pytest.mark.parametrize("field", HARMLESS)
async def test_a_value_that_asks_for_nothing_is_no_reason_to_refuse(post, field):
    status, _, _ = await post(**{field: HARMLESS[field]})
    assert status == 200


async def test_null_is_not_given(post):
    _, _, plain = await post()
    fields = {*EFFECTIVE, *IGNORED, *REFUSED} - {"messages"}
    status, _, request = await post(**dict.fromkeys(fields))
    assert status == 200
    for part in PARTS:
        assert getattr(request, part) == getattr(plain, part)


def test_no_field_of_the_official_client_is_forgotten():
    known = {*EFFECTIVE, *IGNORED, *REFUSED, "model", "stream"}
    assert set(CompletionCreateParamsBase.__annotations__) <= known
