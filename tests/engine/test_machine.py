"""Random traffic against the engine: every answer right, every end once, nothing held."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    rule,
    run_state_machine_as_test,
)

from ragcache.types import FinishReason

TEXTS = [[(7 * text + 3 * i) % 61 for i in range(40)] for text in range(3)]


class Traffic(RuleBasedStateMachine):
    """Requests over a few common prefixes come, go on and leave in any order."""

    requests = Bundle("requests")
    make = None  # set by the test, from its fixture

    @initialize(
        num_blocks=st.integers(14, 40),
        budget=st.integers(6, 24),
        running=st.integers(1, 6),
        share=st.booleans(),
    )
    def start(self, num_blocks, budget, running, share):
        self.engine = self.make(
            num_blocks, max_batch_tokens=budget, max_running=running, share=share
        )
        self.prompts, self.limits, self.aborted = {}, {}, set()

    @rule(
        target=requests,
        text=st.sampled_from(TEXTS),
        length=st.integers(0, 39),
        last=st.integers(0, 60),
        max_tokens=st.integers(1, 12),
        n=st.integers(1, 3),
    )
    def submit(self, text, length, last, max_tokens, n):
        name = str(len(self.prompts))
        self.prompts[name] = [*text[:length], last]
        self.limits[name] = max_tokens
        self.engine.submit(name, self.prompts[name], max_tokens, n=n)
        return name, n

    @rule(times=st.integers(1, 4))
    def step(self, times):
        self.engine.step(times)

    @rule(request=consumes(requests))
    def abort(self, request):
        self.aborted.add(request[0])
        self.engine.engine.abort(request[0])

    @rule(request=requests)
    def finish_last_choice(self, request):
        name, n = request
        self.aborted.add(name)  # that is: its answer may be short
        self.engine.engine.finish(name, n - 1)

    def teardown(self):
        outcomes = self.engine.drain()
        assert outcomes.keys() == self.prompts.keys()
        for name, outcome in outcomes.items():
            expected = self.engine.greedy(self.prompts[name], self.limits[name])
            for index, reason in outcome.finished.items():
                tokens = outcome.tokens.get(index, [])
                assert tokens == expected[: len(tokens)]
                if name not in self.aborted:
                    assert reason == FinishReason.LENGTH
                    assert tokens == expected


def test_random_traffic(bench):
    machine = type("Bound", (Traffic,), {"make": staticmethod(bench)})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )
