"""Drafts that are tried ahead change no answer, only how many steps it takes."""

import pytest
import torch

from ragcache.engine.drafter import DRAFT_ROWS
from ragcache.types import FinishReason

LOOP = [7, 3, 9, 1, 4]
PROMPT = [*LOOP, *LOOP, 7, 3, 9]  # three blocks and one token
ANY = set(range(61))
REQUESTS = {
    "greedy": {},
    "logprobs": {"logprobs": 3},
    "sampled": {"temperature": 1.0, "seed": 3, "logprobs": 0},
    "filtered": {"temperature": 1.2, "seed": 3, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"presence_penalty": 0.1, "frequency_penalty": 0.3, "logprobs": 1},
    "repetition": {"repetition_penalty": 1.02, "temperature": 0.5, "seed": 1},
    "bias": {"logit_bias": {8: 7.0}},
    "min_tokens": {"min_tokens": 11, "eos": frozenset([9])},
    "end": {"eos": frozenset([44])},
    "stop token": {"stop_token_ids": frozenset([15])},
    "ignore_eos": {"ignore_eos": True, "eos": frozenset([1, 4])},
    "choices": {"n": 3, "temperature": 1.3, "seed": 5, "logprobs": 1},
    "greedy choices": {"n": 3},
    "prompt_logprobs": {"prompt_logprobs": 1, "n": 2},
    "explicit": {"cacheable": 20},
}


def spy(engine):
    """The chunks of every step that is still to come."""
    steps, schedule = [], engine.scheduler.schedule

    def watch():
        steps.append(schedule())
        return steps[-1]

    engine.scheduler.schedule = watch
    return steps


def stats_of(engine):
    stats = engine.engine.stats
    assert 0 <= stats.accepted_tokens <= stats.drafted_tokens
    return stats


def answered(bench, max_draft, requests, **setting):
    """The engine and the outcomes of requests: name, prompt, options."""
    engine = bench(max_draft=max_draft, echo=True, **setting)
    for name, prompt, options in requests:
        engine.submit(name, prompt, **{"max_tokens": 40, **options})
    return engine, engine.drain()


@pytest.mark.parametrize("options", REQUESTS.values(), ids=REQUESTS)
def test_a_draft_changes_nothing_that_a_request_is_told(bench, options):
    plain, expected = answered(bench, 0, [("a", PROMPT, options)])
    engine, outcomes = answered(bench, 8, [("a", PROMPT, options)])
    assert outcomes == expected
    assert stats_of(plain).drafted_tokens == 0
    assert stats_of(engine).accepted_tokens > 0


@pytest.mark.parametrize("max_draft", [1, 2, 3, 8, 60])
@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3, 7, 12, 40])
def test_max_tokens_is_kept_whatever_is_tried_ahead(bench, max_draft, max_tokens):
    request = "a", PROMPT, {"max_tokens": max_tokens}
    _, expected = answered(bench, 0, [request])
    engine, outcomes = answered(bench, max_draft, [request])
    assert outcomes == expected
    assert outcomes["a"].num_tokens == {0: max_tokens}
    assert outcomes["a"].finished == {0: FinishReason.LENGTH}
    assert (stats_of(engine).drafted_tokens > 0) is (max_tokens > 2)


def test_repetitive_text_takes_fewer_steps(bench):
    def count(max_draft):
        engine = bench(max_draft=max_draft, echo=True)
        engine.model.MOOD = 1000  # in which it echoes
        steps = spy(engine)
        engine.submit("a", PROMPT, max_tokens=40)
        engine.drain()
        return len(steps)

    assert count(8) < count(1) < count(0) / 1.5


def test_both_right_and_wrong_drafts_are_tried(bench):
    engine, _ = answered(bench, 8, [("a", PROMPT, {"max_tokens": 100})])
    stats = stats_of(engine)
    wrong = stats.drafted_tokens - stats.accepted_tokens
    assert min(stats.accepted_tokens, wrong) > 20
    assert stats.computed_tokens == len(PROMPT) + 99 + wrong  # what was right, only once


def test_an_end_token_in_a_right_draft_is_the_last(bench):
    _, plain = answered(bench, 0, [("a", PROMPT, {})])
    tokens = plain["a"].tokens[0]
    for end in set(tokens):
        requests = [("a", PROMPT, {"eos": frozenset([end])})]
        _, expected = answered(bench, 0, requests)
        _, outcomes = answered(bench, 8, requests)
        assert outcomes == expected
        assert outcomes["a"].num_tokens == {0: tokens.index(end) + 1}


def test_many_at_once_under_pressure_are_answered_as_alone(bench):
    names = list(REQUESTS)
    requests = [(name, [*LOOP * 3, i % 3], REQUESTS[name]) for i, name in enumerate(names)]
    alone = {each[0]: answered(bench, 0, [each])[1][each[0]] for each in requests}
    for setting in ({"num_blocks": 30}, {"num_blocks": 30, "host_blocks": 40}, {"num_blocks": 300}):
        setting["max_running"] = 16
        engine, outcomes = answered(bench, 8, requests, **setting)
        for name, outcome in outcomes.items():
            outcome.cached_tokens = 0
            assert outcome == alone[name]
        assert stats_of(engine).accepted_tokens > 0
        assert (stats_of(engine).preemptions > 0) is (setting["num_blocks"] < 100)
        host = stats_of(engine).host
        assert (host is not None and host.swapped_in > 0) is ("host_blocks" in setting)


