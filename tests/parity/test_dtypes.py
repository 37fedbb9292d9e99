"""Half precision: the paged model stays as close to the plain one as rounding allows."""

import pytest
import torch

PROMPT = [5, 17, 40, 8, 8, 61, 33, 90, 12, 7, 77, 25, 50]


# About as far as plain logits in this dtype are from those in float32.
ROUNDING = {torch.bfloat16: 0.2, torch.float16: 0.03}


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "starcoder2"])
def test_cold_and_warm_logits_are_those_of_the_plain_model(make_pair, name, dtype):
    pair = make_pair(name, dtype)
    engine = pair.engine()
    for _ in ("cold", "warm"):
        pair.run(engine, {"a": PROMPT}, 3)
        pair.check_logits(engine, tolerance=ROUNDING[dtype])
    assert engine.stats.hit_tokens == 12
