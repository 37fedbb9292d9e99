"""What a grammar on every request of a decoding batch costs, by llguidance over a JSON schema."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

from torch import Tensor

from ragcache.engine.constraint import Grammar
from ragcache.engine.request import Sequence
from ragcache.engine.sampler import sample

STEPS = 4  # in one round

SCHEMA = {
    "type": "object",
    "properties": {
        "query": {"type": "string"},
        "year": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "kind": {"enum": ["paper", "book", "page"]},
    },
    "required": ["query", "year", "tags", "kind"],
}


def throughput(
    grammar: Grammar, forward: Callable[[], Tensor], sequences: list[Sequence], repeats: int
) -> float:
    """Tokens a second with the grammar ÷ without, the median over rounds in turns.

    `forward` gives the next logits `[S, V]` of the sequences.
    """
    ratios = []
    for _ in range(repeats + 1):  # the first round warms up
        for sequence in sequences:
            sequence.constraint = None
        without = sum(_step(grammar, forward, sequences) for _ in range(STEPS))
        for sequence in sequences:
            sequence.constraint = grammar.constraint()
        ratios.append(without / sum(_step(grammar, forward, sequences) for _ in range(STEPS)))
    return median(ratios[1:])


def _step(grammar: Grammar, forward: Callable[[], Tensor], sequences: list[Sequence]) -> float:
    started = perf_counter()
    chosen, _ = sample(forward(), sequences, list(range(len(sequences))))
    for sequence, sampled in zip(sequences, chosen, strict=True):
        if sequence.constraint is None:
            continue
        sequence.constraint.advance(sampled.token_id)
        if sequence.constraint.finished:
            sequence.constraint = grammar.constraint()
    return perf_counter() - started
