"""What the GPU kernels are meant to reach, each as one figure of the results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ragcache_kernels.bench.cases import GROWING

Result = dict[str, Any]
Verdict = Literal["met", "missed", "not run"]


@dataclass(frozen=True, slots=True)
class Goal:
    """`figure` of the result `key` is to be at least, or else at most, `target`."""

    name: str
    key: str
    figure: Callable[[Result], float | None]
    target: float
    at_least: bool

    def judge(self, results: dict[str, Result]) -> dict[str, Any]:
        """The verdict on the results by key."""
        value = self.figure(results[self.key]) if self.key in results else None
        verdict: Verdict = "not run"
        if value is not None:
            reached = value >= self.target if self.at_least else value <= self.target
            verdict = "met" if reached else "missed"
        return {"goal": self.name, "target": self.target, "value": value, "verdict": verdict}


def _of_memory(result: Result) -> float:
    return float(result["memory_seconds"] / result["seconds"])


def _of_compute(result: Result) -> float:
    return float(result["compute_seconds"] / result["seconds"])


def _gain(result: Result) -> float | None:
    return result.get("gain")


def _slowness(result: Result) -> float | None:
    gain = _gain(result)
    return None if gain is None else 1 / gain


GOALS = (
    Goal("decode: share of the copy bandwidth", "pages in a row", _of_memory, 0.8, True),
    Goal("pages of 16: time over contiguous", "contiguous", _slowness, 1.05, False),
    Goal("shared prefix: gain over no sharing", "shared", _gain, 8, True),
    Goal(
        "sharing gains from so many tokens",
        GROWING,
        lambda result: result["tokens"] or float("inf"),
        256,
        False,
    ),
    Goal("chunk: share of the dense product's rate", "chunk", _of_compute, 0.55, True),
    Goal("decode: time over torch's varlen_attn", "varlen", _slowness, 1.1, False),
    Goal(
        "decode step of a model: time over reading its weights",
        "decode step",
        lambda result: 1 / _of_memory(result),
        1.25,
        False,
    ),
)
