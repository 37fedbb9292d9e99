"""What a comparison of servers found, as ratios of what was played in the same round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from ragcache.bench.figures import Figures, RunFigures
from ragcache.bench.options import OURS


class Played(Figures):
    """What a server took for the text of a round."""

    server: str
    round: int
    concurrency: int
    figures: RunFigures


class Failure(Figures):
    """Why a server has no figures; `turn` is None where it could not even be asked."""

    server: str
    turn: str | None = None
    error: str


class Standing(Figures):
    """A server at a concurrency: medians over the rounds that it played to the end.

    `ratio` is its wall time ÷ that of ragcache in the same round, from `least` to `most`.
    """

    server: str
    concurrency: int
    rounds: int
    wall: float
    ratio: float
    least: float
    most: float
    ttft_p50: float
    tpot_p50: float | None
    output_rate: float
    output_tokens: float
    hit_rate: float


class Comparison(Figures):
    """Everything that one `ragcache bench compare` found out."""

    models: dict[str, str]
    options: dict[str, object]
    standings: list[Standing]
    failures: list[Failure]
    played: list[Played]


def standings(played: Sequence[Played]) -> Iterator[Standing]:
    """By concurrency, and by server in the order in which they first played it."""
    ours = {(each.concurrency, each.round): each.figures for each in played if each.server == OURS}
    groups: dict[tuple[int, str], list[Played]] = {}
    for each in sorted(played, key=lambda each: each.concurrency):
        groups.setdefault((each.concurrency, each.server), []).append(each)
    for (concurrency, server), theirs in groups.items():
        ratios = [each.figures.wall / ours[concurrency, each.round].wall for each in theirs]
        yield _standing(server, concurrency, [each.figures for each in theirs], ratios)


def _standing(
    server: str, concurrency: int, figures: Sequence[RunFigures], ratios: Sequence[float]
) -> Standing:
    tpot = [each.tpot_p50 for each in figures if each.tpot_p50 is not None]
    return Standing(
        server=server,
        concurrency=concurrency,
        rounds=len(figures),
        wall=median(each.wall for each in figures),
        ratio=median(ratios),
        least=min(ratios),
        most=max(ratios),
        ttft_p50=median(each.ttft_p50 for each in figures),
        tpot_p50=median(tpot) if tpot else None,
        output_rate=median(each.output_rate for each in figures),
        output_tokens=median(each.output_tokens for each in figures),
        hit_rate=median(each.hit_rate for each in figures),
    )
