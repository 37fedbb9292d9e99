"""One call of a chat model: its time limit, its retries, its errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

from langchain_core.exceptions import ModelTimeoutError

from langchain_ragcache.failures import Refused
from langchain_ragcache.gateways import Gateway

Json = dict[str, Any]
T = TypeVar("T")

_MAY_PASS = {408, 429, 502, 503, 504}
_LONGEST_PAUSE = 8.0  # seconds


@dataclass(frozen=True)
class Calls:
    """Sends bodies to a gateway; raises LangChain's exceptions.

    `timeout`, in seconds, is for a whole call with its retries; None waits for ever. What may pass
    (a full queue, a gateway that starts, a lost connection) is tried again up to `max_retries`
    times, but never once a part of the answer has arrived.
    """

    gateway: Gateway
    timeout: float | None
    max_retries: int

    async def models(self) -> list[Json]:
        """What is served, the canonical name first."""
        return await self._one(self.gateway.models)

    async def complete(self, body: Json) -> Json:
        """The whole answer."""
        return await self._one(lambda: self.gateway.complete(body))

    async def count_tokens(self, body: Json) -> int:
        """The prompt tokens of a body."""
        return await self._one(lambda: self.gateway.count_tokens(body))

    async def stream(self, body: Json) -> AsyncGenerator[Json]:
        """The chunks of the answer."""
        tried = self._tried(lambda: self.gateway.stream(body))
        async with self._limited(), aclosing(tried) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _one(self, work: Callable[[], Awaitable[T]]) -> T:
        async def answer() -> AsyncGenerator[T]:
            yield await work()

        async with self._limited(), aclosing(self._tried(answer)) as answers:
            return await anext(answers)

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
                if begun or tries >= self.max_retries or error.status not in _MAY_PASS:
                    raise
                pause = min(error.retry_after or 0.5 * 2**tries, _LONGEST_PAUSE)
            await asyncio.sleep(pause)

    @asynccontextmanager
    async def _limited(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self.timeout):
                yield
        except Refused as error:
            raise error.as_model_error() from error
        except TimeoutError as error:
            raise ModelTimeoutError(f"no complete answer within {self.timeout} seconds") from error
