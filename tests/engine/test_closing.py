"""A forced end is computed once more, so that the conversation's next turn finds it cached."""

import pytest

from ragcache.types import FinishReason

PROMPT = [7, 3, 9, 1, 4, 4, 8, 2, 6, 5, 0, 11, 13]  # three blocks and one token
ANY = set(range(61))
TAIL = [{20}, {21}, {22}, {23}, {24}, {25}]
CALL = [ANY, ANY, *TAIL]  # with the prompt 21 tokens: five blocks and one token


def next_turn(engine, answer):
    """The tokens that the next turn of the conversation finds in the cache."""
    engine.submit("next", [*PROMPT, *answer, 1, 2, 3], max_tokens=2)
    outcome = engine.drain()["next"]
    assert outcome.tokens[0] == engine.greedy([*PROMPT, *answer, 1, 2, 3], 2)
    return outcome.cached_tokens


def run_until_told(engine, name="a"):
    while name not in engine.sink.outcomes or not engine.sink.outcomes[name].finished:
        engine.step()
    return engine.sink.outcomes[name]


@pytest.mark.parametrize("length", range(1, 13))
@pytest.mark.parametrize("sampled", [0, 1, 2])
def test_the_next_turn_finds_all_whole_blocks_of_a_forced_end(bench, steps, sampled, length):
    allowed = [ANY] * sampled + [{20 + i} for i in range(length)]
    engine = bench()
    engine.submit("a", PROMPT, max_tokens=40, grammar=steps(allowed))
    answer = engine.drain()["a"].tokens[0]
    assert answer == engine.constrained(PROMPT, allowed)
    total = len(PROMPT) + len(answer)
    if sampled == 0 and length == 1:
        total -= 1  # one token without KV is what every answer ends with
    assert next_turn(engine, answer) == total // 4 * 4


@pytest.mark.parametrize("forcing", [True, False])
def test_only_a_forced_end_is_computed(bench, steps, forcing):
    allowed = [*CALL[:-2], ANY, *([{25}] if forcing else [])]  # 20 tokens with the prompt, or 21
    engine = bench()
    engine.submit("a", PROMPT, max_tokens=40, grammar=steps(allowed))
    answer = engine.drain()["a"].tokens[0]
    assert engine.engine.stats.computed_tokens == (20 if forcing else 19)
    assert next_turn(engine, answer) == (20 if forcing else 16)


@pytest.mark.parametrize("allowed", [CALL, CALL[:-1]])  # its end fills no block, or one
def test_the_end_is_told_at_once_and_asks_for_no_logits(bench, steps, allowed):
    engine = bench()
    wanted = []
    run = engine.model.run

    def spy(batch, meanwhile):
        wanted.append(len(batch.last_idx))
        return run(batch, meanwhile)

    engine.model.run = spy
    engine.submit("a", PROMPT, max_tokens=40, grammar=steps(allowed))
    outcome = run_until_told(engine)
    assert outcome.finished == {0: FinishReason.STOP}
    assert outcome.num_tokens == {0: len(allowed)}
    assert wanted == [1, 1]  # the prompt, and the first of the two sampled tokens
    assert engine.engine.stats.running == 1
    engine.step()
    assert wanted == [1, 1, 0]
    assert engine.engine.stats.running == 0
    assert engine.engine.stats.pool.held == 0
    assert engine.engine.stats.computed_tokens == 20  # whole blocks only


def test_a_next_turn_that_comes_at_once_waits_for_the_last_blocks(bench, steps):
    engine = bench()
    engine.submit("a", PROMPT, max_tokens=40, grammar=steps(CALL))
    answer = run_until_told(engine).tokens[0]
    assert next_turn(engine, answer) == 20


@pytest.mark.parametrize("max_running", [1, 2, 8])
def test_every_choice_ends_with_its_last_blocks_cached(bench, steps, max_running):
    engine = bench(max_running=max_running)
    options = {"n": 3, "temperature": 1.0, "seed": 1}
    engine.submit("a", PROMPT, max_tokens=40, grammar=steps(CALL), **options)
    outcome = engine.drain()["a"]
    assert len({tuple(tokens) for tokens in outcome.tokens.values()}) == 3
    for index, answer in outcome.tokens.items():
        name = f"next{index}"
        engine.submit(name, [*PROMPT, *answer, 1], max_tokens=1)
        assert engine.drain()[name].cached_tokens == 20


