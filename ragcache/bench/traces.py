"""Requests as traces record them: when, how long, and which blocks their prompts share."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

BLOCK = 512  # tokens, of which the blocks of such traces consist
STEP = 3.0  # seconds; within one, arrivals are spread evenly

Quantiles = Sequence[tuple[float, float]]

# Kimi's conversations: Qin et al., "Mooncake", FAST 2025, as quantiles of its public trace.
FIRST = ((0, 513), (0.1, 905), (0.25, 1336), (0.5, 5264), (0.75, 13056), (0.9, 25561), (1, 89869))
GROWTH = ((0, 0), (0.1, 0), (0.25, 187), (0.5, 454), (0.75, 900), (0.9, 4622), (1, 17472))
GAP = ((0, 20), (0.1, 42), (0.25, 66), (0.5, 123), (0.75, 264), (0.9, 483), (1, 1482))
OUTPUT = ((0, 8), (0.1, 24), (0.25, 156), (0.5, 350), (0.75, 472), (0.9, 597), (1, 1120))
CONTINUES = (0.31, 0.42, 0.51, 0.59, 0.59, 0.68, 0.77)  # after the first turn, the second …


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request; `blocks` are numbers, and equal where all that stands before is equal, too."""

    at: float  # seconds
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


def read_trace(path: Path, seed: int = 0) -> list[TraceRequest]:
    """Read Mooncake's JSONL form: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`."""
    rng = random.Random(seed)
    with path.open() as lines:
        requests = [_read(json.loads(line), rng.random() * STEP) for line in lines]
    return sorted(requests, key=lambda request: request.at)


def _read(row: dict[str, Any], late: float) -> TraceRequest:
    at = row["timestamp"] / 1000 + late
    return TraceRequest(at, row["input_length"], row["output_length"], tuple(row["hash_ids"]))


def generate(rate: float, seconds: float, seed: int = 0) -> list[TraceRequest]:
    """Invent a mix of agents' requests: conversations, and calls of two shared prompts.

    The shares follow Mooncake's trace of tools and agents: 48 % belong to conversations over one
    block that all share, 38 % are calls of a prompt of 12 blocks, 14 % of one of 5 blocks. `rate`
    is in requests a second; they arrive in bursts (gamma, coefficient of variation 3).
    """
    rng = random.Random(seed)
    fresh = count(100).__next__
    per_conversation = 2.0  # requests, with the shares of `CONTINUES`
    requests = [
        *_arrivals(rng, 0.48 * rate / per_conversation, seconds, partial(_conversation, fresh)),
        *_arrivals(rng, 0.38 * rate, seconds, partial(_call, fresh, range(1, 13), (1, 40))),
        *_arrivals(rng, 0.14 * rate, seconds, partial(_call, fresh, range(13, 18), (16, 24))),
    ]
    return sorted(requests, key=lambda request: request.at)


Fresh = Callable[[], int]
Maker = Callable[[random.Random, float], Iterator[TraceRequest]]


def _arrivals(
    rng: random.Random, rate: float, seconds: float, make: Maker
) -> Iterator[TraceRequest]:
    shape = 1 / 3**2
    at = 0.0
    while (at := at + rng.gammavariate(shape, 1 / (rate * shape))) < seconds:
        yield from make(rng, at)


def _conversation(fresh: Fresh, rng: random.Random, at: float) -> Iterator[TraceRequest]:
    blocks, tokens = [0], round(_draw(rng, FIRST))
    for again in (*CONTINUES, 0.0):
        blocks += [fresh() for _ in range(-(-tokens // BLOCK) - len(blocks))]
        output = round(_draw(rng, OUTPUT))
        yield TraceRequest(at, tokens, output, tuple(blocks))
        if rng.random() >= again:
            return
        at += _draw(rng, GAP)
        del blocks[tokens // BLOCK :]  # the last one was not full, and goes on otherwise
        tokens += output + round(_draw(rng, GROWTH))


def _call(
    fresh: Fresh, prompt: Sequence[int], outputs: tuple[int, int], rng: random.Random, at: float
) -> Iterator[TraceRequest]:
    own = rng.randint(25, 2036)
    blocks = (*prompt, *(fresh() for _ in range(-(-own // BLOCK))))
    yield TraceRequest(at, len(prompt) * BLOCK + own, rng.randint(*outputs), blocks)


def _draw(rng: random.Random, quantiles: Quantiles) -> float:
    """A value whose distribution has these quantiles, with straight lines between them."""
    share = rng.random()
    for (low, first), (high, last) in pairwise(quantiles):
        if share <= high:
            return first + (last - first) * (share - low) / (high - low)
    raise AssertionError("the last quantile is at 1")
