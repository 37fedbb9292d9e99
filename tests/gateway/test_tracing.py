"""Spans, as a collector gets them."""

import asyncio
import subprocess
import sys

import aiohttp
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from ragcache.errors import ConfigError, RequestTimeout
from ragcache.gateway import tracing
from ragcache.gateway.record import Record
from ragcache.gateway.tracing import Tracer

ASK = {"model": "alias", "messages": [{"role": "user", "content": "one two three"}]}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
async def traced(start):
    """A client of a server with a tracer, and the spans that it has made."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = Tracer(provider)
    async with aiohttp.ClientSession(await start(tracer=tracer)) as http:

        async def spans(count):  # a stream's span is made behind the last byte of the stream
            async with asyncio.timeout(10):
                while len(exporter.get_finished_spans()) < count:
                    await asyncio.sleep(0.005)
            return exporter.get_finished_spans()

        yield http, spans
    tracer.close()


async def test_a_request_is_a_span_below_the_clients(traced, serving):
    http, spans = traced
    serving.script.cached_tokens = 3
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    async with http.post("/v1/chat/completions", json=ASK, headers=headers) as response:
        answer = await response.json()
    (span,) = await spans(1)
    assert (span.name, span.kind) == ("chat alias", SpanKind.SERVER)
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert span.end_time > span.start_time
    attributes = dict(span.attributes)
    assert attributes.pop("ragcache.request_id").startswith("req-")
    assert 0 < attributes.pop("gen_ai.response.time_to_first_chunk") < 60
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "ragcache",
        "gen_ai.request.model": "alias",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.usage.output_tokens": 5,
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "url.path": "/v1/chat/completions",
    }


async def test_the_log_names_the_trace(traced, caplog):
    http, _ = traced
    caplog.set_level("INFO", "ragcache")
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    await (await http.post("/v1/chat/completions", json=ASK, headers=headers)).read()
    assert [r.fields["trace_id"] for r in caplog.records if hasattr(r, "fields")] == [TRACE]


@pytest.mark.parametrize("stream", [False, True])
async def test_failures_are_marked(traced, serving, stream):
    http, spans = traced
    serving.script.fail_after, serving.script.failure = 1, RequestTimeout("took long")
    await (await http.post("/v1/messages", json=ASK | {"max_tokens": 9, "stream": stream})).read()
    (span,) = await spans(1)
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == "RequestTimeout"
    assert span.attributes["http.response.status_code"] == 504
    assert "gen_ai.response.finish_reasons" not in span.attributes


async def test_a_model_that_is_not_served_is_not_named(traced):
    http, spans = traced
    response = await http.post("/v1/messages", json=ASK | {"max_tokens": 9, "model": "x" * 10_000})
    assert response.status == 404
    (span,) = await spans(1)
    assert span.name == "chat"
    assert not any("x" * 100 in str(value) for value in span.attributes.values())


async def test_only_what_asks_the_model_is_traced(traced):
    http, spans = traced
    for path in ("/health", "/metrics", "/v1/models"):
        await (await http.get(path)).read()
    await (await http.post("/v1/completions", json={"model": "tiny", "prompt": "x"})).read()
    assert [span.name for span in await spans(1)] == ["text_completion tiny"]


@pytest.fixture
async def collector(monkeypatch):
    """What a collector of OTLP over HTTP was sent; it takes its time when told to."""
    received, patience = [], asyncio.Event()
    patience.set()

    async def traces(request):
        await patience.wait()
        received.append(ExportTraceServiceRequest.FromString(await request.read()))
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/traces", traces)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{runner.addresses[0][1]}")
    yield received, patience
    patience.set()
    await runner.cleanup()


def a_record():
    record = Record("req-1", "POST", "/v1/messages", api="messages", model="tiny")
    record.end = record.arrival + 1
    return record


async def test_spans_are_sent_where_the_variables_say(collector):
    received, _ = collector
    tracer = Tracer()
    trace_id = tracer.span(a_record(), {})
    await asyncio.to_thread(tracer.close)
    (request,) = received
    (span,) = request.resource_spans[0].scope_spans[0].spans
    assert (span.name, span.trace_id.hex()) == ("chat tiny", trace_id)
    assert span.end_time_unix_nano - span.start_time_unix_nano == 10**9


async def test_a_collector_that_hangs_does_not_hold_up_the_end(collector, monkeypatch):
    received, patience = collector
    patience.clear()
    monkeypatch.setattr(tracing, "CLOSE_WITHIN", 0.05)
    tracer = Tracer()
    tracer.span(a_record(), {})
    await asyncio.to_thread(tracer.close)
    assert not received


def test_the_service_has_a_name_unless_it_is_given_one(monkeypatch):
    for given, name in ((None, "ragcache"), ("mine", "mine")):
        if given:
            monkeypatch.setenv("OTEL_SERVICE_NAME", given)
        provider = tracing._exporting()
        assert provider.resource.attributes["service.name"] == name
        provider.shutdown()


def test_without_the_extra_there_is_one_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"pip install 'ragcache-gateway\[otel\]'"):
        Tracer()


def test_nothing_of_it_is_imported_when_it_is_off():
    code = "import sys, ragcache.gateway.app; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
