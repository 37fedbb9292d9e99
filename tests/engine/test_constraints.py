"""Grammars: what they allow is all that comes, and what they force costs no step."""

import random

import pytest

from ragcache.errors import GenerationFailed
from ragcache.types import FinishReason

PROMPT = [7, 3, 9, 1, 4, 4, 8, 2, 6, 5, 0, 11, 13]  # three blocks and one token
ANY = set(range(61))
RUN = [{20}, {21}, {22}, {23}, {24}, {25}]  # longer than a block of four
PATTERN = [{30}, {31}, ANY, {1, 2, 3}, *RUN, {5, 60}, {40}, {41}, ANY, {7, 8}]  # 15 tokens


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.5},
        {"temperature": 1.0, "top_p": 0.3},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 2.0, "min_p": 0.5},
        {"repetition_penalty": 3.0, "presence_penalty": 2.0, "logit_bias": {9: 100.0}},
        {"logit_bias": {1: -100.0, 2: -100.0, 3: -100.0}},
    ],
)
def test_only_allowed_tokens_come_whatever_the_sampling(bench, steps, options):
    engine = bench()
    grammar = steps([{1, 2, 3}, {0, 32, 60}, {31}, {4, 5}] * 3)
    for i in range(4):
        engine.submit(f"free{i}", [*PROMPT, i], max_tokens=12, **options)
        engine.submit(str(i), [*PROMPT, i], max_tokens=20, grammar=grammar, seed=i, **options)
    outcomes = engine.drain()
    for i in range(4):
        tokens = outcomes[str(i)].tokens[0]
        assert len(tokens) == 12
        assert all(token in allowed for token, allowed in zip(tokens, grammar.allowed, strict=True))
    assert any(outcomes[f"free{i}"].tokens[0] != outcomes[str(i)].tokens[0] for i in range(4))


def test_a_constrained_greedy_choice_is_the_most_likely_allowed_token(bench, steps):
    engine = bench()
    engine.submit("a", PROMPT, max_tokens=50, grammar=steps(PATTERN))
    outcome = engine.drain()["a"]
    assert outcome.tokens[0] == engine.constrained(PROMPT, PATTERN)
    assert outcome.finished == {0: FinishReason.STOP}
    assert outcome.num_tokens == {0: len(PATTERN)}


def test_neighbours_of_constrained_requests_are_not_changed(bench, steps):
    def answers(grammar):
        engine = bench(num_blocks=200, max_batch_tokens=64)
        for i in range(4):
            engine.submit(f"other{i}", [*PROMPT, i], max_tokens=15, grammar=grammar)
            engine.submit(f"greedy{i}", [*PROMPT, 10 + i], max_tokens=15, logprobs=3)
            engine.submit(f"drawn{i}", [i, 3], max_tokens=15, seed=i, temperature=1.4, top_p=0.9)
        outcomes = engine.drain()
        rest = {name: each for name, each in outcomes.items() if not name.startswith("other")}
        return {name: (each.tokens, each.logprobs) for name, each in rest.items()}

    assert answers(None) == answers(steps(PATTERN))


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.2, "seed": 5}])
@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"max_batch_tokens": 3, "max_running": 2},
        {"max_batch_tokens": 64, "max_running": 16, "num_blocks": 200},
    ],
)
def test_forcing_changes_nothing_but_the_number_of_steps(bench, steps, n, options, setting):
    steps_taken = []

    def answers(forcing):
        engine = bench(**setting)
        for i in range(2):
            grammar = steps(PATTERN, forcing)
            engine.submit(str(i), [*PROMPT, i], max_tokens=40, grammar=grammar, n=n, **options)
        engine.step()
        count = 1
        while engine.scheduler.running or engine.scheduler.waiting:
            engine.step()
            count += 1
        steps_taken.append(count)
        return engine.drain(), engine.engine.stats.query_tokens

    assert answers(True) == answers(False)
    assert steps_taken[0] < steps_taken[1]


@pytest.mark.parametrize(("length", "num_blocks"), [(3, 14), (30, 20)])
def test_forced_runs_survive_preemption(bench, steps, length, num_blocks):
    allowed = [{i % 61} for i in range(length)] + [ANY, *RUN, ANY, ANY] * 3
    prompts = {str(i): [i, *PROMPT[:8]] for i in range(4)}

    def answers(forcing):
        engine = bench(num_blocks, max_running=4, max_batch_tokens=12)
        for name, prompt in prompts.items():
            engine.submit(name, prompt, max_tokens=60, grammar=steps(allowed, forcing))
        return engine, engine.drain()

    engine, outcomes = answers(True)
    assert engine.scheduler.preemptions > 0
    for name, prompt in prompts.items():
        assert outcomes[name].tokens[0] == engine.constrained(prompt, allowed)
    assert outcomes == answers(False)[1]


@pytest.mark.parametrize("limit", range(1, 16))
def test_max_tokens_cuts_a_forced_run(bench, steps, limit):
    engine = bench()
    engine.submit("a", PROMPT, max_tokens=limit, grammar=steps(PATTERN), n=2)
    outcome = engine.drain()["a"]
    expected = engine.constrained(PROMPT, PATTERN)[:limit]
    reason = FinishReason.STOP if limit == len(PATTERN) else FinishReason.LENGTH
    assert outcome.tokens == {0: expected, 1: expected}
    assert outcome.finished == {0: reason, 1: reason}


