"""What the engine promises for every request, whatever else runs."""

import gc
import random

import pytest

from ragcache.types import FinishReason

PROMPT = [7, 3, 9, 1, 4, 4, 8, 2, 6, 5, 0, 11, 13]  # three blocks and one token


def test_answers_equal_the_bare_model(bench):
    engine = bench()
    engine.submit("a", PROMPT, max_tokens=10)
    outcome = engine.drain()["a"]
    assert outcome.tokens[0] == engine.greedy(PROMPT, 10)
    assert outcome.finished == {0: FinishReason.LENGTH}
    assert outcome.cached_tokens == 0


def test_a_hit_is_told_before_the_model_runs(bench, monkeypatch):
    engine = bench()
    run, told = engine.model.run, []

    def watch(batch, meanwhile):
        meanwhile()
        told.append({name: seen.cached_tokens for name, seen in engine.sink.outcomes.items()})
        return run(batch)

    monkeypatch.setattr(engine.model, "run", watch)
    engine.submit("cold", PROMPT, max_tokens=1)
    engine.drain()
    engine.submit("warm", PROMPT, max_tokens=1)
    engine.drain()
    assert told == [{"cold": 0}, {"cold": 0, "warm": 12}]


@pytest.mark.parametrize("budget", [1, 3, 4, 5, 64])
def test_chunk_size_does_not_change_the_answer(bench, budget):
    engine = bench(max_batch_tokens=budget, max_running=1)
    engine.submit("a", PROMPT, max_tokens=6)
    assert engine.drain()["a"].tokens[0] == engine.greedy(PROMPT, 6)


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9, 12, 13])
def test_a_warm_prompt_hits_all_whole_blocks_but_computes_its_last_token(bench, length):
    engine = bench()
    prompt = PROMPT[:length]
    engine.submit("cold", prompt, max_tokens=2)
    engine.drain()
    computed = engine.engine.stats.computed_tokens
    engine.submit("warm", prompt, max_tokens=2)
    warm = engine.drain()["warm"]
    assert warm.cached_tokens == (length - 1) // 4 * 4
    assert warm.tokens[0] == engine.greedy(prompt, 2)
    assert engine.engine.stats.computed_tokens - computed == length - warm.cached_tokens + 1


def test_an_answer_is_cached_for_the_next_turn(bench):
    engine = bench()
    engine.submit("first", PROMPT, max_tokens=8)
    answer = engine.drain()["first"].tokens[0]
    turn = PROMPT + answer + [1, 2, 3]
    engine.submit("second", turn, max_tokens=4)
    second = engine.drain()["second"]
    # The last sampled token was never computed, so its block is not whole.
    assert second.cached_tokens == (len(PROMPT) + len(answer) - 1) // 4 * 4
    assert second.tokens[0] == engine.greedy(turn, 4)


def test_caching_off_hits_nothing_and_answers_alike(bench):
    engine = bench(share=False)
    for name in ("a", "b"):
        engine.submit(name, PROMPT, max_tokens=5)
        engine.drain()
    outcomes = engine.sink.outcomes
    assert outcomes["b"].cached_tokens == 0
    assert outcomes["a"].tokens == outcomes["b"].tokens == {0: engine.greedy(PROMPT, 5)}


def test_other_namespaces_share_nothing(bench):
    engine = bench()
    for name, namespace in (("a", b"x"), ("b", b"y"), ("c", b"x")):
        engine.submit(name, PROMPT, namespace=namespace)
        engine.drain()
    assert [engine.sink.outcomes[name].cached_tokens for name in "abc"] == [0, 0, 12]


def test_sixteen_different_requests_at_once_get_their_solo_answers(bench):
    rng = random.Random(5)
    prompts = [[rng.randrange(61) for _ in range(rng.randrange(1, 30))] for _ in range(16)]
    engine = bench(num_blocks=200, max_running=16, max_batch_tokens=16)
    for i, prompt in enumerate(prompts):
        engine.submit(str(i), prompt, max_tokens=7)
    outcomes = engine.drain()
    for i, prompt in enumerate(prompts):
        assert outcomes[str(i)].tokens[0] == engine.greedy(prompt, 7)


