"""Blocks that were swapped out and in give the same logits as those that never left."""

import pytest
import torch

from ragcache.prefix.cache import PrefixCache

PROMPTS = {str(i): [i + 3, *range(5, 25)] for i in range(4)}  # five blocks and one token
COUNT = 4


def alone(pair, engine):
    """The answers to all prompts, one after the other, and all logits on the way."""
    answers = {}
    for name, prompt in PROMPTS.items():
        answers |= pair.run(engine, {name: prompt}, COUNT)
    logits = [(context, row) for context, row in engine.logits]
    engine.logits.clear()
    return answers, logits


def assert_equal(ours, theirs):
    for (context, mine), (other, expected) in zip(ours, theirs, strict=True):
        assert context == other
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek_v3"])
def test_the_logits_are_bit_for_bit_those_of_blocks_that_stayed(make_pair, name):
    pair = make_pair(name)
    small, large = pair.engine(num_blocks=8, host_blocks=30), pair.engine()
    cold, expected = alone(pair, small), alone(pair, large)
    assert cold[0] == expected[0]
    assert_equal(cold[1], expected[1])
    warm, expected = alone(pair, small), alone(pair, large)
    assert warm[0] == expected[0]
    assert_equal(warm[1], expected[1])
    assert small.stats.hit_tokens == large.stats.hit_tokens == 4 * 20
    assert small.stats.host.hit_tokens == 4 * 20
    assert large.stats.host is None


def test_without_the_tier_the_same_load_is_computed_again(llama):
    engine = llama.engine(num_blocks=8)
    for _ in ("cold", "warm"):
        alone(llama, engine)
    assert engine.stats.hit_tokens == 0


def test_a_batch_under_pressure_agrees_with_the_plain_model(llama):
    prompts = {name: prompt[:8] for name, prompt in PROMPTS.items()}
    engine = llama.engine(num_blocks=9, max_running=4, host_blocks=60)
    for _ in ("cold", "warm"):
        answers = llama.run(engine, prompts, 12)
        assert answers == {name: llama.greedy(prompt, 12) for name, prompt in prompts.items()}
        llama.check_logits(engine)
    assert engine.stats.preemptions > 0
    assert engine.stats.host.swapped_in > 0


def test_a_swap_that_is_not_run_would_be_seen(llama, monkeypatch):
    monkeypatch.setattr(
        PrefixCache, "take_swaps", lambda cache: (cache.host.swap_outs.take() and [], [])
    )
    engine = llama.engine(num_blocks=8, host_blocks=30)
    alone(llama, engine)
    llama.run(engine, {"0": PROMPTS["0"]}, COUNT)
    with pytest.raises(AssertionError):
        llama.check_logits(engine)
