"""Keeps a directory as the replicas of a pool say it should be."""

from __future__ import annotations

import logging
import time

from ragcache.cluster import lease, snapshot
from ragcache.cluster.blocks import Changes
from ragcache.cluster.directory import Directory
from ragcache.cluster.keys import Keys
from ragcache.cluster.link import Link
from ragcache.cluster.replica import Replica
from ragcache.cluster.server import PATIENCE, Client, Server

log = logging.getLogger(__name__)

INTERVAL = 0.2  # seconds between two looks at the streams
LEASES_EVERY = 1.0  # seconds
BATCHES = 100  # of one stream, in one reply


class Follower:
    """Reads leases, then a snapshot of each replica, then its stream from there on."""

    def __init__(self, server: Server, keys: Keys, directory: Directory) -> None:
        self._link = Link(server, self._work, self._lost)
        self._keys = keys
        self._directory = directory
        self._leases_at = 0.0
        self._unreadable: set[str] = set()  # ids that the log has

    def start(self) -> None:
        """Begin, in the background; whether the server is there does not matter."""
        self._link.start(INTERVAL)

    async def close(self) -> None:
        """Stop."""
        await self._link.close()

    async def _work(self, client: Client) -> None:
        if time.monotonic() >= self._leases_at:
            await self._read_leases(client)
            await self._read_snapshots()
            self._leases_at = time.monotonic() + LEASES_EVERY
        while await self._read_batches(client):
            pass

    def _lost(self) -> None:
        self._directory.lost()
        self._leases_at = 0.0

    async def _read_leases(self, client: Client) -> None:
        leases = await lease.read(client, self._keys)
        self._directory.found()
        for replica_id, (fields, seconds) in leases.items():
            try:
                self._directory.renew(lease.parse(replica_id, fields), seconds)
            except ValueError as error:
                self._complain(replica_id, error)
        self._directory.expire()

    async def _read_snapshots(self) -> None:
        for replica, position in self._directory.positions().items():
            if position is None:
                await self._read_snapshot(replica)

    async def _read_snapshot(self, replica: Replica) -> None:
        try:
            async with self._link.server.client(PATIENCE) as patient:
                found = await snapshot.read(patient, self._keys, replica)
        except ValueError as error:
            self._complain(replica.id, error)
        else:
            if found is not None:
                self._directory.restore(replica, *found)

    async def _read_batches(self, client: Client) -> bool:
        """Take what the streams have; whether there may be more."""
        streams = {
            self._keys.events(replica.id, replica.epoch): (replica, position)
            for replica, position in self._directory.positions().items()
            if position is not None
        }
        if not streams:
            return False
        starts = {key: f"{position}-0" for key, (_, position) in streams.items()}
        replies = await client.xread(starts, count=BATCHES)
        for key, entries in replies:
            for entry_id, fields in entries:
                self._apply(streams[key.decode()][0], entry_id, fields)
        return any(len(entries) == BATCHES for _, entries in replies)

    def _apply(self, replica: Replica, entry_id: bytes, fields: dict[bytes, bytes]) -> None:
        try:
            changes = Changes.read(fields)
        except ValueError as error:
            self._complain(replica.id, error)
        else:
            self._directory.apply(replica, int(entry_id.partition(b"-")[0]), changes)

    def _complain(self, replica_id: str, error: ValueError) -> None:
        if replica_id not in self._unreadable:
            self._unreadable.add(replica_id)
            log.warning("what %s says in Redis cannot be read: %s", replica_id, error)
