"""What is sent: the same bytes for the same thing, so that a prefix cache finds it again."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from itertools import permutations
from typing import Annotated, Literal

import pytest
from graphs import SYSTEM
from langchain.agents import create_agent
from langchain_core.exceptions import ModelInvalidRequestError, OutputParserException
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import StructuredTool, tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_ragcache.calls import Calls
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

BLOCK = 16
QUESTION = "What will I see in Oslo, Rome and Cairo?"
CITIES = ["Oslo", "Rome", "Cairo"]
MARKER = {"type": "ephemeral", "ttl": "1h"}


@pytest.fixture
def sent(monkeypatch):
    """The bodies of all calls, as bytes would be."""
    bodies = []
    complete = Calls.complete

    async def recorded(self, body):
        bodies.append(json.dumps(body))
        return await complete(self, body)

    monkeypatch.setattr(Calls, "complete", recorded)
    return bodies


def read(message):
    return message.usage_metadata["input_token_details"]["cache_read"]


def all_blocks(message):
    """What a prompt that is there already can hit: whole blocks, but never its last token."""
    return (message.usage_metadata["input_tokens"] - 1) // BLOCK * BLOCK


def written(*calls):
    """Calls as the model writes them."""
    listed = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return f"<tool_call>{json.dumps(listed)}</tool_call>"


# Tools.


@tool
def look(place: str) -> str:
    """Look at a place."""
    return place


@tool
def ask(who: str) -> str:
    """Ask somebody."""
    return who


DESCRIPTION = "Look up the weather."


class AsModel(BaseModel):
    """Look up the weather."""

    city: str = Field(description="The city.")
    days: int = Field(3, description="How many.")
    unit: Literal["C", "F"] = Field("C", description="Of what.")


class AsDict(TypedDict):
    """Look up the weather."""

    city: Annotated[str, ..., "The city."]
    days: Annotated[int, 3, "How many."]
    unit: Annotated[Literal["C", "F"], "C", "Of what."]


def as_function(city: str, days: int = 3, unit: Literal["C", "F"] = "C") -> str:
    """Look up the weather.

    Args:
        city: The city.
        days: How many.
        unit: Of what.
    """
    return f"{city} {days} {unit}"


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "The city."},
        "days": {"type": "integer", "description": "How many.", "default": 3},
        "unit": {"type": "string", "enum": ["C", "F"], "description": "Of what.", "default": "C"},
    },
    "required": ["city"],
}
FORMS = {
    "model": type("weather", (AsModel,), {"__doc__": DESCRIPTION}),
    "typed dict": AsDict,
    "function": as_function,
    "tool": StructuredTool.from_function(as_function, name="weather", parse_docstring=True),
    "tool of a model": StructuredTool.from_function(
        as_function, name="weather", description=DESCRIPTION, args_schema=AsModel
    ),
    "openai": {
        "type": "function",
        "function": {"name": "weather", "description": DESCRIPTION, "parameters": SCHEMA},
    },
    "anthropic": {"name": "weather", "description": DESCRIPTION, "input_schema": SCHEMA},
}
AsDict.__name__ = as_function.__name__ = "weather"


def test_a_tool_is_the_same_in_every_form(model, sent):
    answers = [model.bind_tools([look, form]).invoke(QUESTION) for form in FORMS.values()]
    assert len(sent) == len(FORMS) == 7
    assert set(sent) == {sent[0]}
    assert [read(answer) for answer in answers] == [0] + [all_blocks(answers[0])] * 6
    (sent_tool,) = (
        each for each in json.loads(sent[0])["tools"] if each["function"]["name"] == "weather"
    )
    assert list(sent_tool["function"]["parameters"]["properties"]) == ["city", "days", "unit"]


def test_tools_are_sent_in_one_order(model, sent):
    tools = [look, ask, FORMS["openai"]]
    answers = [model.bind_tools(order).invoke(QUESTION) for order in permutations(tools)]
    assert set(sent) == {sent[0]}
    assert [read(answer) for answer in answers] == [0] + [all_blocks(answers[0])] * 5


def test_tools_are_sent_as_they_are_given_where_that_is_asked_for(chat, sent):
    model = chat(stable_tool_order=False, max_tokens=20)
    for order in ([look, ask], [ask, look]):
        model.bind_tools(order).invoke(QUESTION)
    names = [[each["function"]["name"] for each in json.loads(body)["tools"]] for body in sent]
    assert names == [["look", "ask"], ["ask", "look"]]


NESTED = {
    "type": "object",
    "properties": {
        "properties": {"type": "object", "properties": {"z": {"type": "null"}, "a": {}}},
        "enum": {"enum": [{"z": 1, "a": 2}], "default": {"z": 1, "a": 2}},
        "any": {"anyOf": [{"type": "string", "description": "x"}, {"type": "null"}]},
    },
    "$defs": {"place": {"type": "string", "description": "x"}},
}
SORTED = """{
    "$defs": {"place": {"description": "x", "type": "string"}},
    "properties": {
        "properties": {"properties": {"z": {"type": "null"}, "a": {}}, "type": "object"},
        "enum": {"default": {"z": 1, "a": 2}, "enum": [{"z": 1, "a": 2}]},
        "any": {"anyOf": [{"description": "x", "type": "string"}, {"type": "null"}]}
    },
    "type": "object"
}"""


def test_only_what_has_no_order_is_sorted(model):
    """Arguments are written in the order of `properties`, and values are the user's own."""
    given = {"name": "f", "description": "F.", "parameters": NESTED}
    before = json.dumps(given)
    (wire,) = model.bind_tools([given]).kwargs["tools"]
    assert json.dumps(wire["function"]["parameters"]) == json.dumps(json.loads(SORTED))
    assert json.dumps(given) == before


