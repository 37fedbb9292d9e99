"""The replicas that there are, and those that can be asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import aiohttp

from ragcache.cluster.directory import Directory
from ragcache.cluster.replica import Replica
from ragcache.cluster.router import Router
from ragcache.gateway.route.pulse import Pulse

INTERVAL = 1.0  # seconds in which a new replica is noticed


@dataclass(frozen=True, slots=True)
class _Member:
    pulse: Pulse
    probing: asyncio.Task[None]


class Fleet:
    """Replicas that were named at the start, and those of the directory.

    What the directory knows under the URL of a named one takes its place. `gone` is told the ids
    of replicas that are no more.
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
                    self._notice(http)
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

    def known(self) -> Iterator[Replica]:
        """All that there are, usable or not."""
        found = self._directory.replicas() if self._directory else []
        yield from found
        urls = {replica.url.rstrip("/") for replica in found}
        yield from (replica for replica in self._named if replica.url not in urls)

    def ready(self) -> str | None:
        """None when some replica is, else the reason why not."""
        if self.usable():
            return None
        known = list(self.known())
        reasons = [f"{replica.url}: {self._state(replica)}" for replica in known]
        return "no replica is ready; " + ("; ".join(reasons) or "none is known")

    def pulse(self, replica: Replica) -> Pulse:
        """The probes of a replica that was usable a moment ago."""
        return self._members[_key(replica)].pulse

    def _state(self, replica: Replica) -> str:
        if replica.draining:
            return "it is shutting down"
        member = self._members.get(_key(replica))
        return member.pulse.reason or "it is ready" if member else "it was not asked yet"

    def _notice(self, http: aiohttp.ClientSession) -> None:
        known = {_key(replica): replica for replica in self.known()}
        self._router.observe(list(known.values()))
        for key, replica in known.items():
            if key not in self._members:
                pulse = Pulse(http, replica.url.rstrip("/"))
                self._members[key] = _Member(pulse, asyncio.create_task(pulse.run()))
        for key in self._members.keys() - known.keys():
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
        capacity=0,
        running=0,
        waiting=0,
        draining=False,
    )
