"""How long a stream waits for its tokens while a long prompt is computed beside it.

Rounds with a bound on the time of a step and without take turns on one runner. Between two tokens
of the stream lies one step.
"""

from __future__ import annotations

from concurrent.futures import Future
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

from rich.progress import track
from rich.table import Table

from ragcache.bench.figures import percentile
from ragcache.engine.answers import Events
from ragcache.engine.loop import Engine
from ragcache.engine.request import Request
from ragcache.engine.runner import Runner
from ragcache.engine.scheduler import Scheduler
from ragcache.engine.step_cost import StepCost
from ragcache.errors import EngineUnavailable
from ragcache.prefix.cache import PrefixCache
from ragcache.types import Finished, SamplingParams, Token

PROMPT = 4096
LEAD = 8  # tokens that the stream has when the prompt comes
MAX_TOKENS = 1024  # of the stream: more than anybody waits for
BLOCK_SIZE = 16
NUM_BLOCKS = (PROMPT + MAX_TOKENS) // BLOCK_SIZE + 4
MAX_BATCH_TOKENS = 512


def measure(runner: Runner, max_step_time: float, repeats: int) -> dict[str, Any]:
    """Times in seconds, tokens a second; medians of the rounds, after one that does not count.

    `runner` has a pool of `NUM_BLOCKS` blocks.
    """
    costs = {"bounded": StepCost(max_step_time), "unbounded": None}
    rounds: dict[str, list[dict[str, float]]] = {side: [] for side in costs}
    for _ in track(range(repeats + 1), description="stalls"):
        for side, cost in costs.items():
            rounds[side].append(_Round(runner, cost).run())
    figures = {
        side: {name: median(each[name] for each in done[1:]) for name in done[0]}
        for side, done in rounds.items()
    }
    return {"max_step_time": max_step_time, **figures}


def render(results: dict[str, Any]) -> Table:
    """Lay the results of `measure` out as a table."""
    bounded, unbounded = results["bounded"], results["unbounded"]
    title = f"a stream beside a prompt of {PROMPT} tokens"
    table = Table(title=title)
    for column in ("", f"steps of {results['max_step_time']:g} s", "of any time", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    for name, value in bounded.items():
        ratio = value / unbounded[name]
        table.add_row(name, f"{value:.3g}", f"{unbounded[name]:.3g}", f"{ratio:.2f}")
    return table


class _Round:
    """A request streams; when it has `LEAD` tokens, one with a long prompt comes."""

    def __init__(self, runner: Runner, cost: StepCost | None) -> None:
        scheduler = Scheduler(
            PrefixCache(NUM_BLOCKS, BLOCK_SIZE, share=False),
            max_batch_tokens=MAX_BATCH_TOKENS,
            max_running=2,
            cost=cost,
        )
        self._engine = Engine(runner, scheduler, self)
        self._times: list[float] = []
        self._ended = Future[None]()

    def run(self) -> dict[str, float]:
        """What the stream, and who waits for the prompt, see of it."""
        self._engine.start()
        self._submit("stream", 64, MAX_TOKENS)
        self._ended.result()
        self._engine.stop()
        times = self._times[LEAD - 1 :]
        gaps = [after - before for before, after in pairwise(times)]
        seconds = times[-1] - times[0]
        return {
            "time between tokens p50": median(gaps),
            "time between tokens p99": percentile(gaps, 99),
            "time between tokens max": max(gaps),
            "time to first token of the prompt": seconds,
            "tokens per second, prompt and stream": (PROMPT + len(gaps)) / seconds,
        }

    def _submit(self, name: str, prompt: int, tokens: int) -> None:
        sampling = SamplingParams(tokens, temperature=0)
        self._engine.submit(Request(name, [1] * prompt, sampling, b"", frozenset()))

    def deliver(self, events: Events) -> None:
        """See `EventSink`."""
        if any(name == "stream" and isinstance(event, Token) for name, event in events):
            self._times.append(perf_counter())
            if len(self._times) == LEAD:
                self._submit("prompt", PROMPT, 1)
        if any(name == "prompt" and isinstance(event, Finished) for name, event in events):
            self._ended.set_result(None)

    def fail(self, error: EngineUnavailable) -> None:
        """See `EventSink`; also called when the engine is stopped."""
        if not self._ended.done():
            self._ended.set_exception(error)
