"""A request's way to a replica, and the answer's way back."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO

import aiohttp
from aiohttp import hdrs, web
from multidict import CIMultiDict
from yarl import URL

from ragcache.cluster.choice import Option
from ragcache.cluster.replica import Replica
from ragcache.cluster.request import RouteRequest
from ragcache.cluster.router import Router
from ragcache.errors import (
    EngineUnavailable,
    Overloaded,
    QueueTimeout,
    ReplicaLost,
    RequestError,
    ShuttingDown,
    TenantOverloaded,
)
from ragcache.gateway.bodies import off_loop, read_bytes
from ragcache.gateway.failures import Failure
from ragcache.gateway.middleware import REQUEST_ID
from ragcache.gateway.route.events import (
    WholeEvents,
    data,
    error_code,
    reported_hits,
    say_nothing,
)
from ragcache.gateway.route.fleet import Fleet
from ragcache.gateway.route.headers import end_to_end
from ragcache.gateway.route.metrics import RouteMetrics
from ragcache.gateway.route.outlet import Outlet
from ragcache.gateway.route.pulse import Watch, refuses_connections
from ragcache.gateway.route.reading import Encode, read_request
from ragcache.gateway.tenants import TENANT

ATTEMPTS = 4  # replicas that a request is sent to, at most
LOST_ATTEMPTS = 2  # of those that died with it: perhaps because of it
REFUSALS = {429, 503}  # of one that is full or leaves; another one may have room
# The tenant has had its share, or its time is over: that would be no better elsewhere.
FINAL = {TenantOverloaded.default_code, QueueTimeout.default_code}
GIVEN_BACK = {EngineUnavailable.default_code, ShuttingDown.default_code}  # instead of an answer

log = logging.getLogger(__name__)

_dumps = json.JSONEncoder(separators=(",", ":")).encode
_UNREACHABLE = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that another replica may still better."""

    status: int
    headers: CIMultiDict[str]
    body: bytes


