"""Cache markers on the stable part of a request: at the end of the system message, of the tools.

A marker asks the gateway to keep the prompt up to it for a while. It never changes the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import SystemMessage
from langchain_core.tools import BaseTool

CacheControl = Mapping[str, str]


def marked_system(message: SystemMessage, cache_control: CacheControl) -> SystemMessage:
    """A copy with the marker on its last content block, unless that has one or there is none."""
    content = message.content
    blocks: list[str | dict[Any, Any]] = [content] if isinstance(content, str) else [*content]
    if not blocks or blocks[-1] == "":
        return message
    last = blocks[-1]
    block: dict[Any, Any] = {"type": "text", "text": last} if isinstance(last, str) else last
    marker = (block.get("extras") or {}).get("cache_control", dict(cache_control))
    blocks[-1] = {"cache_control": marker, **block}
    return message.model_copy(update={"content": blocks})


def marked_tools(
    tools: Sequence[BaseTool | dict[str, Any]], cache_control: CacheControl
) -> list[BaseTool | dict[str, Any]]:
    """The tools, the last one replaced by a copy with the marker, unless it has one."""
    return [*tools[:-1], *(_marked_tool(tool, cache_control) for tool in tools[-1:])]


def _marked_tool(
    tool: BaseTool | dict[str, Any], cache_control: CacheControl
) -> BaseTool | dict[str, Any]:
    marker = {"cache_control": dict(cache_control)}
    if isinstance(tool, BaseTool):
        return tool.model_copy(update={"extras": {**marker, **(tool.extras or {})}})
    return {**marker, **tool}
