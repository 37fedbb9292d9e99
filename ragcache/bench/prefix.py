"""What the prefix cache itself costs: pure bookkeeping, no model.

Five questions: how long does a fully cached 128k-token prompt take from plan to release, does
that (and eviction, and retention at its cap) stay flat as the pool grows, what share of the held
slots is unfilled, how long does it take to explain a prompt of 32k tokens, and to find the hottest
branches of a tree in which every block was hit.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from time import process_time
from typing import Any

from rich.table import Table

from ragcache.bench.lengths import SHAREGPT, token_count
from ragcache.bench.options import PrefixBench
from ragcache.prefix.cache import PrefixCache
from ragcache.prefix.explain import History
from ragcache.prefix.names import OWNER_BYTES, namespace_name, owner_name
from ragcache.types import Segment

BLOCK_SIZE = 16
PROMPT_TOKENS = 128 * 1024
POOL_BLOCKS = (10_000, 100_000, 400_000)
FILLER_TOKENS = 64 * BLOCK_SIZE  # one of the prompts that fill the pool beforehand
EXPLAINED_TOKENS = 32 * 1024
EXPLAINED_SEGMENTS = 40
CALLS = ("plan", "admit", "count", "commit", "release")
NAMESPACE = namespace_name(owner_name("bench"))


def run(_options: PrefixBench) -> dict[str, Any]:
    """Measure with the sizes above; the command has no options of its own."""
    return measure()


def measure(
    pool_blocks: Sequence[int] = POOL_BLOCKS,
    prompt_tokens: int = PROMPT_TOKENS,
    repeats: int = 9,
    steps: int = 2_000,
    explained_tokens: int = EXPLAINED_TOKENS,
) -> dict[str, Any]:
    """Measure; every pool is full of cached blocks to begin with.

    Times are medians of CPU time: what the calls cost, whatever else the machine is doing.
    """
    return {
        "block_size": BLOCK_SIZE,
        "prompt_tokens": prompt_tokens,
        "pools": [_measure_pool(blocks, prompt_tokens, repeats) for blocks in pool_blocks],
        "unfilled_share": unfilled_share(steps),
        "explained_tokens": explained_tokens,
        "explain_ms": explain_ms(explained_tokens),
    }


def render(results: dict[str, Any]) -> Table:
    """Lay the results of `measure` out as a table."""
    table = Table(
        title=f"{results['prompt_tokens']:,} cached tokens, blocks of {results['block_size']}",
        caption="CPU time, median; "
        f"{results['unfilled_share']:.1%} of the held slots unfilled at ShareGPT lengths\n"
        f"explaining {results['explained_tokens']:,} tokens: {results['explain_ms']:.2f} ms",
    )
    for name in (
        "pool blocks",
        *CALLS,
        "together",
        "evict",
        "retain",
        "hottest",
    ):
        table.add_column(name, justify="right")
    for pool in results["pools"]:
        table.add_row(
            f"{pool['blocks']:,}",
            *(f"{pool[f'{call}_ms']:.2f} ms" for call in CALLS),
            f"{pool['total_ms']:.2f} ms",
            f"{pool['evict_us']:.2f} µs/block",
            f"{pool['retain_us']:.2f} µs/block",
            f"{pool['hottest_ms']:.2f} ms",
        )
    return table


def _measure_pool(num_blocks: int, prompt_tokens: int, repeats: int) -> dict[str, float | int]:
    cache = PrefixCache(num_blocks, BLOCK_SIZE)
    capacity = num_blocks * BLOCK_SIZE
    for start in range(0, capacity, FILLER_TOKENS):
        _serve(cache, range(start, start + FILLER_TOKENS))
    starts = (capacity + i * prompt_tokens for i in range(1, repeats + 1))
    prompts = [list(range(start, start + prompt_tokens)) for start in starts]
    evict_us = [_evict(cache, prompt) for prompt in prompts]
    rounds = [_hit(cache, prompts[-1]) for _ in range(repeats)]
    times = {name: median(each[name] for each in rounds) for name in rounds[0]}
    return {
        "blocks": num_blocks,
        **times,
        "evict_us": median(evict_us),
        "retain_us": retain_us(num_blocks, prompt_tokens),
        "hottest_ms": hottest_ms(num_blocks, repeats),
    }


def _serve(cache: PrefixCache, tokens: Sequence[int]) -> None:
    if cache.admit("filler", cache.plan(tokens, NAMESPACE)) is None:
        raise ValueError(f"a pool of {cache.available} blocks is too small")
    cache.count_hit("filler")
    cache.commit("filler", len(tokens))
    cache.release("filler")


def _evict(cache: PrefixCache, prompt: list[int]) -> float:
    """Admit an unknown prompt to the full pool; µs per evicted block."""
    plan = cache.plan(prompt, NAMESPACE)
    evictions = cache.evictions
    elapsed = _timed(lambda: cache.admit("cold", plan))
    evicted = cache.evictions - evictions
    cache.commit("cold", len(prompt))
    cache.release("cold")
    return elapsed / evicted * 1e6


def retain_us(num_blocks: int, prompt_tokens: int) -> float:
    """Retain a prompt where the cap is full of retentions of one block; µs per retained block."""
    cache = PrefixCache(num_blocks, BLOCK_SIZE)
    tokens = range(min(prompt_tokens, num_blocks // 4 * BLOCK_SIZE))
    _serve(cache, tokens)
    for i in range(1, num_blocks // 2 + 1):
        marked = [-i] * BLOCK_SIZE
        _serve(cache, marked)
        cache.retain(NAMESPACE, marked, ttl=300)
    elapsed = _timed(lambda: cache.retain(NAMESPACE, tokens, ttl=3600))
    return elapsed / (len(tokens) // BLOCK_SIZE) * 1e6


def hottest_ms(num_blocks: int, repeats: int) -> float:
    """Find a dozen branches among prompts that share a first half; median ms of CPU time."""
    cache = PrefixCache(num_blocks, BLOCK_SIZE)
    common = list(range(FILLER_TOKENS // 2))
    for i in range(2 * num_blocks * BLOCK_SIZE // FILLER_TOKENS - 2):
        prompt = [*common, *range(-FILLER_TOKENS * i, -FILLER_TOKENS * i + FILLER_TOKENS // 2)]
        for _ in range(2):
            _serve(cache, prompt)
    find = partial(cache.hottest, NAMESPACE[:OWNER_BYTES], 12)
    return median(_timed(find) for _ in range(repeats)) * 1e3


def _hit(cache: PrefixCache, prompt: list[int]) -> dict[str, float]:
    """Send a cached prompt through; ms per call."""
    times = {}
    start = process_time()
    plan = cache.plan(prompt, NAMESPACE)
    times["plan_ms"] = (process_time() - start) * 1e3
    times["admit_ms"] = _timed(lambda: cache.admit("hit", plan)) * 1e3
    times["count_ms"] = _timed(lambda: cache.count_hit("hit")) * 1e3
    times["commit_ms"] = _timed(lambda: cache.commit("hit", len(prompt))) * 1e3
    times["release_ms"] = _timed(lambda: cache.release("hit")) * 1e3
    times["total_ms"] = sum(times.values())
    return times


def _timed(call: Callable[[], object]) -> float:
    start = process_time()
    call()
    return process_time() - start


def explain_ms(num_tokens: int, repeats: int = 40) -> float:
    """Explain prompts that differ from all before them in one token; median ms of CPU time."""
    rng = random.Random(0)
    history = History(BLOCK_SIZE)
    ends = [i * num_tokens // EXPLAINED_SEGMENTS for i in range(EXPLAINED_SEGMENTS + 1)]
    segments = [Segment(f"messages.{i}", *ends[i : i + 2]) for i in range(EXPLAINED_SEGMENTS)]
    common = [rng.randrange(50_000) for _ in range(num_tokens)]
    times = []
    for i in range(repeats):
        tokens = array("I", common)  # as `TokenizedPrompt.packed` has them
        tokens[rng.randrange(num_tokens)] += 1
        times.append(_timed(partial(_explain, history, str(i), tokens, segments)) * 1e3)
    return median(times)


def _explain(
    history: History, request_id: str, tokens: Sequence[int], segments: Sequence[Segment]
) -> None:
    prompt = history.fingerprint(NAMESPACE, tokens, segments, history.generation)
    history.remember(request_id, prompt, history.compare(prompt, hit_tokens=0))
    history.computed(request_id)


def unfilled_share(steps: int, running: int = 32) -> float:
    """Share of held slots without a token while `running` requests of ShareGPT's lengths decode."""
    rng = random.Random(0)
    cache = PrefixCache(running * 256, BLOCK_SIZE)
    users = [_requests(cache, user, rng) for user in range(running)]
    filled = held = 0
    for _ in range(steps):
        filled += sum(map(next, users))
        held += cache.counts().held * BLOCK_SIZE
    return 1 - filled / held


def _requests(cache: PrefixCache, user: int, rng: random.Random) -> Iterator[int]:
    """Run one request after the other; yields the number of filled slots after each step."""
    while True:
        tokens = [rng.randrange(50_000) for _ in range(token_count(rng, SHAREGPT.mean_input))]
        cache.admit(user, cache.plan(tokens, NAMESPACE))
        for _ in range(token_count(rng, SHAREGPT.mean_output)):
            cache.commit(user, len(tokens))
            yield len(tokens)
            tokens.append(rng.randrange(50_000))
            cache.grow(user, len(tokens))
        cache.release(user)
