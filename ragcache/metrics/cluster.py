"""How well other replicas are informed, as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ragcache.types import ClusterStats


class ClusterCollector(Collector):
    """What a replica tells Redis."""

    def __init__(self, stats: Callable[[], ClusterStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        stats = self._stats()
        for name, text, value in (
            ("connected", "Whether Redis answers", float(stats.connected)),
            ("lag_seconds", "How old what the others know may be", stats.lag_seconds),
        ):
            yield GaugeMetricFamily(f"ragcache_cluster_{name}", text, value)
        for name, text, value in (
            ("published", "Changes of blocks told to the others", stats.published),
            ("dropped", "Changes of blocks that only a snapshot tells", stats.dropped),
        ):
            yield CounterMetricFamily(f"ragcache_cluster_events_{name}", text, value)
