"""Half precision: the paged model stays as close to the plain one as rounding allows."""

import pytest
import torch

PROMPT = [5, 17, 40, 8, 8, 61, 33, 90, 12, 7, 77, 25, 50]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cold_and_warm_logits_are_those_of_the_plain_model(make_pair, dtype):
    pair = make_pair("llama", dtype)
    engine = pair.engine()
    for _ in ("cold", "warm"):
        pair.run(engine, {"a": PROMPT}, 3)
        pair.check_logits(engine, tolerance=0.1)
    assert engine.stats.hit_tokens == 12
