"""The generations behind one HTTP request, as one flow of deltas."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ragcache.errors import SlowReader
from ragcache.gateway.meter import GenerationMeter, RequestMeter
from ragcache.types import Delta, Explanation, GenerateRequest, Usage

if TYPE_CHECKING:
    from ragcache.serving import Serving
    from ragcache.serving.generation import Generation

BEHIND = 4096  # deltas of each choice that a client may be behind
BATCH = 256  # deltas that are written at once, some tens of KiB: what a write waits for is bounded


@asynccontextmanager
async def exchange(
    serving: Serving, requests: Sequence[GenerateRequest], meter: RequestMeter
) -> AsyncIterator[Exchange]:
    """Start all requests; whatever ends the block aborts what still runs.

    Raises RequestError, before anything can be streamed, when one of them is refused.
    """
    async with AsyncExitStack() as stack:
        generations = await serving.start_all(requests)
        for generation in generations:
            stack.push_async_callback(generation.aclose)
        meter.record.response_id = requests[0].id
        block_size = serving.stats().block_size
        meters = [GenerationMeter(meter, block_size, request.tenant) for request in requests]
        merged = Exchange(generations, meters, requests[0].sampling.n)
        stack.push_async_callback(merged.stop)
        yield merged


class Exchange:
    """Merges generations in the order of arrival; choice j of prompt i gets index i·n + j."""

    def __init__(
        self, generations: Sequence[Generation], meters: Sequence[GenerationMeter], n: int
    ) -> None:
        self.choices = n * len(generations)
        self._generations = generations
        # A slow reader never holds up the engine; it only loses its own generations, beyond BEHIND.
        self._arrived: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()
        self._pumps = [
            asyncio.create_task(self._pump(generation, meter, i * n))
            for i, (generation, meter) in enumerate(zip(generations, meters, strict=True))
        ]

    @property
    def usage(self) -> Usage:
        """The sum over the prompts, each counted once whatever n is."""
        usages = [generation.usage for generation in self._generations]
        written: Counter[str] = Counter()
        for usage in usages:
            written.update(usage.written)
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in usages),
            cached_tokens=sum(usage.cached_tokens for usage in usages),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            written=dict(written),
        )

    @property
    def explanations(self) -> list[Explanation | None]:
        """One for each prompt, known from `admitted` on; None with prefix caching off."""
        return [generation.explanation for generation in self._generations]

    async def admitted(self, patience: float) -> bool:
        """Whether, within `patience` seconds, every prompt's hit is known or its end has come."""
        try:
            async with asyncio.timeout(patience):
                for generation in self._generations:
                    await generation.admitted.wait()
        except TimeoutError:
            return False
        return True

    async def batches(self, patience: float | None = None) -> AsyncIterator[list[Delta]]:
        """Yield the deltas that are ready together, or an empty list after `patience` seconds.

        Raises what a generation raised, after the deltas that came before it.
        """
        running = len(self._pumps)
        while running:
            arrived = await self._next(patience)
            deltas = [item for item in arrived if isinstance(item, Delta)]
            if deltas or not arrived:
                yield deltas
            for item in arrived:
                if isinstance(item, Exception):
                    raise item
            running -= arrived.count(None)

    async def stop(self) -> None:
        """Stop listening to the generations."""
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _next(self, patience: float | None) -> list[Delta | Exception | None]:
        try:
            async with asyncio.timeout(patience):
                arrived = [await self._arrived.get()]
        except TimeoutError:
            return []
        while not self._arrived.empty() and len(arrived) < BATCH:
            arrived.append(self._arrived.get_nowait())
        return arrived

    async def _pump(self, generation: Generation, meter: GenerationMeter, offset: int) -> None:
        try:
            async for delta in generation:
                meter.delta(delta, generation)
                if (behind := self._arrived.qsize()) >= BEHIND * self.choices:
                    raise SlowReader(f"the client is {behind} pieces of the answer behind")
                self._arrived.put_nowait(replace(delta, index=offset + delta.index))
            self._arrived.put_nowait(None)
        except Exception as error:
            self._arrived.put_nowait(error)
        finally:
            await generation.aclose()  # its blocks are free before the reader hears of its end
            meter.ended(generation)
