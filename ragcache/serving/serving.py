"""Requests in, generations out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from contextvars import Context
from dataclasses import dataclass, replace
from functools import partial

from ragcache.engine.bridge import EngineClient
from ragcache.engine.constraint import Grammar
from ragcache.engine.request import Request
from ragcache.errors import (
    ContextLengthExceeded,
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    ShuttingDown,
)
from ragcache.prefix.explain import History
from ragcache.prefix.names import namespace_name, owner_name
from ragcache.prompt.grammar import GrammarCompiler
from ragcache.prompt.layout import TokenizedPrompt
from ragcache.prompt.threads import background_threads
from ragcache.prompt.tokenize import TokenizerPool
from ragcache.serving.generation import Generation
from ragcache.serving.places import Capacity, Place
from ragcache.serving.prompted import Prompted
from ragcache.types import (
    ChatPrompt,
    EngineStats,
    Explanation,
    GenerateRequest,
    HotPrefix,
    SamplingParams,
)

COUNTED = 1 << 21  # tokens; seconds on a thread of the tokenizer, and some 100 MB meanwhile
STALLED_AFTER = 60.0  # seconds in one step, after which the engine counts as stuck


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What serving needs to know of the model behind the engine.

    `max_model_len` counts prompt and output tokens of one request; `pool_tokens` is what the KV
    pool holds in all. `fingerprint` tells its KV apart from that of any other model.
    """

    names: tuple[str, ...]
    max_model_len: int
    pool_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    fingerprint: str
    prefix_caching: bool = True


