"""The typed exceptions of both official clients, raised by the whole gateway, and their retries."""

from __future__ import annotations

import asyncio

import anthropic
import numpy as np
import openai
import pytest
import torch

from ragcache.config import ServeSettings
from ragcache.errors import EngineUnavailable
from ragcache.gateway.app import create_app, listening

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
WRONG = {"type": "object", "properties": {"city": {"type": "strin"}}}


class Wire:
    """One of the two SDKs, the way its errors are provoked in it."""

    def __init__(self, sdk, name, schema_field, tool_field) -> None:
        self.sdk = sdk
        self.blocking, self.asynchronous = getattr(sdk, name), getattr(sdk, f"Async{name}")
        self.schema_field, self.tool_field = schema_field, tool_field

    def options(self, url, **options):
        base_url = f"{url}/v1" if self.sdk is openai else url
        return {"base_url": base_url, "api_key": "none", "max_retries": 0, **options}

    def create(self, client, **changes):
        route = client.chat.completions if self.sdk is openai else client.messages
        return route.create(**{**ASK, **changes})

    def schema(self, schema):
        if self.sdk is openai:
            wanted = {"name": "x", "schema": schema}
            return {"response_format": {"type": "json_schema", "json_schema": wanted}}
        return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}

    def tools(self, schema):
        if self.sdk is openai:
            return [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        return [{"name": "f", "input_schema": schema}]


WIRES = {
    "openai": Wire(openai, "OpenAI", "response_format", "tools[0].function.parameters"),
    "anthropic": Wire(anthropic, "Anthropic", "output_config.format", "tools[0].input_schema"),
}


@pytest.fixture(params=WIRES)
def wire(request):
    return WIRES[request.param]


@pytest.fixture
def open_client(wire, connect):
    def open_client(url, **options):
        return connect(wire.blocking, wire.asynchronous, **wire.options(url, **options))

    return open_client


@pytest.fixture
def refusal(wire, gateway, open_client):
    """The exception that a request ends with."""

    def refusal(kind, url=gateway.url, api_key="none", **changes):
        with pytest.raises(getattr(wire.sdk, kind)) as caught:
            wire.create(open_client(url, api_key=api_key), **changes)
        assert caught.value.request_id.startswith("req-")
        return caught.value

    return refusal


def test_a_schema_that_is_none_is_a_400(wire, refusal):
    error = refusal("BadRequestError", **wire.schema(WRONG))
    assert f"{wire.schema_field}: " in error.message
    assert "strin" in error.message
    error = refusal("BadRequestError", tools=wire.tools(WRONG))
    assert f"{wire.tool_field}: " in error.message


def test_a_prompt_beyond_the_context_is_a_400(refusal):
    error = refusal("BadRequestError", messages=[{"role": "user", "content": "word " * 9000}])
    assert "prompt is too long" in error.message
    assert "8192" in error.message


def test_an_unknown_model_is_a_404(refusal):
    assert "'gpt-99'" in refusal("NotFoundError", model="gpt-99").message


@pytest.fixture(scope="module")
def guarded(make_gateway):
    with make_gateway(api_keys=["right"], max_body_size=10_000) as gateway:
        yield gateway


def test_keys_and_large_bodies(guarded, wire, refusal, open_client):
    refusal("AuthenticationError", guarded.url, "wrong")
    large = [{"role": "user", "content": "x" * 10_000}]
    error = refusal("APIStatusError", guarded.url, "right", messages=large)
    assert error.status_code == 413
    assert wire.create(open_client(guarded.url, api_key="right")).id


@pytest.fixture(scope="module")
def narrow(make_gateway):
    """Room for one request that runs and one that waits."""
    settings = ServeSettings(max_running=1, max_queue=1, max_batch_tokens=512)
    with make_gateway(settings=settings) as gateway:
        yield gateway


@pytest.fixture
def occupants(narrow):
    """Streams that take all the room until they are closed."""
    with openai.OpenAI(base_url=f"{narrow.url}/v1", api_key="none", max_retries=0) as client:
        streams = [
            client.completions.create(
                model="tiny", prompt="x", stream=True, max_tokens=5000, logit_bias={"2": -100}
            )
            for _ in range(2)
        ]
        yield streams
        for stream in streams:
            stream.close()
    narrow.at_rest()


def test_a_full_queue_is_a_429(narrow, occupants, refusal):
    error = refusal("RateLimitError", narrow.url)
    assert error.response.headers["retry-after"] == "1"


def test_a_retry_is_answered_once_there_is_room(narrow, occupants, wire):
    refused = []

    def make_room(response):
        if response.status_code == 429:
            refused.append(response)
            for stream in occupants:
                stream.close()

    hooks = wire.sdk.DefaultHttpxClient(event_hooks={"response": [make_room]})
    with wire.blocking(**wire.options(narrow.url, max_retries=3), http_client=hooks) as client:
        assert wire.create(client).id
    assert refused


def test_an_answer_that_cannot_be_sampled_is_a_500_and_the_next_is_fine(
    gateway, wire, refusal, open_client, monkeypatch
):
    with monkeypatch.context() as patched:
        broken = torch.full((49152,), np.nan)
        patched.setattr(gateway.model, "logits", lambda context: broken)
        assert refusal("InternalServerError").status_code == 500
    assert wire.create(open_client(gateway.url)).id


def test_a_model_that_breaks_is_an_exception_in_a_stream_and_a_503_from_then_on(make_gateway, wire):
    with make_gateway() as gateway, wire.blocking(**wire.options(gateway.url)) as client:
        gateway.script.text = "word " * 500
        stream = iter(wire.create(client, stream=True, max_tokens=5000))
        next(stream)
        gateway.script.fail = True
        with pytest.raises(wire.sdk.APIError, match="the engine has failed"):
            list(stream)
        for streamed in (False, True):
            with pytest.raises(wire.sdk.InternalServerError) as caught:
                wire.create(client, stream=streamed)
            assert caught.value.status_code == 503
            assert caught.value.response.headers["retry-after"] == "5"


async def test_a_client_that_comes_too_early_is_answered_later(gateway, wire, monkeypatch):
    monkeypatch.setattr(EngineUnavailable, "retry_after", 0)
    loading = asyncio.get_running_loop().create_future()
    refused = []

    async def load(response):
        if response.status_code == 503 and refused:
            loading.set_result(gateway.serving)
        refused.append(response.status_code)

    hooks = wire.sdk.DefaultAsyncHttpxClient(event_hooks={"response": [load]})
    async with (
        listening(create_app(loading), "127.0.0.1", 0) as url,
        wire.asynchronous(**wire.options(url), http_client=hooks) as client,
    ):
        with pytest.raises(wire.sdk.InternalServerError) as caught:
            await wire.create(client)
        assert "loading" in caught.value.message
        patient = client.with_options(max_retries=2)
        assert (await wire.create(patient)).id
    assert refused == [503, 503, 200]
