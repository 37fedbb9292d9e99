"""The messages of a chat completion: every role, every form of content that is text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from ragcache.gateway.fields import Fields, PartList, ToolList
from ragcache.gateway.openai.cache import CacheControl, PromptCacheBreakpoint, Ttl
from ragcache.types import Breakpoint, Message

Id = Annotated[str, Field(min_length=1, max_length=256)]


class ContentPart(Fields):
    """A part of a message's content: text, or a refusal as text; other kinds are refused."""

    type: Literal["text", "refusal"]
    text: str
    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in ("text", "refusal"):
            raise PydanticCustomError(
                "content_part", "a content part of type {kind} is not supported", {"kind": kind}
            )
        return {**part, "text": part.get("refusal")} if kind == "refusal" else part

    def ttl(self, default: Ttl) -> Ttl | None:
        """The lifetime that a marker on this part asks for, None without one."""
        if self.prompt_cache_breakpoint is not None:
            return self.prompt_cache_breakpoint.ttl or default
        return self.cache_control.ttl if self.cache_control is not None else None


class FunctionCall(Fields):
    """What an assistant called; the arguments are JSON text, or already an object."""

    name: Annotated[str, Field(min_length=1)]
    arguments: Any = ""

    @field_validator("arguments")
    @classmethod
    def _text_or_object(cls, arguments: Any) -> Any:
        if not isinstance(arguments, str | dict):
            raise PydanticCustomError("arguments", "must be a string of JSON, or an object")
        return arguments


class MessageToolCall(Fields):
    """An entry of an assistant message's `tool_calls`."""

    id: Id
    type: Literal["function"] = "function"
    function: FunctionCall


def _parts(content: Any) -> Any:
    """A string is one part, so that both forms render to the same tokens."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Parts = PartList[ContentPart]
Content = Annotated[Parts, BeforeValidator(_parts, json_schema_input_type=str | Parts)]


class ChatMessage(Fields):
    """One message of a conversation; its content becomes one string."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    name: str | None = None
    function_call: None = None  # superseded by tool_calls
    audio: None = None
    tool_calls: ToolList[MessageToolCall] | None = None
    tool_call_id: Id | None = Field(None, validate_default=True)
    refusal: str | None = None
    content: Content | None = Field(None, validate_default=True)
    cache_control: CacheControl | None = None

    @field_validator("tool_calls")
    @classmethod
    def _by_assistants(cls, calls: Any, info: ValidationInfo) -> Any:
        if calls and info.data.get("role") != "assistant":
            raise PydanticCustomError("tool_calls", "only an assistant message has them")
        return calls

    @field_validator("tool_call_id")
    @classmethod
    def _answered_call(cls, call_id: str | None, info: ValidationInfo) -> str | None:
        if call_id is None and info.data.get("role") == "tool":
            raise PydanticCustomError("tool_call_id", "is required in a tool message")
        return call_id

    @field_validator("content")
    @classmethod
    def _needed(
        cls, parts: list[ContentPart] | None, info: ValidationInfo
    ) -> list[ContentPart] | None:
        assistant = info.data.get("role") == "assistant"
        if parts is None and not (
            assistant and (info.data.get("tool_calls") or info.data.get("refusal"))
        ):
            raise PydanticCustomError("content", "is required, except beside tool_calls")
        if not assistant and any(part.type == "refusal" for part in parts or ()):
            raise PydanticCustomError("content", "only an assistant message has refusals")
        return parts

    def message(self) -> Message:
        """The shared form of this message."""
        text = "".join(part.text for part in self.content or ())
        return Message(
            role=self.role,
            content=text or self.refusal or "",
            name=self.name,
            tool_calls=tuple(call.model_dump() for call in self.tool_calls or ()),
            tool_call_id=self.tool_call_id,
        )

    def breakpoints(self, index: int, default: Ttl) -> Iterator[Breakpoint]:
        """The markers in this message, which is number `index`."""
        end = 0
        for part in self.content or ():
            end += len(part.text)
            if ttl := part.ttl(default):
                yield Breakpoint(index, end, ttl)
        if self.cache_control is not None:
            yield Breakpoint(index, None, self.cache_control.ttl)
