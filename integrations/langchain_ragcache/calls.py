"""The calls of a chat model: their time limit, their retries, their errors."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

from langchain_core.exceptions import ModelTimeoutError

from langchain_ragcache.background import BackgroundLoop
from langchain_ragcache.failures import Refused
from langchain_ragcache.gateways import Gateway

Json = dict[str, Any]
T = TypeVar("T")

_MAY_PASS = {408, 429, 502, 503, 504}
_LONGEST_PAUSE = 8.0  # seconds


@dataclass(frozen=True, slots=True)
class Calls:
    """Sends bodies to a gateway; raises LangChain's exceptions.

    Its coroutines belong on `loop`. Bodies without a model are for `model`, or for whatever is
    served where that is None. `timeout`, in seconds, is for a whole call with its retries; None
    waits for ever. What may pass (a full queue, a gateway that starts, a lost connection) is tried
    again up to `max_retries` times, but never once a part of the answer has arrived.
    """

    loop: BackgroundLoop
    gateway: Gateway
    model: str | None
    timeout: float | None
    max_retries: int

    async def served(self) -> Json:
        """The gateway's entry of the model."""
        return await self._one(self._entry)

    async def complete(self, body: Json) -> Json:
        """The whole answer."""

        async def complete() -> Json:
            return await self.gateway.complete(await self._addressed(body))

        return await self._one(complete)

    async def count_tokens(self, body: Json) -> int:
        """The prompt tokens of a body."""

        async def count_tokens() -> int:
            return await self.gateway.count_tokens(await self._addressed(body))

        return await self._one(count_tokens)

    async def stream(self, body: Json) -> AsyncGenerator[Json]:
        """The chunks of the answer."""

        async def stream() -> AsyncGenerator[Json]:
            async with aclosing(self.gateway.stream(await self._addressed(body))) as chunks:
                async for chunk in chunks:
                    yield chunk

        async with self._limited(), aclosing(self._tried(stream)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _addressed(self, body: Json) -> Json:
        """The body with a model. Asked for each time: a gateway may restart with another one."""
        name = body.get("model") or self.model or (await self._entry())["id"]
        return {**body, "model": name}

    async def _entry(self) -> Json:
        entries = {entry["id"]: entry for entry in await self.gateway.models()}
        name = self.model or next(iter(entries), None)
        if name is None or name not in entries:
            known = ", ".join(entries) or "nothing"
            raise Refused(404, f"the model {name!r} is not served; served here: {known}")
        return entries[name]

    async def _one(self, work: Callable[[], Awaitable[T]]) -> T:
        tries = 0
        async with self._limited():
            while True:
                try:
                    return await work()
                except Refused as error:
                    pause = self._pause(error, tries)
                await asyncio.sleep(pause)
                tries += 1

    async def _tried(self, attempt: Callable[[], AsyncGenerator[T]]) -> AsyncGenerator[T]:
        for tries in count():
            begun = False
            try:
                async with aclosing(attempt()) as items:
                    async for item in items:
                        begun = True
                        yield item
                return
            except Refused as error:
                if begun:
                    raise
                pause = self._pause(error, tries)
            await asyncio.sleep(pause)

    def _pause(self, error: Refused, tries: int) -> float:
        """Seconds until the next try; raises the error where there is none."""
        if tries >= self.max_retries or error.status not in _MAY_PASS:
            raise error
        asked = error.retry_after
        pause = min(0.5 * 2**tries if asked is None else asked, _LONGEST_PAUSE)
        # Not all at the same moment: those who were refused together would be again.
        return pause * random.uniform(1, 1.5)

    @asynccontextmanager
    async def _limited(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self.timeout):
                yield
        except Refused as error:
            raise error.as_model_error() from error
        except TimeoutError as error:
            raise ModelTimeoutError(f"no complete answer within {self.timeout} seconds") from error
