"""LangChain's tools, and the choice among them, as the fields of a chat completion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool

Json = dict[str, Any]
AnyTool = Json | type | Callable[..., Any] | BaseTool

_DATA = {"const", "default", "enum", "examples"}  # of a schema, but no schemas themselves


def wire_tools(tools: Sequence[AnyTool], *, strict: bool | None, stable_order: bool) -> list[Json]:
    """The request's `tools`; with `stable_order` by name, so that every process sends the same.

    A pydantic or TypedDict class, a function and a tool with the same arguments are the same here.

    Raises ValueError for what cannot be made into a tool.
    """
    converted = [_tool(tool, strict) for tool in tools]
    return sorted(converted, key=name_of) if stable_order else converted


def name_of(tool: Json) -> str:
    """The name by which a tool of a request is called."""
    return str(tool["function"]["name"])


def wire_choice(choice: Json | str | bool | None, tools: Sequence[Json]) -> Json | str | None:
    """The request's `tool_choice`, None where it is left to the model.

    Raises ValueError for a name that none of the tools has.
    """
    if choice is None or choice is False or not tools:
        return None
    if choice is True or choice in ("any", "required"):
        return "required"
    if choice in ("auto", "none") or isinstance(choice, dict):
        return choice
    if choice not in map(name_of, tools):
        known = ", ".join(map(name_of, tools))
        raise ValueError(f"tool_choice: there is no tool {choice!r} among {known}")
    return {"type": "function", "function": {"name": choice}}


def _tool(tool: AnyTool, strict: bool | None) -> Json:
    wire = tool if _is_foreign(tool) else convert_to_openai_tool(tool, strict=strict)
    if "function" not in wire:
        raise ValueError(f"tools: only functions can be called here, not {wire}")
    wire = {**wire, "function": _sorted(wire["function"])}
    marker = _marker(tool)
    return wire if marker is None else {**wire, "cache_control": marker}


def _is_foreign(tool: AnyTool) -> TypeGuard[Json]:
    """Whether this defines what only some provider has: its own search, a computer to use …"""
    if not isinstance(tool, dict):
        return False
    usual = (None, "function", "object", "custom" if "input_schema" in tool else None)
    return tool.get("type") not in usual


def _sorted(schema: Any) -> Any:
    """A function, or its schema, with the keys in pydantic's order; others have their own."""
    if isinstance(schema, list):
        return [_sorted(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {keyword: _value(keyword, schema[keyword]) for keyword in sorted(schema)}


def _value(keyword: str, value: Any) -> Any:
    if keyword in _DATA:
        return value
    if keyword == "properties" and isinstance(value, dict):  # in the order of the arguments
        return {name: _sorted(each) for name, each in value.items()}
    return _sorted(value)


def _marker(tool: AnyTool) -> Any:
    """Caching middleware leaves it in a tool's extras, Anthropic's form has it in the tool."""
    if isinstance(tool, BaseTool):
        return (tool.extras or {}).get("cache_control")
    return tool.get("cache_control") if isinstance(tool, dict) else None