class Serving:
    """Turns requests into token ids for the engine, and its tokens back into text."""

    def __init__(
        self,
        model: ServedModel,
        tokenizer: TokenizerPool,
        client: EngineClient,
        grammars: GrammarCompiler,
    ) -> None:
        self.model = model
        self.created = int(time.time())
        self._tokenizer = tokenizer
        self._client = client
        self._grammars = grammars
        self._compiling = background_threads(2, "grammar")  # slow schemas hold up only each other
        self._history = History(client.engine.stats.block_size)
        limits = client.limits
        self._capacity = Capacity(limits.max_requests, limits.max_tenant_requests)
        self._counting = Capacity(limits.max_requests, limits.max_tenant_requests)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Served names; the first is the canonical one."""
        return self.model.names

    def check_name(self, name: str) -> None:
        """Raise ModelNotFound unless the model is served under this name."""
        if name not in self.model_names:
            known = ", ".join(self.model_names)
            raise ModelNotFound(
                f"the model {name!r} does not exist; served here: {known}", param="model"
            )

    @property
    def max_model_len(self) -> int:
        """Most tokens of one request, prompt and output together."""
        return min(self.model.max_model_len, self.model.pool_tokens)

    async def start(self, request: GenerateRequest) -> Generation:
        """Render, tokenize, validate and enqueue a request.

        Raises:
            InvalidRequest: naming the field.
            ContextLengthExceeded: when the prompt leaves no room for one output token.
            Overloaded: when the queue is full, or as much of it as the tenant may have.
            QueueTimeout: when reading the prompt alone takes longer than a request may wait.
            EngineUnavailable: when the engine has stopped.
        """
        (generation,) = await self.start_all([request])
        return generation

    async def start_all(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Start several requests of one tenant, or none of them; raises what `start` does."""
        # Their places are taken before the work of tokenizing: what is refused costs nothing.
        first = requests[0]
        places = self._capacity.take(first.tenant, len(requests), first.sampling.n)
        arrival = asyncio.get_running_loop().time()
        async with AsyncExitStack() as undo:
            for place in places:
                undo.callback(place.leave)
            generations: list[Generation] = []
            for request, place in zip(requests, places, strict=True):
                generations.append(await self._start(request, place, arrival))
                undo.push_async_callback(generations[-1].aclose)
            undo.pop_all()
        return generations

    async def _start(self, request: GenerateRequest, place: Place, arrival: float) -> Generation:
        limits = self._client.limits
        try:
            async with asyncio.timeout(None) as limit:
                # In a context of its own: a loop keeps timers for long after they were cancelled.
                Context().run(limit.reschedule, arrival + limits.queue_timeout)
                prompted, engine_request = await self._read(request)
        except TimeoutError:
            raise limits.waited() from None
        subscription = self._client.submit(engine_request, arrival, ended=place.leave)
        return Generation(prompted, subscription, self._tokenizer)

    async def _read(self, request: GenerateRequest) -> tuple[Prompted, Request]:
        namespace = namespace_name(self._owner(request.tenant), request.cache_salt)
        prompt = await self._encode(request, namespace)
        if not isinstance(request.prompt, tuple):  # ids are checked before they are read
            self._check_length(prompt.token_ids, _field(request.prompt))
            if self._tokenizer.num_ids > self.model.vocab_size:
                self._check_range(prompt.token_ids, _field(request.prompt))
        sampling = self._resolve(request.sampling, len(prompt.token_ids))
        grammar = await self._grammar(request)
        prompted = self._prompted(request, prompt, namespace)
        return prompted, Request(
            request.id,
            prompt.token_ids,
            sampling,
            namespace,
            self.model.eos_token_ids,
            grammar=grammar,
            breakpoints=prompted.retentions,
            cacheable=prompted.cacheable,
        )

    async def count_tokens(self, prompt: ChatPrompt, tenant: str) -> int:
        """The length of a rendered conversation.

        Whoever counts is about to shorten a history, however many contexts that fills by now. Only
        what is longer than both `COUNTED` tokens and a context raises ContextLengthExceeded.
        As many as requests may be under way, beside these: they keep the tokenizer busy, too.
        Raises Overloaded beyond.
        """
        limit, scope = max(COUNTED, self.max_model_len), namespace_name(self._owner(tenant)).hex()
        (place,) = self._counting.take(tenant)
        try:
            return await self._tokenizer.count_tokens(prompt, limit, scope)
        finally:
            place.leave()

    def explanation(self, request_id: str, tenant: str) -> Explanation:
        """Why the prompt of a recent request hit as far as it did.

        Raises NotFound for a request that is forgotten, or another tenant's.
        """
        known = self._history.explanation(request_id, self._owner(tenant))
        if known is None:
            raise NotFound(f"no recent request {request_id!r}")
        return known

    def ready(self) -> str | None:
        """None when requests are served, else the reason why not."""
        if self.failure is not None:
            return self.failure.message
        return f"no step for {self._client.engine.stalled:.0f} seconds" if self.stuck else None

    @property
    def failure(self) -> EngineUnavailable | None:
        """Why no request will ever be served again; None while some may be."""
        return self._client.engine.failure

    @property
    def stuck(self) -> bool:
        """Whether the engine has work to do and does not get on with it."""
        return self._client.engine.stalled >= STALLED_AFTER

    def engine_stack(self) -> str:
        """What the engine's thread is doing."""
        return self._client.engine.stack()

    def stats(self) -> EngineStats:
        """A snapshot of the engine."""
        return self._client.engine.stats

    async def hot_prefixes(self, tenant: str, count: int) -> list[HotPrefix]:
        """The prefixes that a tenant's prompts share most, parents before their children.

        Waits for the step that the engine is in; raises EngineUnavailable when it has stopped.
        """
        return await self._client.hottest(self._owner(tenant), count)

    async def check_cache(self) -> None:
        """Recount all KV blocks, between two steps; raises AssertionError for what is wrong."""
        await self._client.check()

    async def drop_cache(self, tenant: str) -> int:
        """Forget what is cached for a tenant; returns how many blocks that were.

        Running requests go on with the blocks they hold and publish no more.
        """
        owner = self._owner(tenant)
        dropped = await self._client.drop(owner)
        self._history.forget(owner)
        return dropped

    def interrupt(self) -> None:
        """Fail the requests under way and those to come, because the server is to end."""
        self._client.close(ShuttingDown("the server is shutting down"))

    def close(self) -> None:
        """Stop the engine; requests that still run fail."""
        self._client.engine.stop()
        self._tokenizer.close()
        self._compiling.shutdown(cancel_futures=True)

    def _owner(self, tenant: str) -> bytes:
        return owner_name(self.model.fingerprint, tenant)

    async def _grammar(self, request: GenerateRequest) -> Grammar | None:
        tools = request.prompt.tools if isinstance(request.prompt, ChatPrompt) else ()
        if not tools and request.output.schema is None:
            return None
        try:
            return self._grammars.find(tools, request.output)
        except LookupError:
            work = partial(self._grammars.compile, tools, request.output)
            return await asyncio.get_running_loop().run_in_executor(self._compiling, work)

    def _prompted(
        self, request: GenerateRequest, prompt: TokenizedPrompt, namespace: bytes
    ) -> Prompted:
        return Prompted(
            request,
            prompt,
            namespace,
            room=self.max_model_len - len(prompt.token_ids),
            block_size=self.stats().block_size,
            tokenizer=self._tokenizer,
            history=self._history if self.model.prefix_caching else None,
            generation=self._history.generation,
        )

    async def _encode(self, request: GenerateRequest, namespace: bytes) -> TokenizedPrompt:
        prompt, limit = request.prompt, self.max_model_len
        if isinstance(prompt, ChatPrompt):
            return await self._tokenizer.encode_chat(prompt, limit, namespace.hex())
        if isinstance(prompt, str):
            return await self._tokenizer.encode_text(prompt, limit)
        self._check_length(prompt, "prompt")
        self._check_range(prompt, "prompt")
        return await self._tokenizer.read_tokens(prompt)

    def _check_range(self, tokens: Sequence[int], field: str) -> None:
        if min(tokens) < 0 or max(tokens) >= self.model.vocab_size:
            raise InvalidRequest(
                f"{field}: token ids must be between 0 and {self.model.vocab_size - 1}", param=field
            )

    def _check_length(self, tokens: Sequence[int], field: str) -> None:
        if not tokens:
            raise InvalidRequest("the prompt is empty", param=field)
        if len(tokens) < self.max_model_len:
            return
        limit, holder = self.model.max_model_len, "the maximum context length"
        if self.model.pool_tokens < limit:
            limit, holder = self.model.pool_tokens, "the capacity of the KV pool"
        raise ContextLengthExceeded(
            f"prompt is too long: {len(tokens)} tokens, but {holder} is {limit} tokens, "
            "of which at least one is for the output",
            param=field,
        )

    def _resolve(self, sampling: SamplingParams, prompt_tokens: int) -> SamplingParams:
        """Fill in or clamp `max_tokens` to the room that is left; check token ids."""
        for name in ("logit_bias", "stop_token_ids"):
            unknown = [t for t in getattr(sampling, name) if not 0 <= t < self.model.vocab_size]
            if unknown:
                raise InvalidRequest(f"{name}: {unknown[0]} is not a token id", param=name)
        room = self.max_model_len - prompt_tokens
        wanted = room if sampling.max_tokens is None else sampling.max_tokens
        if sampling.min_tokens > wanted:
            raise InvalidRequest("min_tokens exceeds max_tokens", param="min_tokens")
        return replace(sampling, max_tokens=min(wanted, room))


def _field(prompt: ChatPrompt | str | tuple[int, ...]) -> str:
    return "messages" if isinstance(prompt, ChatPrompt) else "prompt"
