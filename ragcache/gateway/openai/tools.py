"""The tools of a chat completion, and which of them may or must be called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from ragcache.errors import InvalidRequest
from ragcache.gateway.fields import Fields, ToolList
from ragcache.gateway.openai.cache import CacheControl
from ragcache.types import Breakpoint

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class FunctionDefinition(Fields):
    """What can be called; `parameters` is the JSON schema of its arguments.

    `strict` changes nothing, because every schema is enforced.
    """

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None

    @field_validator("parameters")
    @classmethod
    def _of_an_object(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema and schema.get("type", "object") != "object":
            raise PydanticCustomError("parameters", 'must be a JSON schema of type "object"')
        return schema


class Tool(Fields):
    """An entry of `tools`."""

    type: Literal["function"]
    function: FunctionDefinition
    cache_control: CacheControl | None = None

    def definition(self) -> Mapping[str, Any]:
        """The shared form: what is not given is not there, or the prompt would depend on it."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        function["parameters"] = self.function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


class FunctionName(Fields):
    """A tool, by its name."""

    name: ToolName


class NamedTool(Fields):
    """An entry of `allowed_tools.tools`."""

    type: Literal["function"] = "function"
    function: FunctionName


class AllowedTools(Fields):
    """A choice among some of the tools, all of which stay in the prompt."""

    mode: Literal["auto", "required"]
    tools: ToolList[NamedTool] = Field(min_length=1)


class ToolChoice(Fields):
    """`tool_choice` as an object."""

    type: Literal["none", "auto", "required", "function", "allowed_tools"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None

    @model_validator(mode="after")
    def _complete(self) -> ToolChoice:
        for field in ("function", "allowed_tools"):
            if (self.type == field) != (getattr(self, field) is not None):
                raise PydanticCustomError("choice", "{field} belongs to its type", {"field": field})
        return self

    @property
    def mode(self) -> Literal["none", "auto", "required"]:
        """Whether there may, must or must not be a call."""
        if self.allowed_tools is not None:
            return self.allowed_tools.mode
        return self.type if self.type in ("none", "auto") else "required"

    @property
    def names(self) -> tuple[str, ...] | None:
        """The tools that may be called, None for all."""
        if self.allowed_tools is not None:
            return tuple(tool.function.name for tool in self.allowed_tools.tools)
        return (self.function.name,) if self.function is not None else None


def _choice(value: Any) -> Any:
    """A string is an object of that type."""
    return {"type": value} if isinstance(value, str) else value


AnyChoice = Annotated[
    ToolChoice,
    BeforeValidator(
        _choice, json_schema_input_type=Literal["none", "auto", "required"] | ToolChoice
    ),
]


class ToolFields(Fields):
    """The top-level fields."""

    tools: ToolList[Tool] = Field([])
    tool_choice: AnyChoice | None = None
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _known_names(self) -> ToolFields:
        names = [tool.function.name for tool in self.tools]
        for index, name in enumerate(names):
            if name in names[:index]:
                param = f"tools[{index}].function.name"
                raise InvalidRequest(f"{param}: {name!r} is there already", param=param)
        unknown = set(self.choice.names or ()) - set(names)
        if unknown or (self.choice.mode == "required" and not names):
            missing = f"no tool {min(unknown)!r}" if unknown else "no tools"
            raise InvalidRequest(f"tool_choice: there is {missing}", param="tool_choice")
        return self

    @cached_property
    def choice(self) -> ToolChoice:
        """`tool_choice`, or its default."""
        return self.tool_choice or ToolChoice(type="auto" if self.tools else "none")

    @property
    def several_calls(self) -> bool:
        """Whether one answer may hold more than one call; a named tool is called once."""
        return self.parallel_tool_calls and self.choice.type != "function"

    def tool_breakpoints(self) -> Iterator[Breakpoint]:
        """The markers on tools."""
        for index, tool in enumerate(self.tools):
            if tool.cache_control is not None:
                yield Breakpoint(None, index + 1, tool.cache_control.ttl)
