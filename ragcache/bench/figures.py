"""What a load test measured; times are in seconds, rates in tokens per second."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from pydantic import BaseModel, ConfigDict

from ragcache.bench.client import Reply


class Figures(BaseModel):
    """Base of all figures: immutable, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RunFigures(Figures):
    """One run of the workload; `ideal_tokens` is None where the tokens are not known."""

    requests: int
    wall: float
    prompt_tokens: int
    cached_tokens: int
    ideal_tokens: int | None
    output_tokens: int
    hit_rate: float
    ideal_hit_rate: float | None
    ttft_p50: float
    ttft_p95: float
    tpot_p50: float | None
    output_rate: float
    total_rate: float


class ProbeFigures(Figures):
    """Time to first token of a long prompt; each time is the median of the rounds.

    A and B are different texts of the same length. A warm request differs from the cold one
    before it in its last words only. `off` is a warm request with nothing to share, and `ratio`
    is warm over off (or over cold, where the server cannot be asked to share nothing).

    `proves_hits` tells whether the speed comes from prefix hits, and not from a server that
    warms up: the second cold prompt is about as slow as the first, and both much slower than
    the warm ones.
    """

    prompt_tokens: int
    cold_cached_tokens: int
    warm_cached_tokens: int
    a_cold: float
    a_warm: float
    b_cold: float
    b_warm: float
    off: float | None
    ratio: float
    proves_hits: bool


class Results(Figures):
    """Everything that one `ragcache bench serve` found out."""

    url: str
    model: str
    options: dict[str, object]
    run: RunFigures
    control: RunFigures | None = None
    same_answers: int | None = None
    probe: ProbeFigures | None = None
    notes: tuple[str, ...] = ()


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile of at least one value."""
    rank = math.ceil(percent / 100 * len(values))
    return sorted(values)[max(rank, 1) - 1]


def summarise(replies: Sequence[Reply], wall: float, ideal_tokens: int | None) -> RunFigures:
    """The figures of one run of at least one request."""
    prompt = sum(reply.prompt_tokens for reply in replies)
    cached = sum(reply.cached_tokens for reply in replies)
    output = sum(reply.completion_tokens for reply in replies)
    ttft = [reply.ttft for reply in replies]
    tpot = [reply.tpot for reply in replies if reply.tpot is not None]
    return RunFigures(
        requests=len(replies),
        wall=wall,
        prompt_tokens=prompt,
        cached_tokens=cached,
        ideal_tokens=ideal_tokens,
        output_tokens=output,
        hit_rate=cached / max(prompt, 1),
        ideal_hit_rate=None if ideal_tokens is None else ideal_tokens / max(prompt, 1),
        ttft_p50=percentile(ttft, 50),
        ttft_p95=percentile(ttft, 95),
        tpot_p50=percentile(tpot, 50) if tpot else None,
        output_rate=output / wall,
        total_rate=(prompt + output) / wall,
    )


def summarise_probe(rounds: Sequence[Mapping[str, Reply]]) -> ProbeFigures:
    """The figures of at least one round of the probe; a round has a reply for each time."""

    def middle(name: str) -> float:
        return median(replies[name].ttft for replies in rounds)

    a_cold, a_warm, b_cold, b_warm = map(middle, ("a_cold", "a_warm", "b_cold", "b_warm"))
    off = middle("off") if "off" in rounds[0] else None
    uncached = off if off is not None else (a_cold + b_cold) / 2
    similar = 2 / 3 < b_cold / a_cold < 3 / 2
    return ProbeFigures(
        prompt_tokens=max(replies["b_warm"].prompt_tokens for replies in rounds),
        cold_cached_tokens=max(replies["b_cold"].cached_tokens for replies in rounds),
        warm_cached_tokens=min(replies["b_warm"].cached_tokens for replies in rounds),
        a_cold=a_cold,
        a_warm=a_warm,
        b_cold=b_cold,
        b_warm=b_warm,
        off=off,
        ratio=(a_warm + b_warm) / 2 / uncached,
        proves_hits=similar and min(a_cold, b_cold, uncached) > 1.5 * max(a_warm, b_warm),
    )
