"""A gateway in this process: the engine without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from contextvars import Context
from typing import TYPE_CHECKING, Any

from langchain_ragcache.failures import Refused

if TYPE_CHECKING:
    from ragcache.embedded import EmbeddedGateway

Json = dict[str, Any]


class GivenEngine:
    """Answers with an engine that somebody else has loaded and will close.

    Every request raises `Refused`, like one over HTTP.
    """

    def __init__(self, engine: EmbeddedGateway) -> None:
        self._given = engine

    async def models(self) -> list[Json]:
        """What is served, the canonical name first."""
        return (await self._engine()).models()

    async def complete(self, body: Json) -> Json:
        """The whole answer to a chat completion."""
        engine = await self._engine()
        with _refusals():
            return await engine.complete(body)

    async def stream(self, body: Json) -> AsyncGenerator[Json]:
        """The chunks of the answer; closing the iterator aborts the generation."""
        engine = await self._engine()
        with _refusals():
            async with aclosing(engine.stream(body)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def count_tokens(self, body: Json) -> int:
        """The prompt tokens of a chat completion."""
        engine = await self._engine()
        with _refusals():
            return await engine.count_tokens(body)

    async def _engine(self) -> EmbeddedGateway:
        return self._given


class OwnEngine(GivenEngine):
    """Loads its engine when it is first needed, once; belongs to one event loop.

    The first request also raises ValueError for a wrong option, and ImportError where the engine
    is not installed.
    """

    def __init__(self, model: str | None, options: Mapping[str, Any]) -> None:
        self._model = model
        self._options = options
        self._loading: asyncio.Task[EmbeddedGateway] | None = None

    async def close(self) -> None:
        """Stop the engine, also one that is still being loaded."""
        if self._loading is not None:
            (engine,) = await asyncio.gather(self._loading, return_exceptions=True)
            if not isinstance(engine, BaseException):
                engine.close()  # on this loop: when the process ends there are no other threads

    async def _engine(self) -> EmbeddedGateway:
        """Callers that come meanwhile wait for the same engine; a failure is tried again."""
        if self._loading is None or (self._loading.done() and self._loading.exception()):
            # In a context of its own, as the background loop is.
            load = asyncio.to_thread(self._load)
            self._loading = asyncio.create_task(load, context=Context())
        return await asyncio.shield(self._loading)

    def _load(self) -> EmbeddedGateway:
        try:
            from ragcache.embedded import EmbeddedGateway
        except ImportError as error:
            raise ImportError(
                "without a base_url, ChatRagcache runs the engine in this process, which is not "
                "installed: give a base_url, or install ragcache beside langchain_ragcache"
            ) from error
        return EmbeddedGateway.load(self._model, **self._options)


@contextmanager
def _refusals() -> Iterator[None]:
    from ragcache.errors import RequestError

    try:
        yield
    except RequestError as error:
        raise Refused(error.status, error.message, error.code, error.retry_after) from error
