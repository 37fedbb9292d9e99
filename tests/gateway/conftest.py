"""A scripted serving behind the real runner, on real sockets."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import aiohttp
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from scripted import make_gateway

from ragcache.errors import (
    ContextLengthExceeded,
    EngineUnavailable,
    InvalidRequest,
    NotFound,
    ShuttingDown,
)
from ragcache.gateway.app import create_app, listening
from ragcache.serving import Serving
from ragcache.serving.generation import Times
from ragcache.types import (
    BlockTimes,
    ChatPrompt,
    Delta,
    EngineStats,
    Explanation,
    FinishReason,
    GenerateRequest,
    HostStats,
    HotPrefix,
    Message,
    PoolCounts,
    Segment,
    TextLogprob,
    Usage,
)

__all__ = ["make_gateway"]

TEXT = ("Hello", ", ", "wörld", " 🌍", "!")


@dataclass
class Script:
    """What the fake model says, and when."""

    pieces: tuple[str, ...] = TEXT
    deltas: tuple[Delta, ...] | None = None  # said as they are, instead of the pieces
    cached_tokens: int = 0
    written: Mapping[str, int] = field(default_factory=dict)
    explanation: Explanation | None = None
    pause: float = 0.0  # seconds between two steps
    queued: asyncio.Event | None = None  # set to let the request out of the queue
    refuse: Exception | None = None  # raised by start
    fail_after: int | None = None  # steps before `failure` is raised
    failure: Exception = field(default_factory=lambda: RuntimeError("the engine is broken"))


def words(prompt: ChatPrompt | str | tuple[int, ...]) -> int:
    """The fake model's tokens: words, and one for each message."""
    if isinstance(prompt, ChatPrompt):
        return sum(map(_message_words, prompt.messages)) + _json_words(*prompt.tools)
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


def _message_words(message: Message) -> int:
    return 1 + len(message.content.split()) + _json_words(*message.tool_calls)


def _json_words(*values: Mapping[str, object]) -> int:
    return sum(len(json.dumps(value).split()) for value in values)


class FakeGeneration:
    def __init__(self, owner: FakeServing, request: GenerateRequest) -> None:
        self.id = request.id
        self.request = request
        self.prompt_tokens = words(request.prompt)
        self.explanation: Explanation | None = None
        self.admitted = asyncio.Event()
        self.times = Times(time.perf_counter())
        self.sampling = request.sampling
        self.closed = 0
        self.ended = False
        self._owner = owner
        self._script = owner.script
        self._cached = 0
        self._written: Mapping[str, int] = {}
        self._completion = 0

    @property
    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, self._cached, self._completion, self._written)

    @property
    def longest(self) -> int:
        return self._completion // self.sampling.n

    @property
    def hit_known(self) -> bool:
        return self.admitted.is_set()

    def segments(self) -> list[Segment]:
        return [Segment("messages.0", 0, self.prompt_tokens)]

    def breakpoint_outcomes(self) -> list[tuple[str, str]]:
        if not isinstance(self.request.prompt, ChatPrompt):
            return []
        outcome = "hit" if self._cached else "miss"
        return [(breakpoint.origin, outcome) for breakpoint in self.request.prompt.breakpoints]

    async def aclose(self) -> None:
        self.closed += 1

    async def __aiter__(self) -> AsyncIterator[Delta]:
        script = self._script
        if script.queued is not None:
            await script.queued.wait()
        self._cached, self._written = script.cached_tokens, script.written
        self.explanation = script.explanation
        self.times.admitted = time.perf_counter()
        self.admitted.set()
        self._owner.query_tokens += self.prompt_tokens
        self._owner.hit_tokens += self._cached
        for step, deltas in enumerate(self._steps()):
            if step == script.fail_after:
                raise script.failure
            await asyncio.sleep(script.pause)
            if self._owner.interrupted:
                raise ShuttingDown("the server is shutting down")
            self.times.token(time.perf_counter())
            for delta in deltas:
                self._completion += bool(delta.text or delta.calls)
                yield delta
        self.ended = True

    def _steps(self) -> Iterator[list[Delta]]:
        script, sampling = self._script, self.request.sampling
        if script.deltas is not None:
            yield from ([delta] for delta in script.deltas)
            return
        said = script.pieces[: sampling.max_tokens]
        for piece in said:
            yield [Delta(index, piece, self._logprobs(piece)) for index in range(sampling.n)]
        reason = FinishReason.LENGTH if len(said) < len(script.pieces) else FinishReason.STOP
        yield [Delta(index, finish_reason=reason) for index in range(sampling.n)]

    def _logprobs(self, piece: str) -> tuple[TextLogprob, ...]:
        if (wanted := self.request.sampling.logprobs) is None:
            return ()
        others = [TextLogprob(f"alt{i}", b"alt", -float("inf")) for i in range(wanted)]
        return (TextLogprob(piece, piece.encode(), -0.5, tuple(others)),)


