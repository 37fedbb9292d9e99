"""How many requests each replica works on."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ragcache.cluster.replica import Replica

SMOOTHING = 30.0  # seconds
RESPITE = 1.0  # seconds, after a replica has refused a request


@dataclass(slots=True)
class _Means:
    """Of the requests in flight, smoothed: all that a replica reports, and ours among them."""

    at: float
    reported: float
    own: float


class Load:
    """Requests in flight by replica id: our own as they are, those of other routers smoothed.

    Reports are seconds old. Routers that follow them closely all send to the replica that was
    idle a moment ago: in simulations that costs more than it would to ignore the others.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.own: Counter[str] = Counter()
        self._means: dict[str, _Means] = {}
        self._full_until: dict[str, float] = {}
        self._clock = clock

    def sent(self, replica_id: str) -> None:
        """Count a request."""
        self.own[replica_id] += 1

    def ended(self, replica_id: str) -> None:
        """Count it no more."""
        self.own[replica_id] -= 1
        if not self.own[replica_id]:
            del self.own[replica_id]

    def in_flight(self, replica_id: str) -> float:
        """Requests that a replica has, of ours and about how many of others."""
        means = self._means.get(replica_id)
        others = max(means.reported - means.own, 0.0) if means else 0.0
        return self.own[replica_id] + others

    def refused(self, replica_id: str) -> None:
        """Note that a replica takes no more for now."""
        self._full_until[replica_id] = self._clock() + RESPITE

    def is_full(self, replica_id: str) -> bool:
        """Whether it has refused a request a moment ago."""
        return self._full_until.get(replica_id, 0.0) > self._clock()

    def observe(self, replicas: Iterable[Replica]) -> None:
        """Take the reports of all replicas into account, and forget replicas that are gone."""
        self._means = {replica.id: self._observed(replica) for replica in replicas}
        full = self._full_until.items()
        self._full_until = {each: until for each, until in full if until > self._clock()}

    def _observed(self, replica: Replica) -> _Means:
        reported, own = replica.running + replica.waiting, self.own[replica.id]
        now = self._clock()
        before = self._means.get(replica.id)
        if before is None:
            return _Means(now, reported, own)
        new = 1 - math.exp((before.at - now) / SMOOTHING)
        return _Means(
            now,
            before.reported + new * (reported - before.reported),
            before.own + new * (own - before.own),
        )