def test_an_end_token_stops_without_being_announced(bench):
    engine = bench()
    expected = engine.greedy(PROMPT, 6)
    end = expected[3]
    engine.submit("a", PROMPT, max_tokens=6, eos=frozenset([end]))
    outcome = engine.drain()["a"]
    assert outcome.tokens.get(0, []) == expected[: expected.index(end)]
    assert outcome.finished == {0: FinishReason.STOP}
    assert outcome.num_tokens == {0: expected.index(end) + 1}


def test_ignore_eos_goes_on(bench):
    engine = bench()
    expected = engine.greedy(PROMPT, 6)
    engine.submit("a", PROMPT, max_tokens=6, eos=frozenset(expected), ignore_eos=True)
    outcome = engine.drain()["a"]
    assert outcome.tokens[0] == expected
    assert outcome.finished == {0: FinishReason.LENGTH}


def test_stop_token_ids_end_a_choice(bench):
    engine = bench()
    expected = engine.greedy(PROMPT, 6)
    engine.submit("a", PROMPT, max_tokens=6, stop_token_ids=frozenset([expected[2]]))
    assert engine.drain()["a"].finished == {0: FinishReason.STOP}


def test_n_choices_prefill_the_prompt_once(bench):
    engine = bench()
    engine.submit("a", PROMPT, max_tokens=5, n=3, temperature=1.0, seed=1)
    outcome = engine.drain()["a"]
    assert sorted(outcome.finished) == [0, 1, 2]
    assert engine.engine.stats.computed_tokens == len(PROMPT) + 3 * 4
    assert engine.engine.stats.prefill_rate > 0
    assert len({tuple(tokens) for tokens in outcome.tokens.values()}) > 1


def test_greedy_choices_are_equal_although_they_share_a_half_filled_block(bench):
    engine = bench()
    engine.submit("a", PROMPT, max_tokens=9, n=3)
    outcome = engine.drain()["a"]
    expected = engine.greedy(PROMPT, 9)
    assert outcome.tokens == {0: expected, 1: expected, 2: expected}


def test_choices_beyond_max_running_wait_their_turn(bench):
    engine = bench(max_running=2)
    engine.submit("a", PROMPT, max_tokens=4, n=5, temperature=0.9, seed=3)
    outcome = engine.drain()["a"]
    wide = bench()
    wide.submit("a", PROMPT, max_tokens=4, n=5, temperature=0.9, seed=3)
    assert outcome.tokens == wide.drain()["a"].tokens


def test_seeded_tokens_do_not_depend_on_the_batch(bench):
    alone, crowded = bench(), bench()
    alone.submit("a", PROMPT, max_tokens=8, temperature=1.3, seed=42, top_p=0.9)
    for i in range(5):
        crowded.submit(f"other{i}", PROMPT[i:], max_tokens=9, temperature=1.0)
    crowded.submit("a", PROMPT, max_tokens=8, temperature=1.3, seed=42, top_p=0.9)
    assert alone.drain()["a"].tokens == crowded.drain()["a"].tokens


def test_unseeded_requests_differ(bench):
    engine = bench()
    for i in range(6):
        engine.submit(str(i), PROMPT, max_tokens=8, temperature=1.5)
    texts = {tuple(outcome.tokens[0]) for outcome in engine.drain().values()}
    assert len(texts) > 1


def test_preemption_is_invisible(bench):
    engine = bench(num_blocks=12, max_running=4)
    prompts = {name: [i, *PROMPT[:8]] for i, name in enumerate("abc")}
    for name, prompt in prompts.items():
        engine.submit(name, prompt, max_tokens=20)
    outcomes = engine.drain()
    assert engine.scheduler.preemptions > 0
    for name, prompt in prompts.items():
        assert outcomes[name].tokens[0] == engine.greedy(prompt, 20)
        assert outcomes[name].num_tokens == {0: 20}
    assert engine.engine.stats.query_tokens == sum(map(len, prompts.values()))


def test_a_prompt_that_fills_the_pool_runs_alone(bench):
    engine = bench(num_blocks=8)
    prompts = {name: [i] * 24 for i, name in enumerate("ab")}
    for name, prompt in prompts.items():
        engine.submit(name, prompt, max_tokens=8)
    outcomes = engine.drain()
    for name, prompt in prompts.items():
        assert outcomes[name].tokens[0] == engine.greedy(prompt, 8)


