"""Chunks whose rows all give logits, and runs of forced tokens, on a real forward pass."""

from __future__ import annotations

import numpy as np
import pytest

PROMPT = [(13 * i + i * i) % 91 + 3 for i in range(30)]


class Fixed:
    """A grammar, and its own only state, of one output: the same tokens for everybody."""

    def __init__(self, tokens: list[int], free: set[int]) -> None:
        self.tokens = tokens
        self.free = free  # positions at which the model may choose any token
        self.position = 0

    def constraint(self) -> Fixed:
        return Fixed(self.tokens, self.free)

    @property
    def finished(self) -> bool:
        return self.position == len(self.tokens)

    def fill_mask(self, bits: np.ndarray) -> None:
        assert self.position in self.free
        bits[:] = -1

    def advance(self, token_id: int) -> None:
        self.position += 1

    def forced(self) -> list[int]:
        start = self.position
        while not self.finished and self.position not in self.free:
            self.position += 1
        return self.tokens[start : self.position]


@pytest.mark.parametrize("chunk", [1, 5, 7, 64])
def test_prompt_logprobs_equal_the_plain_models(llama, chunk):
    engine = llama.engine(max_batch_tokens=chunk, max_running=1)
    expected = llama.reference(PROMPT).log_softmax(-1)
    for name in ("cold", "warm"):
        llama.run(engine, {name: PROMPT}, 2, prompt_logprobs=3)
        entries = engine._sink.prompt_logprobs[name]
        assert [entry.token_id for entry in entries] == PROMPT[1:]
        for entry, row in zip(entries, expected, strict=False):
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
            best = [value for _, value in entry.top]
            assert best == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
    llama.check_logits(engine)


@pytest.mark.parametrize("options", [{}, {"num_blocks": 26, "max_batch_tokens": 9}])
def test_what_follows_a_forced_run_equals_the_plain_model(llama, options):
    output = [(7 * i + 3) % 91 + 3 for i in range(40)]
    free = {4, 5, 12, 39}
    engine = llama.engine(max_running=4, **options)
    prompts = {str(i): [i + 3, *PROMPT[:20]] for i in range(3)}
    answers = llama.run(engine, prompts, 60, grammar=Fixed(output, free))
    assert bool(engine.stats.preemptions) is bool(options)
    for name, prompt in prompts.items():
        tokens = answers[name]
        assert len(tokens) == 40
        assert all(tokens[i] == output[i] for i in range(40) if i not in free)
        rows = llama.reference(prompt + tokens)
        for i in free:
            assert tokens[i] == int(rows[len(prompt) + i - 1].argmax())
    llama.check_logits(engine)
