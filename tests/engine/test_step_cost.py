"""The time of steps with decodes: learned on a clock of the test's own, and kept."""

from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache.engine.step_cost import MIN_CHUNK, MIN_SHARE, StepCost

BOUND = 0.25
PROMPT = 2048


@dataclass(frozen=True)
class Chunk:
    """What is read of one."""

    start: int
    count: int


@dataclass
class Machine:
    """Runs steps that take as long as its numbers say, times what `Random` adds."""

    fixed: float = 0.04
    token: float = 0.0025
    decode_context: float = 3e-6
    pair: float = 7e-7
    noise: float = 0.0
    outliers: float = 0.0

    def __post_init__(self):
        self.cost = StepCost(BOUND)
        self.random = Random(0)
        self.decodes = [Chunk(1000, 1)]

    def forecast(self, decodes, prefills):
        """Seconds without noise."""
        context = sum(chunk.start for chunk in decodes)
        tokens = sum(chunk.count for chunk in [*decodes, *prefills])
        pairs = sum(chunk.count * (chunk.start + chunk.count / 2) for chunk in prefills)
        return self.fixed + self.token * tokens + self.decode_context * context + self.pair * pairs

    def run(self, decodes, prefills):
        self.cost.begin(decodes, prefills)
        seconds = self.forecast(decodes, prefills) * (1 + self.noise * self.random.random())
        seconds *= 3 if self.random.random() < self.outliers else 1
        self.cost.end(seconds)
        return seconds

    def decode(self, steps=8):
        for _ in range(steps):
            self.run(self.decodes, [])

    def prefill(self):
        """The chunks of one prompt beside the decodes, and the time of their steps."""
        start, chunks, times = 0, [], []
        while start < PROMPT:
            count = min(512, PROMPT - start, self.cost.fitting(self.decodes, start))
            chunks.append(Chunk(start, count))
            times.append(self.run(self.decodes, chunks[-1:]))
            start += count
        return chunks, times


costs = st.builds(
    Machine,
    fixed=st.floats(0.001, 0.1),
    token=st.floats(1e-5, 4e-3),
    decode_context=st.floats(0, 1e-5),
    pair=st.floats(0, 1e-6),
)


def test_until_something_is_learned_chunks_double_from_the_smallest():
    machine = Machine(token=1e-6, pair=0.0)
    chunks, _ = machine.prefill()
    assert [chunk.count for chunk in chunks[:6]] == [16, 32, 64, 128, 256, 512]


@settings(max_examples=25, deadline=None)
@given(costs)
def test_a_long_prompt_uses_the_time_and_keeps_the_bound(machine):
    machine.decode()
    machine.prefill()
    machine.decode()
    chunks, times = machine.prefill()
    for chunk, seconds in zip(chunks[:-1], times, strict=False):
        longer = machine.forecast(machine.decodes, [Chunk(chunk.start, 2 * chunk.count)])
        assert chunk.count == MIN_CHUNK or seconds <= 1.1 * BOUND
        assert chunk.count == 512 or longer > BOUND  # no less than half of what fits


@settings(max_examples=15, deadline=None)
@given(costs, st.integers(2, 16), st.integers(0, 8000))
def test_it_holds_for_other_decodes_after_a_step_with_them(machine, batch, context):
    machine.decode()
    machine.prefill()
    machine.decodes = [Chunk(context, 1)] * batch
    machine.decode(1)
    machine.prefill()
    chunks, times = machine.prefill()
    alone = machine.forecast(machine.decodes, [])
    for chunk, seconds in zip(chunks, times, strict=True):
        assert chunk.count == MIN_CHUNK or seconds <= 1.15 * max(BOUND, alone / (1 - MIN_SHARE))


@pytest.mark.parametrize("outliers", [0.0, 0.05])
def test_noise_is_kept_clear_of_and_outliers_are_not_learned(outliers):
    machine = Machine(noise=0.2, outliers=outliers)
    machine.decode()
    machine.prefill()
    chunks, times = machine.prefill()
    within = sum(seconds <= 1.1 * BOUND for seconds in times)
    assert within >= (0.95 - 1.5 * outliers) * len(times)
    quiet = Machine()
    quiet.decode()
    assert len(chunks) < 2 * len(quiet.prefill()[0])


def test_a_machine_that_becomes_slower_and_faster_again_is_followed():
    machine = Machine()
    machine.decode()
    machine.prefill()
    for factor in (2, 0.5):
        for name in ("fixed", "token", "decode_context", "pair"):
            setattr(machine, name, factor * getattr(machine, name))
        machine.prefill()
        machine.decode()
        _, times = machine.prefill()
        assert max(times) <= 1.15 * BOUND
        assert sum(times) / len(times) >= 0.7 * BOUND


@pytest.mark.parametrize("fixed", [0.24, 0.5])
def test_where_decoding_alone_takes_the_time_prefill_has_its_share(fixed):
    machine = Machine(fixed=fixed, token=1e-4, pair=1e-8)
    machine.decode()
    machine.prefill()
    chunks, times = machine.prefill()
    alone = machine.forecast(machine.decodes, [])
    assert min(chunk.count for chunk in chunks[:-1]) > 4 * MIN_CHUNK
    assert max(times) <= 1.05 * alone / (1 - MIN_SHARE)


def test_steps_that_were_timed_together_teach_as_much():
    machine = Machine()
    machine.decode()
    for count in (100, 200, 300):
        chunks = [Chunk(0, count), Chunk(count, count)]
        for chunk in chunks:
            machine.cost.begin([], [chunk])
        machine.cost.end(sum(machine.forecast([], [chunk]) for chunk in chunks))
    fits = machine.cost.fitting(machine.decodes, 500)
    assert machine.forecast(machine.decodes, [Chunk(500, fits)]) == pytest.approx(BOUND, rel=0.1)