def test_a_burst_of_equal_cold_prefixes_computes_the_prefix_once(bench):
    prefix = [i % 59 for i in range(80)]
    engine = bench(num_blocks=200, max_running=8, max_batch_tokens=16)
    prompts = {str(i): [*prefix, 50 + i, 3, 1] for i in range(8)}
    for name, prompt in prompts.items():
        engine.submit(name, prompt, max_tokens=3)
    outcomes = engine.drain()
    for name, prompt in prompts.items():
        assert outcomes[name].tokens[0] == engine.greedy(prompt, 3)
    assert sorted(outcome.cached_tokens for outcome in outcomes.values()) == [0] + [80] * 7


def test_a_held_back_request_runs_when_its_leader_leaves(bench):
    prefix = [i % 59 for i in range(80)]
    engine = bench(num_blocks=200, max_batch_tokens=8)
    engine.submit("leader", [*prefix, 1])
    engine.submit("follower", [*prefix, 2], max_tokens=3)
    engine.step(3)
    assert [sequence.request.id for sequence in engine.scheduler.waiting] == ["follower"]
    engine.engine.abort("leader")
    outcome = engine.drain()["follower"]
    assert outcome.tokens[0] == engine.greedy([*prefix, 2], 3)
    assert outcome.cached_tokens == 24


def test_a_short_prompt_overtakes_a_long_one(bench):
    engine = bench(num_blocks=400, max_batch_tokens=16)
    engine.submit("long", [i % 60 for i in range(400)], max_tokens=1)
    engine.step(2)
    engine.submit("short", [60, 1, 2, 3, 4], max_tokens=1)
    engine.step(2)
    assert "short" in engine.sink.outcomes
    assert not engine.sink.outcomes["long"].finished
    engine.drain()


def test_a_long_prompt_advances_under_a_stream_of_short_ones(bench):
    engine = bench(num_blocks=400, max_batch_tokens=16, max_running=8)
    engine.submit("long", [i % 60 for i in range(200)], max_tokens=1)
    engine.step()
    for i in range(60):
        engine.submit(f"short{i}", [60, i % 61, *range(14)], max_tokens=1)
        engine.step()
    assert engine.sink.outcomes["long"].finished


def test_decodes_are_never_starved_by_a_prefill(bench):
    engine = bench(num_blocks=400, max_batch_tokens=8)
    engine.submit("stream", [1, 2, 3], max_tokens=30)
    engine.step()
    engine.submit("long", [i % 60 for i in range(300)], max_tokens=1)
    for expected in range(2, 20):
        engine.step()
        assert len(engine.sink.outcomes["stream"].tokens[0]) == expected
    engine.drain()


def test_abort_in_every_state_leaves_nothing_held(bench):
    def run_until(steps, **options):
        engine = bench(num_blocks=16, max_batch_tokens=8, max_running=2)
        engine.submit("other", [9, 8, 7, 6, 5], max_tokens=12)
        engine.submit("victim", PROMPT, max_tokens=12, **options)
        engine.submit("queued", [5, 5, 5], max_tokens=2)
        engine.step(steps)
        engine.engine.abort("victim")
        engine.engine.abort("victim")
        outcomes = engine.drain()
        assert outcomes["other"].tokens[0] == engine.greedy([9, 8, 7, 6, 5], 12)
        assert outcomes["queued"].tokens[0] == engine.greedy([5, 5, 5], 2)
        return outcomes["victim"]

    reasons = [run_until(steps).finished[0] for steps in range(20)]
    assert reasons[0] == FinishReason.ABORT
    assert reasons[-1] == FinishReason.LENGTH
    for steps in range(12):
        assert sorted(run_until(steps, n=3, temperature=1.0).finished) == [0, 1, 2]


def test_finish_ends_one_choice_and_leaves_the_others(bench):
    engine = bench()
    engine.submit("a", PROMPT, max_tokens=9, n=2)
    engine.step(4)
    engine.engine.finish("a", 1)
    outcome = engine.drain()["a"]
    assert outcome.finished == {0: FinishReason.LENGTH, 1: FinishReason.STOP}
    assert outcome.num_tokens[0] == 9
    assert outcome.num_tokens[1] < 9


