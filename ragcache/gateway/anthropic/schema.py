"""What clients send to Anthropic's message routes, checked and made into a `GenerateRequest`.

Fields and ranges follow Anthropic's API reference; `cache_salt` and `ragcache` are extensions of
this gateway. Unknown fields are tolerated, and so are those that only choose a way of serving
(`service_tier`, `metadata`, `speed`, `container`, `output_config.effort` …). The models here do
not think, whatever `thinking` says.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, WithJsonSchema, field_validator, model_validator
from pydantic_core import PydanticCustomError

from ragcache.errors import InvalidRequest
from ragcache.gateway.anthropic.blocks import Texts
from ragcache.gateway.anthropic.cache import CacheControl, Spot, breakpoints
from ragcache.gateway.anthropic.messages import (
    AssistantMessage,
    Conversation,
    Messages,
    without_billing,
)
from ragcache.gateway.fields import Fields, Harmless, RequestBody, ToolList, Whole
from ragcache.types import ChatPrompt, GenerateRequest, OutputRules, SamplingParams

StopString = Annotated[str, Field(min_length=1)]

_CHOICES: dict[str, Literal["auto", "required", "none"]] = {
    "auto": "auto",
    "any": "required",
    "tool": "required",
    "none": "none",
}

_SCHEMA_OF_AN_OBJECT = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"const": "object"}},
}


class Tool(Fields):
    """A function that the client runs; tools that Anthropic's servers run are not offered."""

    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")
    description: str | None = None
    input_schema: Annotated[dict[str, Any], WithJsonSchema(_SCHEMA_OF_AN_OBJECT)]
    cache_control: CacheControl | None = None

    @field_validator("input_schema")
    @classmethod
    def _object(cls, schema: dict[str, Any]) -> dict[str, Any]:
        if schema.get("type") != "object":
            raise PydanticCustomError("schema", 'must be a JSON schema with "type": "object"')
        return schema

    def definition(self) -> dict[str, Any]:
        """The tool in the form of `ChatPrompt.tools`, OpenAI's."""
        described = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **described, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class ToolChoice(Fields):
    """Whether tools may, must or must not be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, validate_default=True)
    disable_parallel_tool_use: bool = False

    @field_validator("name")
    @classmethod
    def _of_the_tool(cls, name: str | None, info: ValidationInfo) -> str | None:
        if name is None and info.data.get("type") == "tool":
            raise PydanticCustomError("name", "is required")
        return name


class Thinking(Fields):
    """Whether to think, and how long; the same to the models here."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputFormat(Fields):
    """A JSON schema for the text of the answer."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Fields):
    """`output_config`; `effort` is left to the model."""

    format: OutputFormat | None = None


class PromptFields(RequestBody):
    """All that makes the prompt; body of POST /v1/messages/count_tokens."""

    unsupported: ClassVar[Harmless] = {"mcp_servers": ([],), "output_format": ()}

    model: str
    messages: Messages = Field(min_length=1)
    system: Texts = Field([])
    tools: ToolList[Tool] = Field([])
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    cache_control: CacheControl | None = None

    @model_validator(mode="after")
    def _tools_fit(self) -> PromptFields:
        names = Counter(tool.name for tool in self.tools)
        if twice := next((name for name, times in names.items() if times > 1), None):
            raise InvalidRequest(f"tools: more than one is called {twice!r}", param="tools")
        choice = self.choice
        if choice.type == "tool" and choice.name not in names:
            param = "tool_choice.name"
            raise InvalidRequest(f"{param}: no tool is called {choice.name!r}", param=param)
        if choice.type == "any" and not names:
            raise InvalidRequest("tool_choice: requires tools", param="tool_choice")
        return self

    @property
    def choice(self) -> ToolChoice:
        """`tool_choice`, or its default."""
        return self.tool_choice or ToolChoice(type="auto" if self.tools else "none")

    def prompt(self) -> ChatPrompt:
        """The conversation, its tools and breakpoints. Raises InvalidRequest."""
        conversation = Conversation()
        for i, tool in enumerate(self.tools):
            conversation.spots.append(Spot(f"tools[{i}]", tool.cache_control, None, i + 1))
        if pieces := list(without_billing(self.system)):
            conversation.say("system", pieces)
        for i, message in enumerate(self.messages):
            message.join(conversation, f"messages[{i}]")
        return ChatPrompt(
            tuple(conversation.messages),
            tuple(tool.definition() for tool in self.tools),
            breakpoints=breakpoints(conversation.spots, self.cache_control),
        )


class Diagnostics(Fields):
    """Asks why the prompt of this request was not found in the cache as far as the other's."""

    previous_message_id: str | None = None


class Extensions(Fields):
    """`ragcache`: what only this gateway has."""

    explain: bool = False


class MessagesRequest(PromptFields):
    """Body of POST /v1/messages; with `max_tokens` 0 the prompt is only written to the cache."""

    max_tokens: Whole = Field(ge=0)
    stop_sequences: list[StopString] = Field([], max_length=16, fail_fast=True)
    stream: bool = False
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: Whole = Field(0, ge=0)
    diagnostics: Diagnostics | None = None
    ragcache: Extensions = Extensions()
    cache_salt: str | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _answerable(self) -> MessagesRequest:
        if isinstance(self.messages[-1], AssistantMessage):
            param = f"messages[{len(self.messages) - 1}].role"
            raise InvalidRequest(
                f"{param}: prefill is not supported, the last message must not be the assistant's",
                param=param,
            )
        if self.max_tokens == 0 and (asked := self._asked_of_output()):
            raise InvalidRequest(f"{asked}: not allowed with max_tokens 0", param=asked)
        return self

    def _asked_of_output(self) -> str | None:
        if self.stream:
            return "stream"
        if self.output_config.format is not None:
            return "output_config.format"
        if self.thinking is not None and self.thinking.type == "enabled":
            return "thinking"
        return "tool_choice" if self.choice.type in ("any", "tool") else None

    def request(self, request_id: str, tenant: str) -> GenerateRequest:
        """The shared form of this request. Raises InvalidRequest."""
        return GenerateRequest(
            id=request_id,
            prompt=self.prompt(),
            sampling=SamplingParams(
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
            ),
            stop=tuple(self.stop_sequences),
            tenant=tenant,
            cache_salt=self.cache_salt,
            output=self._output(),
            previous_id=self.diagnostics.previous_message_id if self.diagnostics else None,
        )

    def _output(self) -> OutputRules:
        choice, wanted = self.choice, self.output_config.format
        return OutputRules(
            tool_choice=_CHOICES[choice.type],
            allowed_tools=(choice.name,) if choice.type == "tool" and choice.name else None,
            parallel_tool_calls=not choice.disable_parallel_tool_use,
            schema=wanted.json_schema if wanted else None,
        )
