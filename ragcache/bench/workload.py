"""The agentic-RAG workload: what the agents say, the same for the same seed.

All sessions share one system prompt with tool descriptions. Every turn brings passages, drawn
Zipf-like from one corpus (a few documents are asked for by everybody), and a question. The
answers come from the model while the workload runs, so that the history grows by real text.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from ragcache.bench.prose import TOPICS, prose

_TOOLS = (
    "search",
    "fetch",
    "summarise",
    "translate",
    "calculate",
    "timeline",
    "cite",
    "compare",
    "tabulate",
    "verify",
)
_INSTRUCTIONS = (
    "You are one of several research agents that work on the same archive. Answer from the "
    "passages only, name the document behind every claim, and say so when they do not answer "
    "the question.\n\nTools:\n"
)


@dataclass(frozen=True, slots=True)
class WorkloadShape:
    """How large the workload is; lengths are in words."""

    sessions: int = 8
    turns: int = 4
    passages: int = 3
    corpus: int = 64
    passage_words: int = 60
    tool_words: int = 40
    zipf: float = 0.8


@dataclass(frozen=True, slots=True)
class Workload:
    """`sessions[s][t]` is the user message of turn t in session s."""

    system: str
    sessions: tuple[tuple[str, ...], ...]


def make_workload(shape: WorkloadShape, seed: int) -> Workload:
    """Draw the workload; equal arguments give equal text in every process."""
    rng = random.Random(seed)
    tools = (f"- {name}: {prose(rng, shape.tool_words)}" for name in _TOOLS)
    system = _INSTRUCTIONS + "\n".join(tools)
    corpus = [f"[doc {i}] {prose(rng, shape.passage_words)}" for i in range(shape.corpus)]
    weights = zipf_weights(shape.corpus, shape.zipf)
    sessions = tuple(
        tuple(_turn(rng, shape.passages, corpus, weights) for _ in range(shape.turns))
        for _ in range(shape.sessions)
    )
    return Workload(system, sessions)


def zipf_weights(n: int, exponent: float) -> list[float]:
    """Cumulative weights of ranks 1 to n, each proportional to rank to the power of -exponent."""
    return list(itertools.accumulate(rank**-exponent for rank in range(1, n + 1)))


def _turn(rng: random.Random, passages: int, corpus: list[str], cum_weights: list[float]) -> str:
    drawn: list[str] = []
    while len(drawn) < min(passages, len(corpus)):
        (passage,) = rng.choices(corpus, cum_weights=cum_weights)
        if passage not in drawn:
            drawn.append(passage)
    first, second = rng.sample(TOPICS, 2)
    question = f"What do the passages say about the {first}, and what about the {second}?"
    return "Passages:\n" + "\n".join(drawn) + f"\n\nQuestion: {question}"
