"""Rows are sampled together, and each as if it were alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ragcache.engine import draw
from ragcache.engine.draw import CANDIDATES, SORTED_ROWS, _uniform, draw_widest
from ragcache.engine.request import Request, Sequence
from ragcache.engine.sampler import sample
from ragcache.types import SamplingParams

VOCAB = 3 * CANDIDATES
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BROKEN = torch.full((VOCAB,), torch.nan, device=DEVICE)
FORBIDDEN = torch.full((VOCAB,), -torch.inf, device=DEVICE)


def sequence(number: int = 0, **options: Any) -> Sequence:
    request = Request("r", [0], SamplingParams(9, seed=number, **options), b"n", frozenset())
    return Sequence(request, 0)


def row(number: int, spread: float) -> torch.Tensor:
    """Logits with many ties; of a small spread for wide nuclei."""
    generator = torch.Generator().manual_seed(number)
    logits = (torch.randn(VOCAB, generator=generator) * 8).round() * spread / 8
    return logits.to(DEVICE)


def tokens(logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
    chosen, _ = sample(logits.clone(), sequences, list(range(len(sequences))))
    return [each.token_id for each in chosen]


def expected(logits: torch.Tensor, sequence: Sequence) -> int:
    """One row's token, from the definitions: sorted whole, filter by filter."""
    sampling, probs = sequence.request.sampling, logits.double().cpu()
    if sampling.temperature == 0:
        return int(probs.argmax())
    probs = (probs / sampling.temperature).softmax(0)
    ids = torch.arange(VOCAB)
    if sampling.top_k or sampling.top_p < 1 or sampling.min_p:
        probs, ids = probs.sort(descending=True, stable=True)
        probs = probs[: sampling.top_k or VOCAB]
        if sampling.top_p < 1:
            before = probs.cumsum(0) - probs
            probs = probs[before < sampling.top_p * probs.sum()]
        probs = probs[probs >= sampling.min_p * probs[0]]
    threshold = probs.sum() * _uniform(sequence)
    return int(ids[(probs.cumsum(0) <= threshold).sum()])


OPTIONS = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.5, 1.0, 3.0])},
    optional={
        "top_k": st.sampled_from([1, 5, CANDIDATES, CANDIDATES + 9, 10**9]),
        "top_p": st.sampled_from([0.1, 0.9, 0.99]),
        "min_p": st.sampled_from([1e-3, 0.3]),
    },
)
ROWS = st.tuples(st.integers(0, 99), st.sampled_from([0.25, 1.0, 5.0]), OPTIONS)


@settings(deadline=None, max_examples=60)
@given(st.lists(ROWS, min_size=1, max_size=8), st.randoms())
def test_a_row_gets_the_same_token_in_any_batch(rows, random):
    sequences = [sequence(number, **options) for number, _, options in rows]
    logits = torch.stack([row(number, spread) for number, spread, _ in rows])
    alone = [tokens(logits[i : i + 1], [each]) for i, each in enumerate(sequences)]
    assert tokens(logits, sequences) == [token for (token,) in alone]
    order = random.sample(range(len(rows)), len(rows))
    shuffled = tokens(logits[order], [sequences[i] for i in order])
    assert shuffled == [alone[i][0] for i in order]


@pytest.mark.parametrize("spread", [0.25, 1.0, 5.0])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 5},
        {"top_k": CANDIDATES + 9},
        {"top_p": 0.9},
        {"top_k": CANDIDATES, "top_p": 0.95},
        {"top_k": 2 * CANDIDATES, "top_p": 0.95, "min_p": 0.01},
        {"min_p": 0.05},
        {"min_p": 1e-9},
    ],
)
def test_tokens_are_those_of_the_filters_definitions(options, spread):
    sequences = [sequence(i, temperature=0.8, **options) for i in range(30)]
    logits = torch.stack([row(i, spread) for i in range(30)])
    together = zip(logits, sequences, strict=True)
    assert tokens(logits, sequences) == [expected(one, each) for one, each in together]


def test_of_equally_likely_tokens_the_first_stay():
    flat = torch.zeros(40, VOCAB, device=DEVICE)
    few = [sequence(i, temperature=1.0, top_k=3) for i in range(40)]
    assert set(tokens(flat, few)) == {0, 1, 2}
    many = [sequence(i, temperature=1.0, top_p=0.5) for i in range(40)]
    drawn = tokens(flat, many)
    assert max(drawn) < VOCAB / 2
    assert max(drawn) > CANDIDATES


def test_sequences_may_share_a_row_and_leave_others_out():
    logits = torch.stack([row(i, 5.0) for i in range(4)])
    sequences = [sequence(0, temperature=1.0), sequence(1, temperature=0.0), sequence(2)]
    chosen, broken = sample(logits.clone(), sequences, [3, 1, 3])
    assert [each.token_id for each in chosen] == tokens(logits[[3, 1, 3]], sequences)
    assert broken == [False] * 4


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.999}])
def test_rows_that_are_not_numbers_are_told_and_harm_no_other(options):
    sequences = [sequence(i, **{"temperature": 1.0, **options}) for i in range(4)]
    logits = torch.stack([row(0, 1.0), BROKEN, row(2, 1.0), row(3, 1.0)])
    logits[3, 7] = torch.nan
    chosen, broken = sample(logits.clone(), sequences, [0, 1, 2, 3])
    assert broken == [False, True, False, True]
    sane = [0, 2]
    assert [chosen[i].token_id for i in sane] == tokens(logits[sane], [sequences[i] for i in sane])


def test_rows_that_nothing_is_chosen_from_are_checked_too():
    logits = torch.stack([BROKEN, row(1, 1.0)])
    assert sample(logits, [], []) == ([], [True, False])


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_where_all_is_forbidden_the_first_comes_and_others_are_not_changed(options):
    sequences = [sequence(i, temperature=1.0, **options) for i in range(3)]
    logits = torch.stack([row(0, 1.0), FORBIDDEN, row(2, 1.0)])
    mixed = tokens(logits, sequences)
    assert mixed[1] == 0
    assert mixed[::2] == tokens(logits[::2], sequences[::2])


def test_the_widest_draws_sort_rows_whole_and_only_some_at_once(monkeypatch):
    sorted_whole, top = [], draw._top

    def spy(probs, count):
        if count == VOCAB:
            sorted_whole.append(len(probs))
        return top(probs, count)

    monkeypatch.setattr(draw, "_top", spy)
    logits = torch.zeros(SORTED_ROWS + 3, VOCAB, device=DEVICE)
    assert len(draw_widest(logits)) == len(logits)
    assert sorted_whole == [SORTED_ROWS, 3]


class Reads(TorchDispatchMode):
    """Counts the operations whose results the host has to know."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.count += name in {"_local_scalar_dense", "nonzero", "equal", "is_nonzero"}
        return func(*args, **(kwargs or {}))


def test_no_value_is_read_before_all_are(steps):
    options = [
        {"temperature": 0.0, "logit_bias": {3: 1.0}},
        {"temperature": 1.0, "repetition_penalty": 1.2},
        {"temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.5},
        {"temperature": 0.7, "top_k": 9, "min_tokens": 4, "stop_token_ids": frozenset([1])},
    ]
    sequences = [sequence(i, **each) for i, each in enumerate(options)]
    for each in sequences:
        each.tokens += [5, 5]
    sequences[0].constraint = steps([{2, 3}]).constraint()
    logits = torch.stack([row(i, 5.0) for i in range(4)])
    with Reads() as reads:
        sample(logits, sequences, [0, 1, 2, 3])
        assert reads.count == 0
        bool(logits.any())
    assert reads.count == 1  # it does count
