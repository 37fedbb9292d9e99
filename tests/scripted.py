"""The whole gateway on a real socket, with a model that says what a script tells it.

Everything but the weights is real: template, tokenizer, prefix cache, engine, grammar, parser.
The fixtures are imported by the conftest of each folder that uses them.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from aiohttp import web
from anthropic import Anthropic
from numpy.typing import NDArray
from openai import OpenAI
from transformers import PreTrainedTokenizerFast

from ragcache.bench.hashing import HashRunner
from ragcache.config import ServeSettings
from ragcache.gateway.app import create_app, listening
from ragcache.gateway.membership import Membership
from ragcache.loading import assemble, load_serving, start_engine
from ragcache.prompt.vocabulary import BYTE_ALPHABET, Vocabulary
from ragcache.serving import ServedModel, Serving
from ragcache.types import EngineStats

VOCAB, EOS, BLOCK = 49152, 2, 16
ANSWER = "<|im_start|>assistant\n"


@dataclass
class Script:
    """What the model says: the reply of the first rule whose pattern is in the prompt.

    A rule is a pattern over the whole rendered prompt and a reply; behind every tool result and
    without a rule the model says `text`.
    """

    rules: list[tuple[str, str]] = field(default_factory=list)
    text: str = "It is said that you will see a lighthouse."
    free: bool = False  # nothing is scripted: what is said depends on every token of the context
    fail: bool = False  # the next step raises
    go: threading.Event = field(default_factory=threading.Event)  # unless set, a step waits for it

    def __post_init__(self) -> None:
        self.go.set()

    def reply(self, prompt: str) -> str:
        last = prompt.rpartition("<|im_start|>")[2]
        if last.startswith("tool"):
            return self.text
        found = (reply for pattern, reply in self.rules if re.search(pattern, prompt, re.DOTALL))
        return next(found, self.text)


class ScriptedModel(HashRunner):
    """Prefers the next token of the script; where a grammar forbids that, any token at random."""

    def __init__(
        self, num_blocks: int, tokenizer: PreTrainedTokenizerFast, host_blocks: int = 0
    ) -> None:
        super().__init__(num_blocks, BLOCK, VOCAB, host_blocks)
        self.script = Script()
        self._tokenizer = tokenizer
        self._vocabulary = Vocabulary(tokenizer.backend_tokenizer)
        bytes_as_tokens = {byte: char for char, byte in BYTE_ALPHABET.items()}
        self._byte_ids = {
            byte: tokenizer.convert_tokens_to_ids(char) for byte, char in bytes_as_tokens.items()
        }
        self._closers = tokenizer.convert_tokens_to_ids(['"', "}", '"}', '",', '"},', "]"])

    def logits(self, context: NDArray[np.int64]) -> torch.Tensor:
        assert self.script.go.wait(60)
        if self.script.fail:
            raise RuntimeError("the model is broken")
        logits = super().logits(context)
        logits[EOS] = -50
        if self.script.free:
            return logits
        rest = self._rest(context)
        if rest is None:
            logits[self._closers] = 20  # off the script: come to an end as soon as that is allowed
            logits[EOS] = 30
        else:
            logits[rest[0] if rest else EOS] = 100
        return logits

    def _rest(self, context: NDArray[np.int64]) -> list[int] | None:
        """The tokens that the script still has; None where something else was said."""
        text = b"".join(map(self._vocabulary.token_bytes, context.tolist()))
        prompt, _, said = text.rpartition(ANSWER.encode())
        reply = self.script.reply(prompt.decode("utf-8", "replace")).encode()
        if not reply.startswith(said):
            return None
        rest = reply[len(said) :]
        if rest and 0x80 <= rest[0] < 0xC0:  # the other bytes of a character that has begun
            return [self._byte_ids[rest[0]]]
        return self._tokenizer.encode(rest.decode(), add_special_tokens=False)


@dataclass
class Gateway:
    """A running gateway, the script of its model, and ways to ask it."""

    url: str
    model: ScriptedModel
    serving: Serving
    clients: ExitStack = field(default_factory=ExitStack)

    @property
    def script(self) -> Script:
        return self.model.script

    @cached_property
    def openai(self) -> OpenAI:
        """OpenAI's client."""
        url = f"{self.url}/v1"
        return self.clients.enter_context(OpenAI(base_url=url, api_key="none", max_retries=0))

    @cached_property
    def anthropic(self) -> Anthropic:
        """Anthropic's client."""
        url = self.url
        return self.clients.enter_context(Anthropic(base_url=url, api_key="none", max_retries=0))

    @cached_property
    def http(self) -> httpx2.Client:
        """A client of neither API."""
        return self.clients.enter_context(httpx2.Client(base_url=self.url, timeout=60))

    def events(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """The data of a stream's events."""
        wire = self.http.post(path, json={**body, "stream": True}).raise_for_status().text
        data = [line[6:] for line in wire.splitlines() if line.startswith("data: ")]
        return [json.loads(each) for each in data if each != "[DONE]"]

    def metrics(self) -> dict[str, float]:
        """All samples by name and labels, as they are written."""
        lines = self.http.get("/metrics").text.splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    def at_rest(self) -> EngineStats:
        """The engine's counts once nothing runs or waits any more."""
        deadline = time.monotonic() + 10
        while (stats := self.serving.stats()).running or stats.waiting:
            assert time.monotonic() < deadline, "the engine does not come to rest"
            time.sleep(0.002)
        return stats


@contextmanager
def in_thread(
    serving: Serving, membership: Membership | None = None, port: int = 0, **options: object
) -> Iterator[str]:
    """The gateway on a loop of its own, so that synchronous clients can be used."""

    def make(loading: asyncio.Future[Serving]) -> web.Application:
        app = create_app(loading, **options)
        if membership is not None:
            membership.join(app)
        return app

    with app_in_thread(make, serving, port) as url:
        yield url


@contextmanager
def app_in_thread(
    make: Callable[[asyncio.Future[Any]], web.Application], loaded: object, port: int = 0
) -> Iterator[str]:
    """An application on a loop of its own, made with what it waits for; yields its URL."""
    loop = asyncio.new_event_loop()
    ready, stop = threading.Event(), asyncio.Event()
    urls: list[str] = []

    async def main() -> None:
        loading = loop.create_future()
        loading.set_result(loaded)
        async with listening(make(loading), "127.0.0.1", port) as url:
            urls.append(url)
            ready.set()
            await stop.wait()
        await asyncio.sleep(0)  # the sockets of connections that were just closed

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),), daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()


