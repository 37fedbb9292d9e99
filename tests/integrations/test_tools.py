"""What can be given as a tool, and what cannot."""

from __future__ import annotations

import pytest
from langchain.agents import create_agent
from langchain_core.tools import Tool
from langchain_ragcache.middleware import RagcachePromptCachingMiddleware
from langchain_ragcache.tools import wire_tools

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {
    "type": "function",
    "function": {"name": "weather", "description": "Look.", "parameters": SCHEMA},
}
DEFINITIONS = {
    "OpenAI": FUNCTION,
    "OpenAI, only the function": FUNCTION["function"],
    "Anthropic": {"name": "weather", "description": "Look.", "input_schema": SCHEMA},
    "Anthropic, with a type": {
        "type": "custom",
        "name": "weather",
        "description": "Look.",
        "input_schema": SCHEMA,
    },
}
FOREIGN = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
    {"type": "computer_20250124", "name": "computer", "display_width_px": 1024},
    {"type": "web_search_preview"},
    {"type": "mcp", "server_label": "x", "server_url": "https://example.com"},
    {"type": "custom", "name": "grammar", "format": {"type": "text"}},
    Tool("grammar", print, "Print.", metadata={"type": "custom_tool"}),
]


def wire(tool):
    return wire_tools([tool], strict=None, stable_order=True)


@pytest.mark.parametrize("definition", DEFINITIONS.values(), ids=DEFINITIONS)
def test_definitions_of_functions_are_taken(definition):
    [tool] = wire(definition)
    assert tool == FUNCTION


def test_a_json_schema_with_a_title_is_a_function():
    [tool] = wire({"title": "weather", "description": "Look.", **SCHEMA})
    assert tool["function"]["name"] == "weather"
    assert tool["function"]["parameters"]["properties"] == SCHEMA["properties"]


@pytest.mark.parametrize("tool", FOREIGN, ids=lambda tool: str(getattr(tool, "name", tool)))
def test_tools_of_some_provider_are_refused_by_their_type(chat, tool):
    kind = "custom" if isinstance(tool, Tool) else tool["type"]
    with pytest.raises(ValueError, match=f"^tools: only functions .*'type': '{kind}'"):
        wire(tool)
    with pytest.raises(ValueError, match=f"'type': '{kind}'"):
        chat().bind_tools([FUNCTION, tool])


def test_so_they_are_in_agents(model):
    middleware = [RagcachePromptCachingMiddleware()]
    agent = create_agent(model, [FUNCTION, FOREIGN[0]], middleware=middleware)
    with pytest.raises(ValueError, match=r"only functions .*'type': 'web_search_20250305'"):
        agent.invoke({"messages": "Hi"})
