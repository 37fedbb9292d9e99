"""What the server tells Prometheus.

Numbers that the engine keeps are read from its snapshot when a scrape comes; those that only
the gateway can see (latencies, outcomes, tokens delivered) are observed by it, request by
request. No label carries anything that a client chose.
"""

from ragcache.metrics.server import Metrics

__all__ = ["Metrics"]
