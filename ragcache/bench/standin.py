"""A gateway in this process whose model has no weights: all that is left is what is around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import perf_counter, sleep

from torch import Tensor
from transformers import PreTrainedTokenizerFast

from ragcache.bench.hashing import HashRunner
from ragcache.bench.settings import apart
from ragcache.engine.batch import StepBatch
from ragcache.engine.bridge import EngineClient
from ragcache.engine.runner import nothing
from ragcache.engine.source import find_model
from ragcache.gateway.app import create_app, listening
from ragcache.loading import assemble, start_engine
from ragcache.prompt.loader import load_tokenizer
from ragcache.serving import ServedModel, Serving

MODEL = "stand-in"
NUM_BLOCKS = 20_000
VOCAB_SIZE = 49_152
STEP = 0.002  # seconds; an 8B model takes longer on an H200


class TimedRunner(HashRunner):
    """Adds up the seconds that the stand-in for the model takes.

    It takes as long as a small model, outside the interpreter, as a model does: what others do
    meanwhile costs a request no time, here as there.
    """

    seconds = 0.0

    def run(self, batch: StepBatch, meanwhile: Callable[[], None] = nothing) -> Tensor:
        """See `HashRunner`."""
        meanwhile()
        started = perf_counter()
        sleep(STEP)
        logits = super().run(batch)
        self.seconds += perf_counter() - started
        return logits


@dataclass(frozen=True, slots=True)
class StandIn:
    """The tokenizer of the embedded model before an engine without a model.

    `client` is the engine that `serving` stands on.
    """

    runner: TimedRunner
    client: EngineClient
    tokenizer: PreTrainedTokenizerFast
    serving: Serving

    def clock(self) -> float:
        """Seconds of a clock that stops while the stand-in for the model computes."""
        return perf_counter() - self.runner.seconds


def make_stand_in() -> StandIn:
    """Start it; takes seconds. Raises ConfigError where there is no embedded model."""
    settings = apart()
    runner = TimedRunner(NUM_BLOCKS, settings.block_size, VOCAB_SIZE)
    pool_tokens = NUM_BLOCKS * settings.block_size
    model = ServedModel((MODEL,), pool_tokens, pool_tokens, VOCAB_SIZE, frozenset(), MODEL)
    tokenizer = load_tokenizer(find_model(None).location)
    client = start_engine(runner, NUM_BLOCKS, settings)
    return StandIn(runner, client, tokenizer, assemble(model, tokenizer, client))


@asynccontextmanager
async def served_stand_in() -> AsyncIterator[tuple[StandIn, str]]:
    """One that runs, and the URL of a gateway on this event loop that serves it."""
    stand_in = await asyncio.to_thread(make_stand_in)
    loading: asyncio.Future[Serving] = asyncio.get_running_loop().create_future()
    loading.set_result(stand_in.serving)
    try:
        async with listening(create_app(loading), "127.0.0.1", 0) as url:
            yield stand_in, url
    finally:
        await asyncio.to_thread(stand_in.serving.close)