@pytest.mark.parametrize("options", [{}, {"eos": frozenset([4])}, {"cacheable": 20}, {"n": 2}])
def test_the_next_turn_finds_the_same_blocks_and_answers_the_same(bench, options):
    told = []
    for max_draft in (0, 8):
        engine, outcomes = answered(bench, max_draft, [("a", PROMPT, options)])
        turn = [*PROMPT, *outcomes["a"].tokens[0], 1, 2]
        engine.submit("next", turn, max_tokens=4)
        told.append(engine.drain()["next"])
        assert told[-1].tokens[0] == engine.greedy(turn, 4)
    assert told[0] == told[1]
    assert told[0].cached_tokens >= 12


@pytest.mark.parametrize("n", [1, 2])
def test_the_first_token_has_no_draft(bench, n):
    engine = bench(max_draft=8, echo=True, max_batch_tokens=12)
    steps = spy(engine)
    engine.submit("a", PROMPT, max_tokens=4, n=n)  # its last token is left for a step of its own
    outcome = engine.drain()["a"]
    assert [[chunk.count for chunk in chunks] for chunks in steps[:2]] == [[12], [1]]
    assert outcome.tokens == dict.fromkeys(range(n), engine.greedy(PROMPT, 4))


def test_a_grammar_has_no_draft(bench, steps):
    engine = bench(max_draft=8, echo=True)
    engine.submit("a", PROMPT, max_tokens=20, grammar=steps([ANY] * 20))
    assert engine.drain()["a"].tokens[0] == engine.greedy(PROMPT, 20)
    assert stats_of(engine).drafted_tokens == 0


@pytest.mark.parametrize("requests", [1, 5, 12, 16, 17, 33])
def test_decodes_and_drafts_have_few_rows_together(bench, requests):
    setting = {"num_blocks": 900, "max_running": 40, "max_batch_tokens": 400}
    engine = bench(max_draft=50, echo=True, **setting)
    steps = spy(engine)
    for i in range(requests):
        engine.submit(str(i), [*PROMPT, i], max_tokens=30)
    engine.drain()
    drafting = [chunks for chunks in steps if any(chunk.draft for chunk in chunks)]
    assert bool(drafting) is (2 * requests <= DRAFT_ROWS)
    assert all(sum(chunk.count for chunk in chunks) <= DRAFT_ROWS for chunks in drafting)


def test_a_prompt_has_half_of_the_budget_beside_drafts(bench):
    engine = bench(max_draft=8, echo=True, max_batch_tokens=9)
    engine.model.MOOD = 1000
    engine.submit("stream", PROMPT, max_tokens=60)
    engine.step(8)
    steps = spy(engine)
    engine.submit("long", [5, *LOOP * 4], max_tokens=1)
    while "long" not in engine.sink.outcomes or not engine.sink.outcomes["long"].finished:
        engine.step()
    assert len(steps) == 6
    assert [sum(chunk.count for chunk in chunks) for chunks in steps[:5]] == [9] * 5
    assert "stream" not in engine.sink.outcomes or not engine.sink.outcomes["stream"].finished


@pytest.mark.parametrize("end", [None, 12, 24, 30, 54])
@pytest.mark.parametrize("num_blocks", [11, 14, 16, 18, 20, 21])
def test_drafts_preempt_nobody(bench, num_blocks, end):
    def play(max_draft):
        engine = bench(num_blocks, max_draft=max_draft, echo=True)
        eos = frozenset() if end is None else frozenset([end])
        for i in range(3):
            engine.submit(str(i), [*PROMPT[:-1], i], max_tokens=30, eos=eos)
        return engine.drain(), engine.scheduler.preemptions

    expected, preemptions = play(0)
    outcomes, with_drafts = play(8)
    assert outcomes == expected
    assert with_drafts <= preemptions


def break_logits(engine, where):
    logits = engine.model.logits

    def broken(context):
        values = logits(context)
        return torch.full_like(values, torch.nan) if where(context.tolist()) else values

    engine.model.logits = broken


@pytest.mark.parametrize(("eos", "mood"), [((), 8), ((44,), 8), ((3,), 1000)])
def test_what_comes_behind_a_wrong_draft_or_an_end_need_not_be_a_number(bench, eos, mood):
    plain, engine = bench(echo=True), bench(max_draft=8, echo=True)
    for each in (plain, engine):
        each.model.MOOD = mood
        each.submit("a", PROMPT, max_tokens=40, eos=frozenset(eos))
    expected = plain.drain()
    whole, seen = [*PROMPT, *expected["a"].tokens[0]], []

    def unmeant(said):
        seen.append(said != whole[: len(said)])
        return seen[-1]

    break_logits(engine, unmeant)
    assert engine.drain() == expected
    assert any(seen)


def test_what_comes_behind_a_right_draft_must_be_a_number(bench):
    engine = bench(max_draft=8, echo=True)
    engine.model.MOOD = 1000
    whole = [*PROMPT, *engine.greedy(PROMPT, 30)]
    break_logits(engine, lambda said: said == whole[:25])
    engine.submit("a", PROMPT, max_tokens=30)
    engine.submit("b", [1, 2, 3], max_tokens=9)
    outcomes = engine.drain()
    assert outcomes["a"].failure == "the model's output is not a number"
    assert outcomes["a"].tokens[0] == whole[13 : 13 + len(outcomes["a"].tokens[0])]
    assert stats_of(engine).accepted_tokens > 0
    assert outcomes["b"].finished == {0: FinishReason.LENGTH}
