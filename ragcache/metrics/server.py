"""All metrics of a server, and the page that shows them."""

from __future__ import annotations

from collections import defaultdict
from importlib.metadata import version
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, Info
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ragcache.metrics.engine import EngineCollector, Source
from ragcache.metrics.tally import Tally
from ragcache.metrics.vllm import WithVllmNames

# seconds
_TAIL = (0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, *_TAIL, 160, 640, 2560)
_GAP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, *_TAIL)
_BRIEF = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30)
_WHOLE = (*_BRIEF, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


class Metrics:
    """All metrics of one server, in a registry of their own.

    With `compat` "vllm" the page has them under vLLM's names, too.
    """

    def __init__(self, source: Source, compat: Literal["vllm"] | None = None) -> None:
        self.source = source
        self.tallies: defaultdict[str, Tally] = defaultdict(Tally)  # by tenant
        self._registry = CollectorRegistry()
        self._page = WithVllmNames(self._registry) if compat == "vllm" else self._registry
        self._registry.register(EngineCollector(source))
        Info("ragcache_build", "The running version", registry=self._registry).info(
            {"version": version("ragcache-gateway")}
        )
        self.requests = self._counter(
            "requests", "Requests by outcome", "api", "status", "finish_reason"
        )
        self.errors = self._counter("request_errors", "Failed requests", "api", "error_type")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated")
        self.miss_reasons = self._counter(
            "cache_miss_reason", "Prompts that missed something, by why", "reason"
        )
        self.lost_tokens = self._counter(
            "cache_lost_tokens", "Prompt tokens that would have been hits otherwise", "reason"
        )
        self.segment_query_tokens = self._counter(
            "segment_query_tokens", "Tokens looked up in the cache, by part of prompt", "segment"
        )
        self.segment_hit_tokens = self._counter(
            "segment_hit_tokens", "Tokens found in the cache, by part of prompt", "segment"
        )
        self.write_tokens = self._counter(
            "cache_write_tokens", "Tokens newly cached up to breakpoints", "ttl"
        )
        self.breakpoints = self._counter(
            "cache_breakpoints", "Cache markers of requests", "origin", "outcome"
        )
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to the first token", _FIRST, "cache"
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between two pieces of one choice", _GAP
        )
        self.queue = self._histogram("request_queue_seconds", "Time in the queue", _WHOLE)
        self.prefill = self._histogram(
            "request_prefill_seconds", "Leaving the queue to the first token", _WHOLE
        )
        self.inference = self._histogram(
            "request_inference_seconds", "Leaving the queue to the last token", _WHOLE
        )
        self.decode = self._histogram(
            "request_decode_seconds", "The first token to the last", _WHOLE
        )
        self.time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Decode time / tokens of the longest choice behind its first",
            _GAP,
        )
        self.e2e = self._histogram("request_e2e_seconds", "Arrival to the last byte", _WHOLE)
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Prompt length", _TOKENS)
        self.uncached_prompt_tokens = self._histogram(
            "request_uncached_prompt_tokens", "Prompt tokens not found in the cache", _TOKENS
        )
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens generated for one prompt", _TOKENS
        )
        self.longest_choice = self._histogram(
            "request_longest_choice_tokens", "Tokens of the longest choice of a prompt", _TOKENS
        )
        self.choices = self._histogram("request_choices", "Choices asked for", (1, 2, 5, 10, 20))
        self.max_tokens = self._histogram(
            "request_max_tokens", "Most tokens of a choice, where a request limits them", _TOKENS
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        names = ("model_name", *labels)
        return Counter(f"ragcache_{name}", text, names, registry=self._registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        names = ("model_name", *labels)
        return Histogram(f"ragcache_{name}", text, names, registry=self._registry, buckets=buckets)

    def register(self, collector: Collector) -> None:
        """Let the page have the metrics of something else, too."""
        self._registry.register(collector)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The page for a scraper, in the format of its Accept header, and its Content-Type."""
        # In OpenMetrics prometheus_client would write vLLM's names with "_" for ":".
        compatible = self._page is not self._registry
        encode, content_type = choose_encoder("text/plain" if compatible else accept)
        return encode(self._page), content_type
