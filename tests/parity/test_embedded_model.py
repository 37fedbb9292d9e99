"""The embedded model: paged = plain, to the last logit."""

import pytest

from ragcache.engine.step_cost import StepCost

BLOCK = 4
PROMPT = [504, 1194, 282, 260, 5895, 314, 281, 3575, 282, 2988, 30, 339, 506, 253, 3365, 284, 1]


@pytest.fixture(scope="module")
def expected(embedded):
    return embedded.greedy(PROMPT, 6)


def test_cold_warm_and_caching_off_agree(embedded, expected):
    for share in (True, False):
        engine = embedded.engine(share=share)
        for _ in ("cold", "warm"):
            assert embedded.run(engine, {"a": PROMPT}, 6) == {"a": expected}
            embedded.check_logits(engine)
        assert engine.stats.hit_tokens == (16 if share else 0)


@pytest.mark.parametrize("chunk", [1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_any_chunk_size_agrees(embedded, expected, chunk):
    engine = embedded.engine(max_batch_tokens=chunk, max_running=1)
    assert embedded.run(engine, {"a": PROMPT}, 6) == {"a": expected}
    embedded.check_logits(engine)


def test_chunks_that_depend_on_the_time_of_steps_agree(embedded):
    prompts = {"stream": PROMPT[:5], "long": [*PROMPT[5:], *PROMPT * 6]}
    engine = embedded.engine(max_batch_tokens=64, cost=StepCost(1e-3))
    embedded.run(engine, prompts, 12)
    embedded.check_logits(engine)
    assert engine.stats.step_tokens.counts[3] >= 3  # of 17 to 32 tokens


def test_a_batch_with_preemption_agrees(embedded):
    prompts = {str(i): [*PROMPT[: 10 + i], 100 + i] for i in range(4)}
    engine = embedded.engine(num_blocks=14, max_batch_tokens=20, max_running=4)
    embedded.run(engine, prompts, 12)
    embedded.check_logits(engine)
    assert engine.stats.preemptions > 0
