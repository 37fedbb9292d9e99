"""How far what is known of a replica's cache can be relied on."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass

from ragcache.cluster.replica import Replica

MEMORY = 20  # answers
FORGIVING = 60.0  # seconds
SURPRISES = 20  # answers

log = logging.getLogger(__name__)


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


class Surprises:
    """Hits that no one foretold, answer after answer: the router reads prompts otherwise.

    A single one is nothing: another router's request may have been a moment earlier.
    """

    def __init__(self) -> None:
        self._in_a_row: Counter[str] = Counter()

    def learn(self, replica: Replica, predicted: int, reported: int) -> None:
        """Compare the hit tokens of one answer; the log says once when none come true."""
        if predicted:
            self._in_a_row[replica.id] = 0
        elif reported:
            self._in_a_row[replica.id] += 1
            if self._in_a_row[replica.id] == SURPRISES:
                log.warning(
                    "%s finds in its cache what nothing here foretells: does it have the model, "
                    "the chat template and the API keys that this router was given?",
                    replica.id,
                )

    def keep(self, replica_ids: Container[str]) -> None:
        """Forget all other replicas."""
        for gone in [each for each in self._in_a_row if each not in replica_ids]:
            del self._in_a_row[gone]