def test_a_wholly_forced_answer_needs_the_prompt_alone(bench, steps):
    engine = bench(share=False)
    engine.submit("a", PROMPT, max_tokens=40, grammar=steps(RUN))
    outcome = engine.drain()["a"]
    assert outcome.tokens[0] == [20, 21, 22, 23, 24, 25]
    assert outcome.finished == {0: FinishReason.STOP}
    assert engine.engine.stats.computed_tokens == len(PROMPT)


def test_a_grammar_that_allows_nothing_ends_at_once(bench, steps):
    engine = bench()
    engine.submit("a", PROMPT, grammar=steps([]), n=2)
    outcome = engine.drain()["a"]
    assert outcome.tokens == {}
    assert outcome.finished == {0: FinishReason.STOP, 1: FinishReason.STOP}


def test_a_decoding_neighbour_gets_a_token_in_every_step(bench, steps):
    engine = bench(num_blocks=200, max_batch_tokens=8)
    engine.submit("stream", [1, 2, 3], max_tokens=30)
    engine.step()
    for i in range(3):
        engine.submit(str(i), [i, 5], max_tokens=60, grammar=steps([{9}] * 25 + [ANY]))
    for expected in range(2, 20):
        engine.step()
        assert len(engine.sink.outcomes["stream"].tokens[0]) == expected
    engine.drain()


def test_a_short_forced_run_does_not_wait_behind_a_long_prompt(bench, steps):
    engine = bench(num_blocks=400, max_batch_tokens=16)
    engine.submit("forced", PROMPT[:3], max_tokens=60, grammar=steps([ANY, *RUN] * 3 + [ANY]))
    engine.step()
    engine.submit("long", [i % 60 for i in range(400)], max_tokens=1)
    engine.step(3)
    assert engine.sink.outcomes["forced"].finished
    assert not engine.sink.outcomes["long"].finished
    engine.drain()


@pytest.mark.parametrize("options", [{"min_tokens": 9}, {"ignore_eos": True}, {"temperature": 1.0}])
def test_the_grammars_end_token_ends_the_choice(bench, steps, options):
    engine = bench()
    grammar = steps([{1, 2}, {60}, ANY])
    engine.submit("a", PROMPT, grammar=grammar, eos=frozenset([60]), **options)
    outcome = engine.drain()["a"]
    assert outcome.tokens[0][0] in {1, 2}
    assert len(outcome.tokens[0]) == 1
    assert outcome.finished == {0: FinishReason.STOP}
    assert outcome.num_tokens == {0: 2}


@pytest.mark.parametrize("forcing", [True, False])
def test_a_finished_grammar_ends_the_choice_before_min_tokens(bench, steps, forcing):
    engine = bench()
    grammar = steps([{1, 2}, {3}], forcing)
    engine.submit("a", PROMPT, grammar=grammar, eos=frozenset([60]), min_tokens=8)
    outcome = engine.drain()["a"]
    assert outcome.num_tokens == {0: 2}
    assert outcome.finished == {0: FinishReason.STOP}


def test_logprobs_are_those_of_the_model_for_forced_tokens_too(bench, steps):
    engine = bench()
    engine.submit("a", PROMPT, max_tokens=40, grammar=steps(PATTERN), logprobs=2)
    outcome = engine.drain()["a"]
    assert outcome.tokens[0] == engine.constrained(PROMPT, PATTERN)
    context = list(PROMPT)
    for token, logprob in zip(outcome.tokens[0], outcome.logprobs, strict=True):
        row = engine.logprobs(context)
        assert logprob.token_id == token
        assert logprob.logprob == pytest.approx(float(row[token]))
        assert logprob.top[0] == (int(row.argmax()), pytest.approx(float(row.max())))
        context.append(token)


def test_a_grammar_that_cannot_go_on_fails_its_request_alone(bench, steps):
    class Broken(steps):
        def constraint(self):
            state = super().constraint()
            advance = state.advance

            def fail_later(token_id):
                advance(token_id)
                if state.position == 3:
                    raise GenerationFailed("the grammar is too complex")

            state.advance = fail_later
            return state

    engine = bench()
    engine.submit("bad", PROMPT, grammar=Broken([ANY] * 8), n=3)
    engine.submit("good", PROMPT, max_tokens=8)
    outcomes = engine.drain()
    assert outcomes["bad"].failure == "the grammar is too complex"
    assert not outcomes["bad"].finished
    assert outcomes["good"].tokens[0] == engine.greedy(PROMPT, 8)


def test_random_grammars_under_random_traffic(bench, steps):
    rng = random.Random(4)
    engine = bench(num_blocks=40, max_batch_tokens=12, max_running=5)
    texts = [[rng.randrange(61) for _ in range(40)] for _ in range(3)]
    expected = {}
    for i in range(80):
        prompt = [*rng.choice(texts)[: rng.randrange(1, 40)], rng.randrange(61)]
        allowed = [set(rng.sample(range(61), rng.choice([1, 1, 1, 4]))) for _ in range(14)]
        engine.submit(str(i), prompt, max_tokens=50, grammar=steps(allowed, rng.random() < 0.7))
        expected[str(i)] = engine.constrained(prompt, allowed)
        engine.step(rng.randrange(3))
    for name, outcome in engine.drain().items():
        assert outcome.tokens[0] == expected[name]
        assert outcome.finished == {0: FinishReason.STOP}
