"""Work with a server that may be away at any time."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from ragcache.cluster.server import FAILURES, Client, Server

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0  # seconds between attempts, while the server is away


class Link:
    """Repeats some work with a server through all outages, and says when one begins and ends.

    `lost` is called after every failure.
    """

    def __init__(
        self,
        server: Server,
        work: Callable[[Client], Awaitable[None]],
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        self.server = server
        self.connected = False
        self.answered_at = time.monotonic()  # when the work was last done, or this was made
        self._work = work
        self._on_lost = lost
        self._told = False  # whether the log has the state
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    def start(self, interval: float) -> None:
        """Begin to work every `interval` seconds, in the background."""
        self._task = asyncio.create_task(self._run(interval), name=f"link to {self.server}")

    async def close(self) -> None:
        """Stop working."""
        self._closing = True  # redis-py calls wait_for, which before Python 3.12 can lose a cancel
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self, interval: float) -> None:
        """Go on with a new client after a failure, and after pauses that double each time."""
        pause = FIRST_PAUSE
        while not self._closing:
            try:
                async with self.server.client() as client:
                    while not self._closing:
                        await self._work(client)
                        self._found()
                        pause = FIRST_PAUSE
                        await asyncio.sleep(interval)
            except Exception as error:
                self._lost(error)
                await asyncio.sleep(pause * random.uniform(0.5, 1))
                pause = min(2 * pause, LONGEST_PAUSE)

    def _found(self) -> None:
        self.answered_at = time.monotonic()
        if not self.connected:
            log.info("working with %s", self.server)
            self.connected = self._told = True

    def _lost(self, error: Exception) -> None:
        if self.connected or not self._told:
            reason, expected = str(error) or type(error).__name__, isinstance(error, FAILURES)
            text = "going on without %s: %s"
            log.warning(text, self.server, reason, exc_info=None if expected else error)
        self.connected, self._told = False, True
        self._on_lost()