PROCESS = """
import json, sys
from langchain_core.tools import StructuredTool
from langchain_ragcache import ChatRagcache

def look(place: str, days: int = 3) -> str: ...

tools = {
    name: StructuredTool.from_function(look, name=name, description="Look at a place.")
    for name in ("look", "ask", "find", "fetch", "read", "open", "weather", "map")
}
order = list(set(tools))
model = ChatRagcache(base_url=sys.argv[1]).bind_tools([tools[name] for name in order])
usage = model.invoke("How is the weather in Oslo?").usage_metadata
print(json.dumps({"order": order, "tools": model.kwargs["tools"], "usage": usage}))
"""


def test_processes_send_the_same_whatever_their_hash_seed(gateway):
    def run(seed):
        command = [sys.executable, "-c", PROCESS, gateway.url]
        environment = {"PYTHONHASHSEED": str(seed)}
        return json.loads(subprocess.check_output(command, env=environment, timeout=60))

    first, second = map(run, (1, 2))
    assert first["order"] != second["order"]
    assert json.dumps(first["tools"]) == json.dumps(second["tools"])
    details = second["usage"]["input_token_details"]
    assert details["cache_read"] == (second["usage"]["input_tokens"] - 1) // BLOCK * BLOCK > 300


# Markers.


def as_anthropic(each):
    function = convert_to_openai_tool(each)["function"]
    return {"input_schema": function.pop("parameters"), **function}


def marked(**fields):
    return {"type": "text", "text": QUESTION, **fields}


