"""OpenAI's caching fields: markers become breakpoints, and usage and explanation come back."""

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from ragcache.types import Breakpoint, Explanation, MissReason

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "say hello to me"}]}
HERE = {"mode": "explicit"}
EPHEMERAL = {"type": "ephemeral"}
IMPLICIT = Breakpoint(0, None, "auto", "implicit")


def text(content, **marker):
    return {"type": "text", "text": content, **marker}


def user(*parts, **marker):
    return {"role": "user", "content": list(parts), **marker}


@pytest.fixture
def sent(http, serving):
    """The request that reaches the serving."""

    async def sent(**body):
        async with http.post("/v1/chat/completions", json={**ASK, **body}) as response:
            assert response.status == 200
        return serving.generations[-1].request

    return sent


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, IMPLICIT),
        ({"prompt_cache_key": "k" * 1024}, IMPLICIT),
        ({"prompt_cache_options": {}}, IMPLICIT),
        ({"prompt_cache_options": {"mode": "implicit"}}, IMPLICIT),
        ({"prompt_cache_options": {"ttl": "30m"}}, Breakpoint(0, None, "30m", "implicit")),
        ({"prompt_cache_retention": "in_memory"}, IMPLICIT),
        ({"prompt_cache_retention": "24h"}, Breakpoint(0, None, "12h", "implicit")),
        (
            {"prompt_cache_retention": "24h", "prompt_cache_options": {"ttl": "1h"}},
            Breakpoint(0, None, "1h", "implicit"),
        ),
        ({"cache_control": EPHEMERAL}, Breakpoint(0, None, "5m", "top_level")),
        ({"cache_control": {**EPHEMERAL, "ttl": "1h"}}, Breakpoint(0, None, "1h", "top_level")),
    ],
)
async def test_there_is_one_automatic_breakpoint_at_the_end(sent, fields, expected):
    request = await sent(**fields)
    assert request.prompt.breakpoints == (expected,)
    assert not request.explicit_caching


async def test_in_explicit_mode_there_is_none(sent):
    request = await sent(prompt_cache_options={"mode": "explicit"})
    assert request.prompt.breakpoints == ()
    assert request.explicit_caching


async def test_a_marked_part_ends_the_prefix_with_its_last_character(sent):
    messages = [
        {"role": "system", "content": [text("wörld", prompt_cache_breakpoint=HERE), text("!")]},
        user(text("ab"), text("c", prompt_cache_breakpoint={**HERE, "ttl": "12h"}), text("d")),
        user(text("x", cache_control={**EPHEMERAL, "ttl": "1h"})),
    ]
    prompt = (await sent(messages=messages)).prompt
    assert prompt.breakpoints == (
        Breakpoint(0, 5, "30m"),
        Breakpoint(1, 3, "12h"),
        Breakpoint(2, 1, "1h"),
        Breakpoint(2, None, "auto", "implicit"),
    )
    assert [message.content for message in prompt.messages] == ["wörld!", "abcd", "x"]


async def test_a_breakpoint_inherits_the_lifetime_of_the_request(sent):
    marked = [user(text("a", prompt_cache_breakpoint=HERE))]
    request = await sent(messages=marked, prompt_cache_options={"mode": "explicit", "ttl": "12h"})
    assert request.prompt.breakpoints == (Breakpoint(0, 1, "12h"),)


async def test_tools_and_whole_messages_can_be_marked(sent):
    function = {"name": "f"}
    tools = [
        {"type": "function", "function": function},
        {"type": "function", "function": {"name": "g"}, "cache_control": EPHEMERAL},
        {"type": "function", "function": {"name": "h"}, "prompt_cache_breakpoint": HERE},
    ]
    messages = [{**ASK["messages"][0], "cache_control": EPHEMERAL}, *ASK["messages"]]
    request = await sent(tools=tools, messages=messages)
    assert request.prompt.breakpoints == (
        Breakpoint(None, 2, "5m"),
        Breakpoint(0, None, "5m"),
        Breakpoint(1, None, "auto", "implicit"),
    )


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, ["c", "d", "e", "implicit"]),
        ({"cache_control": EPHEMERAL}, ["c", "d", "e", "top_level"]),
        ({"prompt_cache_options": {"mode": "explicit"}}, ["b", "c", "d", "e"]),
    ],
)
async def test_the_latest_four_are_kept(sent, fields, kept):
    parts = [text(letter, prompt_cache_breakpoint=HERE) for letter in "abcde"]
    request = await sent(messages=[user(*parts)], **fields)
    names = [
        "abcde"[point.end - 1] if point.origin == "explicit" else point.origin
        for point in request.prompt.breakpoints
    ]
    assert names == kept


