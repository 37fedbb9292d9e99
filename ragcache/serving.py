"""One request from messages to text: the only place where prompt meets engine."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from ragcache.engine.bridge import EngineClient, Subscription
from ragcache.engine.request import Request
from ragcache.errors import ContextLengthExceeded, InvalidRequest
from ragcache.prefix.names import namespace_name, owner_name
from ragcache.prompt.stops import StopStrings
from ragcache.prompt.tokenize import TokenizerPool
from ragcache.types import (
    Admitted,
    ChatPrompt,
    Delta,
    EngineStats,
    Finished,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TextLogprob,
    Token,
    TokenLogprob,
    Usage,
)

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


class Serving:
    """Turns requests into token ids for the engine, and its tokens back into text."""

    def __init__(self, model: ServedModel, tokenizer: TokenizerPool, client: EngineClient) -> None:
        self.model = model
        self.created = int(time.time())
        self._tokenizer = tokenizer
        self._client = client

    @property
    def model_names(self) -> tuple[str, ...]:
        """Served names; the first is the canonical one."""
        return self.model.names

    @property
    def max_model_len(self) -> int:
        """Most tokens of one request, prompt and output together."""
        return min(self.model.max_model_len, self.model.pool_tokens)

    async def start(self, request: GenerateRequest) -> Generation:
        """Render, tokenize, validate and enqueue a request.

        Raises:
            InvalidRequest: naming the field.
            ContextLengthExceeded: when the prompt leaves no room for one output token.
            Overloaded: when the queue is full.
            EngineUnavailable: when the engine has stopped.
        """
        self._client.require_room()  # before the work of tokenizing, not only after it
        tokens = await self._encode(request.prompt)
        self._check(tokens, "messages" if isinstance(request.prompt, ChatPrompt) else "prompt")
        engine_request = Request(
            request.id,
            tokens,
            self._resolve(request.sampling, len(tokens)),
            namespace_name(owner_name(self.model.fingerprint, request.tenant), request.cache_salt),
            self.model.eos_token_ids,
        )
        return Generation(request, self._client.submit(engine_request), self._tokenizer)

    def ready(self) -> str | None:
        """None when requests are served, else the reason why not."""
        engine = self._client.engine
        if engine.failure is not None:
            return engine.failure.message
        idle = not (engine.stats.running or engine.stats.waiting)
        stalled = time.monotonic() - engine.progressed_at
        return None if idle or stalled < STALLED_AFTER else f"no step for {stalled:.0f} seconds"

    def stats(self) -> EngineStats:
        """A snapshot of the engine."""
        return self._client.engine.stats

    async def reset_cache(self) -> bool:
        """Forget all cached blocks."""
        await self._client.drop(b"")
        return True

    def close(self) -> None:
        """Stop the engine; requests that still run fail."""
        self._client.engine.stop()
        self._tokenizer.close()

    async def _encode(self, prompt: ChatPrompt | str | tuple[int, ...]) -> list[int]:
        if isinstance(prompt, ChatPrompt):
            encoded = await self._tokenizer.encode_chat(prompt, max_tokens=self.max_model_len)
            return encoded.token_ids
        if isinstance(prompt, str):
            encoded = await self._tokenizer.encode_text(prompt, max_tokens=self.max_model_len)
            return encoded.token_ids
        return list(prompt)

    def _check(self, tokens: list[int], field: str) -> None:
        if not tokens:
            raise InvalidRequest("the prompt is empty", param=field)
        self._check_length(len(tokens), field)
        if min(tokens) < 0 or max(tokens) >= self.model.vocab_size:
            raise InvalidRequest(
                f"{field}: token ids must be between 0 and {self.model.vocab_size - 1}", param=field
            )

    def _check_length(self, num_tokens: int, field: str) -> None:
        if num_tokens < self.max_model_len:
            return
        limit, holder = self.model.max_model_len, "the maximum context length"
        if self.model.pool_tokens < limit:
            limit, holder = self.model.pool_tokens, "the capacity of the KV pool"
        raise ContextLengthExceeded(
            f"prompt is too long: {num_tokens} tokens, but {holder} is {limit} tokens, "
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


class Generation:
    """The answer to one request: an asynchronous iterator of deltas, to be iterated once.

    Every choice gets exactly one delta with a finish reason. `usage` is final once the iteration
    has ended; its `cached_tokens` are known from the first delta on. `aclose` must be called
    when the iteration is left early.
    """

    def __init__(
        self, request: GenerateRequest, subscription: Subscription, tokenizer: TokenizerPool
    ) -> None:
        self.id = request.id
        self.prompt_tokens = len(subscription.request.prompt)
        self._cached_tokens = 0
        self._subscription = subscription
        self._choices = [_Choice(request, tokenizer) for _ in range(request.sampling.n)]

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        completion_tokens = sum(choice.num_tokens for choice in self._choices)
        return Usage(self.prompt_tokens, self._cached_tokens, completion_tokens)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        async for events in self._subscription:
            for event in events:
                if isinstance(event, Admitted):
                    self._cached_tokens = event.cached_tokens
                elif isinstance(event, Token | Finished) and (delta := self._advance(event)):
                    yield delta

    async def aclose(self) -> None:
        """Abort what still runs; closing again does nothing."""
        self._subscription.close()

    def _advance(self, event: Token | Finished) -> Delta | None:
        choice = self._choices[event.index]
        if choice.ended:
            return None  # what the engine did before it learned that the text was complete
        if isinstance(event, Finished):
            return choice.end(event)
        delta = choice.push(event)
        if choice.ended:
            self._subscription.finish(event.index)
        return delta


class _Choice:
    """Text, stop strings and token count of one choice."""

    def __init__(self, request: GenerateRequest, tokenizer: TokenizerPool) -> None:
        self.num_tokens = 0
        self.ended = False
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._stops = StopStrings(request.stop)

    def push(self, event: Token) -> Delta | None:
        """The text that a token completes; None while it has to be held back."""
        self.num_tokens += 1
        text, matched = self._stops.push(self._detokenizer.push([event.token_id]))
        self.ended = matched is not None
        logprobs = () if event.logprob is None else (self._logprob(event.logprob),)
        if not (text or logprobs or self.ended):
            return None
        reason = FinishReason.STOP if self.ended else None
        return Delta(event.index, text, logprobs, reason)

    def end(self, event: Finished) -> Delta:
        """The rest of the text and the finish reason."""
        self.ended = True
        self.num_tokens = event.num_tokens
        text, matched = self._stops.push(self._detokenizer.finish())
        if matched is None:
            return Delta(event.index, text + self._stops.finish(), (), event.reason)
        return Delta(event.index, text, (), FinishReason.STOP)

    def _logprob(self, logprob: TokenLogprob) -> TextLogprob:
        top = tuple(self._text(token, value) for token, value in logprob.top)
        return self._text(logprob.token_id, logprob.logprob, top)

    def _text(self, token_id: int, value: float, top: tuple[TextLogprob, ...] = ()) -> TextLogprob:
        text, raw = self._tokenizer.token_text(token_id)
        return TextLogprob(text, raw, value, top)
