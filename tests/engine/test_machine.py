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

ANY = set(range(61))
TEXTS = [
    [(7 * text + 3 * (i % 5 if text == 2 else i)) % 61 for i in range(40)] for text in range(3)
]


class Traffic(RuleBasedStateMachine):
    """Requests over a few common prefixes come, go on and leave in any order."""

    requests = Bundle("requests")
    make = None  # these are set by the test, from its fixtures
    grammar = None

    @initialize(
        num_blocks=st.integers(14, 40),
        budget=st.integers(6, 24),
        running=st.integers(1, 6),
        share=st.booleans(),
        host_blocks=st.sampled_from([0, 5, 60]),
        max_step_time=st.sampled_from([None, 0.03, 0.05]),
        max_draft=st.sampled_from([0, 2, 8]),
        echo=st.booleans(),
    )
    def start(self, num_blocks, budget, running, **options):
        self.engine = self.make(
            num_blocks,
            max_batch_tokens=budget,
            max_running=running,
            **options,
        )
        self.prompts, self.rules, self.aborted = {}, {}, set()

    @rule(
        target=requests,
        text=st.sampled_from(TEXTS),
        length=st.integers(0, 39),
        last=st.integers(0, 60),
        max_tokens=st.integers(0, 12),
        n=st.integers(1, 3),
        allowed=st.none() | st.lists(st.sampled_from([ANY, {1, 2}, {9}, {10}]), max_size=14),
        forcing=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, 1]),
        cacheable=st.none() | st.integers(0, 40),
    )
    def submit(self, text, length, last, max_tokens, n, allowed, forcing, **options):
        name = str(len(self.prompts))
        self.prompts[name] = [*text[:length], last]
        self.rules[name] = max_tokens, allowed, options["prompt_logprobs"]
        grammar = None if allowed is None else self.grammar(allowed, forcing)
        self.engine.submit(name, self.prompts[name], max_tokens, n=n, grammar=grammar, **options)
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

    @rule()
    def drop(self):
        self.engine.engine.drop(b"n")

    def teardown(self):
        outcomes = self.engine.drain()
        assert outcomes.keys() == self.prompts.keys()
        for name, outcome in outcomes.items():
            limit, allowed, scored = self.rules[name]
            whole = [ANY] * limit if allowed is None else allowed
            expected = self.engine.constrained(self.prompts[name], whole[:limit])
            complete = limit > 0 and allowed is not None and len(allowed) <= limit
            for index, reason in outcome.finished.items():
                tokens = outcome.tokens.get(index, [])
                assert tokens == expected[: len(tokens)]
                if name not in self.aborted:
                    assert reason == (FinishReason.STOP if complete else FinishReason.LENGTH)
                    assert tokens == expected
            if name not in self.aborted:
                found = [each.token_id for each in outcome.prompt_logprobs]
                assert found == ([] if scored is None else self.prompts[name][1:])


def test_random_traffic(bench, steps):
    machine = type("Bound", (Traffic,), {"make": staticmethod(bench), "grammar": steps})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )
