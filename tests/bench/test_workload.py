import random
from collections import Counter

import pytest

from ragcache.bench.prose import prose
from ragcache.bench.workload import WorkloadShape, make_workload, zipf_weights

SHAPE = WorkloadShape(sessions=20, turns=5, passages=3, corpus=32)


def passages(turn):
    return [line.split("]")[0] for line in turn.splitlines() if line.startswith("[doc ")]


def test_the_seed_decides_everything():
    assert make_workload(SHAPE, 7) == make_workload(SHAPE, 7)
    assert make_workload(SHAPE, 7) != make_workload(SHAPE, 8)


def test_the_shape_is_kept():
    workload = make_workload(SHAPE, 0)
    assert [len(turns) for turns in workload.sessions] == [5] * 20
    assert all(len(passages(turn)) == 3 for turns in workload.sessions for turn in turns)


def test_passages_of_a_turn_are_distinct():
    for turns in make_workload(SHAPE, 0).sessions:
        for turn in turns:
            assert len(set(passages(turn))) == 3


def test_a_corpus_smaller_than_a_turn_is_used_whole():
    (session,) = make_workload(WorkloadShape(sessions=1, turns=1, passages=5, corpus=2), 0).sessions
    assert sorted(passages(session[0])) == ["[doc 0", "[doc 1"]


def test_low_ranks_are_asked_for_most():
    turns = [turn for session in make_workload(SHAPE, 0).sessions for turn in session]
    counts = Counter(name for turn in turns for name in passages(turn))
    assert counts["[doc 0"] > 3 * counts["[doc 31"]


def test_zipf_weights_are_cumulative():
    assert zipf_weights(3, 1.0) == pytest.approx([1, 1 + 1 / 2, 1 + 1 / 2 + 1 / 3])


@pytest.mark.parametrize("words", [1, 9, 60])
def test_prose_has_exactly_the_words_asked_for(words):
    assert len(prose(random.Random(0), words).split()) == words
