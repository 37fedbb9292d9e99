"""What our routes answer, as JSON schemas: all that a client may rely on."""

from __future__ import annotations

from typing import Any

from ragcache.types import MissReason

Json = dict[str, Any]

TEXT: Json = {"type": "string"}
_MAYBE_TEXT: Json = {"type": ["string", "null"]}
_COUNT: Json = {"type": "integer", "minimum": 0}
_MAYBE_COUNT: Json = {"type": ["integer", "null"], "minimum": 0}
_SHARE: Json = {"type": ["number", "null"], "minimum": 0, "maximum": 1}
_MAYBE_NUMBER: Json = {"type": ["number", "null"], "minimum": 0}


def _object(**properties: Json) -> Json:
    return {"type": "object", "required": list(properties), "properties": properties}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _only(value: Any) -> Json:
    return {"const": value}


def json_content(schema: Json) -> Json:
    """A body of JSON, as `content` of a request or a response."""
    return {"application/json": {"schema": schema}}


def _streamed(schema: Json) -> Json:
    """A body, or with `stream` events whose data adds up to it."""
    event = {"type": "object", "required": ["data"], "properties": {"event": TEXT, "data": TEXT}}
    return {**json_content(schema), "text/event-stream": {"schema": event}}


ERROR = _object(error=_object(message=TEXT, type=TEXT, param=_MAYBE_TEXT, code=_MAYBE_TEXT))
ANTHROPIC_ERROR = _object(
    type=_only("error"), error=_object(type=TEXT, message=TEXT), request_id=TEXT
)

_USAGE = _object(
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
    prompt_tokens_details=_object(cached_tokens=_COUNT, cache_write_tokens=_COUNT),
)
_MESSAGES_USAGE = _object(
    input_tokens=_COUNT,
    cache_creation_input_tokens=_COUNT,
    cache_read_input_tokens=_COUNT,
    cache_creation=_object(ephemeral_5m_input_tokens=_COUNT, ephemeral_1h_input_tokens=_COUNT),
    output_tokens=_COUNT,
)


def _completion(kind: str, **choice: Json) -> Json:
    choice = {"index": _COUNT, **choice, "logprobs": {}, "finish_reason": TEXT}
    return _object(
        id=TEXT,
        object=_only(kind),
        created=_COUNT,
        model=TEXT,
        choices=_list(_object(**choice)),
        usage=_USAGE,
    )


_CHAT = _completion(
    "chat.completion",
    message=_object(role=_only("assistant"), content=_MAYBE_TEXT, refusal=_MAYBE_TEXT),
)
_MESSAGE = _object(
    id=TEXT,
    type=_only("message"),
    role=_only("assistant"),
    model=TEXT,
    content=_list(_object(type={"enum": ["text", "tool_use"]})),
    stop_reason=TEXT,
    stop_sequence=_MAYBE_TEXT,
    usage=_MESSAGES_USAGE,
)
_MODEL = _object(
    id=TEXT, object=_only("model"), created=_COUNT, owned_by=TEXT, max_input_tokens=_COUNT
)
_READY = _object(ready={"type": "boolean"}, reason=_MAYBE_TEXT)
_RATES = _object(**dict.fromkeys(("1m", "5m", "total"), _SHARE))
_PREFIX = _object(
    fingerprint=TEXT,
    parent=_MAYBE_TEXT,
    tokens=_COUNT,
    hits=_COUNT,
    hit_tokens=_COUNT,
    age={"type": "number", "minimum": 0},
    retention=_MAYBE_NUMBER,
)
_SEGMENT = _object(query=_COUNT, hit=_COUNT, hit_rate=_RATES)
_STATS = _object(
    hit_rate=_RATES,
    tokens=_object(query=_COUNT, hit=_COUNT),
    segments=_object(**dict.fromkeys(("tools", "system", "messages", "prompt"), _SEGMENT)),
    saved=_object(tokens=_COUNT, seconds=_MAYBE_NUMBER, prefill_rate=_MAYBE_NUMBER),
    prefixes=_list(_PREFIX),
    block_size=_COUNT,
)
_LINE = _list(_MAYBE_NUMBER)  # a number for each slot of so many seconds
_LINES: Json = {"seconds": _COUNT, "p50": _LINE, "p95": _LINE}
_MISS = _object(
    id=TEXT,
    age={"type": "number", "minimum": 0},
    reason={"enum": [*MissReason]},
    segment=_MAYBE_TEXT,
    token=_MAYBE_COUNT,
    prompt_tokens=_COUNT,
    hit_tokens=_COUNT,
    lost_tokens=_COUNT,
)
_DASHBOARD = _object(
    model=TEXT,
    ready={"type": "boolean"},
    reason=_MAYBE_TEXT,
    stats={"anyOf": [_STATS, {"type": "null"}]},
    ttft=_object(**{"1m": _object(p50=_MAYBE_NUMBER, p95=_MAYBE_NUMBER)}, **_LINES),
    history=_object(seconds=_COUNT, query=_LINE, hit=_LINE),
    misses=_list(_MISS),
)
_RESET = _object(reset=_only(True), blocks=_COUNT)
_EXPLANATION = _object(
    id=TEXT,
    prompt_tokens=_COUNT,
    hit_tokens=_COUNT,
    reason={"enum": [*MissReason, None]},
    lost_tokens=_COUNT,
    token=_MAYBE_COUNT,
    exact={"type": "boolean"},
    segment=_MAYBE_TEXT,
    character=_MAYBE_COUNT,
    previous=_MAYBE_TEXT,
    block_size=_COUNT,
)

# path → content of its 200
REPLIES: dict[str, Json] = {
    "/v1/chat/completions": _streamed(_CHAT),
    "/v1/chat/completions/count_tokens": json_content(_object(prompt_tokens=_COUNT)),
    "/v1/completions": _streamed(_completion("text_completion", text=TEXT)),
    "/v1/messages": _streamed(_MESSAGE),
    "/v1/messages/count_tokens": json_content(_object(input_tokens=_COUNT)),
    "/v1/models": json_content(_object(object=_only("list"), data=_list(_MODEL))),
    "/v1/models/{id}": json_content(_MODEL),
    "/health": json_content(_object(status=_only("ok"))),
    "/ready": json_content(_READY),
    "/metrics": {
        "text/plain": {"schema": TEXT},
        "application/openmetrics-text": {"schema": TEXT},
    },
    "/cache/stats": json_content(_STATS),
    "/cache/explain/{id}": json_content(_EXPLANATION),
    "/cache/reset": json_content(_RESET),
    "/reset_prefix_cache": json_content(_RESET),
    "/dashboard": {"text/html": {"schema": TEXT}},
    "/dashboard/data": json_content(_DASHBOARD),
    "/openapi.json": json_content(_object(openapi=TEXT, info={}, paths={})),
}
