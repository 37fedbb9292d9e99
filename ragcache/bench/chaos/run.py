"""Plays the requests and keeps account of what came of them."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from statistics import median

import aiohttp

from ragcache.bench.chaos.answers import Answer, Broken, read_answer
from ragcache.bench.chaos.requests import PATHS, ChaosRequest, make_request

USUAL = 0.05  # seconds of a request, before one has been measured
SHOWN = 20  # violations
SETTLED = 60.0  # seconds in which the last requests have left the engine
GROWTH = 0.03  # of the resident memory, within the second half: more is no noise
LONG_ENOUGH = 2_000  # requests, in the second half of which caches of bounded size are full


@dataclass(slots=True)
class Account:
    """Outcomes by name, and what must not have happened."""

    outcomes: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    answers: dict[int, Answer] = field(default_factory=dict)  # those to be compared
    memory: list[int] = field(default_factory=list)  # bytes, from time to time

    def violated(self, what: str) -> None:
        """Note a violation; of many only the first are told in words."""
        self.outcomes["violation"] += 1
        if len(self.violations) < SHOWN:
            self.violations.append(what)


@dataclass(frozen=True, slots=True)
class Plan:
    """How many requests there are, how many of them at once, and which are looked at again."""

    seed: int
    requests: int
    concurrency: int
    leaving: float
    compared: int
    model: str

    def request(self, number: int) -> ChaosRequest:
        """Request `number`."""
        return make_request(self.seed, number, self.model, self.leaving)

    def chosen(self) -> set[int]:
        """Numbers of the requests whose answers are compared with those they get alone."""
        order = list(range(self.requests))
        random.Random(self.seed).shuffle(order)
        found: set[int] = set()
        for number in order:
            if len(found) == self.compared:
                break
            if self.request(number).is_comparable:
                found.add(number)
        return found


@dataclass(frozen=True, slots=True)
class Inside:
    """What is seen only of a gateway in this process.

    `resident` is its memory in bytes; `check` recounts its KV blocks, and raises AssertionError.
    """

    resident: Callable[[], int]
    check: Callable[[], Awaitable[None]]


class Chaos:
    """Plays a plan against `url`; `inside` is None for a gateway of another process."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        url: str,
        plan: Plan,
        inside: Inside | None,
        on_request: Callable[[], None],
    ) -> None:
        self._http = http
        self._url = url
        self._plan = plan
        self._inside = inside
        self._on_request = on_request
        self._chosen = plan.chosen()
        self._usual = USUAL
        self.account = Account()

    async def play(self) -> None:
        """Send all requests, several at once; then compare, and look at pool and memory."""
        numbers = iter(range(self._plan.requests))
        workers = (self._work(numbers) for _ in range(self._plan.concurrency))
        await asyncio.gather(*workers)
        await self._check_pool()
        await self._compare()
        await self._check_blocks()
        self._check_memory()

    async def _work(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            request = self._plan.request(number)
            answer = await self._send(request)
            if number in self._chosen:
                if answer is None:
                    self.account.violated(f"request {number} got no answer")
                else:
                    self.account.answers[number] = answer
            if self._inside and number % max(1, self._plan.requests // 400) == 0:
                self.account.memory.append(self._inside.resident())
            self._on_request()

    async def _send(self, request: ChaosRequest) -> Answer | None:
        """Its answer, if it gets one."""
        leaves, started = request.leaves_after, time.perf_counter()
        try:
            async with asyncio.timeout(None if leaves is None else leaves * self._usual):
                answer = await self._exchange(request)
        except TimeoutError:
            self.account.outcomes["left"] += 1
            return None
        except (Broken, aiohttp.ClientError, ValueError, LookupError) as error:
            self.account.violated(f"request {request.number}: {error!r}")
            return None
        self._usual += 0.05 * (time.perf_counter() - started - self._usual)
        return answer

    async def _exchange(self, request: ChaosRequest) -> Answer | None:
        path, outcomes = self._url + PATHS[request.wire], self.account.outcomes
        async with self._http.post(path, json=request.body) as response:
            if response.status == 200 and request.is_valid:
                answer = await read_answer(response, request.wire)
                outcomes["streamed" if request.body["stream"] else "whole"] += 1
                return answer
            text = await response.text()
            if response.status == 400 and not request.is_valid:
                outcomes["refused, as it must be"] += 1
            elif response.status == 429 and "Retry-After" in response.headers:
                outcomes["refused, too many"] += 1
            else:
                raise Broken(f"HTTP {response.status}: {text[:200]}")
        return None

    async def _compare(self) -> None:
        """Each chosen answer with the one that the same request gets alone."""
        for number, answer in sorted(self.account.answers.items()):
            alone = await self._send(self._plan.request(number).alone())
            if alone == answer:
                self.account.outcomes["same answer alone"] += 1
            else:
                self.account.violated(f"request {number}: {answer}, but alone {alone}")

    async def _check_pool(self) -> None:
        """When nothing runs any more, no block is held."""
        deadline = time.monotonic() + SETTLED
        while True:
            async with self._http.get(f"{self._url.removesuffix('/v1')}/cache/stats") as response:
                stats = await response.json()
            pool = stats.get("pool")
            if pool is None:  # with API keys it is nobody's to see
                self.account.outcomes["pool not shown"] += 1
                return
            if not stats["running"] and not stats["waiting"] and not pool["held"]:
                return
            if time.monotonic() > deadline:
                self.account.violated(f"blocks are still held: {stats}")
                return
            await asyncio.sleep(0.05)

    async def _check_blocks(self) -> None:
        """Each block is where the accounts have it: the counts alone could not be otherwise."""
        if self._inside is None:
            return
        try:
            await self._inside.check()
        except AssertionError as error:
            self.account.violated(f"the accounting of KV blocks is wrong: {error}")

    def _check_memory(self) -> None:
        growth = self.growth()
        if growth is not None and growth > GROWTH and self._plan.requests >= LONG_ENOUGH:
            self.account.violated(f"memory grew by {growth:.1%} in the second half")

    def growth(self) -> float | None:
        """Of the memory, from the third to the fourth quarter of the requests; medians."""
        memory = self.account.memory
        quarter = len(memory) // 4
        if not quarter:
            return None
        third, fourth = memory[-2 * quarter : -quarter], memory[-quarter:]
        return median(fourth) / median(third) - 1
