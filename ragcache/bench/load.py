"""Plays a workload: all sessions are alive at once, `concurrency` requests are in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from ragcache.bench.client import ChatClient, ChatMessages, Reply, RequestFailed
from ragcache.bench.workload import Workload


@dataclass(frozen=True, slots=True)
class Exchange:
    """Turn `turn` of session `session`: what was sent and what came back."""

    session: int
    turn: int
    messages: ChatMessages
    reply: Reply


@dataclass(frozen=True, slots=True)
class Load:
    """How a workload is played.

    `salt` is called for every request; a constant one lets the requests share a cache, a new
    one for each request keeps them from sharing anything, and None leaves the field out.
    """

    client: ChatClient
    concurrency: int
    max_tokens: int
    salt: Callable[[], str | None]
    on_reply: Callable[[], None]

    async def play(self, workload: Workload) -> tuple[list[Exchange], float]:
        """All exchanges in the order in which they were sent, and the wall time in seconds.

        Raises RequestFailed at the first request that fails; the others are given up then,
        since the figures of such a run would mean nothing.
        """
        gate = asyncio.Semaphore(self.concurrency)
        exchanges: list[Exchange] = []
        start = time.perf_counter()
        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for session in range(len(workload.sessions)):
                    group.create_task(self._play_session(workload, session, gate, exchanges))
        except* RequestFailed as failures:
            failure = failures.exceptions[0]  # raised here, it could leave as a group again
        if failure is not None:
            raise failure
        wall = time.perf_counter() - start
        return sorted(exchanges, key=lambda exchange: exchange.reply.sent_at), wall

    async def _play_session(
        self,
        workload: Workload,
        session: int,
        gate: asyncio.Semaphore,
        exchanges: list[Exchange],
    ) -> None:
        messages = [{"role": "system", "content": workload.system}]
        for turn, question in enumerate(workload.sessions[session]):
            messages.append({"role": "user", "content": question})
            async with gate:
                reply = await self.client.ask(tuple(messages), self.max_tokens, self.salt())
            exchanges.append(Exchange(session, turn, tuple(messages), reply))
            messages.append({"role": "assistant", "content": reply.text})
            self.on_reply()
