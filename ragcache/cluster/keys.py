"""Every key in Redis, with what is in it and how long it lasts.

All keys of a pool are in one slot of a Redis cluster. For each life of a replica, its epoch, there
are a stream and a snapshot of their own, so nothing of an earlier life can be taken for it.

    rc:{pool}:replicas               SET      ids of replicas, also of some that are gone
    rc:{pool}:lease:<id>             HASH     a `Replica`; what is not renewed is dead
    rc:{pool}:events:<id>:<epoch>    STREAM   batches of `Changes`, entry <position>-0
    rc:{pool}:snapshot:<id>:<epoch>  HASH     all blocks as `Changes`, as of field `position`
"""

from __future__ import annotations

from dataclasses import dataclass

LEASE = 15  # seconds
RENEWAL = 5.0  # seconds between two renewals of a lease
FAREWELL = 3  # seconds of a last lease, by which others see that its replica is leaving
REMAINS = 60  # seconds that anything else outlives its replica
MOST_BATCHES = 1000  # in a stream, about; many times those that come between two snapshots


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one pool."""

    pool: str

    @property
    def replicas(self) -> str:
        """The ids."""
        return f"rc:{{{self.pool}}}:replicas"

    def lease(self, replica_id: str) -> str:
        """That a replica lives."""
        return f"rc:{{{self.pool}}}:lease:{replica_id}"

    def events(self, replica_id: str, epoch: str) -> str:
        """How its blocks change."""
        return f"rc:{{{self.pool}}}:events:{replica_id}:{epoch}"

    def snapshot(self, replica_id: str, epoch: str) -> str:
        """Which blocks it has."""
        return f"rc:{{{self.pool}}}:snapshot:{replica_id}:{epoch}"
