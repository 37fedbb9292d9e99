"""What ends with the prompt: log-probabilities, retention, explicit caching, no output at all."""

import pytest

from ragcache.types import FinishReason

PROMPT = [7, 3, 9, 1, 4, 4, 8, 2, 6, 5, 0, 11, 13]  # three blocks and one token
LONG = [(7 * i + i // 9) % 61 for i in range(40)]


def logprobs(engine, prompt, top):
    """Straight from the model: (token, log-probability, alternatives) from the second token on."""
    entries = []
    for i, token in enumerate(prompt[1:], 1):
        row = engine.logprobs(prompt[:i])
        values, ids = row.topk(top)
        best = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        entries.append((token, float(row[token]), best))
    return entries


@pytest.mark.parametrize("n", [1, 3])
def test_no_output_tokens_only_write_the_prompt(bench, n):
    engine = bench()
    engine.submit("warm up", PROMPT, max_tokens=0, n=n)
    outcome = engine.drain()["warm up"]
    assert outcome.prompt_logprobs == ()
    assert outcome.tokens == {}
    assert outcome.finished == dict.fromkeys(range(n), FinishReason.LENGTH)
    assert outcome.num_tokens == dict.fromkeys(range(n), 0)
    assert engine.engine.stats.computed_tokens == len(PROMPT)
    engine.submit("next", [*PROMPT, 1], max_tokens=2)
    assert engine.drain()["next"].cached_tokens == 12


@pytest.mark.parametrize("top", [0, 3])
@pytest.mark.parametrize("budget", [1, 3, 4, 7, 64])
def test_prompt_logprobs_are_those_of_the_model_cold_and_warm(bench, budget, top):
    engine = bench(max_batch_tokens=budget, max_running=1)
    for name in ("cold", "warm"):
        engine.submit(name, LONG, max_tokens=3, prompt_logprobs=top)
        outcome = engine.drain()[name]
        entries = [(e.token_id, e.logprob, e.top) for e in outcome.prompt_logprobs]
        assert entries == logprobs(engine, LONG, top)
        assert outcome.tokens[0] == engine.greedy(LONG, 3)
        assert outcome.cached_tokens == 0
    engine.submit("plain", LONG, max_tokens=3)
    assert engine.drain()["plain"].cached_tokens == 36


def test_prompt_logprobs_survive_preemption_without_repetition(bench):
    engine = bench(num_blocks=13, max_running=3, max_batch_tokens=6)
    engine.submit("stream", [1, 2, 3], max_tokens=40)
    engine.step(3)
    engine.submit("b", LONG, max_tokens=3, prompt_logprobs=2, n=2)
    engine.step(8)
    assert engine.scheduler.preemptions
    assert engine.sink.outcomes["b"].prompt_logprobs is None  # in the middle of its prompt
    outcome = engine.drain()["b"]
    entries = [(e.token_id, e.logprob, e.top) for e in outcome.prompt_logprobs]
    assert entries == logprobs(engine, LONG, 2)
    assert outcome.tokens == {0: engine.greedy(LONG, 3), 1: engine.greedy(LONG, 3)}


def test_prompt_logprobs_in_a_mixed_batch(bench):
    engine = bench(num_blocks=200, max_batch_tokens=24)
    for i in range(3):
        engine.submit(f"plain{i}", [i, *LONG], max_tokens=6)
        engine.submit(f"scored{i}", [i, *LONG], max_tokens=6, prompt_logprobs=1)
        engine.step()
    outcomes = engine.drain()
    for i in range(3):
        entries = [(e.token_id, e.logprob, e.top) for e in outcomes[f"scored{i}"].prompt_logprobs]
        assert entries == logprobs(engine, [i, *LONG], 1)
        assert outcomes[f"plain{i}"].prompt_logprobs == ()
        assert outcomes[f"plain{i}"].tokens == outcomes[f"scored{i}"].tokens
        assert outcomes[f"plain{i}"].tokens[0] == engine.greedy([i, *LONG], 6)


def test_a_prompt_of_one_token_has_no_logprobs(bench):
    engine = bench()
    engine.submit("a", [5], max_tokens=2, prompt_logprobs=4)
    outcome = engine.drain()["a"]
    assert outcome.prompt_logprobs == ()
    assert outcome.tokens[0] == engine.greedy([5], 2)


def test_a_broken_row_in_the_middle_of_the_prompt_fails_the_request(bench):
    engine = bench()
    run = engine.model.run

    def broken(batch, meanwhile):
        logits = run(batch, meanwhile)
        logits[batch.input_ids[0, batch.last_idx] == 60] = float("nan")
        return logits

    engine.model.run = broken
    engine.submit("bad", [60, *PROMPT], prompt_logprobs=0)
    engine.submit("good", PROMPT, prompt_logprobs=0, max_tokens=2)
    outcomes = engine.drain()
    assert outcomes["bad"].failure == "the model's output is not a number"
    assert len(outcomes["good"].prompt_logprobs) == len(PROMPT) - 1


@pytest.mark.parametrize(
    ("cacheable", "hit"), [(None, 36), (0, 0), (3, 0), (4, 4), (11, 8), (40, 36)]
)
def test_explicit_caching_publishes_whole_blocks_of_what_it_may(bench, cacheable, hit):
    engine = bench()
    engine.submit("writer", LONG, max_tokens=9, cacheable=cacheable)
    engine.drain()
    engine.submit("reader", LONG, max_tokens=2)
    outcome = engine.drain()["reader"]
    assert outcome.cached_tokens == hit
    assert outcome.tokens[0] == engine.greedy(LONG, 2)


@pytest.mark.parametrize(("cacheable", "hit"), [(None, 36), (0, 0), (7, 4), (20, 20), (40, 36)])
def test_explicit_caching_reads_whole_blocks_of_what_it_may(bench, cacheable, hit):
    engine = bench()
    engine.submit("writer", LONG, max_tokens=2)
    engine.drain()
    engine.submit("reader", LONG, max_tokens=2, cacheable=cacheable)
    outcome = engine.drain()["reader"]
    assert outcome.cached_tokens == hit
    assert outcome.tokens[0] == engine.greedy(LONG, 2)


def test_nobody_waits_for_blocks_that_will_not_be_published(bench):
    engine = bench(num_blocks=200, max_batch_tokens=8)
    engine.submit("private", [*LONG, 1], max_tokens=2, cacheable=0)
    engine.step()
    engine.submit("follower", [*LONG, 2], max_tokens=2)
    engine.step()
    assert not engine.scheduler.waiting
    engine.drain()


@pytest.mark.parametrize("options", [{"cacheable": 0}, {"prompt_logprobs": 0}])
def test_who_reads_nothing_waits_for_nobody(bench, options):
    engine = bench(num_blocks=200, max_batch_tokens=8)
    engine.submit("leader", [*LONG, 1], max_tokens=2)
    engine.step()
    engine.submit("other", [*LONG, 2], max_tokens=2, **options)
    engine.step()
    assert not engine.scheduler.waiting
    engine.drain()


def test_preemption_of_uncached_requests_is_invisible(bench):
    engine = bench(num_blocks=12, max_running=4)
    prompts = {str(i): [i, *PROMPT[:8]] for i in range(3)}
    for name, prompt in prompts.items():
        engine.submit(name, prompt, max_tokens=20, cacheable=0)
    outcomes = engine.drain()
    assert engine.scheduler.preemptions > 0
    for name, prompt in prompts.items():
        assert outcomes[name].tokens[0] == engine.greedy(prompt, 20)
    assert engine.cache.counts().cached == 0


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_a_breakpoint_outlives_a_scan_that_evicts_everything_else(bench, max_tokens):
    engine = bench(num_blocks=24)
    marked, plain = LONG[:16], [60, *LONG[1:16]]
    engine.submit("marked", marked, max_tokens=max_tokens, breakpoints=((9, 60.0), (12, 300.0)))
    engine.submit("plain", plain, max_tokens=max_tokens)
    engine.drain()
    assert engine.engine.stats.retained == 3
    for i in range(30):
        engine.submit(f"scan{i}", [i, i, *LONG[:14]], max_tokens=1)
        engine.drain()
    for name, prompt in (("marked again", marked), ("plain again", plain)):
        engine.submit(name, prompt, max_tokens=1)
        engine.drain()
    assert engine.sink.outcomes["marked again"].cached_tokens == 12
    assert engine.sink.outcomes["plain again"].cached_tokens == 0


def test_nothing_is_retained_of_what_may_not_be_cached(bench):
    engine = bench()
    engine.submit("a", LONG, max_tokens=2, breakpoints=((24, 60.0),), cacheable=10)
    engine.drain()
    assert engine.engine.stats.retained == 2