class FakeServing:
    model_names = ("tiny", "alias")
    max_model_len = 1000
    created = 1_750_000_000
    check_name = Serving.check_name

    def __init__(self) -> None:
        self.script = Script()
        self.generations: list[FakeGeneration] = []
        self.query_tokens = 0
        self.hit_tokens = 0
        self.held = 0
        self.dropped: list[str] = []  # tenants
        self.not_ready: str | None = None
        self.stack: str | None = None  # of an engine that hangs
        self.interrupted = False
        self.failure: EngineUnavailable | None = None
        self.host: HostStats | None = None
        self.block_times: BlockTimes | None = None
        self.prefixes: list[HotPrefix] = []
        self.answering = asyncio.Event()  # else the engine is in a long step
        self.answering.set()
        self.asked: list[str] = []  # tenants, for their prefixes

    async def start(self, request: GenerateRequest) -> FakeGeneration:
        if self.script.refuse is not None:
            raise self.script.refuse
        if words(request.prompt) >= self.max_model_len:
            raise ContextLengthExceeded("prompt is too long: 1000 tokens", param="messages")
        if isinstance(request.prompt, ChatPrompt):
            for message in request.prompt.messages:
                if any("\ud800" <= char <= "\udfff" for char in message.content):
                    raise InvalidRequest("lone surrogate", param="messages")
        self.generations.append(FakeGeneration(self, request))
        return self.generations[-1]

    async def start_all(self, requests: Sequence[GenerateRequest]) -> list[FakeGeneration]:
        return [await self.start(request) for request in requests]

    async def count_tokens(self, prompt: ChatPrompt, tenant: str) -> int:
        return words(prompt)

    def ready(self) -> str | None:
        return self.not_ready

    def stats(self) -> EngineStats:
        return EngineStats(
            running=self.held,
            waiting=0,
            pool=PoolCounts(free=90 - self.held, cached=10, held=self.held),
            block_size=4,
            query_tokens=self.query_tokens,
            hit_tokens=self.hit_tokens,
            evictions=3,
            preemptions=1,
            drafted_tokens=9,
            accepted_tokens=6,
            computed_tokens=self.query_tokens - self.hit_tokens,
            prefill_rate=200.0,
            host=self.host,
            block_times=self.block_times,
        )

    async def hot_prefixes(self, tenant: str, count: int) -> list[HotPrefix]:
        self.asked.append(tenant)
        await self.answering.wait()
        return self.prefixes[:count]

    def interrupt(self) -> None:
        self.interrupted = True

    @property
    def stuck(self) -> bool:
        return self.stack is not None

    def engine_stack(self) -> str:
        return self.stack

    async def drop_cache(self, tenant: str) -> int:
        self.dropped.append(tenant)
        return 7

    def explanation(self, request_id: str, tenant: str) -> Explanation:
        for generation in self.generations:
            if (generation.id, generation.request.tenant) == (request_id, tenant):
                return generation.explanation
        raise NotFound(f"no recent request {request_id!r}")


@pytest.fixture
def serving() -> FakeServing:
    return FakeServing()


@pytest.fixture
async def start(serving: FakeServing) -> AsyncIterator[Callable[..., Awaitable[str]]]:
    """Start a server with the options of `create_app`; returns its base URL."""
    async with AsyncExitStack() as stack:

        async def start(
            loading: asyncio.Future[FakeServing] | None = None, **options: object
        ) -> str:
            if loading is None:
                loading = asyncio.get_running_loop().create_future()
                loading.set_result(serving)
            app = create_app(loading, **options)
            return await stack.enter_async_context(listening(app, "127.0.0.1", 0))

        yield start


@pytest.fixture
async def url(start: Callable[..., Awaitable[str]]) -> str:
    return await start()


@pytest.fixture
async def http(url: str) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(url) as session:
        yield session


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def anthropic(url: str) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def chunks_of(http: aiohttp.ClientSession) -> Callable[..., Awaitable[list[dict]]]:
    """Post a body as a streaming request of OpenAI's; returns its chunks as they are."""

    async def chunks_of(body: dict, path: str = "/v1/chat/completions") -> list[dict]:
        async with http.post(path, json={**body, "stream": True}) as response:
            *events, done, end = (await response.text()).split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    return chunks_of


@pytest.fixture
def errors_logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The messages of level ERROR and above so far."""
    return lambda: [r.getMessage() for r in caplog.records if r.levelname in {"ERROR", "CRITICAL"}]
