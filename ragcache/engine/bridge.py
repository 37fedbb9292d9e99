"""The one place where the engine thread and asyncio meet."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextvars import Context
from dataclasses import dataclass

from ragcache.engine.answers import Events
from ragcache.engine.loop import Engine
from ragcache.engine.request import Request
from ragcache.errors import (
    EngineUnavailable,
    GenerationFailed,
    QueueTimeout,
    RequestError,
    RequestTimeout,
)
from ragcache.types import Admitted, EngineEvent, Failed, Finished, HotPrefix

Delivery = list[EngineEvent] | RequestError


@dataclass(frozen=True, slots=True)
class Limits:
    """How many requests may be under way, in all and of one tenant, and for how long.

    The seconds count from a request's arrival: until it leaves the queue, and until its end.
    """

    max_requests: int
    max_tenant_requests: int | None = None
    queue_timeout: float = 60.0
    request_timeout: float = 600.0

    def waited(self) -> QueueTimeout:
        """What a request is told that is still in the queue then."""
        return QueueTimeout(f"the request waited for {self.queue_timeout:g} s and was not begun")

    def took(self) -> RequestTimeout:
        """What one is told that has not ended then."""
        return RequestTimeout(f"the request took longer than {self.request_timeout:g} s")


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
        subscription.take(delivery)


class Subscription:
    """The events of one request, as an asynchronous iterator of those that come together.

    Ends after the last choice has finished; raises `GenerationFailed` when this request fails,
    `QueueTimeout` or `RequestTimeout` when its time is up, and `EngineUnavailable` when the engine
    fails. The time is kept on the event loop, since an engine that hangs could not keep it.
    `close` must be called when the iteration is left early: it aborts the request.
    """

    def __init__(
        self, client: EngineClient, request: Request, arrival: float, ended: Callable[[], None]
    ) -> None:
        self.request = request
        self.loop = asyncio.get_running_loop()
        self._inbox: asyncio.Queue[Delivery] = asyncio.Queue()
        self._client = client
        self._arrival = arrival
        self._ended = ended
        self._unfinished = request.sampling.n
        self._queued = True
        self._timer = self._alarm(client.limits.queue_timeout)

    def take(self, delivery: Delivery) -> None:
        """Take what the engine says; called on the loop."""
        if self._queued and isinstance(delivery, list) and isinstance(delivery[0], Admitted):
            self._queued = False
            self._timer.cancel()
            self._timer = self._alarm(self._client.limits.request_timeout)
        self._inbox.put_nowait(delivery)

    async def __aiter__(self) -> AsyncIterator[list[EngineEvent]]:
        while self._unfinished:
            delivery = await self._inbox.get()
            if isinstance(delivery, RequestError):
                raise type(delivery)(delivery.message)  # several may have been given this one
            for event in delivery:
                if isinstance(event, Failed):
                    self._unfinished = 0
                    self._forget()
                    raise GenerationFailed(event.message)
                self._unfinished -= isinstance(event, Finished)
            yield delivery
        self._forget()

    def finish(self, index: int) -> None:
        """End choice `index`; its `Finished` event still comes."""
        self._client.engine.finish(self.request.id, index)

    def close(self) -> None:
        """Abort whatever still runs; closing again does nothing."""
        self._forget()
        if self._unfinished:
            self._unfinished = 0
            self._client.engine.abort(self.request.id)

    def _alarm(self, seconds: float) -> asyncio.TimerHandle:
        # In a context of its own: a loop keeps timers for long after they were cancelled.
        return self.loop.call_at(self._arrival + seconds, self._expire, context=Context())

    def _expire(self) -> None:
        """Give the engine's blocks back at once, whenever the reader comes to hear of it."""
        limits = self._client.limits
        self._inbox.put_nowait(limits.waited() if self._queued else limits.took())
        self._forget()
        self._client.engine.abort(self.request.id)

    def _forget(self) -> None:
        self._timer.cancel()
        self._client.forget(self.request.id)
        self._ended()


class EngineClient:
    """Submits requests from any event loop."""

    def __init__(self, engine: Engine, mailboxes: Mailboxes, limits: Limits) -> None:
        self.engine = engine
        self.limits = limits
        self._mailboxes = mailboxes
        self._closed: EngineUnavailable | None = None

    def submit(
        self,
        request: Request,
        arrival: float | None = None,
        ended: Callable[[], None] = lambda: None,
    ) -> Subscription:
        """Enqueue a request and subscribe to its events.

        Its time counts from `arrival`, on the running loop's clock, or from now. `ended` is called
        when the engine has done with it, maybe more than once and on any thread.
        Raises EngineUnavailable when the engine has stopped.
        """
        now = asyncio.get_running_loop().time()
        subscription = Subscription(self, request, now if arrival is None else arrival, ended)
        self._mailboxes.add(subscription)
        self.engine.submit(request)
        # Only now: who fails all requests in between has either seen the mailbox or left a word.
        if (error := self._closed or self.engine.failure) is not None:
            subscription.close()
            raise type(error)(error.message)
        return subscription

    def close(self, error: EngineUnavailable) -> None:
        """Fail all requests under way and those to come, whether or not the engine still moves."""
        self._closed = error
        self._mailboxes.fail(error)

    def forget(self, request_id: str) -> None:
        """Deliver nothing more to this request."""
        self._mailboxes.discard(request_id)

    async def drop(self, owner: bytes) -> int:
        """Forget the blocks of all namespaces that begin with `owner`; gives their number."""
        return await asyncio.wrap_future(self.engine.drop(owner))

    async def check(self) -> None:
        """Recount the blocks of the cache; raises AssertionError for what is wrong."""
        await asyncio.wrap_future(self.engine.check())

    async def hottest(self, owner: bytes, count: int) -> list[HotPrefix]:
        """The prefixes that an owner's prompts share most; waits for the step that runs."""
        return await asyncio.wrap_future(self.engine.hottest(owner, count))
