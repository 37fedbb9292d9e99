"""What the server tells Prometheus.

Numbers that the engine keeps are read from its snapshot when a scrape comes; those that only
the gateway can see (latencies, outcomes, tokens delivered) are observed by it, request by
request. No label carries anything that a client chose.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, Info
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ragcache.types import EngineStats

# seconds
_TAIL = (0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, *_TAIL, 160, 640, 2560)
_GAP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, *_TAIL)
_BRIEF = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30)
_WHOLE = (*_BRIEF, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


class Source(Protocol):
    """Where the metrics find the engine, which may still be loading."""

    @property
    def model_name(self) -> str:
        """The served name, empty while the model is loading."""
        ...

    def stats(self) -> EngineStats | None:
        """A snapshot of the engine, None while the model is loading."""
        ...


class HitRate:
    """The share of prompt tokens that came from the cache, in all and over sliding windows.

    One bucket per second in which something was admitted, none older than the longest window.
    """

    longest = 300

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.query_tokens = 0
        self.hit_tokens = 0
        self._clock = clock
        self._buckets: deque[tuple[int, int, int]] = deque()  # second, query tokens, hit tokens

    def add(self, query_tokens: int, hit_tokens: int) -> None:
        """Count one admitted prompt."""
        self.query_tokens += query_tokens
        self.hit_tokens += hit_tokens
        now = int(self._clock())
        if self._buckets and self._buckets[-1][0] == now:
            _, queried, hit = self._buckets.pop()
            query_tokens, hit_tokens = query_tokens + queried, hit_tokens + hit
        self._buckets.append((now, query_tokens, hit_tokens))
        while self._buckets[0][0] <= now - self.longest:
            self._buckets.popleft()

    @property
    def total(self) -> float | None:
        """Hit tokens / query tokens since the start; None without a prompt."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else None

    def over(self, seconds: int) -> float | None:
        """Hit tokens / query tokens of the last `seconds` (≤ 300); None without a prompt."""
        oldest = int(self._clock()) - seconds
        recent = [bucket for bucket in self._buckets if bucket[0] > oldest]
        queried = sum(bucket[1] for bucket in recent)
        return sum(bucket[2] for bucket in recent) / queried if queried else None


class EngineCollector(Collector):
    """The engine's own counts, read at scrape time."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        """Yield every family; nothing while the model is loading."""
        stats = self._source.stats()
        if stats is None:
            return
        yield from self._gauges(stats)
        yield from self._counters(stats)
        config = {"block_size": str(stats.block_size), "num_blocks": str(stats.pool.total)}
        info = InfoMetricFamily(
            "ragcache_cache_config", "The shape of the KV cache", labels=["model_name"]
        )
        info.add_metric([self._source.model_name], config)
        yield info

    def _gauges(self, stats: EngineStats) -> Iterator[Metric]:
        pool, model = stats.pool, [self._source.model_name]
        for name, text, value in (
            ("requests_running", "Requests that hold KV blocks", stats.running),
            ("requests_waiting", "Requests in the queue", stats.waiting),
            ("kv_usage_ratio", "Held blocks / all blocks", pool.held / max(pool.total, 1)),
            ("kv_blocks_retained", "KV blocks that a breakpoint keeps", stats.retained),
        ):
            gauge = GaugeMetricFamily(f"ragcache_{name}", text, labels=["model_name"])
            gauge.add_metric(model, value)
            yield gauge
        blocks = GaugeMetricFamily(
            "ragcache_kv_blocks",
            "KV blocks by where they are and state",
            labels=["model_name", "tier", "state"],
        )
        for tier, each in (("device", pool), ("host", stats.host and stats.host.pool)):
            for state in ("free", "cached", "held") if each else ():
                blocks.add_metric([*model, tier, state], getattr(each, state))
        yield blocks

    def _counters(self, stats: EngineStats) -> Iterator[Metric]:
        model = [self._source.model_name]
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens admitted", stats.query_tokens),
            ("prefix_cache_query_tokens", "Tokens looked up in the cache", stats.query_tokens),
            ("prefix_cache_hit_tokens", "Tokens found in the cache", stats.hit_tokens),
            ("preemptions", "Requests that lost their blocks and resumed", stats.preemptions),
        ):
            counter = CounterMetricFamily(f"ragcache_{name}", text, labels=["model_name"])
            counter.add_metric(model, value)
            yield counter
        host = stats.host
        from_host = host.hit_tokens if host else 0
        sources = {
            "computed": stats.query_tokens - stats.hit_tokens,
            "device": stats.hit_tokens - from_host,
        }
        evictions = {"device": stats.evictions}
        if host is not None:
            sources["host"] = from_host
            evictions["host"] = host.evictions
            swapped = {"out": host.swapped_out, "in": host.swapped_in}
            yield self._counter(
                "kv_blocks_swapped", "KV blocks moved to the host and back", "direction", swapped
            )
        yield self._counter(
            "kv_evictions", "Cached blocks given up for new ones", "tier", evictions
        )
        yield self._counter(
            "prompt_tokens_by_source",
            "Prompt tokens by where their KV came from",
            "source",
            sources,
        )

    def _counter(
        self, name: str, text: str, label: str, values: Mapping[str, int]
    ) -> CounterMetricFamily:
        counter = CounterMetricFamily(f"ragcache_{name}", text, labels=["model_name", label])
        for value, count in values.items():
            counter.add_metric([self._source.model_name, value], count)
        return counter


class Metrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.hit_rates: defaultdict[str, HitRate] = defaultdict(HitRate)  # by tenant
        self._registry = CollectorRegistry()
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
        self.e2e = self._histogram("request_e2e_seconds", "Arrival to the last byte", _WHOLE)
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Prompt length", _TOKENS)
        self.uncached_prompt_tokens = self._histogram(
            "request_uncached_prompt_tokens", "Prompt tokens not found in the cache", _TOKENS
        )
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens generated for one prompt", _TOKENS
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        names = ("model_name", *labels)
        return Counter(f"ragcache_{name}", text, names, registry=self._registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        names = ("model_name", *labels)
        return Histogram(f"ragcache_{name}", text, names, registry=self._registry, buckets=buckets)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The page for a scraper, in the format of its Accept header, and its Content-Type."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type