async def test_markers_change_nothing_else(sent):
    def conversation(**marker):
        return {
            "messages": [user(text("a b", **marker), text(" c", **marker)), *ASK["messages"]],
            "tools": [{"type": "function", "function": {"name": "f"}, **marker}],
            **({"cache_control": marker["cache_control"]} if marker else {}),
        }

    plain = await sent(**conversation())
    marked = await sent(**conversation(cache_control=EPHEMERAL, prompt_cache_breakpoint=HERE))
    assert marked.prompt.messages == plain.prompt.messages
    assert marked.prompt.tools == plain.prompt.tools
    assert marked.output == plain.output
    assert len(marked.prompt.breakpoints) == 4


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt_cache_options": {"mode": "off"}}, "prompt_cache_options.mode"),
        ({"prompt_cache_options": {"ttl": "2h"}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_options": "explicit"}, "prompt_cache_options"),
        ({"prompt_cache_retention": "1h"}, "prompt_cache_retention"),
        ({"prompt_cache_key": "k" * 1025}, "prompt_cache_key"),
        ({"prompt_cache_key": 5}, "prompt_cache_key"),
        ({"cache_control": {"type": "eternal"}}, "cache_control.type"),
        ({"cache_control": {**EPHEMERAL, "ttl": "2h"}}, "cache_control.ttl"),
        (
            {"messages": [user(text("a", prompt_cache_breakpoint={"mode": "implicit"}))]},
            "messages[0].content[0].prompt_cache_breakpoint.mode",
        ),
        ({"ragcache": {"explain": "why"}}, "ragcache.explain"),
        ({"ragcache": {"previous_id": ""}}, "ragcache.previous_id"),
    ],
)
async def test_an_unknown_value_is_named(http, body, param):
    async with http.post("/v1/chat/completions", json={**ASK, **body}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == param


async def test_usage_has_reads_and_writes_in_stream_and_whole(client, chunks_of, serving):
    cold = (await client.chat.completions.create(**ASK)).usage
    details = cold.prompt_tokens_details
    assert (details.cached_tokens, details.cache_write_tokens) == (0, 0)
    serving.script.cached_tokens, serving.script.written = 2, {"5m": 1, "1h": 2}
    warm = (await client.chat.completions.create(**ASK)).usage
    details = warm.prompt_tokens_details
    assert (warm.prompt_tokens, details.cached_tokens, details.cache_write_tokens) == (5, 2, 3)
    assert warm.completion_tokens_details.reasoning_tokens == 0
    *_, last = await chunks_of({**ASK, "stream_options": {"include_usage": True}})
    assert last["usage"] == warm.model_dump(exclude_unset=True)


WHY = Explanation(
    prompt_tokens=5,
    hit_tokens=0,
    reason=MissReason.CHANGED,
    lost_tokens=4,
    token=1,
    segment="messages.0",
    character=3,
    previous="chatcmpl-1",
)
BECAUSE = {
    "prompt_tokens": 5,
    "hit_tokens": 0,
    "reason": "changed",
    "lost_tokens": 4,
    "token": 1,
    "exact": True,
    "segment": "messages.0",
    "character": 3,
    "previous": "chatcmpl-1",
    "block_size": 4,
}
EXPLAIN = {"explain": True, "previous_id": "chatcmpl-1"}


@pytest.mark.parametrize(("why", "because"), [(WHY, BECAUSE), (None, None)])
async def test_a_whole_answer_explains_itself_if_asked(client, serving, why, because):
    serving.script.explanation = why
    answer = await client.chat.completions.create(**ASK, extra_body={"ragcache": EXPLAIN})
    assert answer.model_extra == {"ragcache": because}
    assert serving.generations[0].request.previous_id == "chatcmpl-1"
    assert not (await client.chat.completions.create(**ASK)).model_extra


async def test_a_stream_explains_itself_at_its_end(chunks_of, serving):
    serving.script.explanation = WHY
    body = {**ASK, "ragcache": EXPLAIN}
    *chunks, last = await chunks_of(body)
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["ragcache"] == BECAUSE
    assert not any("ragcache" in chunk for chunk in chunks)
    *chunks, last = await chunks_of({**body, "stream_options": {"include_usage": True}})
    assert (last["choices"], last["ragcache"]) == ([], BECAUSE)
    assert not any("ragcache" in chunk for chunk in chunks)


async def test_completions_explain_too(client, chunks_of, serving):
    serving.script.explanation = WHY
    ask = {"model": "tiny", "prompt": "one two"}
    answer = await client.completions.create(**ask, extra_body={"ragcache": EXPLAIN})
    assert answer.model_extra == {"ragcache": BECAUSE}
    *_, last = await chunks_of({**ask, "ragcache": EXPLAIN}, "/v1/completions")
    assert last["ragcache"] == BECAUSE


async def test_explained_answers_still_validate_against_the_clients_types(http, chunks_of, serving):
    serving.script.explanation = WHY
    body = {**ASK, "ragcache": EXPLAIN}
    async with http.post("/v1/chat/completions", json=body) as response:
        ChatCompletion.model_validate(await response.json(), strict=True)
    for chunk in await chunks_of(body):
        ChatCompletionChunk.model_validate(chunk, strict=True)
