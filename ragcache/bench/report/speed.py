"""What caching saves in time: an engine with it and one without, on the same model, in turns."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from ragcache_kernels import best_backend, get_backend
from ragcache_kernels.bench.clock import Clock
from ragcache_kernels.bench.layer import Heads, Layer, blocks_for, layout

from ragcache.bench.report.memory import NAMESPACE
from ragcache.bench.settings import apart
from ragcache.engine.bridge import EngineClient
from ragcache.engine.machine import cpu_name
from ragcache.engine.model import choose_device, choose_dtype
from ragcache.engine.request import Request
from ragcache.loading import load_runner, start_engine
from ragcache.types import Admitted, SamplingParams, Token

PREFIXES = (0, 256, 512, 1024, 2048)  # tokens that all requests of a point begin with
OWN, OUTPUT = 64, 16  # tokens of each behind it, and of its answer
IN_FLIGHT = 2
HEADS, DECODES, CONTEXT = Heads(16, 4, 64), 8, 1024  # of the attention that is timed


@dataclass(frozen=True, slots=True)
class Answer:
    """Its tokens, how many prompt tokens were hits, and seconds to the first of them."""

    tokens: list[int]
    hit_tokens: int
    ttft: float


@dataclass(frozen=True, slots=True)
class Side:
    """An engine with caching, or without."""

    name: str
    client: EngineClient
    vocab_size: int

    async def ask(self, name: str, prompt: list[int]) -> Answer:
        """Answer greedily, to the last token that is asked for."""
        started, first, hit_tokens, tokens = perf_counter(), 0.0, 0, []
        sampling = SamplingParams(OUTPUT, temperature=0)
        request = Request(name, prompt, sampling, NAMESPACE, frozenset())
        async for events in self.client.submit(request):
            for event in events:
                if isinstance(event, Admitted):
                    hit_tokens = event.cached_tokens
                elif isinstance(event, Token):
                    first = first or perf_counter()
                    tokens.append(event.token_id)
        return Answer(tokens, hit_tokens, first - started)


@asynccontextmanager
async def side(name: str, model: str | None, *, caching: bool) -> AsyncIterator[Side]:
    """An engine that runs; raises ConfigError where the model cannot be loaded."""
    longest = max(PREFIXES) + OWN + OUTPUT
    settings = apart(
        model=model,
        prefix_caching=caching,
        kv_cache_blocks=(IN_FLIGHT + 2) * blocks_for(longest),
    )
    loaded = await asyncio.to_thread(load_runner, settings, lambda: None)
    client = start_engine(loaded.runner, loaded.num_blocks, settings)
    try:
        yield Side(name, client, loaded.model.config.get_text_config().vocab_size)
    finally:
        await asyncio.to_thread(client.engine.stop)


async def caching(
    model: str | None,
    requests: int,
    seed: int,
    on_request: Callable[[], None],
    prefixes: Sequence[int] = PREFIXES,
) -> dict[str, Any]:
    """Time to first token and throughput of both sides, for each length of the shared prefix.

    Where there is caching one request computes the prefix first, and is not counted. Prompts are
    random tokens.
    """
    rng, points, same = random.Random(seed), [], 0
    async with side("on", model, caching=True) as on, side("off", model, caching=False) as off:
        for each in (on, off):
            await each.ask("warm up", [0] * OWN)
        for prefix in prefixes:
            prompts = _prompts(rng, on.vocab_size, prefix, requests + 1)
            point: dict[str, Any] = {"prefix": prefix}
            answers = {}
            for each in (on, off):
                if each is on:
                    await on.ask(f"first {prefix}", prompts[0])
                answers[each.name], wall = await _play(each, prompts[1:], on_request)
                point[each.name] = _figures(answers[each.name], wall)
            same += sum(a.tokens == b.tokens for a, b in zip(*answers.values(), strict=True))
            points.append(point)
    return {"points": points, "same_answers": same, "answers": requests * len(prefixes)}


def _prompts(rng: random.Random, vocab_size: int, prefix: int, count: int) -> list[list[int]]:
    shared = [rng.randrange(vocab_size) for _ in range(prefix)]
    return [shared + [rng.randrange(vocab_size) for _ in range(OWN)] for _ in range(count)]


async def _play(
    to: Side, prompts: list[list[int]], on_request: Callable[[], None]
) -> tuple[list[Answer], float]:
    """Answers to the prompts, and the seconds that they took together."""
    gate = asyncio.Semaphore(IN_FLIGHT)

    async def ask(number: int) -> Answer:
        async with gate:
            answer = await to.ask(f"{len(prompts[0])}.{number}", prompts[number])
        on_request()
        return answer

    started = perf_counter()
    answers = await asyncio.gather(*(ask(number) for number in range(len(prompts))))
    return answers, perf_counter() - started


def _figures(answers: list[Answer], wall: float) -> dict[str, float]:
    return {
        "ttft": median(answer.ttft for answer in answers),
        "output_rate": sum(len(answer.tokens) for answer in answers) / wall,
        "hit_tokens": sum(answer.hit_tokens for answer in answers) / len(answers),
    }


def attention_ms(block_sizes: Sequence[int], rounds: int) -> list[float]:
    """Milliseconds of one layer's attention of some decodes, for each block size.

    The least of some rounds in turns: what else the machine does makes no size look slow.
    """
    device = choose_device("auto")
    dtype = choose_dtype("auto", device)
    backend = get_backend(best_backend(device, dtype, [HEADS.dim]))
    layer = Layer(backend, HEADS, DECODES * blocks_for(CONTEXT), device, dtype)
    calls = []
    for size in block_sizes:
        pages = torch.randperm(DECODES * CONTEXT // size).view(DECODES, CONTEXT // size)
        step = layout(pages, 1, CONTEXT, block_size=size)
        calls.append(layer.paged(layer.queries(DECODES), step))
    times = zip(*Clock(device).turns(calls, rounds), strict=True)
    return [min(each) * 1e3 for each in times]


def machine() -> dict[str, str]:
    """What it was measured on."""
    device = choose_device("auto")
    name = (
        torch.cuda.get_device_name()
        if device.type == "cuda"
        else f"{cpu_name()}, {os.cpu_count()} cores"
    )
    return {
        "device": name,
        "threads": str(torch.get_num_threads()),
        "dtype": str(choose_dtype("auto", device)).removeprefix("torch."),
        "torch": torch.__version__,
    }
