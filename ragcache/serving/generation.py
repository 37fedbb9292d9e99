"""The engine's tokens as an answer: text, calls, log-probabilities, usage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ragcache.engine.bridge import Subscription
from ragcache.prompt.tokenize import TokenizerPool
from ragcache.serving.choice import Choice, readable, text_logprob
from ragcache.serving.prompted import Prompted
from ragcache.types import (
    Admitted,
    Delta,
    EngineEvent,
    Explanation,
    Finished,
    Prefilled,
    SamplingParams,
    Segment,
    TextLogprob,
    Token,
    Usage,
)


@dataclass(slots=True)
class Times:
    """When a request came as far as this, in seconds on `time.perf_counter`."""

    submitted: float
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    def token(self, now: float) -> None:
        """Note that a token came."""
        self.first_token = self.first_token or now
        self.last_token = now


class Generation:
    """The answer to one request: an asynchronous iterator of deltas, to be iterated once.

    Every choice gets exactly one delta with a finish reason. `usage` is final once the iteration
    has ended; its cached and written tokens and `explanation` are known once `admitted` is set,
    which is before the first delta. `aclose` must be called when the iteration is left early.
    """

    def __init__(
        self, prompted: Prompted, subscription: Subscription, tokenizer: TokenizerPool
    ) -> None:
        self.id = prompted.request.id
        self.explanation: Explanation | None = None
        self.admitted = asyncio.Event()  # or ended without ever being admitted
        self.times = Times(time.perf_counter())
        self._prompted = prompted
        self._tokenizer = tokenizer
        self._subscription = subscription
        self._hit_tokens: int | None = None
        self._written: Mapping[str, int] = {}
        n = prompted.request.sampling.n
        self._choices = [Choice(prompted, tokenizer) for _ in range(n)]

    @property
    def prompt_tokens(self) -> int:
        """The length of the prompt."""
        return len(self._prompted.prompt.token_ids)

    @property
    def hit_known(self) -> bool:
        """Whether the request has left the queue."""
        return self._hit_tokens is not None

    @property
    def sampling(self) -> SamplingParams:
        """How its tokens are chosen."""
        return self._prompted.request.sampling

    @property
    def longest(self) -> int:
        """Tokens of the longest choice so far."""
        return max(choice.num_tokens for choice in self._choices)

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        completion_tokens = sum(choice.num_tokens for choice in self._choices)
        return Usage(self.prompt_tokens, self._hit_tokens or 0, completion_tokens, self._written)

    def segments(self) -> Sequence[Segment]:
        """The parts of the prompt, in order and without gaps."""
        return self._prompted.prompt.layout().segments

    def breakpoint_outcomes(self) -> list[tuple[str, str]]:
        """Origin and outcome of each cache marker, see `PlacedBreakpoints.outcomes`."""
        return list(self._prompted.breakpoints.outcomes(self._hit_tokens or 0))

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            async for events in self._subscription:
                for event in events:
                    if isinstance(event, Admitted):
                        await self._admit(event.cached_tokens)
                    elif isinstance(event, Token):
                        self.times.token(time.perf_counter())
                    for delta in self._deltas(event):
                        yield delta
        finally:
            self.admitted.set()

    async def aclose(self) -> None:
        """Abort what still runs; closing again does nothing."""
        self._subscription.close()

    async def _admit(self, hit_tokens: int) -> None:
        self.times.admitted = time.perf_counter()
        self._hit_tokens = hit_tokens
        if self._prompted.explainer is not None:
            self.explanation = await self._prompted.explainer.explain(hit_tokens)
            self._written = self._prompted.breakpoints.written(hit_tokens)
        self.admitted.set()

    def _deltas(self, event: EngineEvent) -> Iterator[Delta]:
        if isinstance(event, Prefilled):
            if self._prompted.explainer is not None:
                self._prompted.explainer.computed()
            if self._prompted.request.echo:
                yield from self._echo(event)
        elif isinstance(event, Token | Finished) and (delta := self._advance(event)):
            yield delta

    def _echo(self, event: Prefilled) -> Iterator[Delta]:
        logprobs: tuple[TextLogprob, ...] = ()
        if self.sampling.prompt_logprobs is not None:
            first = text_logprob(self._tokenizer, self._prompted.prompt.token_ids[0], None)
            rest = (readable(self._tokenizer, logprob) for logprob in event.logprobs)
            logprobs = (first, *rest)
        for index in range(len(self._choices)):
            yield Delta(index, self._prompted.prompt.text, logprobs)

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
