"""What a load test measured; times are in seconds, rates in tokens per second."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    """Time to first token of a long prompt; each figure is the median of the repeats.

    A and B are different texts of the same length. A warm request differs from the cold one
    before it in its last words only. `off` is the warm request with nothing to share.
    """

    prompt_tokens: int
    cold_cached_tokens: int
    warm_cached_tokens: int
    a_cold: float
    a_warm: float
    b_cold: float
    b_warm: float
    off: float | None

    @property
    def ratio(self) -> float:
        """Warm time over the time without caching; the smaller, the better."""
        warm = (self.a_warm + self.b_warm) / 2
        return warm / (self.off or (self.a_cold + self.b_cold) / 2)

    @property
    def proves_hits(self) -> bool:
        """Whether the speed comes from prefix hits, and not from a server that warms up.

        The second cold prompt must be about as slow as the first, and both slower than warm.
        """
        similar = 2 / 3 < self.b_cold / self.a_cold < 3 / 2
        return similar and min(self.a_cold, self.b_cold) > max(self.a_warm, self.b_warm)


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
