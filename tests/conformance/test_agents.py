"""LangChain's agents over the whole gateway: tools, structured output, prompt caching."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_anthropic import ChatAnthropic
from langchain_anthropic.middleware import AnthropicPromptCachingMiddleware
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

# Warnings of the libraries about themselves.
pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")

BLOCK = 16
SYSTEM = "You answer from the passages given, and say so when they do not tell. " * 8
LIMIT = {"recursion_limit": 12}
CITIES = ("Oslo", "Rome", "Cairo")


class Forecast(BaseModel):
    """The weather in a city."""

    city: str
    degrees: int


@tool
def weather(city: str) -> str:
    """Look up the weather in a city."""
    return f"{len(city)} degrees in {city}"


def written(name, **arguments):
    """A call as the model writes it."""
    return f'<tool_call>[{{"name": "{name}", "arguments": {json.dumps(arguments)}}}]</tool_call>'


OPTIONS = {"model": "tiny", "api_key": "none", "temperature": 0, "max_retries": 0}


@pytest.fixture
def openai(gateway):
    return ChatOpenAI(base_url=f"{gateway.url}/v1", stream_usage=True, max_tokens=200, **OPTIONS)


@pytest.fixture
def anthropic(gateway):
    return ChatAnthropic(base_url=gateway.url, max_tokens=200, **OPTIONS)


@pytest.fixture(params=["openai", "anthropic"])
def model(request):
    return request.getfixturevalue(request.param)


def details(message):
    return message.usage_metadata["input_token_details"]


def converse(agent):
    """Three turns of a user, each with a call; yields what each turn adds."""
    messages = []
    for city in CITIES:
        messages.append({"role": "user", "content": f"How is the weather in {city}?"})
        result = agent.invoke({"messages": messages}, LIMIT)["messages"]
        yield result[len(messages) :]
        messages = result


@pytest.fixture
def script(gateway):
    gateway.script.rules = [
        (f"in {city}", written("weather", city=city)) for city in reversed(CITIES)
    ]
    return gateway.script


def test_an_agent_calls_its_tool_in_every_turn_and_hits_the_turn_before(model, script):
    agent = create_agent(model, [weather], system_prompt=SYSTEM)
    before = 0
    for city, (call, result, answer) in zip(CITIES, converse(agent), strict=True):
        assert [each["args"] for each in call.tool_calls] == [{"city": city}]
        assert isinstance(result, ToolMessage)
        assert result.content == f"{len(city)} degrees in {city}"
        assert answer.text == script.text
        for message in (call, answer):
            assert details(message)["cache_read"] >= before // BLOCK * BLOCK
            before = message.usage_metadata["input_tokens"]
    assert before > 300


async def test_an_agent_streams(model, script):
    agent = create_agent(model, [weather], system_prompt=SYSTEM)
    question = {"messages": [{"role": "user", "content": "How is the weather in Oslo?"}]}
    texts, calls = [], []
    async for chunk, _ in agent.astream(question, LIMIT, stream_mode="messages"):
        if isinstance(chunk, AIMessage):
            texts.append(chunk.text)
            calls += [each["args"] for each in chunk.tool_call_chunks]
    assert "".join(texts) == script.text
    assert json.loads("".join(filter(None, calls))) == {"city": "Oslo"}


def test_the_prompt_caching_middleware_reads_what_the_turn_before_wrote(anthropic, gateway, script):
    caching = AnthropicPromptCachingMiddleware(ttl="1h")
    agent = create_agent(anthropic, [weather], system_prompt=SYSTEM, middleware=[caching])
    calls = [message for turn in converse(agent) for message in turn if message.type == "ai"]
    written_first = details(calls[0])["ephemeral_1h_input_tokens"]
    assert written_first == calls[0].usage_metadata["input_tokens"] // BLOCK * BLOCK
    assert details(calls[0])["cache_read"] == 0
    for previous, message in pairwise(calls):
        prompt, computed = (
            previous.usage_metadata[f"{kind}_tokens"] for kind in ("input", "total")
        )
        read = details(message)["cache_read"]
        assert 0 < prompt // BLOCK * BLOCK <= read <= (computed - 1) // BLOCK * BLOCK
        assert read % BLOCK == 0
    assert gateway.serving.stats().retained > 0


FORECAST = {"city": "Oslo", "degrees": 18}


@pytest.mark.parametrize("strategy", [ProviderStrategy, ToolStrategy])
def test_structured_output(model, gateway, strategy):
    said = json.dumps(FORECAST) if strategy is ProviderStrategy else written("Forecast", **FORECAST)
    gateway.script.text = said
    gateway.script.rules = [("in Oslo", written("weather", city="Oslo"))]
    agent = create_agent(model, [weather], response_format=strategy(Forecast))
    question = {"messages": [{"role": "user", "content": "How is the weather in Oslo?"}]}
    result = agent.invoke(question, LIMIT)
    assert result["structured_response"] == Forecast(**FORECAST)
    assert [call["name"] for call in result["messages"][1].tool_calls] == ["weather"]
