"""LangChain's messages as the messages of a chat completion."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from langchain_ragcache.tool_results import in_call_order

Json = dict[str, Any]

_ROLES: dict[type[BaseMessage], str] = {
    AIMessage: "assistant",
    FunctionMessage: "function",
    HumanMessage: "user",
    SystemMessage: "system",
    ToolMessage: "tool",
}
_MARKERS = ("cache_control", "prompt_cache_breakpoint")

# What `AIMessage.tool_calls` says already, and thoughts, which no later turn gets to see.
_NOT_CONTENT = {
    "function_call",
    "invalid_tool_call",
    "reasoning",
    "redacted_thinking",
    "thinking",
    "tool_call",
    "tool_call_chunk",
    "tool_use",
}


def wire_messages(messages: Sequence[BaseMessage]) -> list[Json]:
    """The request's `messages`; results of tools stand in the order of their calls.

    Raises ValueError for a kind of message that no chat template has a place for.
    """
    return [wire for message in in_call_order(messages) for wire in _wire(message)]


def _wire(message: BaseMessage) -> Iterator[Json]:
    content, results = message.content, []
    if isinstance(message, HumanMessage) and isinstance(content, list):
        results = _blocks(content, "tool_result")
        content = [block for block in content if block not in results]
    for block in results:  # Anthropic's place for them is the user's turn
        yield {
            "role": "tool",
            "tool_call_id": block["tool_use_id"],
            "content": _content(block.get("content") or ""),
            **_marked(block),
        }
    if content or not results:
        yield _whole(message, content)


def _whole(message: BaseMessage, content: str | list[Any]) -> Json:
    wire: Json = {"role": _role(message), "content": _content(content)}
    if message.name:
        wire["name"] = message.name
    if isinstance(message, ToolMessage):
        wire["tool_call_id"] = message.tool_call_id
    if isinstance(message, AIMessage) and (calls := list(_calls(message))):
        wire["tool_calls"] = calls
        wire["content"] = wire["content"] or None
    return wire | _marked(message.additional_kwargs)


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    if message.additional_kwargs.get("__openai_role__") == "developer":
        return "developer"
    for kind, role in _ROLES.items():
        if isinstance(message, kind):
            return role
    raise ValueError(f"a message of type {type(message).__name__} cannot be sent to a model")


def _content(content: str | list[Any]) -> str | list[Json]:
    if isinstance(content, str):
        return content
    return [_part(block) for block in content if _kind(block) not in _NOT_CONTENT]


def _part(block: str | Mapping[str, Any]) -> Json:
    """Text with its cache markers; other kinds go as they are, to be refused by name."""
    if isinstance(block, str):
        return {"type": "text", "text": block}
    if _kind(block) != "text":
        return dict(block)
    return {"type": "text", "text": block["text"], **_marked(block)}


def _marked(fields: Mapping[str, Any]) -> Json:
    extras = fields.get("extras") or {}  # where LangChain's standard blocks keep such fields
    found = {name: fields.get(name) or extras.get(name) for name in _MARKERS}
    return {name: marker for name, marker in found.items() if marker}


def _kind(block: str | Mapping[str, Any]) -> str:
    return "text" if isinstance(block, str) else str(block.get("type"))


def _calls(message: AIMessage) -> Iterator[Json]:
    for call in message.tool_calls:
        yield _call(call["id"], call["name"], json.dumps(call["args"], ensure_ascii=False))
    for invalid in message.invalid_tool_calls:
        yield _call(invalid["id"], invalid["name"], invalid["args"] or "")
    known = {call["id"] for call in (*message.tool_calls, *message.invalid_tool_calls)}
    for block in _blocks(message.content, "tool_use"):
        if block["id"] not in known:
            arguments = json.dumps(block["input"], ensure_ascii=False)
            yield _call(block["id"], block["name"], arguments)


def _blocks(content: str | Iterable[Any], kind: str) -> list[Mapping[str, Any]]:
    blocks: Iterable[Any] = () if isinstance(content, str) else content
    return [block for block in blocks if _kind(block) == kind]


def _call(call_id: str | None, name: str | None, arguments: str) -> Json:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
