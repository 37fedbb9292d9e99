"""What a router tells Prometheus; the label `replica` goes with its replica."""

from __future__ import annotations

from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder

from ragcache.cluster.choice import Option

OUTCOMES = ("answered", "refused", "unreachable", "lost", "left")

_DECISION = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2)  # seconds


class RouteMetrics:
    """All metrics of one router, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = self._counter(
            "requests", "Requests sent to replicas, by what came of it", "replica", "outcome"
        )
        self.answers = self._counter("answers", "Answers to clients", "api", "status")
        self._predicted = self._counter(
            "predicted_hit_tokens", "Cached tokens that the router expected", "replica"
        )
        self._reported = self._counter(
            "reported_hit_tokens", "Cached tokens that the same answers reported", "replica"
        )
        self._error = self._counter(
            "hit_tokens_error", "Sum of |reported - expected cached tokens|", "replica"
        )
        self.decision = Histogram(
            "ragcache_route_decision_seconds",
            "From the body to the choice of a replica",
            registry=self._registry,
            buckets=_DECISION,
        )
        self.ready = self._gauge("replica_ready", "1 where a replica can be asked", "replica")
        self.in_flight = self._gauge("in_flight", "Requests that a replica has of us", "replica")
        self.blind = self._gauge("blind", "1 while conversations are hashed to replicas")

    def compared(self, option: Option, reported: int) -> None:
        """Count what was expected of an answer and what it reported."""
        replica = option.replica.id
        self._predicted.labels(replica).inc(option.hit_tokens)
        self._reported.labels(replica).inc(reported)
        self._error.labels(replica).inc(abs(reported - option.hit_tokens))

    def forget(self, replica_id: str) -> None:
        """Drop what is labelled with a replica that is no more."""
        for outcome in OUTCOMES:
            with suppress(KeyError):
                self.requests.remove(replica_id, outcome)
        for counter in (self._predicted, self._reported, self._error):
            with suppress(KeyError):
                counter.remove(replica_id)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The page for a scraper, in the format of its Accept header, and its Content-Type."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"ragcache_route_{name}", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"ragcache_route_{name}", text, labels, registry=self._registry)