MARKED = {
    "a part": {"messages": [HumanMessage([marked(cache_control=MARKER)])]},
    "a standard part": {
        "messages": [HumanMessage([marked(extras={"cache_control": MARKER})])],
    },
    "a part, as OpenAI has it": {
        "messages": [
            HumanMessage([marked(prompt_cache_breakpoint={"mode": "explicit", "ttl": "12h"})])
        ],
        "fields": {"prompt_cache_options": {"mode": "explicit"}},
    },
    "a message": {
        "messages": [HumanMessage(QUESTION, additional_kwargs={"cache_control": MARKER})],
    },
    "a system message": {
        "system": SystemMessage([{"type": "text", "text": SYSTEM, "cache_control": MARKER}]),
    },
    "a tool": {"tools": [ask, look.model_copy(update={"extras": {"cache_control": MARKER}})]},
    "a definition of a tool": {
        "tools": [ask, {**convert_to_openai_tool(look), "cache_control": MARKER}],
    },
    "a definition, as Anthropic has it": {
        "tools": [ask, {**as_anthropic(look), "cache_control": MARKER}],
    },
    "the request": {"fields": {"cache_control": MARKER}},
    "the model": {"options": {"cache_control": MARKER}},
}


@pytest.mark.parametrize("case", MARKED.values(), ids=MARKED)
def test_markers_are_taken_everywhere_and_never_change_the_prompt(chat, gateway, case):
    plain = {
        "messages": [HumanMessage(QUESTION)],
        "system": SystemMessage(SYSTEM),
        "tools": [ask, look],
        "options": {},
        "fields": {},
    }

    def invoke(messages, system, tools, options, fields):
        model = chat(max_tokens=200, **options).bind_tools(tools)
        return model.invoke([system, *messages], **fields)

    answer = invoke(**plain)
    assert gateway.serving.stats().retained == 0
    again = invoke(**{**plain, **case})
    assert again.usage_metadata["input_tokens"] == answer.usage_metadata["input_tokens"]
    assert read(again) == all_blocks(again) > 250
    assert gateway.serving.stats().retained > 0


# Results of tools.

CALLS = written(*(("weather", {"city": city}) for city in CITIES))


@tool
async def weather(city: str) -> str:
    """Look up the weather in a city."""
    await asyncio.sleep(random.random() / 50)
    return f"{len(city)} degrees in {city}"


@pytest.fixture
def parallel(gateway):
    gateway.script.rules = [("Oslo, Rome and Cairo", CALLS)]


def contents(body):
    return [each["content"] for each in json.loads(body)["messages"] if each["role"] == "tool"]


IN_ORDER = ["4 degrees in Oslo", "4 degrees in Rome", "5 degrees in Cairo"]


async def test_results_of_parallel_tools_are_sent_in_the_order_of_the_calls(model, parallel, sent):
    agent = create_agent(model, [weather], system_prompt=SYSTEM)
    for run in range(5):
        question = {"messages": [("user", f"{run}: {QUESTION}")]}
        messages = (await agent.ainvoke(question, {"recursion_limit": 8}))["messages"]
        assert contents(sent[-1]) == IN_ORDER
        replayed = await model.bind_tools([weather]).ainvoke(
            [SystemMessage(SYSTEM), *messages[:-1]]
        )
        assert read(replayed) == all_blocks(replayed) > read(messages[1])


async def test_results_that_were_collected_as_they_came_are_sent_in_the_order_of_the_calls(
    model, parallel, sent
):
    bound = model.bind_tools([weather])
    question = [SystemMessage(SYSTEM), HumanMessage(QUESTION)]
    call = await bound.ainvoke(question)
    seen = set()
    for order in permutations(call.tool_calls):
        results = [
            ToolMessage(
                f"{len(each['args']['city'])} degrees in {each['args']['city']}",
                tool_call_id=each["id"],
            )
            for each in order
        ]
        answer = await bound.ainvoke([*question, call, *results])
        assert contents(sent[-1]) == IN_ORDER
        seen.add(sent[-1])
    assert len(seen) == 1
    assert read(answer) == all_blocks(answer)


def history(*results):
    calls = [{"name": "weather", "args": {"city": city}, "id": f"call_{city}"} for city in CITIES]
    answers = [ToolMessage(f"fine in {city}", tool_call_id=f"call_{city}") for city in results]
    return [HumanMessage(QUESTION), AIMessage("", tool_calls=calls), *answers, HumanMessage("And?")]


