"""`ragcache bench gateway`: what everything around the model adds to a request.

A gateway in this process serves a model without weights over a real socket: HTTP, validation,
rendering, tokenizing, scheduling, the index and the way back are all there; only the forward
pass is not, and the time that its stand-in takes is measured and subtracted.
"""

from __future__ import annotations

import asyncio
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import aiohttp
from rich.progress import track
from rich.table import Table
from torch import Tensor

from ragcache.bench.hashing import HashRunner
from ragcache.bench.options import GatewayBench
from ragcache.config import ServeSettings
from ragcache.engine.batch import StepBatch
from ragcache.engine.model import find_model
from ragcache.gateway.app import create_app, listening
from ragcache.loading import assemble, start_engine
from ragcache.prompt.loader import load_tokenizer
from ragcache.serving import ServedModel, Serving

NUM_BLOCKS = 20_000
VOCAB_SIZE = 49_152


class TimedRunner(HashRunner):
    """Adds up the time that the stand-in for the model takes."""

    seconds = 0.0

    def run(self, batch: StepBatch) -> Tensor:
        """See `HashRunner`."""
        started = perf_counter()
        logits = super().run(batch)
        self.seconds += perf_counter() - started
        return logits


def run(options: GatewayBench) -> dict[str, Any]:
    """Measure; times are in seconds, without those of the stand-in for the model."""
    return asyncio.run(_run(options))


def render(results: dict[str, Any]) -> Table:
    """Lay the results of `run` out as a table."""
    table = Table(title=f"{results['prompt_tokens']} prompt tokens, milliseconds a request")
    for name in ("p50", "p95"):
        table.add_column(name, justify="right")
    table.add_row(*(f"{results[name] * 1e3:.2f}" for name in ("p50", "p95")))
    return table


async def _run(options: GatewayBench) -> dict[str, Any]:
    runner, serving = await asyncio.to_thread(_fake_serving)
    loading: asyncio.Future[Serving] = asyncio.get_running_loop().create_future()
    loading.set_result(serving)
    try:
        async with listening(create_app(loading), "127.0.0.1", 0) as url:
            return await _measure(options, runner, url)
    finally:
        await asyncio.to_thread(serving.close)


def _fake_serving() -> tuple[TimedRunner, Serving]:
    settings = ServeSettings()
    runner = TimedRunner(NUM_BLOCKS, settings.block_size, VOCAB_SIZE)
    pool_tokens = NUM_BLOCKS * settings.block_size
    model = ServedModel(("fake",), pool_tokens, pool_tokens, VOCAB_SIZE, frozenset(), "fake")
    source = find_model(None)
    tokenizer = load_tokenizer(source.location)
    return runner, assemble(model, tokenizer, start_engine(runner, NUM_BLOCKS, settings))


async def _measure(options: GatewayBench, runner: TimedRunner, url: str) -> dict[str, Any]:
    system = " ".join(f"word{i}" for i in range(options.words))
    times: list[float] = []
    prompt_tokens = 0
    async with aiohttp.ClientSession() as http:
        for index in track(range(options.requests + 5), description="gateway"):
            question = f"Question {index}: what do the passages say?"
            messages = [("system", system), ("user", question)]
            body = {
                "model": "fake",
                "max_tokens": 1,
                "temperature": 0,
                "messages": [{"role": role, "content": text} for role, text in messages],
            }
            before, started = runner.seconds, perf_counter()
            async with http.post(f"{url}/v1/chat/completions", json=body) as response:
                answer = await response.json()
            times.append(perf_counter() - started - (runner.seconds - before))
            response.raise_for_status()
            prompt_tokens = answer["usage"]["prompt_tokens"]
    warm = times[5:]
    return {"prompt_tokens": prompt_tokens, "p50": median(warm), "p95": quantiles(warm, n=20)[-1]}
