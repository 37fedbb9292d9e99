"""LangChain's messages as the messages of a chat completion."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping, Sequence
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

from langchain_ragcache.tool_results import call_blocks, in_call_order

Json = dict[str, Any]

_ROLES: dict[type[BaseMessage], str] = {
    AIMessage: "assistant",
    FunctionMessage: "function",
    HumanMessage: "user",
    SystemMessage: "system",
    ToolMessage: "tool",
}
_MARKERS = ("cache_control", "prompt_cache_breakpoint")

_NEEDED = {  # fields of the blocks that are read here
    "text": ("text",),
    "tool_call": ("id", "name", "args"),
    "tool_result": ("tool_use_id",),
    "tool_use": ("id", "name", "input"),
}

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

    Raises ValueError for a kind of message that no chat template has a place for, and for a block
    that lacks one of its fields, with its place.
    """
    for number, message in enumerate(messages):
        _check(message.content, f"messages[{number}].content", _stated(message))
    return [wire for message in in_call_order(messages) for wire in _wire(message)]


def _check(content: Any, place: str, stated: Container[str | None] = ()) -> None:
    """Raise ValueError for what is no content."""
    if not isinstance(content, str | list):
        raise ValueError(f"{place}: is neither a text nor a list of blocks")
    for number, block in enumerate([] if isinstance(content, str) else content):
        _check_block(block, f"{place}[{number}]", stated)


def _check_block(block: Any, place: str, stated: Container[str | None]) -> None:
    if not isinstance(block, str | Mapping):
        raise ValueError(f"{place}: is neither a text nor a block")
    if isinstance(block, str) or ("id" in block and block["id"] in stated):  # that is not read
        return
    kind = _kind(block)
    if missing := [name for name in _NEEDED.get(kind, ()) if name not in block]:
        raise ValueError(f"{place}: a {kind} block needs {', '.join(missing)}")
    if kind == "tool_result":
        _check(block.get("content") or "", f"{place}.content")


def _wire(message: BaseMessage) -> Iterator[Json]:
    content, results = message.content, []
    if isinstance(message, HumanMessage) and isinstance(content, list):
        blocks = (block for block in content if isinstance(block, dict))
        results = [block for block in blocks if _kind(block) == "tool_result"]
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
    stated = _stated(message)
    for block in call_blocks(message):
        if block["id"] not in stated:
            arguments = block["input" if _kind(block) == "tool_use" else "args"]
            yield _call(block["id"], block["name"], json.dumps(arguments, ensure_ascii=False))


def _stated(message: BaseMessage) -> set[str | None]:
    """The ids of the calls that a message has not only in its content."""
    if not isinstance(message, AIMessage):
        return set()
    return {call["id"] for call in (*message.tool_calls, *message.invalid_tool_calls)}


def _call(call_id: str | None, name: str | None, arguments: str) -> Json:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