@pytest.mark.parametrize(
    ("results", "named"),
    [
        (["Oslo", "Rome", "Rome", "Cairo"], "call_Rome"),
        (["Oslo", "Rome", "Cairo", "Paris"], "call_Paris"),
        (["Oslo", "Cairo"], "call_Rome"),
    ],
    ids=["twice", "unknown", "missing"],
)
def test_results_that_do_not_fit_the_calls_are_refused_by_their_id(model, results, named):
    with pytest.raises(ModelInvalidRequestError, match=named):
        model.invoke(history(*results))


def test_results_that_fit_the_calls_are_taken(model):
    assert model.invoke(history("Cairo", "Oslo", "Rome")).text


# Structured output.


class Forecast(BaseModel):
    """The weather in a city."""

    city: str
    degrees: int


class Other(BaseModel):
    """Something else."""

    words: list[str]


FORECAST = Forecast(city="Oslo", degrees=4)
SAID = {
    "json_schema": json.dumps(FORECAST.model_dump()),
    "json_mode": json.dumps(FORECAST.model_dump()),
    "function_calling": written(("Forecast", FORECAST.model_dump())),
}


@pytest.mark.parametrize("method", SAID)
async def test_structured_output(model, gateway, method):
    gateway.script.text = SAID[method]
    structured = model.with_structured_output(Forecast, method=method)
    assert structured.invoke(QUESTION) == await structured.ainvoke(QUESTION) == FORECAST
    assert list(structured.stream(QUESTION))[-1] == FORECAST
    assert [each async for each in structured.astream(QUESTION)][-1] == FORECAST
    raw = model.with_structured_output(Forecast, method=method, include_raw=True).invoke(QUESTION)
    assert (raw["parsed"], raw["parsing_error"]) == (FORECAST, None)
    assert raw["raw"].usage_metadata["output_tokens"] > 5


@pytest.mark.parametrize("method", SAID)
@pytest.mark.parametrize("schema", [Forecast, Forecast.model_json_schema()], ids=["object", "dict"])
async def test_structured_output_that_is_cut_off_is_an_error(model, gateway, method, schema):
    gateway.script.text = SAID[method]
    bound = model.with_structured_output(schema, method=method, max_tokens=8)
    with pytest.raises(OutputParserException, match="max_tokens"):
        bound.invoke(QUESTION)
    with pytest.raises(OutputParserException, match="max_tokens"):
        await bound.ainvoke(QUESTION)
    with pytest.raises(OutputParserException, match="max_tokens"):
        list(bound.stream(QUESTION))
    raw = model.with_structured_output(schema, method=method, include_raw=True, max_tokens=8)
    result = raw.invoke(QUESTION)
    assert result["parsed"] is None
    assert "max_tokens" in str(result["parsing_error"])


def test_a_schema_that_decoding_enforces_is_not_in_the_prompt(model):
    plain = model.invoke([SystemMessage(SYSTEM), HumanMessage(QUESTION)])
    for schema in (Forecast, Other):
        answers = model.with_structured_output(schema, include_raw=True)
        raw = answers.invoke([SystemMessage(SYSTEM), HumanMessage(QUESTION)])["raw"]
        assert raw.usage_metadata["input_tokens"] == plain.usage_metadata["input_tokens"]
        assert read(raw) == all_blocks(raw) > 100


def test_a_choice_of_tools_is_not_in_the_prompt(model):
    messages = [SystemMessage(SYSTEM), HumanMessage(QUESTION)]
    choices = [None, "auto", "any", "look", "none"]
    answers = [model.bind_tools([look, ask], tool_choice=each).invoke(messages) for each in choices]
    assert [read(answer) for answer in answers] == [0] + [all_blocks(answers[0])] * 4
    assert [call["name"] for call in answers[3].tool_calls] == ["look"]
    assert answers[4].tool_calls == []