def test_choices_that_end_before_they_run_leave_it_to_the_first(bench, steps):
    engine = bench(max_running=1)
    engine.submit("a", PROMPT, max_tokens=40, grammar=steps(TAIL), n=3)
    outcome = engine.drain()["a"]
    assert outcome.finished == dict.fromkeys(range(3), FinishReason.STOP)
    assert engine.engine.stats.computed_tokens == 16
    assert next_turn(engine, outcome.tokens[2]) == 16


def test_an_abort_in_the_last_step_ends_only_the_choices_that_run(bench, steps):
    engine = bench(max_running=1)
    engine.submit("a", PROMPT, max_tokens=40, grammar=steps(CALL), n=2)
    answer = run_until_told(engine).tokens[0]
    assert engine.scheduler.closing
    engine.engine.abort("a")
    engine.engine.finish("a", 0)
    outcome = engine.drain()["a"]
    assert outcome.finished == {0: FinishReason.STOP, 1: FinishReason.ABORT}
    assert next_turn(engine, answer) == 20


@pytest.mark.parametrize("options", [{}, {"n": 2}])
def test_an_abort_before_the_end_computes_nothing_more(bench, steps, options):
    engine = bench()
    engine.submit("a", PROMPT, max_tokens=40, grammar=steps([*TAIL, ANY]), **options)
    engine.step()  # the forced run has been told, and the last token is still to be sampled
    engine.engine.abort("a")
    engine.drain()
    assert engine.engine.stats.computed_tokens == len(PROMPT)


@pytest.mark.parametrize("limit", range(3, 8))
def test_a_forced_run_cut_by_max_tokens_is_computed_too(bench, steps, limit):
    engine = bench()
    engine.submit("a", PROMPT, max_tokens=limit, grammar=steps(CALL))
    outcome = engine.drain()["a"]
    assert outcome.finished == {0: FinishReason.LENGTH}
    assert next_turn(engine, outcome.tokens[0]) == (len(PROMPT) + limit) // 4 * 4


@pytest.mark.parametrize(
    ("setting", "options"),
    [
        ({"share": False}, {}),
        ({}, {"cacheable": 0}),
        ({}, {"cacheable": 14}),
        ({"num_blocks": 4}, {}),
        ({"max_batch_tokens": 5}, {}),
    ],
)
def test_nothing_is_computed_that_could_not_be_published(bench, steps, setting, options):
    engine = bench(**setting)
    engine.submit("a", PROMPT, max_tokens=40, grammar=steps([ANY, *TAIL]), **options)
    outcome = engine.drain()["a"]
    assert outcome.tokens[0] == engine.constrained(PROMPT, [ANY, *TAIL])
    assert outcome.finished == {0: FinishReason.STOP}
    assert engine.engine.stats.computed_tokens == len(PROMPT)


def test_explicit_caching_publishes_no_more_of_a_forced_end_than_it_may(bench, steps):
    engine = bench()
    engine.submit("a", PROMPT, max_tokens=40, grammar=steps([ANY, *TAIL]), cacheable=18)
    answer = engine.drain()["a"].tokens[0]
    assert engine.engine.stats.computed_tokens == 16
    assert next_turn(engine, answer) == 16


def test_what_has_ended_gives_its_blocks_to_what_runs(bench, steps):
    def preemptions(num_blocks, tail):
        engine = bench(num_blocks, max_running=4)
        for i in range(3):
            engine.submit(f"stream{i}", [i, *PROMPT[:4]], max_tokens=20)
        engine.submit("a", PROMPT, max_tokens=40, grammar=steps([*[ANY] * 8, *tail]))
        outcomes = engine.drain()
        for i in range(3):
            assert outcomes[f"stream{i}"].tokens[0] == engine.greedy([i, *PROMPT[:4]], 20)
        return engine.scheduler.preemptions

    counts = {size: preemptions(size, TAIL) for size in range(8, 26)}
    assert counts[8] > 0
    assert counts == {size: preemptions(size, []) for size in range(8, 26)}


def test_a_drop_in_the_last_step_leaves_nothing_behind(bench, steps):
    engine = bench()
    engine.submit("a", PROMPT, max_tokens=40, grammar=steps(CALL))
    answer = run_until_told(engine).tokens[0]
    engine.engine.drop(b"n")
    engine.drain()
    assert engine.cache.counts().cached == 0
    assert next_turn(engine, answer) == 0
