"""A chat completion's body and chunks as LangChain's messages; both tell the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk, InvalidToolCall, ToolCall
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import ToolCallChunk, tool_call, tool_call_chunk
from langchain_core.output_parsers.openai_tools import make_invalid_tool_call, parse_tool_call

Json = Mapping[str, Any]
PROVIDER = "ragcache"


def whole_messages(body: Json) -> list[AIMessage]:
    """One message for each choice of a body."""
    return [_message(body, choice) for choice in body["choices"]]


def message_chunks(chunk: Json) -> Iterator[AIMessageChunk]:
    """What a chunk of a stream adds to the message, which may be nothing.

    The reason of the end, the names and the usage come once each: merging chunks adds them up.
    """
    for choice in chunk["choices"]:
        message = _chunk(chunk, choice)
        if message.content or message.tool_call_chunks or message.response_metadata:
            yield message
    if chunk.get("usage"):
        yield AIMessageChunk(
            content="",
            id=chunk["id"],
            usage_metadata=_usage(chunk["usage"]),
            response_metadata=_explanation(chunk),
            chunk_position="last",
        )


def _message(body: Json, choice: Json) -> AIMessage:
    message = choice["message"]
    valid, invalid = _calls(message.get("tool_calls") or ())
    return AIMessage(
        content=message["content"] or "",
        id=body["id"],
        tool_calls=valid,
        invalid_tool_calls=invalid,
        usage_metadata=_usage(body["usage"]),
        response_metadata=_metadata(body, choice) | _explanation(body),
    )


def _chunk(chunk: Json, choice: Json) -> AIMessageChunk:
    delta = choice["delta"]
    return AIMessageChunk(
        content=delta.get("content") or "",
        id=chunk["id"],
        tool_call_chunks=[_call_chunk(call) for call in delta.get("tool_calls") or ()],
        response_metadata=_metadata(chunk, choice),
    )


def _metadata(body: Json, choice: Json) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    if choice["finish_reason"]:
        metadata["model_name"] = body["model"]
        metadata["model_provider"] = PROVIDER
        metadata["finish_reason"] = choice["finish_reason"]
    if logprobs := choice.get("logprobs"):
        metadata["logprobs"] = logprobs
    return metadata


def _explanation(body: Json) -> dict[str, Any]:
    """Why the cache hit as far as it did; nothing where the server's caching is off."""
    explanation = body.get("ragcache")
    return {"ragcache": explanation} if explanation else {}


def _usage(usage: Json) -> UsageMetadata:
    """LangChain's input tokens are the whole prompt, of which the details are parts."""
    details = usage.get("prompt_tokens_details") or {}
    return UsageMetadata(
        input_tokens=usage["prompt_tokens"],
        output_tokens=usage["completion_tokens"],
        total_tokens=usage["total_tokens"],
        input_token_details=InputTokenDetails(
            cache_read=details.get("cached_tokens") or 0,
            cache_creation=details.get("cache_write_tokens") or 0,
        ),
    )


def _calls(calls: Any) -> tuple[list[ToolCall], list[InvalidToolCall]]:
    valid, invalid = [], []
    for call in calls:
        try:
            parsed = parse_tool_call(call, return_id=True) or {}
            valid.append(tool_call(name=parsed["name"], args=parsed["args"], id=parsed["id"]))
        except OutputParserException as error:
            invalid.append(make_invalid_tool_call(call, str(error)))
    return valid, invalid


def _call_chunk(call: Json) -> ToolCallChunk:
    function = call["function"]
    return tool_call_chunk(
        name=function.get("name"),
        args=function.get("arguments"),
        id=call.get("id"),
        index=call["index"],
    )
