"""What a step costs, learned from those that ran, and how much prefill fits into the next one.

On a CPU it is chunks of prompts that make a step long, and every running stream waits for all of
it: a step's tokens must follow from the time that it may take (Sarathi-Serve, OSDI 2024).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import sqrt
from statistics import quantiles

import numpy as np
from numpy.typing import NDArray

from ragcache.engine.request import Chunk

MIN_CHUNK = 16  # prefill tokens that a step may always have; fewer cost about as much as a decode
MIN_SHARE = 0.2  # of a step's time, which its prefill may always take
RECENT = 32  # steps with prefill, and as many without, from which is learned
ROUNDS = 3  # of weighting the least squares
MAX_MARGIN = 1.5  # shorter chunks do not help a machine that falters
RIDGE = 0.01  # shares out what cannot be told apart
UNITS = np.array([1, 64, 4096, 64 * 4096])  # of work, such that their costs may be much alike

Vector = NDArray[np.float64]


class StepCost:
    """How many prefill tokens keep a step with decodes within `max_step_time` seconds.

    A step is taken to cost so much as such, for each token, for each token of its decodes'
    context, and for each that a token of its prefill attends to. What is aimed at is shorter than
    the bound by the error of nine in ten recent forecasts, up to `MAX_MARGIN`, so on a machine that
    falters more than that, steps overrun. Where decoding alone takes long, prefill gets `MIN_SHARE`
    nevertheless.
    """

    def __init__(self, max_step_time: float) -> None:
        self._max_step_time = max_step_time
        self._decodes: deque[_Step] = deque(maxlen=RECENT)
        self._prefills: deque[_Step] = deque(maxlen=RECENT)
        self._running = _Step()
        self._costs = np.zeros(4)
        self._margin = 1.0  # most steps take at most so many times what is forecast
        self._learned = True  # everything that has been seen

    def begin(self, decodes: Iterable[Chunk], prefills: Iterable[Chunk]) -> None:
        """A step begins with these chunks."""
        self._running.add(decodes, prefills)

    def end(self, seconds: float) -> None:
        """It took so long, with all that began since the last end."""
        step, self._running = self._running, _Step()
        step.seconds = seconds
        (self._prefills if step.prefill >= MIN_CHUNK else self._decodes).append(step)
        self._learned = False

    def fitting(self, decodes: Iterable[Chunk], context: int) -> int:
        """Prefill tokens that fit into a step with these decodes, behind `context` tokens.

        At most twice what has been seen: costs are wrong far from where they were learned.
        """
        if not self._learned:
            self._learn()
        seconds = self._seconds_left(decodes)
        token, pair = (self._costs / UNITS)[[1, 3]]
        first = token + pair * context  # of the chunk's first token; each costs a pair more
        divisor = first + sqrt(first**2 + 2 * pair * seconds)
        limit = 2 * max((step.prefill for step in self._prefills), default=MIN_CHUNK // 2)
        fits = int(2 * seconds / divisor) if divisor else limit
        return max(MIN_CHUNK, min(fits, limit))

    def _seconds_left(self, decodes: Iterable[Chunk]) -> float:
        """Those of a step that its decodes leave to prefill."""
        step = _Step()
        step.add(decodes, ())
        decoding = self._forecast(step)
        least = decoding * MIN_SHARE / (1 - MIN_SHARE)
        return max(self._max_step_time / self._margin - decoding, least)

    def _learn(self) -> None:
        self._costs = _costs([*self._decodes, *self._prefills])
        mixed = [step for step in self._prefills if step.decodes]
        errors = [step.seconds / self._forecast(step) for step in mixed]
        most = quantiles(errors, n=10)[-1] if len(errors) > 1 else 1.0
        self._margin = min(max(most, 1.0), MAX_MARGIN)
        self._learned = True

    def _forecast(self, step: _Step) -> float:
        return max(float(step.work @ self._costs), 1e-6)


class _Step:
    """What was computed in a step, or in several that were timed together, and how long it took.

    `work` is `[4]` in `UNITS`: steps, tokens, context of decodes, pairs of tokens in chunks.
    """

    def __init__(self) -> None:
        self.work: Vector = np.zeros(4)
        self.prefill = 0  # tokens
        self.decodes = False
        self.seconds = 0.0

    def add(self, decodes: Iterable[Chunk], prefills: Iterable[Chunk]) -> None:
        """Add what one step computes."""
        self.work[0] += 1
        for chunk in decodes:
            self.decodes = True
            self.work[1:3] += (chunk.count, chunk.start) / UNITS[1:3]
        for chunk in prefills:
            self.prefill += chunk.count
            pairs = chunk.count * (chunk.start + chunk.count / 2)
            self.work[[1, 3]] += (chunk.count, pairs) / UNITS[[1, 3]]


def _costs(steps: Sequence[_Step]) -> Vector:
    """Seconds `[4]` for the units of work, with the least sum of relative errors.

    Unlike squares, these let steps in which the machine did something else have no say.
    """
    seconds = np.array([step.seconds for step in steps])
    work = np.array([step.work for step in steps]) / seconds[:, None]
    weights = np.ones(len(steps))
    for _ in range(ROUNDS):
        costs = _nonnegative(work * np.sqrt(weights)[:, None], np.sqrt(weights))
        weights = 1 / np.maximum(np.abs(work @ costs - 1), 1e-2)
    return costs


def _nonnegative(rows: Vector, values: Vector) -> Vector:
    """Costs `[4]` ≥ 0 with the least squares of `rows @ costs` against `values`.

    What comes out negative is left out, the worst first.
    """
    kept = np.arange(4)
    solved = np.zeros(4)
    square, product = rows.T @ rows + RIDGE * np.eye(4), rows.T @ values
    while len(kept):
        costs = np.linalg.solve(square[np.ix_(kept, kept)], product[kept])
        if costs.min() >= 0:
            solved[kept] = costs
            break
        kept = np.delete(kept, costs.argmin())
    return solved
