"""Whether a replica lives: probes, and what ends with them."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from errno import ECONNREFUSED, EMFILE, ENFILE, ENOBUFS, ENOMEM
from types import TracebackType
from typing import Self

import aiohttp

from ragcache.errors import ReplicaLost

INTERVAL = 1.0  # seconds between two probes
TIMEOUT = aiohttp.ClientTimeout(total=2.0)
FORGIVEN = 1  # probes without an answer, in a row
PATIENCE = 30.0  # seconds, without a sign of life, that a stream which has begun still waits
SPENT = {EMFILE, ENFILE, ENOBUFS, ENOMEM}  # what a connection needs on our side

log = logging.getLogger(__name__)


class Pulse:
    """Asks one replica again and again whether it is ready.

    It is lost when it accepts no connection, or leaves several probes without an answer. A replica
    that is only slow answers them: it computes on another thread. A probe that we cannot even send,
    for want of files or memory, says nothing about it.
    """

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self.ready = False
        self.reason: str | None = "it was not asked yet"  # why not
        self.lost_at: float | None = None  # on the loop's clock
        self._http = http
        self._url = url
        self._missed = 0
        self._spent = False  # probes cannot be sent
        self._told: bool | None = None  # what the log has: ready or not
        self._hurry = asyncio.Event()
        self._watches: set[Watch] = set()

    async def run(self) -> None:
        """Probe until cancelled."""
        while True:
            await self._probe()
            with suppress(TimeoutError):
                async with asyncio.timeout(INTERVAL):
                    await self._hurry.wait()
            self._hurry.clear()

    def suspect(self) -> None:
        """Probe at once."""
        self._hurry.set()

    def refused(self) -> None:
        """Note that it accepts no connection."""
        self._lose("it accepts no connection")

    @property
    def watched(self) -> bool:
        """Whether some work with it is under way."""
        return bool(self._watches)

    def watch(self) -> Watch:
        """A block that ends with ReplicaLost when the replica is lost."""
        return Watch(self, self._watches)

    async def _probe(self) -> None:
        try:
            async with self._http.get(f"{self._url}/ready", timeout=TIMEOUT) as response:
                self._found(None if response.status == 200 else await _reason(response))
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in SPENT:
                if not self._spent:
                    log.warning("replica %s cannot be probed: %s", self._url, error)
                self._spent = True
                return
            self._missed += 1
            if refuses_connections(error):
                self.refused()
            elif self._missed > FORGIVEN:
                self._lose("it does not answer")

    def _found(self, reason: str | None) -> None:
        self._missed, self._spent = 0, False
        self.ready, self.reason = reason is None, reason
        if self.ready != self._told:
            log.info("replica %s is %s", self._url, f"not ready: {reason}" if reason else "ready")
            self._told = self.ready
        self._set_lost(None)

    def _lose(self, reason: str) -> None:
        if self.lost_at is None:
            log.warning("replica %s is lost: %s", self._url, reason)
            self._told = None
            self._set_lost(asyncio.get_running_loop().time())
        self.ready, self.reason = False, reason

    def _set_lost(self, when: float | None) -> None:
        self.lost_at = when
        for watch in self._watches:
            watch.update()


class Watch:
    """A block of work with a replica, which ends with ReplicaLost when the replica is lost.

    Once the replica has begun to answer, losing that answer is the last thing to do.
    """

    def __init__(self, pulse: Pulse, watches: set[Watch]) -> None:
        self._pulse = pulse
        self._watches = watches
        self._patience = 0.0
        self._timeout = asyncio.timeout(None)

    def answered(self) -> None:
        """Be patient from now on."""
        self._patience = PATIENCE
        self.update()

    def update(self) -> None:
        """Follow the replica's state."""
        if not self._timeout.expired():
            lost_at = self._pulse.lost_at
            self._timeout.reschedule(None if lost_at is None else lost_at + self._patience)

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._watches.add(self)
        self.update()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._watches.discard(self)
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError:
            raise ReplicaLost(f"the replica is lost: {self._pulse.reason}") from None


def refuses_connections(error: Exception) -> bool:
    """Whether nobody listens there; anything else may be our own trouble, or pass."""
    return isinstance(error, aiohttp.ClientConnectorError) and error.errno == ECONNREFUSED


async def _reason(response: aiohttp.ClientResponse) -> str:
    """Why it is not ready, in its own words."""
    body = await response.json(content_type=None)
    said = body.get("reason") if isinstance(body, dict) else None
    return str(said or f"status {response.status}")
