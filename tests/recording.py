"""Agents over a chat model that keeps its requests, for tests of middleware."""

from __future__ import annotations

import warnings

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langchain_ragcache.chat_models import ChatRagcache
from langchain_ragcache.middleware import RagcachePromptCachingMiddleware
from pydantic import Field

SYSTEM = "You answer from the passages given."


class Recording(ChatRagcache):
    """Keeps the request of each call, and answers with the script."""

    model: str = "tiny"
    base_url: str | None = "http://127.0.0.1:9/v1"  # never called
    script: list[AIMessage] = Field(default_factory=list)
    calls: list[dict] = Field(default_factory=list)

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        self.calls.append(self._body(messages, stop, kwargs))
        answer = self.script.pop(0) if self.script else AIMessage("Done.")
        return ChatResult(generations=[ChatGeneration(message=answer)])

    async def _agenerate(self, messages, stop=None, run_manager=None, **kwargs):
        return self._generate(messages, stop, run_manager, **kwargs)


@tool
def weather(city: str) -> str:
    """Look up the weather in a city."""
    return f"sunny in {city}"


@tool
def archive(query: str) -> str:
    """Search the archive."""
    return f"nothing about {query}"


TOOLS = [weather, archive]
DICT_TOOL = {
    "type": "function",
    "function": {
        "name": "map",
        "description": "Show a map.",
        "parameters": {"type": "object", "properties": {}},
    },
}
WEATHER = {"name": "weather", "args": {"city": "Oslo"}, "id": "c1", "type": "tool_call"}


@pytest.fixture
def model():
    return Recording()


@pytest.fixture
def told():
    """The messages of the warnings so far, in a list."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lambda: [str(one.message) for one in caught if issubclass(one.category, UserWarning)]


def agent_of(model, *middleware, tools=TOOLS, **options):
    middleware = middleware or (RagcachePromptCachingMiddleware(),)
    return create_agent(model, tools, **{"system_prompt": SYSTEM, **options}, middleware=middleware)


def ask(agent, thread=None, text="Hello?"):
    config = {"recursion_limit": 12}
    if thread is not None:
        config["configurable"] = {"thread_id": thread}
    return agent.invoke({"messages": [HumanMessage(text)]}, config)


def names(call):
    return [tool["function"]["name"] for tool in call["tools"]]


def markers(call):
    """The cache markers of a call: those of the tools, those of the system blocks."""
    system = call["messages"][0]["content"]
    blocks = system if isinstance(system, list) else []
    return (
        [tool.get("cache_control") for tool in call["tools"]],
        [block.get("cache_control") for block in blocks],
    )
