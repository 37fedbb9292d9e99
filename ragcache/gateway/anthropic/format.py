"""What Anthropic's message routes answer: messages, stream events, usage, diagnostics."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any
from uuid import uuid4

from ragcache.gateway.anthropic.schema import MessagesRequest
from ragcache.gateway.explanations import explanation_body
from ragcache.types import Delta, Explanation, FinishReason, MissReason, ToolCall, Usage

Json = dict[str, Any]

_STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.CONTEXT: "model_context_window_exceeded",
    FinishReason.TOOL_CALLS: "tool_use",
}
_CHANGES = {
    "tools": "tools_changed",
    "system": "system_changed",
    "messages": "messages_changed",
}


class MessageReply:
    """The answer to one request, as a message or as the events of a stream."""

    def __init__(self, request: MessagesRequest, block_size: int) -> None:
        self.id = f"msg_{uuid4().hex}"
        self._request = request
        self._block_size = block_size

    def message(
        self, usage: Usage, explanation: Explanation | None, deltas: Sequence[Delta] = ()
    ) -> Json:
        """The message; without `deltas`, as it is when a stream starts."""
        body = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": content_blocks(deltas),
            **ending(deltas[-1] if deltas else Delta(0)),
            "usage": usage_body(usage),
            "diagnostics": self._diagnostics(explanation),
        }
        if self._request.ragcache.explain:
            body["ragcache"] = explanation and explanation_body(explanation, self._block_size)
        return body

    def _diagnostics(self, explanation: Explanation | None) -> Json | None:
        """Null for no divergence; a null reason says that nothing is known (yet)."""
        if (asked := self._request.diagnostics) is None:
            return None
        if explanation is None:
            return {"cache_miss_reason": None}
        if asked.previous_message_id is None:
            return None
        reason = miss_reason(explanation, asked.previous_message_id)
        return reason and {"cache_miss_reason": reason}


class BlockEvents:
    """Deltas as events of content blocks; at most one block, of text, is open at a time."""

    def __init__(self) -> None:
        self._index = 0
        self._open = False

    def of(self, delta: Delta) -> Iterator[Json]:
        """The events of one delta; the last delta closes the last block."""
        if delta.text:
            yield from self._text(delta.text)
        for call in delta.calls:
            yield from self._close()
            yield from self._call(call)
        if delta.finish_reason is not None:
            yield from self._close()

    def _text(self, text: str) -> Iterator[Json]:
        if not self._open:
            self._open = True
            yield self._event("start", content_block={"type": "text", "text": ""})
        yield self._event("delta", delta={"type": "text_delta", "text": text})

    def _call(self, call: ToolCall) -> Iterator[Json]:
        self._open = True
        yield self._event("start", content_block={**tool_use(call), "input": {}})
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        yield self._event("delta", delta=delta)
        yield from self._close()

    def _close(self) -> Iterator[Json]:
        if self._open:
            yield self._event("stop")
            self._index, self._open = self._index + 1, False

    def _event(self, what: str, **fields: Json) -> Json:
        return {"type": f"content_block_{what}", "index": self._index, **fields}


def content_blocks(deltas: Iterable[Delta]) -> list[Json]:
    """The content of a whole message: adjacent text is one block."""
    pieces = [piece for delta in deltas for piece in (delta.text, *delta.calls) if piece]
    blocks: list[Json] = []
    for is_text, run in groupby(pieces, lambda piece: isinstance(piece, str)):
        if is_text:
            blocks.append({"type": "text", "text": "".join(map(str, run))})
        else:
            blocks += [tool_use(call) for call in run if isinstance(call, ToolCall)]
    return blocks


def tool_use(call: ToolCall) -> Json:
    """A call as a content block, with a new id."""
    return {
        "type": "tool_use",
        "id": f"toolu_{uuid4().hex[:24]}",
        "name": call.name,
        "input": json.loads(call.arguments),
    }


def ending(last: Delta) -> Json:
    """Why the answer ended, from its last delta; nulls as long as it has not."""
    if last.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": last.stop}
    reason = last.finish_reason and _STOP_REASONS.get(last.finish_reason)
    return {"stop_reason": reason, "stop_sequence": None}


def usage_body(usage: Usage) -> Json:
    """Anthropic's `usage`: the prompt is the sum of what was read, written, and neither."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - usage.written_tokens,
        "cache_creation_input_tokens": usage.written_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation": {
            "ephemeral_5m_input_tokens": usage.written.get("5m", 0),
            "ephemeral_1h_input_tokens": usage.written.get("1h", 0),
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": 0},
        "service_tier": "standard",
    }


def miss_reason(explanation: Explanation, previous_id: str) -> Json | None:
    """Anthropic's `cache_miss_reason`, compared with the request `previous_id`; None is no miss."""
    if explanation.previous != previous_id:
        return {"type": "previous_message_not_found"}
    if explanation.reason is None:
        return None
    segment = (explanation.segment or "").partition(".")[0]
    if explanation.reason is not MissReason.CHANGED or segment not in _CHANGES:
        return {"type": "unavailable"}
    return {"type": _CHANGES[segment], "cache_missed_input_tokens": explanation.lost_tokens}
