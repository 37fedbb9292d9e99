"""`ragcache bench gateway`: what everything around the model adds to a request.

A gateway in this process serves a model without weights over a real socket: HTTP, validation,
rendering, tokenizing, scheduling, the index and the way back are all there; only the forward
pass is not, and the time that its stand-in takes is measured and subtracted.
"""

from __future__ import annotations

import asyncio
from statistics import median
from typing import Any

import aiohttp
from rich.progress import track
from rich.table import Table

from ragcache.bench.figures import percentile
from ragcache.bench.options import GatewayBench
from ragcache.bench.standin import MODEL, StandIn, served_stand_in

WARM_UP = 5  # requests that are not counted


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
    async with served_stand_in() as (stand_in, url):
        return await _measure(options, stand_in, url)


async def _measure(options: GatewayBench, stand_in: StandIn, url: str) -> dict[str, Any]:
    system = " ".join(f"word{i}" for i in range(options.words))
    times: list[float] = []
    prompt_tokens = 0
    async with aiohttp.ClientSession() as http:
        for index in track(range(options.requests + WARM_UP), description="gateway"):
            question = f"Question {index}: what do the passages say?"
            messages = [("system", system), ("user", question)]
            body = {
                "model": MODEL,
                "max_tokens": 1,
                "temperature": 0,
                "messages": [{"role": role, "content": text} for role, text in messages],
            }
            started = stand_in.clock()
            async with http.post(f"{url}/v1/chat/completions", json=body) as response:
                answer = await response.json()
            times.append(stand_in.clock() - started)
            response.raise_for_status()
            prompt_tokens = answer["usage"]["prompt_tokens"]
    warm = times[WARM_UP:]
    return {"prompt_tokens": prompt_tokens, "p50": median(warm), "p95": percentile(warm, 95)}
