"""A cache hit never changes an answer: paged = plain, for every architecture."""

import pytest

PROMPT = [5, 17, 40, 8, 8, 61, 33, 90, 12, 7, 77, 25, 50]  # three blocks and one token
COUNT = 5


def test_cold_warm_and_caching_off_agree_with_the_plain_model(pair):
    expected = pair.greedy(PROMPT, COUNT)
    for share in (True, False):
        engine = pair.engine(share=share)
        for _ in ("cold", "warm"):
            assert pair.run(engine, {"a": PROMPT}, COUNT) == {"a": expected}
            pair.check_logits(engine)
        assert engine.stats.hit_tokens == (12 if share else 0)


@pytest.mark.parametrize("chunk", [1, 3, 4, 5])
def test_any_chunk_size_agrees(pair, chunk):
    engine = pair.engine(max_batch_tokens=chunk, max_running=1)
    assert pair.run(engine, {"a": PROMPT}, 3) == {"a": pair.greedy(PROMPT, 3)}
    pair.check_logits(engine)


def test_batches_over_a_shared_prefix_agree(pair):
    prompts = {str(i): [*PROMPT[: 8 + i], 3 * i + 1] for i in range(5)}
    engine = pair.engine(max_batch_tokens=7, max_running=6)
    answers = pair.run(engine, prompts, COUNT)
    assert answers == {name: pair.greedy(prompt, COUNT) for name, prompt in prompts.items()}
    pair.check_logits(engine)
    assert engine.stats.hit_tokens > 0


def test_preemption_and_forks_agree(pair):
    prompts = {str(i): [i + 3, *PROMPT[:7]] for i in range(3)}
    engine = pair.engine(num_blocks=9, max_running=4)
    pair.run(engine, prompts, 12)
    assert engine.stats.preemptions > 0
    pair.run(engine, {"forked": PROMPT[:6]}, 4, n=3)
    pair.check_logits(engine)