@dataclass(slots=True)
class Forwarder:
    """Sends requests to the replica that suits them best, or to the next best.

    `loading` gives what reads prompts, None where nothing would be gained by it.
    """

    router: Router
    fleet: Fleet
    metrics: RouteMetrics
    http: aiohttp.ClientSession
    loading: asyncio.Future[Encode | None]
    max_requests: int = 1000
    requests: int = 0  # under way, those included whose body is still on its way
    draining: bool = False
    under_way: set[Forwarding] = field(default_factory=set)

    def interrupt(self) -> None:
        """Let all requests under way fail now."""
        for forwarding in self.under_way:
            forwarding.interrupt()

    def ready(self) -> str | None:
        """None when requests will be answered, else the reason why not."""
        if self.draining:
            return "the server is shutting down"
        return self.fleet.ready() if self.loading.done() else "the tokenizer is loading"

    def gauge(self) -> None:
        """Bring the gauges up to date."""
        usable = {replica.id for replica in self.fleet.usable()}
        self.metrics.ready.clear()
        self.metrics.in_flight.clear()
        for replica in self.fleet.known():
            self.metrics.ready.labels(replica.id).set(replica.id in usable)
            self.metrics.in_flight.labels(replica.id).set(self.router.load.own[replica.id])
        self.metrics.blind.set(self.router.is_blind())

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a request as one of the replicas does.

        Raises EngineUnavailable where there is none, ReplicaLost where they were lost, Overloaded
        where too many others are under way.
        """
        if self.requests >= self.max_requests:
            raise Overloaded(f"{self.requests} requests are under way")
        self.requests += 1
        try:
            return await self._answer(request)
        finally:
            self.requests -= 1

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await read_bytes(request)
        began = time.perf_counter()
        encode = self.loading.result() if self.loading.done() else None
        tenant = request.get(TENANT, "")
        asked = await read_request(request.path, request.headers, body, tenant, encode)
        kinds = {(each.fingerprint, each.block_size): each for each in self.fleet.usable()}
        for replica in kinds.values():  # naming thousands of blocks takes a while
            await off_loop(4 * asked.tokens, partial(asked.chains, replica))
        self.metrics.decision.observe(time.perf_counter() - began)
        return await Forwarding(self, request, body, asked).run()


class Forwarding:
    """One request, with the attempts to have it answered."""

    def __init__(
        self, forwarder: Forwarder, request: web.Request, body: bytes, asked: RouteRequest
    ) -> None:
        self._forwarder = forwarder
        self._request = request
        self._body = body
        self._asked = asked
        self._outlet = Outlet(request)
        self._tried: list[str] = []
        self._lost: list[str] = []
        self._limit = asyncio.timeout(None)

    async def run(self) -> web.StreamResponse:
        """Ask replicas until one answers, or the server ends."""
        under_way = self._forwarder.under_way
        under_way.add(self)
        try:
            async with self._limit:
                return await self._ask_all()
        except TimeoutError:
            if not self._limit.expired():
                raise
            return await self._fail(ShuttingDown("the server is shutting down"))
        finally:
            under_way.discard(self)

    def interrupt(self) -> None:
        """End it now, with an error."""
        self._limit.reschedule(0)

    async def _ask_all(self) -> web.StreamResponse:
        refusal: Refusal | None = None
        failure: RequestError | None = None
        while option := self._next():
            self._tried.append(option.replica.id)
            try:
                answer = await self._ask(option)
            except (ReplicaLost, EngineUnavailable) as error:
                if self._outlet.began:
                    return await self._fail(error)
                failure = error
            else:
                if not isinstance(answer, Refusal):
                    return answer
                refusal = answer
        if refusal is not None:
            return await self._outlet.whole(refusal.status, refusal.headers, refusal.body)
        return await self._fail(failure or EngineUnavailable("no replica is ready"))

    def _next(self) -> Option | None:
        """The best replica that was not tried; none where enough of them were."""
        if len(self._tried) == ATTEMPTS or len(self._lost) == LOST_ATTEMPTS:
            return None
        usable = self._forwarder.fleet.usable()
        fresh = [each for each in usable if each.id not in self._tried]
        ranked = self._forwarder.router.rank(self._asked, fresh)
        return ranked[0] if ranked else None

    async def _ask(self, option: Option) -> web.StreamResponse | Refusal:
        """Have one replica answer; raises ReplicaLost or EngineUnavailable."""
        forwarder, replica = self._forwarder, option.replica.id
        pulse = forwarder.fleet.pulse(option.replica)
        outcome = "left"  # by the client, which cancels us
        forwarder.router.sent(self._asked, option)
        try:
            async with pulse.watch() as watch:
                answer = await self._exchange(option, watch)
            outcome = "answered"
            if isinstance(answer, Refusal):
                outcome = "refused"
                forwarder.router.load.refused(replica)
                pulse.suspect()
            return answer
        except _UNREACHABLE as error:
            outcome = "unreachable"
            if refuses_connections(error):
                pulse.refused()
            else:
                pulse.suspect()
            raise EngineUnavailable("no replica accepts connections") from error
        except (aiohttp.ClientError, ReplicaLost) as error:
            outcome = "lost"
            pulse.suspect()
            self._lost.append(replica)
            reason = str(error) or type(error).__name__
            log.warning("request %s: %s: %s", self._request[REQUEST_ID], replica, reason)
            said = reason if isinstance(error, ReplicaLost) else "the replica broke off"
            raise ReplicaLost(said) from error
        finally:
            forwarder.router.ended(option)
            if outcome != "answered":
                forwarder.router.unanswered(self._asked, option)
            forwarder.metrics.requests.labels(replica, outcome).inc()

    async def _exchange(self, option: Option, watch: Watch) -> web.StreamResponse | Refusal:
        request = self._request
        headers = end_to_end(request.headers)
        headers["x-request-id"] = request[REQUEST_ID]
        url = target(option.replica, request)
        body = BytesIO(self._body)  # is written piece by piece
        async with self._forwarder.http.request(
            request.method, url, data=body, headers=headers, allow_redirects=False
        ) as reply:
            try:
                return await self._pass_on(reply, option, watch)
            except BaseException:
                reply.close()  # what it still computes is not wanted any more
                raise

    async def _pass_on(
        self, reply: aiohttp.ClientResponse, option: Option, watch: Watch
    ) -> web.StreamResponse | Refusal:
        headers = end_to_end(reply.headers)
        if reply.content_type == "text/event-stream":
            return await self._pass_events(reply, headers, option, watch)
        watch.answered()
        body = await reply.read()
        if reply.status in REFUSALS and error_code(body) not in FINAL:
            return Refusal(reply.status, headers, body)
        self._compare(option, body)
        return await self._outlet.whole(reply.status, headers, body)

    async def _pass_events(
        self,
        reply: aiohttp.ClientResponse,
        headers: CIMultiDict[str],
        option: Option,
        watch: Watch,
    ) -> web.StreamResponse | Refusal:
        cut = WholeEvents()
        compared = False
        async for received in reply.content.iter_any():
            events = cut.feed(received)
            if not self._outlet.began and say_nothing(events):
                if events:
                    await self._outlet.keep_alive(headers, events)
                continue
            if not self._outlet.began and (refusal := _given_back(events)):
                return refusal
            watch.answered()
            compared = compared or any(self._compare(option, each) for each in data(events))
            await self._outlet.send(headers, events)
        return await self._outlet.end(headers, cut.rest)

    def _compare(self, option: Option, body: bytes) -> bool:
        """Whether the body tells what was cached; then we learn from it."""
        reported = reported_hits(body)
        if reported is None:
            return False
        self._forwarder.router.learn(option, reported)
        self._forwarder.metrics.compared(option, reported)
        return True

    async def _fail(self, error: RequestError) -> web.StreamResponse:
        failure = Failure.of(error, self._request[REQUEST_ID])
        body = failure.body(self._request.path, self._request[REQUEST_ID])
        headers = {hdrs.CONTENT_TYPE: "application/json; charset=utf-8", **failure.headers}
        return await self._outlet.whole(failure.status, headers, _dumps(body).encode())


def target(replica: Replica, request: web.Request) -> URL:
    """The same path at a replica, whatever host the request line names."""
    return URL(replica.url.rstrip("/") + request.rel_url.raw_path_qs, encoded=True)


def _given_back(events: bytes) -> Refusal | None:
    """The refusal that a stream begins with, if it does: it was open before its turn came."""
    first = next(data(events), b"")
    if error_code(first) not in GIVEN_BACK:
        return None
    headers = CIMultiDict({hdrs.CONTENT_TYPE: "application/json; charset=utf-8"})
    headers[hdrs.RETRY_AFTER] = str(EngineUnavailable.retry_after)
    return Refusal(EngineUnavailable.status, headers, first)
