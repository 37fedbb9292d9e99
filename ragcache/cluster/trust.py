"""How far what is known of a replica's cache can be relied on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container
from dataclasses import dataclass

from ragcache.cluster.replica import Replica

MEMORY = 20  # answers
FORGIVING = 60.0  # seconds


@dataclass(slots=True)
class _Record:
    epoch: str
    at: float
    share: float = 1.0  # of the predicted tokens that were hit


class Trust:
    """The share of predicted hits that came true, over the last answers of each replica.

    It comes back by itself: whoever is not trusted is asked less, and gets no chance to improve.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._records: dict[str, _Record] = {}
        self._clock = clock

    def of(self, replica: Replica) -> float:
        """Between 0 and 1; 1 without any experience with this life of the replica."""
        record = self._records.get(replica.id)
        if record is None or record.epoch != replica.epoch:
            return 1.0
        return 1 - (1 - record.share) * math.exp((record.at - self._clock()) / FORGIVING)

    def learn(self, replica: Replica, predicted: int, reported: int) -> None:
        """Compare the hit tokens of one answer, of which some were predicted."""
        share = self.of(replica)
        share += (min(reported / predicted, 1.0) - share) / MEMORY
        self._records[replica.id] = _Record(replica.epoch, self._clock(), share)

    def keep(self, replica_ids: Container[str]) -> None:
        """Forget all other replicas."""
        known = self._records.items()
        self._records = {each: record for each, record in known if each in replica_ids}
