"""The engine's own counts, read from its snapshot when a scrape comes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ragcache.types import EngineStats


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
