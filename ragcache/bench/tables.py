"""The figures of load tests as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ragcache.bench.comparison import Comparison, Failure, Standing
from ragcache.bench.figures import ProbeFigures, Results, RunFigures
from ragcache.bench.options import OURS

UNEQUAL = 0.05  # by which the output tokens of two servers may differ


def report(results: Results) -> RenderableType:
    """All tables of one load test, with notes below."""
    parts: list[RenderableType] = [_runs(results)]
    if results.probe is not None:
        parts.append(_probe(results.probe))
    parts += [Text(f"Note: {note}", style="yellow") for note in results.notes]
    return Group(*parts)


def _runs(results: Results) -> Table:
    table = Table(title=f"{results.model} at {results.url}")
    table.add_column("")
    table.add_column("prefix cache", justify="right")
    runs = [_run_cells(results.run)]
    if results.control is not None:
        table.add_column("nothing shared", justify="right")
        runs.append(_run_cells(results.control))
    for name in runs[0]:
        table.add_row(name, *(cells[name] for cells in runs))
    if results.same_answers is not None:
        table.add_row("same answers", "", f"{results.same_answers} of {results.run.requests}")
    return table


def _run_cells(run: RunFigures) -> dict[str, str]:
    return {
        "requests": str(run.requests),
        "prompt / output tokens": f"{run.prompt_tokens:,} / {run.output_tokens:,}",
        "token hit rate": f"{run.hit_rate:.1%}",
        "ideal hit rate": "unknown" if run.ideal_hit_rate is None else f"{run.ideal_hit_rate:.1%}",
        "first token p50 / p95": f"{_time(run.ttft_p50)} / {_time(run.ttft_p95)}",
        "per output token p50": _time(run.tpot_p50),
        "output tokens / s": f"{run.output_rate:,.1f}",
        "all tokens / s": f"{run.total_rate:,.0f}",
        "wall time": _time(run.wall),
    }


def _probe(probe: ProbeFigures) -> Table:
    table = Table(
        title=f"Time to first token, {probe.prompt_tokens:,} prompt tokens, medians",
        caption=_verdict(probe),
    )
    for column in ("A cold", "A warm", "B cold", "B warm", "not shared", "warm / not shared"):
        table.add_column(column, justify="right")
    times = (probe.a_cold, probe.a_warm, probe.b_cold, probe.b_warm, probe.off)
    table.add_row(*(_time(time) for time in times), f"{probe.ratio:.3f}")
    return table


def _verdict(probe: ProbeFigures) -> str:
    counts = (
        f"{probe.warm_cached_tokens:,} tokens reused when warm, "
        f"{probe.cold_cached_tokens:,} when cold; "
    )
    if probe.proves_hits:
        return counts + "B cold is as slow as A cold: the difference comes from the prefix cache."
    return counts + "the cold and warm times do not show an effect of the prefix cache."


def contest(results: Comparison) -> RenderableType:
    """What servers took for the same work, with notes on what failed or was not the same."""
    table = Table(title="Medians over the rounds")
    for column in ("in flight", "server", "wall time", "÷ ragcache", "(least, most)"):
        table.add_column(column, justify="left" if column == "server" else "right")
    for column in ("first token p50", "per output token", "output tokens / s", "hit rate"):
        table.add_column(column, justify="right")
    for _, group in groupby(results.standings, lambda each: each.concurrency):
        for each in group:
            table.add_row(*_standing_cells(each))
        table.add_section()
    notes = [_failure(each) for each in results.failures] + _unequal(results.standings)
    return Group(table, *(Text(f"Note: {note}", style="yellow") for note in notes))


def _standing_cells(each: Standing) -> list[str]:
    return [
        str(each.concurrency),
        each.server,
        _time(each.wall),
        f"{each.ratio:.2f}",
        f"{each.least:.2f}, {each.most:.2f}",
        _time(each.ttft_p50),
        _time(each.tpot_p50),
        f"{each.output_rate:,.1f}",
        f"{each.hit_rate:.1%}" if each.hit_rate else "none told",
    ]


def _failure(each: Failure) -> str:
    return f"{each.server} failed{f' in {each.turn}' if each.turn else ''}: {each.error}"


def _unequal(standings: Sequence[Standing]) -> list[str]:
    """Notes on servers that gave more or fewer tokens than ragcache for the same requests."""
    ours = {each.concurrency: each.output_tokens for each in standings if each.server == OURS}
    return [
        f"{each.server} gave {each.output_tokens:,.0f} output tokens at {each.concurrency} in "
        f"flight where {OURS} gave {ours[each.concurrency]:,.0f}; an option in --extra, such as "
        "ignore_eos, may make them equal"
        for each in standings
        if abs(each.output_tokens / max(ours[each.concurrency], 1) - 1) > UNEQUAL
    ]


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.1f} ms"
