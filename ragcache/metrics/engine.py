"""The engine's own counts, read from its snapshot when a scrape comes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Protocol

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ragcache.types import EngineStats, Histogram


class Source(Protocol):
    """Where the metrics find the engine, which may still be loading."""

    @property
    def model_name(self) -> str:
        """The served name, empty while the model is loading."""
        ...

    def stats(self) -> EngineStats | None:
        """A snapshot of the engine, None while the model is loading."""
        ...

    def ready(self) -> str | None:
        """None when requests will be answered, else the reason why not."""
        ...


class EngineCollector(Collector):
    """What the engine counts, as Prometheus reads it."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        """Yield every family; while the model is loading, only that it is not ready."""
        ready = self._source.ready() is None
        yield GaugeMetricFamily("ragcache_ready", "Whether requests are answered", value=ready)
        stats = self._source.stats()
        if stats is None:
            return
        yield from self._gauges(stats)
        yield from self._counters(stats)
        yield from self._histograms(stats)
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
            ("draft_tokens", "Tokens tried ahead of being sampled", stats.drafted_tokens),
            ("accepted_draft_tokens", "Of these, those that were right", stats.accepted_tokens),
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

    def _histograms(self, stats: EngineStats) -> Iterator[Metric]:
        if stats.step_tokens is not None:
            yield self._histogram("step_tokens", "Tokens computed in a step", stats.step_tokens)
        if stats.step_seconds is not None:
            yield self._histogram(
                "step_seconds", "Time of the steps until one gives tokens", stats.step_seconds
            )
        if (times := stats.block_times) is None:
            return
        for name, text, histogram in (
            ("lifetime", "Publication of a block to its eviction", times.lifetime),
            ("idle_before_evict", "Last use of a block to its eviction", times.idle_before_evict),
            ("reuse_gap", "Last use of a prefix to the hit", times.reuse_gap),
        ):
            yield self._histogram(f"kv_block_{name}_seconds", text, histogram)

    def _histogram(self, name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
        family = HistogramMetricFamily(f"ragcache_{name}", text, labels=["model_name"])
        bounds = (*(str(float(bound)) for bound in histogram.bounds), "+Inf")
        buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
        family.add_metric([self._source.model_name], buckets, sum_value=histogram.total)
        return family

    def _counter(
        self, name: str, text: str, label: str, values: Mapping[str, int]
    ) -> CounterMetricFamily:
        counter = CounterMetricFamily(f"ragcache_{name}", text, labels=["model_name", label])
        for value, count in values.items():
            counter.add_metric([self._source.model_name, value], count)
        return counter
