"""Guards that measure one request while the gateway serves it."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from aiohttp import web

from ragcache.gateway.record import Record
from ragcache.metrics import Metrics
from ragcache.types import Delta, Explanation, FinishReason, MissReason, Usage

if TYPE_CHECKING:
    from ragcache.serving.generation import Generation

METRICS = web.AppKey("metrics", Metrics)


class RequestMeter:
    """Measures one request, from its arrival to the end of the `with` block.

    An exception that leaves the block decides the outcome: a cancellation or a broken connection
    is `abort` (status 499, nginx's number for it), anything else `error`.
    """

    def __init__(self, metrics: Metrics, api: str, record: Record) -> None:
        self.metrics = metrics
        self.record = record
        record.api = self._api = api
        self.begun = False  # one of its prompts has left the queue
        self._reasons: set[FinishReason] = set()
        self._failure: BaseException | None = None

    def finished(self, reason: FinishReason) -> None:
        """Note the end of one choice."""
        self._reasons.add(reason)

    def failed(self, error: BaseException) -> None:
        """Note a failure that cannot leave the block, since the response has begun."""
        self._failure = error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        failure = error or self._failure
        status, reason = self._outcome(failure)
        self.record.status, self.record.finish_reason = status, reason
        model, metrics = self.metrics.source.model_name, self.metrics
        self.record.served_model = model or None
        metrics.requests.labels(model, self._api, status, reason).inc()
        if self.begun:  # how soon one is refused says nothing about the answers
            metrics.e2e.labels(model).observe(time.perf_counter() - self.record.arrival)
        if reason == "error":
            self.record.error_type = type(failure).__name__
            metrics.errors.labels(model, self._api, self.record.error_type).inc()

    def _outcome(self, failure: BaseException | None) -> tuple[int, str]:
        if isinstance(failure, asyncio.CancelledError | ConnectionError):
            return 499, FinishReason.ABORT
        if failure is not None:
            return getattr(failure, "status", 500), "error"
        for reason in (FinishReason.LENGTH, FinishReason.CONTEXT, FinishReason.TOOL_CALLS):
            if reason in self._reasons:
                return 200, reason
        return 200, FinishReason.STOP


METER = web.RequestKey("meter", RequestMeter)


class GenerationMeter:
    """Measures one generation of a request: its hit, its first token, its pace, its tokens."""

    def __init__(self, request: RequestMeter, block_size: int, tenant: str) -> None:
        self._request = request
        self._metrics = request.metrics
        self._model = request.metrics.source.model_name
        self._block_size = block_size
        self._tally = request.metrics.tallies[tenant]
        self._tokens = 0
        self._counted = self._begun = False
        self._last: dict[int, float] = {}  # choice → when its last piece came

    def delta(self, delta: Delta, generation: Generation) -> None:
        """Count one delta of `generation`."""
        self._prompt(generation)
        self._first_token(generation)
        now = time.perf_counter()
        if delta.text and delta.index in self._last:
            gap = now - self._last[delta.index]
            self._metrics.inter_token_latency.labels(self._model).observe(gap)
        self._last[delta.index] = now
        self._count(generation.usage)
        if delta.finish_reason is not None:
            self._request.finished(delta.finish_reason)

    def ended(self, generation: Generation) -> None:
        """Count what was computed in the end, delivered or not; of what waited in vain nothing."""
        self._request.record.add(generation)
        if not generation.hit_known:
            return
        self._prompt(generation)
        self._first_token(generation)
        self._count(generation.usage)
        self._timed(generation)
        metrics, model = self._metrics, self._model
        tokens = generation.usage.completion_tokens
        metrics.request_generation_tokens.labels(model).observe(tokens)
        metrics.longest_choice.labels(model).observe(generation.longest)

    def _timed(self, generation: Generation) -> None:
        """Observe how long each phase took that came to an end."""
        metrics, model, times = self._metrics, self._model, generation.times
        if times.admitted is None:
            return
        metrics.queue.labels(model).observe(times.admitted - times.submitted)
        if times.first_token is None or times.last_token is None:
            return
        metrics.prefill.labels(model).observe(times.first_token - times.admitted)
        decode = times.last_token - times.first_token
        metrics.decode.labels(model).observe(decode)
        metrics.inference.labels(model).observe(times.last_token - times.admitted)
        if generation.longest > 1:
            metrics.time_per_output_token.labels(model).observe(decode / (generation.longest - 1))

    def _prompt(self, generation: Generation) -> None:
        """Count the prompt once, as soon as its hit is known."""
        if self._counted:
            return
        self._counted = self._request.begun = True
        metrics, model, usage = self._metrics, self._model, generation.usage
        metrics.prompt_tokens.labels(model).observe(usage.prompt_tokens)
        uncached = usage.prompt_tokens - usage.cached_tokens
        metrics.uncached_prompt_tokens.labels(model).observe(uncached)
        metrics.choices.labels(model).observe(generation.sampling.n)
        if (limit := generation.sampling.max_tokens) is not None:
            metrics.max_tokens.labels(model).observe(limit)
        for name, part in self._tally.prompt(generation.segments(), usage.cached_tokens).items():
            metrics.segment_query_tokens.labels(model, name).inc(part.query)
            metrics.segment_hit_tokens.labels(model, name).inc(part.hit)
        self._explained(generation)

    def _explained(self, generation: Generation) -> None:
        metrics, model = self._metrics, self._model
        for ttl, tokens in generation.usage.written.items():
            metrics.write_tokens.labels(model, ttl).inc(tokens)
        for origin, outcome in generation.breakpoint_outcomes():
            metrics.breakpoints.labels(model, origin, outcome).inc()
        if (why := generation.explanation) is not None and why.reason is not None:
            reason = _label(why)
            metrics.miss_reasons.labels(model, reason).inc()
            metrics.lost_tokens.labels(model, reason).inc(why.lost_tokens)
            self._tally.explained(generation.id, why)

    def _first_token(self, generation: Generation) -> None:
        """Count the wait for the first token once, as soon as it is over."""
        if self._begun or generation.times.first_token is None:
            return
        self._begun = True
        took = generation.times.first_token - self._request.record.arrival
        cache = self._cache(generation.usage)
        self._metrics.time_to_first_token.labels(self._model, cache).observe(took)
        self._tally.first_token(took)

    def _cache(self, usage: Usage) -> str:
        """`hit` when every whole block in front of the last prompt token was found."""
        reachable = (usage.prompt_tokens - 1) // self._block_size * self._block_size
        if not usage.cached_tokens:
            return "miss"
        return "hit" if usage.cached_tokens >= reachable else "partial"

    def _count(self, usage: Usage) -> None:
        fresh = usage.completion_tokens - self._tokens
        self._metrics.generation_tokens.labels(self._model).inc(fresh)
        self._tokens = usage.completion_tokens


def _label(why: Explanation) -> str:
    """The reason; of a change, what changed: tools, system, messages."""
    if why.reason is MissReason.CHANGED and why.segment is not None:
        return why.segment.partition(".")[0]
    return str(why.reason)
