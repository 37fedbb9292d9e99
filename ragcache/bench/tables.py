"""The figures of a load test as tables for a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ragcache.bench.figures import ProbeFigures, Results, RunFigures


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


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.1f} ms"
