"""The one place where the engine thread and asyncio meet."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator

from ragcache.engine.answers import Events
from ragcache.engine.loop import Engine
from ragcache.engine.request import Request
from ragcache.errors import EngineUnavailable, GenerationFailed, Overloaded
from ragcache.types import EngineEvent, Failed, Finished, HotPrefix

Delivery = list[EngineEvent] | EngineUnavailable


class Mailboxes:
    """The engine's event sink: sorts what comes together and enters each event loop once."""

    def __init__(self) -> None:
        self._open: dict[str, Subscription] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, subscription: Subscription) -> None:
        """Deliver to `subscription` from now on."""
        self._open[subscription.request.id] = subscription

    def discard(self, request_id: str) -> None:
        """Deliver nothing more to this request."""
        self._open.pop(request_id, None)

    def deliver(self, events: Events) -> None:
        """See `EventSink`."""
        by_request: dict[str, list[EngineEvent]] = defaultdict(list)
        for request_id, event in events:
            by_request[request_id].append(event)
        self._send(dict(by_request))

    def fail(self, error: EngineUnavailable) -> None:
        """See `EventSink`."""
        self._send(dict.fromkeys(list(self._open), error))

    def _send(
        self, deliveries: dict[str, list[EngineEvent]] | dict[str, EngineUnavailable]
    ) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Subscription, Delivery]]]
        by_loop = defaultdict(list)
        for request_id, delivery in deliveries.items():
            subscription = self._open.get(request_id)
            if subscription is not None:
                by_loop[subscription.loop].append((subscription, delivery))
        for loop, batch in by_loop.items():
            try:
                loop.call_soon_threadsafe(_hand_out, batch)
            except RuntimeError:  # the loop has been closed, and its tasks with it
                for subscription, _ in batch:
                    subscription.close()


def _hand_out(batch: list[tuple[Subscription, Delivery]]) -> None:
    for subscription, delivery in batch:
        subscription.inbox.put_nowait(delivery)


class Subscription:
    """The events of one request, as an asynchronous iterator of those that come together.

    Ends after the last choice has finished; raises `GenerationFailed` when this request fails
    and `EngineUnavailable` when the engine does.
    `close` must be called when the iteration is left early: it aborts the request.
    """

    def __init__(self, client: EngineClient, request: Request) -> None:
        self.request = request
        self.loop = asyncio.get_running_loop()
        self.inbox: asyncio.Queue[Delivery] = asyncio.Queue()
        self._client = client
        self._unfinished = request.sampling.n

    async def __aiter__(self) -> AsyncIterator[list[EngineEvent]]:
        while self._unfinished:
            delivery = await self.inbox.get()
            if isinstance(delivery, EngineUnavailable):
                raise EngineUnavailable(delivery.message)
            for event in delivery:
                if isinstance(event, Failed):
                    self._unfinished = 0
                    self._client.forget(self.request.id)
                    raise GenerationFailed(event.message)
                self._unfinished -= isinstance(event, Finished)
            yield delivery
        self._client.forget(self.request.id)

    def finish(self, index: int) -> None:
        """End choice `index`; its `Finished` event still comes."""
        self._client.engine.finish(self.request.id, index)

    def close(self) -> None:
        """Abort whatever still runs; closing again does nothing."""
        self._client.forget(self.request.id)
        if self._unfinished:
            self._unfinished = 0
            self._client.engine.abort(self.request.id)


class EngineClient:
    """Submits requests from any event loop; refuses them when too many are under way."""

    def __init__(self, engine: Engine, mailboxes: Mailboxes, max_requests: int) -> None:
        self.engine = engine
        self._mailboxes = mailboxes
        self._max_requests = max_requests

    def require_room(self) -> None:
        """Raise `Overloaded` when the queue is full."""
        if len(self._mailboxes) >= self._max_requests:
            raise Overloaded(f"{self._max_requests} requests are running or queued already")

    def submit(self, request: Request) -> Subscription:
        """Enqueue a request and subscribe to its events.

        Raises:
            Overloaded: when the queue is full.
            EngineUnavailable: when the engine has stopped.
        """
        self.require_room()
        subscription = Subscription(self, request)
        self._mailboxes.add(subscription)
        self.engine.submit(request)
        # Only now: an engine that dies in between has either seen the mailbox or set `failure`.
        if self.engine.failure is not None:
            self.forget(request.id)
            raise EngineUnavailable(self.engine.failure.message)
        return subscription

    def forget(self, request_id: str) -> None:
        """Deliver nothing more to this request."""
        self._mailboxes.discard(request_id)

    async def drop(self, owner: bytes) -> int:
        """Forget the blocks of all namespaces that begin with `owner`; gives their number."""
        return await asyncio.wrap_future(self.engine.drop(owner))

    async def hottest(self, owner: bytes, count: int) -> list[HotPrefix]:
        """The prefixes that an owner's prompts share most; waits for the step that runs."""
        return await asyncio.wrap_future(self.engine.hottest(owner, count))
