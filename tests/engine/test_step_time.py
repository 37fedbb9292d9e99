"""Steps with decodes keep their time: on a clock of its own, the engine's answers stay the same."""

import pytest

BOUND = 0.06  # seconds: decoding takes 0.022, and there is room for some 30 tokens more
LONG = [(7 * i + i // 9) % 61 for i in range(520)]


def other(seed, length=520):
    return [seed, *LONG[: length - 1]]


class Stream:
    """A request that decodes, and the time of the steps until each of its tokens."""

    def __init__(self, bench, **options):
        self.engine = bench(num_blocks=500, max_batch_tokens=256, **options)
        self.engine.submit("stream", [1, 2, 3], max_tokens=1000)
        self.engine.step(6)

    def gaps(self, until=lambda: False, limit=100):
        """The times of steps, each of which gives it a token."""
        times, outcomes = [], self.engine.sink.outcomes
        while not until() and len(times) < limit:
            before, tokens = self.engine.model.now, len(outcomes["stream"].tokens[0])
            self.engine.step()
            assert len(outcomes["stream"].tokens[0]) == tokens + 1
            times.append(self.engine.model.now - before)
        return times

    def serve(self, prompts):
        """Gaps until all of these have been answered, with the answers of the model."""
        for name, prompt in prompts.items():
            self.engine.submit(name, prompt, max_tokens=3)
        outcomes = self.engine.sink.outcomes
        times = self.gaps(
            until=lambda: all(name in outcomes and outcomes[name].finished for name in prompts)
        )
        for name, prompt in prompts.items():
            assert outcomes[name].tokens[0] == self.engine.greedy(prompt, 3)
        return times


def test_a_long_prompt_stretches_no_gap_beyond_the_bound_once_it_is_learned(bench):
    bounded, unbounded = Stream(bench, max_step_time=BOUND), Stream(bench)
    bounded.serve({"teacher": other(5)})
    times = bounded.serve({"long": other(9)})
    assert max(times) <= 1.05 * BOUND
    assert sum(times) / len(times) > 0.8 * BOUND  # and the time is used
    assert max(unbounded.serve({"long": other(9)})) > 4 * BOUND


def test_several_prompts_at_once_share_the_bound(bench):
    stream = Stream(bench, max_step_time=BOUND)
    stream.serve({"teacher": other(5)})
    times = stream.serve({str(i): other(10 + i, 100 * i + 60) for i in range(4)})
    assert max(times) <= 1.1 * BOUND


def test_every_step_computes_some_prefill_even_if_decoding_takes_all_the_time(bench):
    stream = Stream(bench, max_step_time=0.001)
    steps = len(stream.serve({"long": other(9)}))
    assert 520 / 32 < steps <= 520 / 16 + 3


def test_with_nothing_decoding_the_whole_budget_is_used(bench):
    engine = bench(num_blocks=500, max_batch_tokens=256, max_step_time=BOUND)
    for name in ("a", "b"):
        engine.submit(name, other(ord(name) % 61, 512), max_tokens=1)
    engine.step(4)
    assert engine.engine.stats.computed_tokens == 1024


def test_a_burst_that_shares_a_prefix_still_computes_it_once(bench):
    stream = Stream(bench, max_step_time=BOUND)
    stream.serve({str(i): [*LONG, i] for i in range(4)})
    outcomes = stream.engine.sink.outcomes
    assert sorted(outcomes[str(i)].cached_tokens for i in range(4)) == [0, 520, 520, 520]


def test_preemption_under_a_bound_is_invisible(bench):
    engine = bench(num_blocks=40, max_batch_tokens=64, max_running=6, max_step_time=BOUND)
    prompts = {str(i): other(i, 60 + 20 * (i % 3)) for i in range(6)}
    for name, prompt in prompts.items():
        engine.submit(name, prompt, max_tokens=24)
        engine.step(2)
    outcomes = engine.drain()
    assert engine.scheduler.preemptions > 0
    for name, prompt in prompts.items():
        assert outcomes[name].tokens[0] == engine.greedy(prompt, 24)


def test_the_times_of_steps_are_counted(bench):
    stream = Stream(bench)
    stream.serve({"long": other(9)})
    histogram = stream.engine.engine.stats.step_seconds
    assert histogram.total == pytest.approx(stream.engine.model.now)
