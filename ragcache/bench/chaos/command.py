"""The benchmark as a command: against a gateway of its own, or one that runs."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import torch
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from ragcache.bench.chaos.run import Chaos, Inside, Plan
from ragcache.bench.client import first_model
from ragcache.bench.options import ChaosBench
from ragcache.bench.progress import progress
from ragcache.bench.settings import apart
from ragcache.engine.source import find_model
from ragcache.gateway.app import create_app, listening
from ragcache.loading import load_serving
from ragcache.prompt.loader import load_tokenizer
from ragcache.serving import Serving

BLOCKS = 120  # of the own gateway: far fewer than its requests would like to have


def run(options: ChaosBench) -> dict[str, Any]:
    """All counts; "violations" is empty if nothing broke.

    Raises RequestFailed when the server cannot be reached, and ConfigError when the own gateway's
    model cannot be had.
    """
    return asyncio.run(_run(options))


def render(results: dict[str, Any]) -> Table:
    """The counts, and what must not have happened."""
    table = Table(
        title=f"{results['requests']:,} requests in {results['seconds']:,.0f} s",
        caption="\n".join(results["violations"]) or "nothing broke",
    )
    table.add_column("")
    table.add_column("", justify="right")
    for name, count in sorted(results["outcomes"].items()):
        table.add_row(name, f"{count:,}")
    if results["growth"] is not None:
        table.add_row("resident memory, MiB", f"{results['memory'][-1] / 2**20:,.0f}")
        table.add_row("its growth in the second half", f"{results['growth']:.1%}")
    return table


async def _run(options: ChaosBench) -> dict[str, Any]:
    if options.url is not None:
        return await _play(options, options.url.rstrip("/"), None)
    async with own_gateway() as (url, serving):
        return await _play(options, f"{url}/v1", Inside(_resident, serving.check_cache))


async def _play(options: ChaosBench, url: str, inside: Inside | None) -> dict[str, Any]:
    limits = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(connector=limits, timeout=timeout) as http:
        plan = Plan(
            options.seed,
            options.requests,
            options.concurrency,
            options.leaving,
            options.compared,
            options.model or await first_model(http, url),
        )
        with progress() as shown:
            task = shown.add_task("chaos", total=options.requests)
            chaos = Chaos(http, url, plan, inside, lambda: shown.advance(task))
            started = time.perf_counter()
            await chaos.play()
    account = chaos.account
    return {
        "requests": options.requests,
        "seconds": time.perf_counter() - started,
        "outcomes": dict(account.outcomes),
        "violations": account.violations,
        "memory": account.memory,
        "growth": chaos.growth(),
    }


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)


@asynccontextmanager
async def own_gateway() -> AsyncIterator[tuple[str, Serving]]:
    """URL and serving of a gateway on this event loop; its model is tiny, its pool small."""
    with tempfile.TemporaryDirectory(prefix="ragcache-") as folder:
        serving = await asyncio.to_thread(_load, Path(folder))
    loading: asyncio.Future[Serving] = asyncio.get_running_loop().create_future()
    loading.set_result(serving)
    try:
        async with listening(create_app(loading), "127.0.0.1", 0) as url:
            yield url, serving
    finally:
        await asyncio.to_thread(serving.close)


def _load(folder: Path) -> Serving:
    tokenizer = load_tokenizer(find_model(None).location)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,  # or all answers would be nearly equally likely
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return load_serving(
        apart(model=str(folder), dtype="float32", kv_cache_blocks=BLOCKS, max_running=12)
    )
