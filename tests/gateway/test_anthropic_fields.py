"""Every field of Anthropic's API: it works, is tolerated by intent, or is refused by name."""

import pytest
from anthropic.types.message_create_params import MessageCreateParamsBase

ASK = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}

# field → a value, and what of the request that reaches the serving shows it
EFFECTIVE = {
    "messages": ([{"role": "user", "content": "ho"}], lambda r: r.prompt.messages),
    "system": ("be brief", lambda r: r.prompt.messages),
    "tools": ([TOOL], lambda r: r.prompt.tools),
    "tool_choice": ({"type": "auto"}, lambda r: r.output),
    "max_tokens": (3, lambda r: r.sampling.max_tokens),
    "temperature": (0.5, lambda r: r.sampling.temperature),
    "top_p": (0.5, lambda r: r.sampling.top_p),
    "top_k": (5, lambda r: r.sampling.top_k),
    "stop_sequences": (["x"], lambda r: r.stop),
    "output_config": ({"format": SCHEMA}, lambda r: r.output.schema),
    "cache_control": ({"type": "ephemeral"}, lambda r: r.prompt.breakpoints),
    "diagnostics": ({"previous_message_id": "msg_0"}, lambda r: r.previous_id),
    "cache_salt": ("s", lambda r: r.cache_salt),
}
IGNORED = {
    "container": "c",
    "inference_geo": "eu",
    "made_up_by_a_client": [1],
    "metadata": {"user_id": "u"},
    "output_config": {"effort": "high"},
    "service_tier": "standard_only",
    "speed": "fast",
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "user_profile_id": "u",
    "workspace_id": "w",
}
REFUSED = {
    "mcp_servers": [{"type": "url", "url": "https://example.com", "name": "x"}],
    "output_format": SCHEMA,
    "tool_choice": {"type": "any"},
    "tools": [{"type": "web_search_20250305", "name": "web_search"}],
}


@pytest.fixture
def post(http, serving):
    """Status and body of an answer, and the request that reached the serving."""

    async def post(**fields):
        async with http.post("/v1/messages", json={**ASK, **fields}) as response:
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
    for part in ("prompt", "sampling", "output", "stop", "cache_salt"):
        assert getattr(ignored, part) == getattr(plain, part)


@pytest.mark.parametrize("field", REFUSED)
async def test_a_field_that_is_not_supported_is_named(post, field):
    status, body, _ = await post(**{field: REFUSED[field]})
    assert status == 400
    assert body["error"]["message"].startswith(field)


def test_the_tables_have_every_field_of_the_official_client():
    known = {*EFFECTIVE, *IGNORED, *REFUSED, "model"}
    assert set(MessageCreateParamsBase.__annotations__) <= known