@pytest.fixture(scope="session")
def make_gateway(smollm2) -> Callable[..., Gateway]:
    """A context manager: a new gateway, with settings and options of `create_app`."""

    @contextmanager
    def make(
        num_blocks: int = 2000,
        max_model_len: int = 8192,
        settings=None,
        host_blocks: int = 0,
        **options,
    ):
        settings = settings or ServeSettings(max_running=8, max_queue=16, max_batch_tokens=2048)
        model = ScriptedModel(num_blocks, smollm2, host_blocks)
        served = ServedModel(
            ("tiny", "alias"),
            max_model_len,
            num_blocks * BLOCK,
            VOCAB,
            frozenset([EOS]),
            "scripted",
            settings.prefix_caching,
        )
        membership = Membership(settings.redis_url, settings) if settings.redis_url else None
        sink = membership.outbox if membership else None
        client = start_engine(model, num_blocks, settings, host_blocks, sink=sink)
        serving = assemble(served, smollm2, client)
        try:
            with in_thread(serving, membership, **options) as url, ExitStack() as clients:
                yield Gateway(url, model, serving, clients)
        finally:
            serving.close()

    return make


@pytest.fixture(scope="session")
def shared_gateway(make_gateway) -> Iterator[Gateway]:
    with make_gateway() as gateway:
        yield gateway


@pytest.fixture
def gateway(shared_gateway) -> Iterator[Gateway]:
    """The session's gateway with a fresh script and an empty cache."""
    shared_gateway.model.script = Script()
    future = shared_gateway.serving._client.engine.drop(b"")
    future.result(10)
    shared_gateway.serving._history.forget(b"")
    return shared_gateway


@pytest.fixture(scope="session")
def small_model() -> Iterator[Serving]:
    """The embedded model."""
    settings = ServeSettings(
        dtype="float32",
        kv_cache_blocks=2000,
        served_model_name=["tiny", "alias"],
        max_string_length=40,
    )
    serving = load_serving(settings)
    try:
        yield serving
    finally:
        serving.close()


@pytest.fixture(scope="session")
def embedded(small_model) -> Iterator[str]:
    """The URL of a gateway with the embedded model."""
    with in_thread(small_model) as url:
        yield url
