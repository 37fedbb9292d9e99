"""Tools on OpenAI's wire: what reaches the serving, and how calls come back."""

import asyncio
import json

import pytest
from openai import OpenAI, pydantic_function_tool
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from ragcache.types import Delta, FinishReason, OutputRules, TextLogprob, ToolCall

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "how warm is it"}]}
EMPTY = {"type": "object", "properties": {}}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("a", "b", "c")]
ARGUMENTS = ['{"city": "Łódź \\"x\\"", "n": {}}', '{"sh": "echo }\\n{ 🌍"}']
CALLS = tuple(ToolCall("f", arguments) for arguments in ARGUMENTS)
END = FinishReason.TOOL_CALLS


class GetWeather(BaseModel):
    """Tell the weather."""

    city: str


def named(name):
    return {"type": "function", "function": {"name": name}}


def allowed(mode, *names):
    tools = [named(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.fixture
def sent(client, serving):
    """The request that reaches the serving."""

    async def sent(**options):
        await client.chat.completions.create(**ASK, **options)
        return serving.generations[-1].request

    return sent


@pytest.mark.parametrize(
    ("choice", "rules"),
    [
        ("none", OutputRules("none")),
        ("auto", OutputRules("auto")),
        ("required", OutputRules("required")),
        (named("b"), OutputRules("required", ("b",), parallel_tool_calls=False)),
        (allowed("auto", "c", "a"), OutputRules("auto", ("c", "a"))),
        (allowed("required", "b"), OutputRules("required", ("b",))),
    ],
)
async def test_every_tool_choice_becomes_a_rule_and_no_other_prompt(sent, choice, rules):
    plain = await sent(tools=TOOLS)
    chosen = await sent(tools=TOOLS, tool_choice=choice)
    assert chosen.output == rules
    assert chosen.prompt == plain.prompt
    assert plain.output == OutputRules("auto")


async def test_one_call_at_a_time_can_be_asked_for(sent):
    request = await sent(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert request.output == OutputRules("required", parallel_tool_calls=False)


@pytest.mark.parametrize("choice", [None, "none", "auto"])
async def test_without_tools_there_is_nothing_to_choose(sent, choice):
    request = await sent(tools=[], **({"tool_choice": choice} if choice else {}))
    assert request.prompt.tools == ()
    assert request.output.allowed_tools is None


async def test_definitions_keep_their_order_and_drop_what_is_not_given(sent):
    schema = {"type": "object", "properties": {"z": {}, "a": {"type": "string"}}, "required": ["z"]}
    functions = [
        {"name": "zeta", "parameters": schema, "strict": True, "description": "last"},
        {"name": "alpha.v-2", "parameters": None},
        {"name": "beta", "parameters": {}, "description": ""},
    ]
    marker = {"type": "ephemeral"}
    tools = [{"type": "function", "function": f, "cache_control": marker} for f in functions]
    prompt = (await sent(tools=tools)).prompt
    expected = [
        {"name": "zeta", "description": "last", "parameters": schema},
        {"name": "alpha.v-2", "parameters": EMPTY},
        {"name": "beta", "description": "", "parameters": EMPTY},
    ]
    assert json.dumps([tool["function"] for tool in prompt.tools]) == json.dumps(expected)
    assert {tool["type"] for tool in prompt.tools} == {"function"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": "search"}, "tools"),
        ({"tools": [*TOOLS, {"type": "custom", "custom": {"name": "d"}}]}, "tools[3].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [named("")]}, "tools[0].function.name"),
        ({"tools": [named("a b")]}, "tools[0].function.name"),
        ({"tools": [named("x" * 65)]}, "tools[0].function.name"),
        ({"tools": [*TOOLS, named("b")]}, "tools[3].function.name"),
        ({"tools": [named(f"f{i}") for i in range(129)]}, "tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
                ]
            },
            "tools[0].function.parameters",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": named("a")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": named("d")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {}}}, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": allowed("auto", "a", "d")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
        ({"tools": TOOLS, "tool_choice": allowed("none", "a")}, "tool_choice.allowed_tools.mode"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
)
async def test_what_cannot_be_meant_is_refused_by_name(http, body, param):
    async with http.post("/v1/chat/completions", json={**ASK, **body}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == param


async def test_a_whole_answer_with_calls_has_no_content(http, client, serving):
    serving.script.deltas = (Delta(0, calls=CALLS), Delta(0, finish_reason=END))
    answer = await client.chat.completions.create(**ASK, tools=TOOLS)
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    assert [call.function.arguments for call in choice.message.tool_calls] == ARGUMENTS
    ids = {call.id for call in choice.message.tool_calls}
    assert len(ids) == 2
    assert all(len(i) == 29 and i.startswith("call_") for i in ids)
    async with http.post("/v1/chat/completions", json=ASK) as response:
        ChatCompletion.model_validate(await response.json(), strict=True)


async def test_text_before_calls_stays(client, serving):
    serving.script.deltas = (
        Delta(0, "Let me see."),
        Delta(0, calls=CALLS[:1], finish_reason=END),
    )
    message = (await client.chat.completions.create(**ASK, tools=TOOLS)).choices[0].message
    assert (message.content, len(message.tool_calls)) == ("Let me see.", 1)


async def test_streamed_calls_come_as_name_then_arguments(chunks_of, serving):
    serving.script.deltas = (
        Delta(0, calls=CALLS[:1]),
        Delta(1, "two", calls=CALLS[:1]),
        Delta(0, calls=CALLS[1:], finish_reason=END),
        Delta(1, finish_reason=END),
    )
    chunks = await chunks_of({**ASK, "n": 2})
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    first = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == 0]
    assert first[0]["delta"] == {"role": "assistant", "content": None}
    assert first[-1]["delta"] == {}
    for number, (head, rest) in enumerate([first[1:3], first[3:5]]):
        (opening,) = head["delta"]["tool_calls"]
        assert opening.pop("id").startswith("call_")
        function = {"name": "f", "arguments": ""}
        assert opening == {"index": number, "type": "function", "function": function}
        tail = {"index": number, "function": {"arguments": ARGUMENTS[number]}}
        assert rest["delta"] == {"tool_calls": [tail]}
    second = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"][0]["index"] == 1]
    assert [delta.get("content") for delta in second] == ["", "two", None, None, None]
    assert second[2]["tool_calls"][0]["index"] == 0


async def test_the_tokens_of_a_call_keep_their_log_probabilities(client, serving):
    tokens = tuple(TextLogprob(text, text.encode(), -0.5) for text in ("<tool", "_call>"))
    serving.script.deltas = (Delta(0, "", tokens[:1]), Delta(0, "", tokens[1:], END, CALLS[:1]))
    options = {"tools": TOOLS, "logprobs": True}
    whole = (await client.chat.completions.create(**ASK, **options)).choices[0]
    stream = await client.chat.completions.create(**ASK, **options, stream=True)
    parts = [c.choices[0].logprobs async for c in stream if c.choices[0].logprobs]
    assert [entry for part in parts for entry in part.content] == whole.logprobs.content
    assert [entry.token for entry in whole.logprobs.content] == ["<tool", "_call>"]


CITY = (ToolCall("GetWeather", '{"city": "Łódź"}'),)


def check_parsed(completion, serving):
    (call,) = completion.choices[0].message.tool_calls
    assert call.function.parsed_arguments == GetWeather(city="Łódź")
    function = serving.generations[-1].request.prompt.tools[0]["function"]
    assert (function["name"], function["description"]) == ("GetWeather", "Tell the weather.")
    assert function["parameters"]["required"] == ["city"]


@pytest.mark.parametrize("pieces", [(), ("Look",)])
async def test_the_clients_helpers_parse_calls(client, serving, pieces):
    said = [Delta(0, piece) for piece in pieces]
    serving.script.deltas = (*said, Delta(0, calls=CITY, finish_reason=END))
    tools = [pydantic_function_tool(GetWeather)]
    check_parsed(await client.chat.completions.parse(**ASK, tools=tools), serving)
    async with client.chat.completions.stream(**ASK, tools=tools) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_completion()
    check_parsed(final, serving)
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [(event.name, event.arguments) for event in done] == [(CITY[0].name, CITY[0].arguments)]
    assert final.choices[0].message.content == ("".join(pieces) or None)


async def test_the_synchronous_helpers_do_too(url, serving):
    serving.script.deltas = (Delta(0, calls=CITY, finish_reason=END),)
    tools = [pydantic_function_tool(GetWeather)]

    def ask():
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            yield client.chat.completions.parse(**ASK, tools=tools)
            with client.chat.completions.stream(**ASK, tools=tools) as stream:
                yield stream.get_final_completion()

    for completion in await asyncio.to_thread(lambda: list(ask())):
        check_parsed(completion, serving)