def test_drop_forgets_one_owner_and_disturbs_no_running_request(bench):
    engine = bench()
    for name, namespace in (("a", b"one"), ("b", b"two")):
        engine.submit(name, PROMPT, namespace=namespace)
        engine.drain()
    engine.submit("running", PROMPT, namespace=b"one")
    engine.step(2)
    dropped = engine.engine.drop(b"one")
    outcome = engine.drain()["running"]
    assert dropped.result() == 5  # of 20 computed tokens
    assert outcome.tokens[0] == engine.greedy(PROMPT, 8)
    for name, namespace in (("c", b"one"), ("d", b"two")):
        engine.submit(name, PROMPT, namespace=namespace)
        engine.drain()
    assert [engine.sink.outcomes[name].cached_tokens for name in "cd"] == [0, 12]


def test_prompts_that_never_come_again_leave_nothing_behind(bench):
    engine = bench(num_blocks=32)

    def objects(rounds):
        for i in rounds:
            prompt = [i % 61, i // 61 % 61, *range(8)]
            engine.submit(str(i), prompt, max_tokens=1, namespace=b"n%d" % (i % 2 * i))
            engine.drain()
        engine.sink.outcomes.clear()
        gc.collect()
        return len(gc.get_objects())

    objects(range(400))
    before = objects(range(400, 600))
    # One object for every second prompt would be seen; other tests' threads may leave some.
    assert objects(range(600, 1200)) < before + 300
    counts = engine.cache.counts()
    assert counts.free + counts.cached == counts.total == 32


def test_dropping_everything_needs_no_owner(bench):
    engine = bench()
    for name in (b"one", b"two"):
        engine.submit(name.decode(), PROMPT, namespace=name)
    engine.drain()
    dropped = engine.engine.drop(b"")
    engine.step()
    assert dropped.result() == 10
    assert engine.cache.counts().cached == 0


def test_random_traffic_keeps_answers_and_accounts(bench):
    rng = random.Random(11)
    engine = bench(num_blocks=40, max_batch_tokens=12, max_running=5)
    texts = [[rng.randrange(61) for _ in range(60)] for _ in range(3)]
    prompts, aborted = {}, set()
    for i in range(120):
        prompt = [*rng.choice(texts)[: rng.randrange(1, 60)], rng.randrange(61)]
        prompts[str(i)] = prompt
        engine.submit(str(i), prompt, max_tokens=rng.randrange(1, 12))
        engine.step(rng.randrange(3))
        if rng.random() < 0.2:
            aborted.add(str(i))
            engine.engine.abort(str(i))
    for name, outcome in engine.drain().items():
        expected = engine.greedy(prompts[name], 12)
        tokens = outcome.tokens.get(0, [])
        assert tokens == expected[: len(tokens)]
        assert name in aborted or outcome.finished == {0: FinishReason.LENGTH}


def test_followers_held_back_do_not_block_others(bench):
    prefix = [i % 59 for i in range(200)]
    engine = bench(num_blocks=400, max_batch_tokens=8, max_running=40)
    engine.submit("leader", [*prefix, 1], max_tokens=1)
    engine.step()
    for i in range(20):
        engine.submit(f"follower{i}", [*prefix, i], max_tokens=1)
    engine.submit("other", [60, 60, 60], max_tokens=1)
    engine.step(3)
    assert engine.sink.outcomes["other"].finished
    assert not engine.sink.outcomes["leader"].finished
    engine.drain()


@pytest.mark.parametrize("allowed", [[{1, 2}] * 3, [{1}, {2, 3}], [{1}], [], None])
@pytest.mark.parametrize("max_tokens", [0, 8])
def test_a_request_whose_logits_are_not_numbers_fails_alone(bench, steps, allowed, max_tokens):
    engine = bench()
    run = engine.model.run

    def broken(batch, meanwhile):
        logits = run(batch, meanwhile)
        for row, last in enumerate(batch.last_idx.tolist()):
            if batch.input_ids[0, last] == 60:
                logits[row] = float("nan")
        return logits

    engine.model.run = broken
    grammar = None if allowed is None else steps(allowed)
    engine.submit("bad", [*PROMPT, 60], max_tokens, n=2, grammar=grammar)
    engine.submit("good", PROMPT, max_tokens=4)
    outcomes = engine.drain()
    assert outcomes["bad"].failure == "the model's output is not a number"
    assert not outcomes["bad"].tokens
    assert not outcomes["bad"].finished
    assert outcomes["good"].tokens[0] == engine.greedy(PROMPT, 4)
    assert not engine.engine._answers._requests
