"""OpenTelemetry: a span of each request, in the words of the GenAI semantic conventions."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from aiohttp import web

from ragcache.errors import ConfigError
from ragcache.gateway.record import Record

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_OPERATIONS = {"chat": "chat", "messages": "chat", "completions": "text_completion"}
_NANO = 10**9

CLOSE_WITHIN = 3.0  # seconds


class Tracer:
    """Makes a span of every finished request; a client's `traceparent` is its parent.

    The spans go to `provider`, which is closed with this. Without one it is the SDK's with the
    exporter for OTLP over HTTP, and the OTEL_* variables say where to and how much.
    Raises ConfigError when OpenTelemetry is not installed.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        try:
            from opentelemetry import propagate, trace
        except ImportError as error:
            raise ConfigError("otel: needs pip install 'ragcache-gateway[otel]'") from error
        self._propagate = propagate
        self._trace = trace
        self._provider = provider or _exporting()
        self._tracer = self._provider.get_tracer("ragcache", version("ragcache-gateway"))

    def span(self, record: Record, headers: Mapping[str, str]) -> str:
        """Tell of a request that has ended; returns the id of its trace in hexadecimal."""
        ended = time.time_ns()
        operation = _OPERATIONS.get(record.api or "", "chat")
        span = self._tracer.start_span(
            f"{operation} {record.model}" if record.model else operation,
            context=self._propagate.extract(headers),
            kind=self._trace.SpanKind.SERVER,
            attributes=dict(_attributes(record, operation)),
            start_time=ended - int(record.duration * _NANO),
        )
        if record.error_type is not None:
            span.set_status(self._trace.StatusCode.ERROR)
        span.end(ended)
        return self._trace.format_trace_id(span.get_span_context().trace_id)

    def close(self) -> None:
        """Send what is left, if the collector takes it in time."""
        last = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        last.start()
        last.join(CLOSE_WITHIN)


def _exporting() -> TracerProvider:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError("otel: needs pip install 'ragcache-gateway[otel]'") from error
    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "ragcache"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def _attributes(record: Record, operation: str) -> Iterator[tuple[str, Any]]:
    yield "gen_ai.operation.name", operation
    yield "gen_ai.provider.name", "ragcache"
    yield "http.request.method", record.method
    yield "url.path", record.path
    yield "http.response.status_code", record.status
    yield "ragcache.request_id", record.request_id
    if record.model is not None:
        yield "gen_ai.request.model", record.model
    if record.response_id is not None:
        yield "gen_ai.response.id", record.response_id
    if record.served_model is not None:
        yield "gen_ai.response.model", record.served_model
    if record.error_type is not None:
        yield "error.type", record.error_type
    elif record.finish_reason is not None:
        yield "gen_ai.response.finish_reasons", [str(record.finish_reason)]
    if (wait := record.time_to_first_token) is not None:
        yield "gen_ai.response.time_to_first_chunk", wait
    if record.usage is not None:
        yield "gen_ai.usage.input_tokens", record.usage.prompt_tokens
        yield "gen_ai.usage.cache_read.input_tokens", record.usage.cached_tokens
        yield "gen_ai.usage.output_tokens", record.usage.completion_tokens


TRACER: web.AppKey[Tracer | None] = web.AppKey("tracer")
