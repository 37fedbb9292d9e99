"""Tool results in the order of their calls.

Parallel tools end in any order, and whoever collects their results by hand appends them in that
order. A replay of the same thread then differs from there on, and is computed anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage


def in_call_order(messages: Sequence[BaseMessage]) -> list[BaseMessage]:
    """The messages, where the results right after an `AIMessage` follow the order of its calls.

    Results of calls that the message does not have come behind the others, and they and repeated
    results stay, in the order they are in: the gateway refuses them by their id.
    """
    ordered: list[BaseMessage] = []
    places: dict[str | None, int] = {}
    for are_results, run in groupby(messages, lambda message: isinstance(message, ToolMessage)):
        group = list(run)
        if are_results:
            group.sort(key=lambda result: places.get(_call_id(result), len(places)))
        else:
            places = _call_places(group[-1])
        ordered += group
    return ordered


def call_blocks(message: AIMessage) -> list[Mapping[str, Any]]:
    """The blocks of its content that are calls: LangChain's `tool_call`, Anthropic's `tool_use`."""
    blocks = [block for block in message.content if isinstance(block, dict)]
    return [block for block in blocks if block.get("type") in ("tool_call", "tool_use")]


def _call_id(result: BaseMessage) -> str | None:
    return result.tool_call_id if isinstance(result, ToolMessage) else None


def _call_places(message: BaseMessage) -> dict[str | None, int]:
    """Where the result of each call belongs; calls that were not valid JSON are answered too."""
    if not isinstance(message, AIMessage):
        return {}
    calls = (*message.tool_calls, *message.invalid_tool_calls, *call_blocks(message))
    ids = dict.fromkeys(call.get("id") for call in calls)
    return {call_id: place for place, call_id in enumerate(ids)}
