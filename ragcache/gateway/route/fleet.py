"""The replicas that there are, and those that can be asked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp

from ragcache.cluster.directory import Directory
from ragcache.cluster.replica import Replica
from ragcache.cluster.router import Router
from ragcache.gateway.route.pulse import Pulse

log = logging.getLogger(__name__)

INTERVAL = 1.0  # seconds in which a new replica is noticed


@dataclass(slots=True)
class _Member:
    replica: Replica  # as it last was
    pulse: Pulse
    probing: asyncio.Task[None]


class Fleet:
    """Replicas that were named at the start, and those of the directory.

    What the directory knows under the URL of a named one takes its place. A lease that ends is no
    death: perhaps Redis refuses writes. Whoever answers probes and did not say farewell stays.
    `gone` is told the ids of replicas that are no more.
    """

    def __init__(
        self,
        urls: Sequence[str],
        directory: Directory | None,
        router: Router,
        gone: Callable[[str], None],
    ) -> None:
        self._named = [_named(url.rstrip("/")) for url in urls]
        self._directory = directory
        self._router = router
        self._gone = gone
        self._members: dict[tuple[str, str], _Member] = {}  # by id and URL

    async def run(self) -> None:
        """Probe all replicas until cancelled."""
        connections = aiohttp.TCPConnector(force_close=True)  # a probe is a new connection
        async with aiohttp.ClientSession(connector=connections) as http:
            try:
                while True:
                    try:
                        self._notice(http)
                    except Exception:
                        log.exception("what is known of the replicas cannot be used")
                    await asyncio.sleep(INTERVAL)
            finally:
                probes = [member.probing for member in self._members.values()]
                for probing in probes:
                    probing.cancel()
                await asyncio.gather(*probes, return_exceptions=True)

    def usable(self) -> list[Replica]:
        """Those that are ready for requests."""
        return [
            replica
            for replica in self.known()
            if not replica.draining
            if (member := self._members.get(_key(replica))) and member.pulse.ready
        ]

    def known(self) -> list[Replica]:
        """All that there are, usable or not."""
        staying = [member.replica for member in self._members.values() if self._stays(member)]
        leased = self._directory.replicas() if self._directory else []
        found = {replica.id: replica for replica in (*staying, *leased)}
        urls = {replica.url.rstrip("/") for replica in found.values()}
        return [*found.values(), *(each for each in self._named if each.url not in urls)]

    def ready(self) -> str | None:
        """None when some replica is, else the reason why not."""
        if self.usable():
            return None
        reasons = sorted({self._state(replica) for replica in self.known()})  # the log says whose
        return "no replica is ready; " + ("; ".join(reasons) or "none is known")

    def pulse(self, replica: Replica) -> Pulse:
        """The probes of a replica that was usable a moment ago."""
        return self._members[_key(replica)].pulse

    def _state(self, replica: Replica) -> str:
        if replica.draining:
            return "it is shutting down"
        member = self._members.get(_key(replica))
        return member.pulse.reason or "it is ready" if member else "it was not asked yet"

    def _stays(self, member: _Member) -> bool:
        """Whether it is here without a lease."""
        replica = member.replica
        return member.pulse.ready and not replica.draining and replica not in self._named

    def _notice(self, http: aiohttp.ClientSession) -> None:
        known = {_key(replica): replica for replica in self.known()}
        self._router.observe(list(known.values()))
        for key, replica in known.items():
            if key in self._members:
                self._members[key].replica = replica
            else:
                pulse = Pulse(http, replica.url.rstrip("/"))
                probing = asyncio.create_task(pulse.run())
                self._members[key] = _Member(replica, pulse, probing)
        for key in self._members.keys() - known.keys():
            if not self._members[key].pulse.watched:  # else nobody would see it die
                self._members.pop(key).probing.cancel()
                self._gone(key[0])


def _key(replica: Replica) -> tuple[str, str]:
    return replica.id, replica.url


def _named(url: str) -> Replica:
    """A replica of which nothing but its URL is known."""
    return Replica(
        id=url,
        epoch="",
        url=url,
        models=(),
        fingerprint="",
        block_size=0,
        running=0,
        waiting=0,
        draining=False,
    )
