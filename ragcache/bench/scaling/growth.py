"""How measured times grow: the plane or the line that fits them best, and by how much they miss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Growth:
    """Seconds to `start` with, and for each `sequence` and `token` more.

    `error` is the largest share of a measured time by which these miss it.
    """

    start: float
    sequence: float
    token: float
    error: float

    def of_steps(self) -> str:
        """What it says about decode steps."""
        return (
            f"A step takes {_ms(self.start)}, and {_ms(self.sequence)} more for each sequence and "
            f"{_ms(self.token * 1000)} for every 1,000 tokens of their contexts{self._trust()}"
        )

    def of_prompts(self) -> str:
        """What it says about first tokens."""
        return (
            f"The first token takes {_ms(self.start)}, and {_ms(self.token * 1000)} more for every "
            f"1,000 tokens that are new{self._trust()}"
        )

    def _trust(self) -> str:
        return f"; no measured time is further from this than {self.error:.0%}."


def of_decode(rows: Rows) -> Growth:
    """A step costs something, each sequence in it, and each token of their contexts."""
    sizes = [[1, row["batch"], row["batch"] * row["context"]] for row in rows]
    return Growth(*_fit(sizes, rows))


def of_prefill(rows: Rows) -> Growth:
    """A request costs something, and each token of its prompt that is new."""
    start, token, error = _fit([[1, row["uncached"]] for row in rows], rows)
    return Growth(start, 0.0, token, error)


def _fit(sizes: Sequence[Sequence[float]], rows: Rows) -> tuple[float, ...]:
    """Least squares of the relative errors, so that short times count as much as long ones."""
    seconds = np.array([row["seconds"] for row in rows])
    relative = np.array(sizes, dtype=float) / seconds[:, None]
    costs, *_ = np.linalg.lstsq(relative, np.ones(len(rows)))
    return (*map(float, costs), float(np.abs(relative @ costs - 1).max()))


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    digits = f"{milliseconds:,.0f}" if abs(milliseconds) >= 100 else f"{milliseconds:.3g}"
    return f"{digits} ms"
