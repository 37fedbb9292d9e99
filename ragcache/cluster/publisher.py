"""A replica tells the others that it lives and which blocks it has."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from ragcache.cluster import lease, snapshot
from ragcache.cluster.blocks import Changes
from ragcache.cluster.keys import FAREWELL, MOST_BATCHES, REMAINS, RENEWAL, Keys
from ragcache.cluster.link import Link
from ragcache.cluster.outbox import Outbox
from ragcache.cluster.replica import Replica
from ragcache.cluster.server import FAILURES, PATIENCE, Client, Server, send
from ragcache.types import ClusterStats

log = logging.getLogger(__name__)

INTERVAL = 0.1  # seconds between two batches
SNAPSHOT_AFTER = 30.0  # seconds


class Publisher:
    """Writes the lease, the changes and the snapshots of one life of a replica.

    `describe` gives the replica as it is now, always with the same id and epoch. Whenever a batch
    may not have arrived, the next number is left out: all followers then take the new snapshot.
    """

    def __init__(
        self, server: Server, keys: Keys, outbox: Outbox, describe: Callable[[], Replica]
    ) -> None:
        self._link = Link(server, self._work)
        self._keys = keys
        self._outbox = outbox
        self._describe = describe
        replica = describe()
        self._events = keys.events(replica.id, replica.epoch)
        self._position = 0  # of the last batch
        self._in_step = False  # whether everything up to it is known to be in Redis
        self._saved = 0  # position of the last snapshot
        self._renew_at = self._save_at = 0.0
        self._published = self._dropped = 0  # changes
        self._renewed = self._rival = self._draining = False

    def start(self) -> None:
        """Begin, in the background; whether the server is there does not matter."""
        self._link.start(INTERVAL)

    async def close(self) -> None:
        """Stop; others see at once that this replica is leaving, if the server is there."""
        await self._link.close()
        if self._link.connected:
            with suppress(*FAILURES):  # then the lease runs out by itself
                async with self._link.server.client() as client:
                    await self._leave(client)

    def stats(self) -> ClusterStats:
        """How well the others are informed."""
        connected, silence = self._link.connected, time.monotonic() - self._link.answered_at
        return ClusterStats(
            connected=connected,
            published=self._published,
            dropped=self._dropped + self._outbox.dropped,
            lag_seconds=self._outbox.lag() if connected else silence,
        )

    async def _work(self, client: Client) -> None:
        replica = self._describe()
        if time.monotonic() >= self._renew_at or replica.draining != self._draining:
            await self._renew(client, replica)
        changes = self._outbox.take()
        if changes is None or not self._in_step:
            self._dropped += len(changes or ())
            await self._begin_anew(client)
        elif changes:
            await self._append(client, changes)
        if time.monotonic() >= self._save_at and self._position > self._saved:
            await self._save()

    async def _renew(self, client: Client, replica: Replica) -> None:
        found = await lease.renew(client, self._keys, replica)
        self._in_step &= found.complete
        if found.epoch_changed and self._renewed and not self._rival:
            log.warning("another replica says that it is reached at %s, too", replica.url)
            self._rival = True
        self._renewed, self._draining = True, replica.draining
        self._renew_at = time.monotonic() + RENEWAL

    async def _begin_anew(self, client: Client) -> None:
        self._in_step = False  # first: what was taken is lost, whatever fails now
        await lease.forget_dead(client, self._keys)
        self._position += 1
        await self._save()
        await self._append(client, Changes())  # by which followers see it

    async def _append(self, client: Client, changes: Changes) -> None:
        self._in_step = False
        self._position += 1
        pipe = client.pipeline(transaction=False)
        entry = f"{self._position}-0"
        pipe.xadd(self._events, changes.fields(), id=entry, maxlen=MOST_BATCHES)
        pipe.expire(self._events, REMAINS)
        try:
            await send(pipe)
        except FAILURES:
            self._dropped += len(changes)
            raise
        self._in_step = True
        self._published += len(changes)

    async def _save(self) -> None:
        replica, position = self._describe(), self._position
        async with self._link.server.client(PATIENCE) as patient:
            blocks = self._outbox.blocks()
            await snapshot.write(patient, self._keys, replica, position, blocks)
        self._saved, self._save_at = position, time.monotonic() + SNAPSHOT_AFTER

    async def _leave(self, client: Client) -> None:
        replica = replace(self._describe(), draining=True)
        await lease.renew(client, self._keys, replica, FAREWELL)
        await client.unlink(self._events, self._keys.snapshot(replica.id, replica.epoch))
