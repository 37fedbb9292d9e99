"""Whole models on the GPU's kernels, which run in Triton's interpreter here."""

import pytest

PROMPT = [5, 17, 40, 8, 8, 61, 33, 90, 12, 7, 77, 25, 50]  # three blocks and one token


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt_oss", "deepseek_v3"])
def test_cold_warm_and_forked_agree_with_the_plain_model(make_pair, name):
    pair = make_pair(name)
    engine = pair.engine(backend="triton", max_batch_tokens=7)
    for _ in ("cold", "warm"):
        assert pair.run(engine, {"a": PROMPT}, 2) == {"a": pair.greedy(PROMPT, 2)}
    assert engine.stats.hit_tokens == 12
    pair.run(engine, {"forked": PROMPT[:6]}, 3, n=2)  # copies a block
    pair.check_logits(engine)
