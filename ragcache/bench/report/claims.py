"""What paging and sharing do to memory, and what the size of blocks does: the index alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from statistics import median
from time import process_time
from typing import Any

from ragcache.bench.ideal import ideal_hits
from ragcache.bench.lengths import ALPACA, SHAREGPT, token_count
from ragcache.bench.report.memory import NAMESPACE, Job, Paged, reservations
from ragcache.bench.report.packing import VOCAB_SIZE, Usage, pack
from ragcache.bench.workload import zipf_weights
from ragcache.prefix.cache import PrefixCache

Rows = list[dict[str, Any]]
Request = tuple[list[int], int]  # a prompt and its answer, and how many tokens the prompt has

SLOTS = 16_384
TOKEN_BYTES = 2 * 32 * 8 * 128 * 2  # K and V of 32 layers, 8 heads of 128, in bfloat16
BLOCK_SIZE = 16
BLOCK_SIZES = (1, 8, 16, 32, 64, 128)
SHARED = 2048  # tokens of the system prompt
CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)
LIFETIMES = 60  # of requests, for which each way of giving memory is watched
LOOKED_UP = 8_192  # tokens of the prompt that is looked up
# The agents of the hit rate: tokens of system prompt and tools, passages, questions, answers.
SYSTEM, PASSAGE, QUESTION, ANSWER = 1_337, 266, 24, 120
SESSIONS, TURNS, PASSAGES, CORPUS = 30, 6, 3, 64
AGENTS_SLOTS = 1 << 17  # more than they fill


def packing(seed: int, lifetimes: int = LIFETIMES) -> Rows:
    """Each way of giving memory, for short and long requests; the contiguous ones are controls."""
    return [
        {"lengths": lengths.name, "way": way} | _usage(pack(memory, lengths, lifetimes, seed=seed))
        for lengths in (SHAREGPT, ALPACA)
        for way, memory in {**reservations(SLOTS), "blocks": Paged(SLOTS, BLOCK_SIZE)}.items()
    ]


def _usage(usage: Usage) -> dict[str, float]:
    return asdict(usage) | {"waste": usage.waste}


def sharing(
    seed: int, concurrency: Sequence[int] = CONCURRENCY, lifetimes: int = LIFETIMES // 12
) -> Rows:
    """Bytes of KV for each of n requests behind one system prompt; unshared is the control."""
    lengths = replace(SHAREGPT, shared=SHARED)
    slots = max(concurrency) * lengths.longest

    def bytes_each(count: int, share: bool) -> float:
        memory = Paged(slots, BLOCK_SIZE, share=share)
        usage = pack(memory, lengths, lifetimes, seed=seed, most=count)
        return (1 - usage.free) * slots / usage.running * TOKEN_BYTES

    return [
        {"requests": n, "shared": bytes_each(n, True), "unshared": bytes_each(n, False)}
        for n in concurrency
    ]


def block_sizes(
    seed: int, sizes: Sequence[int] = BLOCK_SIZES, lifetimes: int = LIFETIMES // 6
) -> Rows:
    """For each size: waste, entries of a block table, hit rate of agents, cost of a lookup."""
    requests = list(agents(seed))
    return [
        {"block_size": size}
        | _waste_and_tables(size, seed, lifetimes)
        | {"hit_rate": hit_rate(requests, size), "lookup_ms": lookup_ms(size)}
        for size in sizes
    ]


def _waste_and_tables(size: int, seed: int, lifetimes: int) -> dict[str, float]:
    memory, entries = Paged(SLOTS, size), []

    def watch(running: list[Job]) -> None:
        entries.append(memory.table_entries(running) / len(running))

    usage = pack(memory, SHAREGPT, lifetimes, seed=seed, watch=watch)
    return {"waste": usage.waste, "entries": sum(entries) / len(entries)}


def agents(seed: int, sessions: int = SESSIONS) -> Iterator[Request]:
    """Requests of agents that share system prompt and corpus, their turns in random order."""
    rng = random.Random(seed)
    system = _text(rng, SYSTEM)
    corpus = [_text(rng, token_count(rng, PASSAGE)) for _ in range(CORPUS)]
    weights = zipf_weights(CORPUS, 0.8)
    histories = [system] * sessions
    turns = [session for session in range(sessions) for _ in range(rng.randint(1, TURNS))]
    rng.shuffle(turns)
    for session in turns:
        passages = rng.choices(corpus, cum_weights=weights, k=PASSAGES)
        prompt = [*histories[session], *(token for passage in passages for token in passage)]
        prompt += _text(rng, token_count(rng, QUESTION))
        histories[session] = prompt + _text(rng, token_count(rng, ANSWER))
        yield histories[session], len(prompt)


def _text(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


def hit_rate(requests: Sequence[Request], block_size: int) -> float:
    """Share of the prompt tokens that are hits, one request after the other."""
    cache = PrefixCache(AGENTS_SLOTS // block_size, block_size)
    hits = 0
    for tokens, prompt in requests:
        running = tokens[:prompt]
        row = cache.admit("agent", cache.plan(running, NAMESPACE))
        if row is None:
            raise ValueError(f"a prompt of {prompt} tokens does not fit into the pool")
        hits += row.hit_tokens
        running += tokens[prompt:]
        cache.grow("agent", len(tokens) - 1)  # the last token of an answer is never computed
        cache.commit("agent", len(tokens) - 1)
        cache.release("agent")
    return hits / sum(prompt for _, prompt in requests)


def ideal_hit_rate(seed: int) -> float:
    """The same without blocks and without end of memory: the control."""
    requests = list(agents(seed))
    hits = ideal_hits([(tokens[:prompt], tokens[:-1]) for tokens, prompt in requests], 1)
    return sum(hits) / sum(prompt for _, prompt in requests)


def lookup_ms(block_size: int, tokens: int = LOOKED_UP, repeats: int = 9) -> float:
    """CPU time to send a cached prompt from plan to release; median."""
    cache = PrefixCache(2 * tokens // block_size, block_size)
    prompt = list(range(tokens))

    def once() -> None:
        cache.admit("prompt", cache.plan(prompt, NAMESPACE))
        cache.commit("prompt", tokens)
        cache.release("prompt")

    once()
    return median(_seconds(once) for _ in range(repeats)) * 1e3


def _seconds(call: Callable[[], object]) -> float:
    started = process_time()
    call()
    return process_time() - started
